"""Drafts, grammars, state that leaves the device, and unlike stages on an accelerator: the tokens of plain steps.

Marked ``gpu``; skipped with the reason if there is none.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from drafted_requests import requests
from eagle_heads import IDS, write_head
from evener_constraints.compiler import GrammarCompiler
from evener_constraints.masks import GrammarMasks
from harsh_traffic import GREEDY, assert_same, shrink, traffic
from knowing_drafter import KnowingDrafter
from lively_weights import write_lively
from random_encoders import FAMILIES, TEXTS, make, rows_of, unit
from step_grammar import STEPS, VOCAB, Steps, follows
from test_accelerator import accelerator

from evener import LLM
from evener.config import from_overrides
from evener.config.schema import Config
from evener.contracts.generation.drafter import Drafter
from evener.engine.controller.controller import Controller
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener.errors import PluginError
from evener_backend_cpu import experts
from evener_conformance.kit.subject import Subject
from evener_conformance.reference.engine import RunResult, play, small_config
from evener_generation.drafting.model_drafter import ModelDrafter
from evener_generation.drafting.ngram_drafter import NgramDrafter
from evener_generation.drafting.speculation import Speculation
from evener_offload import choice_counts, resident_experts, slot_products
from evener_offload.captured_prompts import CapturesPieces

__all__ = ["accelerator"]

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

LIMITS = {"load": "auto", "infer.max_reqs": 4, "infer.kv_memory": 2**26, "infer.step_tokens": 32}
#: Few tokens, so that random weights are right now and then.
FEW = {"vocab_size": 11, "tie_word_embeddings": False}
PREDICTING = {"num_hidden_layers": 2, "first_k_dense_replace": 9, "num_nextn_predict_layers": 1, "vocab_size": 11}
RECURRENT = {"num_experts": 0, "vocab_size": 11}

#: Family, changes of its tiny config, drafter, keys.
DRAFTED: dict[str, tuple[str, dict[str, Any], type[Drafter], dict[str, Any]]] = {
    "n-grams": ("Llama", FEW, NgramDrafter, {"infer.drafter": "ngram"}),
    "n-grams, recurrent layers": ("Qwen3Next", RECURRENT, NgramDrafter, {"infer.drafter": "ngram"}),
    "its own draft model": ("Llama", FEW, ModelDrafter, {"infer.draft_model": "own"}),
    "EAGLE-3": ("Llama", {**FEW, "num_hidden_layers": 7}, ModelDrafter, {"infer.draft_model": "head"}),
    "EAGLE-3, recurrent layers": ("Qwen3Next", RECURRENT, ModelDrafter, {"infer.draft_model": "head"}),
    "a predicting layer": ("DeepseekV3", PREDICTING, ModelDrafter, {"infer.drafter": "mtp"}),
    "a predicting layer, recurrent layers": ("Qwen3Next", RECURRENT, ModelDrafter, {"infer.drafter": "mtp"}),
}


class Always(Speculation):
    """Makes no pauses behind wrong drafts."""

    def record(self, rows: Sequence[Any], on: bool, tokens: int) -> None: ...


def lively(folder: Path, family: str, shape: dict[str, Any], **keys: Any) -> Config:
    config = small_config(folder, family, shape, **LIMITS, **keys)
    write_lively(config.model)
    return config


def with_keys(config: Config, accelerator: Subject, **keys: Any) -> Config:
    """The same model on the accelerator."""
    small = {"dtype": "float32", "infer.max_seq_len": 128, "infer.threads": 1}
    chosen = {} if "infer.stages" in keys else {"backend": accelerator.name}
    return from_overrides(config.model, {**small, **LIMITS, **chosen, **keys})


@contextmanager
def opened(config: Config) -> Iterator[Controller]:
    controller, _ = build_controller(config)
    try:
        yield controller
    finally:
        controller.close()


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("case", DRAFTED)
def test_drafts_change_no_token(accelerator: Subject, case: str, captured: bool, tmp_path: Path) -> None:
    family, shape, drafter, keys = DRAFTED[case]
    model = lively(tmp_path / "model", family, shape)
    if keys.get("infer.draft_model") == "head":
        layers = {IDS: [1, 2, 3]} if family == "Qwen3Next" else {}
        keys = {"infer.draft_model": str(write_head(tmp_path / "head", model.model, **layers))}
    elif keys.get("infer.draft_model") == "own":
        keys = {"infer.draft_model": model.model}
    graphs = {"infer.use_cuda_graph": captured}
    with opened(with_keys(model, accelerator, **graphs)) as plain:
        expected = play(plain, requests(40))
    with opened(with_keys(model, accelerator, **graphs, **keys)) as controller:
        controller.scheduler.drafts = Always(drafter, 4, max_samples=16, vocabulary=11)
        found = play(controller, requests(40))
        stats = controller.scheduler.stats
        assert 0 < stats.accepted_tokens <= stats.drafted_tokens
        assert controller.scheduler.state.pool.used == 0
    assert found.tokens == expected.tokens


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("drafter", [KnowingDrafter, ModelDrafter], ids=["by the controller", "by the worker"])
def test_drafts_under_a_grammar_change_no_token(
    accelerator: Subject, drafter: type[Drafter], captured: bool, tmp_path: Path
) -> None:
    model = lively(tmp_path / "model", "Llama", {"num_hidden_layers": 1, "vocab_size": VOCAB})
    asked = [
        NewRequest(id=f"r{at}", prompt=[9 + at % 4, *range(20, 40)], max_tokens=20 + at, sampling=sampling)
        for at, sampling in enumerate([Sampling(temperature=0.0, grammar=STEPS), GREEDY,
                                       Sampling(temperature=0.9, top_p=0.9, top_k=20, seed=5, grammar=STEPS)])
    ]  # fmt: skip

    def tokens(chosen: type[Drafter] | None) -> RunResult:
        own = {"infer.draft_model": model.model} if chosen is ModelDrafter else {}
        with opened(with_keys(model, accelerator, **{"infer.use_cuda_graph": captured}, **own)) as controller:
            controller.scheduler.grammars = GrammarMasks(GrammarCompiler(Steps))
            if chosen is not None:
                controller.scheduler.drafts = Always(chosen, 4, max_samples=12, vocabulary=VOCAB)
            played = play(controller, asked)
            assert chosen is None or controller.scheduler.stats.accepted_tokens > 0
        return played

    plain = tokens(None)
    KnowingDrafter.answers = [each.prompt + plain.tokens[each.id] for each in asked]
    assert tokens(drafter).tokens == plain.tokens
    assert follows(plain.tokens["r0"]) and follows(plain.tokens["r2"])


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_have_the_vectors_that_transformers_encoders_give_them(
    accelerator: Subject, family: str, tmp_path: Path
) -> None:
    model = make(tmp_path, f"{family}Model")
    keys = {"backend": accelerator.name, "dtype": "float32", "infer.max_reqs": 4, "infer.pooling": "mean"}
    with LLM(tmp_path, **keys) as llm:
        found = llm.embed(TEXTS)
    for each, ids in zip(found, TEXTS, strict=True):
        torch.testing.assert_close(torch.tensor(each.vector), unit(rows_of(model, ids).mean(0)), atol=2e-4, rtol=1e-3)


KEPT: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 4}),
    "latent": ("DeepseekV3", {"first_k_dense_replace": 9}),
    "windows": ("Gemma3", {}),
}


@pytest.mark.parametrize("files", [False, True], ids=["host memory", "files"])
@pytest.mark.parametrize("kind", KEPT)
def test_blocks_that_left_the_device_come_back_with_the_same_tokens(
    accelerator: Subject, kind: str, files: bool, tmp_path: Path
) -> None:
    family, shape = KEPT[kind]
    model = lively(tmp_path / "model", family, shape)
    (tmp_path / "kv").mkdir(mode=0o700)
    ids = [5 + 7 * i * i % 89 for i in range(200)]
    asked = [NewRequest(id=str(at), prompt=ids[at : at + 70], max_tokens=6, sampling=GREEDY)
             for at in (0, 30, 60, 90, 120)]  # fmt: skip
    with opened(with_keys(model, accelerator)) as plain:
        expected = {m.id: play(plain, [m]).tokens[m.id] for m in asked}
    kept = {"infer.kv_host_memory": "16MiB", "infer.block_size": 16}
    if files:
        kept["offload.kv_files"] = str(tmp_path / "kv")
    cached: list[int] = []
    for _ in range(2):
        with opened(with_keys(model, accelerator, **kept)) as controller:
            shrink(controller, 7 * len(controller.scheduler.state.specs))
            for again in range(2):
                played = [play(controller, [m]) for m in asked]
                assert {m.id: p.tokens[m.id] for m, p in zip(asked, played, strict=True)} == expected
                cached.append(sum(p.cached[m.id] for m, p in zip(asked, played, strict=True)))
                assert not again or cached[-1] > 0
    assert not files or cached[2] > 0, "nothing came from files after a new start"


@pytest.mark.parametrize("stages", ["{0}:0,cpu", "cpu,{0}:0"])
def test_a_stage_on_the_processor_changes_no_token(accelerator: Subject, stages: str, tmp_path: Path) -> None:
    model = lively(tmp_path / "model", "Llama", {"num_hidden_layers": 6})
    long = {"infer.max_seq_len": 256}
    with opened(with_keys(model, accelerator, **long)) as plain:
        expected = play(plain, **traffic())
    keys = {"infer.stages": stages.format(accelerator.name), "infer.pp_size": 2, "executor": "process", **long}
    with opened(with_keys(model, accelerator, **keys)) as controller:
        assert_same(play(controller, **traffic()), expected)


def test_another_thread_may_copy_to_the_host_while_a_step_is_captured(accelerator: Subject, tmp_path: Path) -> None:
    """A transfer of state runs in a thread of its own. A step that is captured at that moment must not fail for it."""
    model = lively(tmp_path / "model", "Llama", FEW)
    where = accelerator.device.torch_device
    ended, moved = threading.Event(), list[int]()

    def copies() -> None:
        source = torch.ones(1 << 20, device=where)
        while not ended.is_set():
            stream = torch.cuda.Stream(where)
            with torch.cuda.stream(stream):
                target = torch.empty(1 << 20, pin_memory=True)
                target.copy_(source, non_blocking=True)
                event = torch.cuda.Event()
                event.record(stream)
            event.synchronize()
            moved.append(int(target[0]))

    thread = threading.Thread(target=copies)
    thread.start()
    try:
        with opened(with_keys(model, accelerator, **{"infer.use_cuda_graph": True})) as controller:
            played = play(controller, requests(40))
    finally:
        ended.set()
        thread.join()
    assert set(played.reasons().values()) == {"length"} and moved


#: Families, their changes, and how many of their layers have experts.
EXPERTS = {
    "Qwen3Moe": ({"num_experts": 16, "num_hidden_layers": 3}, 3),
    "DeepseekV3": ({"num_hidden_layers": 3, "first_k_dense_replace": 1}, 2),
    "GptOss": (
        {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        3,
    ),
}


def on_the_device(accelerator: Subject, family: str, folder: Path) -> tuple[Config, dict[str, Any], RunResult]:
    """A model of a family of experts, keys of all its runs, and its answers to ``traffic`` with all on the device."""
    long: dict[str, Any] = {"infer.max_seq_len": 256}
    if family == "GptOss":  # its tensors of several sources are not among those that write_lively knows
        model, long["load"] = small_config(folder / "model", family, EXPERTS[family][0], **LIMITS), "dummy"
    else:
        model = lively(folder / "model", family, EXPERTS[family][0])
    with opened(with_keys(model, accelerator, **long)) as plain:
        return model, long, play(plain, **traffic())


@pytest.mark.parametrize("family", EXPERTS)
def test_captured_steps_call_the_host_for_its_experts_and_change_no_token(
    accelerator: Subject, family: str, tmp_path: Path
) -> None:
    model, long, expected = on_the_device(accelerator, family, tmp_path)
    for captured in (True, False):
        keys = {**long, "infer.cpu_layer_num": EXPERTS[family][1], "infer.use_cuda_graph": captured}
        with opened(with_keys(model, accelerator, **keys)) as controller:
            assert_same(play(controller, **traffic()), expected)
            steps = controller.scheduler.stats.counters["host_expert_captured_steps"]
            assert steps > 10 if captured and accelerator.device.capabilities.host_calls else not steps


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize(("prompts", "chosen"), [("off", True), ("auto", False), ("auto", True)])
def test_experts_that_pass_through_the_device_in_captured_steps_change_no_token(
    accelerator: Subject, prompts: str, chosen: bool, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are copied in each step, beside the host, which computes the others, and others take their places between
    steps; with prompts that use slots of their own, too."""
    monkeypatch.setattr(choice_counts, "_PART", 100.0)  # exchanges take long beside the steps of tiny models
    if not accelerator.device.capabilities.host_calls:
        pytest.skip(f"{accelerator.name} does not call the host")
    model, long, expected = on_the_device(accelerator, family, tmp_path)
    keys = {"infer.cpu_layer_num": EXPERTS[family][1], "infer.use_cuda_graph": True, "offload.stream_prompts": prompts}
    passing = {"offload.pass_experts": "12", "offload.pass_experts_rows": 2, "offload.pass_most_chosen": chosen}
    with opened(with_keys(model, accelerator, **long, **keys, **passing)) as controller:
        assert_same(play(controller, **traffic()), expected)
        assert_same(play(controller, **traffic()), expected)
        counters = controller.scheduler.stats.counters
        assert counters["host_expert_captured_steps"] > 10 and counters["host_expert_passed_bytes"] > 0
        assert counters["expert_exchanges"] > 0 or not chosen or family != "Qwen3Moe", (
            "others choose too evenly in so few steps"
        )


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("least", ["8", "auto"])
def test_prompts_captured_but_for_experts_on_the_host_change_no_token(
    accelerator: Subject, least: str, family: str, tmp_path: Path
) -> None:
    """Those experts are copied to the device or, where measured costs decide, computed on the host."""
    if not isinstance(accelerator.device, CapturesPieces):
        pytest.skip(f"{accelerator.name} does not capture in pieces")
    model, long, expected = on_the_device(accelerator, family, tmp_path)
    keys = {"infer.cpu_layer_num": EXPERTS[family][1], "offload.stream_prompts": least, "infer.use_cuda_graph": True}
    with opened(with_keys(model, accelerator, **long, **keys)) as controller:
        assert_same(play(controller, **traffic()), expected)
        worker = controller.executor.worker  # type: ignore[attr-defined]  # the inline executor's
        worker.assembly.placement.streamed._least = 8  # whatever was measured
        assert_same(play(controller, **traffic()), expected)
        captured, latent = controller.scheduler.stats.counters["host_expert_captured_prompts"], family == "DeepseekV3"
        assert captured == 0 if latent else captured > 1


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("part", ["off", "12"])
def test_captured_steps_with_some_experts_on_the_device_change_no_token(
    accelerator: Subject, part: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host computes those that are not there, in the run's dtype: float32; or some of them pass through other slots
    in steps of two requests or more. Prompts are captured but for experts."""
    for module in (slot_products, resident_experts):
        monkeypatch.setattr(module, "MOST_TOKENS", 8)
    if not accelerator.device.capabilities.host_calls:
        pytest.skip(f"{accelerator.name} does not call the host")
    model, long, expected = on_the_device(accelerator, family, tmp_path)
    keys = {"infer.cpu_layer_num": EXPERTS[family][1], "infer.resident_experts": 3, "offload.host_when_sooner": "auto"}
    keys |= {"infer.use_cuda_graph": True, "offload.pass_experts": part, "offload.pass_experts_rows": 2}
    with opened(with_keys(model, accelerator, **long, **keys)) as controller:
        assert_same(play(controller, **traffic()), expected)
        assert_same(play(controller, **traffic()), expected)
        counters, captured = controller.scheduler.stats.counters, isinstance(accelerator.device, CapturesPieces)
        assert counters["host_expert_captured_steps"] > 10
        assert (counters["host_expert_passed_bytes"] > 0) == (part != "off")
        # State of latent attention cannot be captured in prompts.
        assert (counters.get("host_expert_captured_prompts", 0) > 3) == (captured and family != "DeepseekV3")


def test_a_failure_of_the_host_in_a_captured_step_ends_the_engine(
    accelerator: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not accelerator.device.capabilities.host_calls:
        pytest.skip(f"{accelerator.name} does not call the host")
    model = lively(tmp_path / "model", *("Qwen3Moe", EXPERTS["Qwen3Moe"][0]))
    keys = {"infer.cpu_layer_num": 3, "infer.use_cuda_graph": True}
    with opened(with_keys(model, accelerator, **keys)) as controller:
        want = play(controller, requests(12))
        assert set(want.reasons().values()) == {"length"}

        def refused(*arguments: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                raise ValueError("a wrong tensor")
            return bind(*arguments)

        bind = experts._Stacks.bind
        monkeypatch.setattr(experts._Stacks, "bind", refused)
        with pytest.raises(PluginError, match=r"kernel cpu/\S+ .* raised ValueError: a wrong tensor"):
            play(controller, requests(12))

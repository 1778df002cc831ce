"""Tests on an accelerator: kernels against references, captured steps against eager ones, and whole models against
transformers. Marked ``gpu``; skipped with the reason if there is none."""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_memory_measured import step as largest_step

from evener.backend_search import BackendSearch
from evener.config import from_overrides
from evener.engine.processes.local_clients import InlineClient
from evener.engine.processes.start import start_engine
from evener.engine.wire.messages import Abort, Finished, NewRequest, Ready, Sampling, Tokens
from evener.engine.worker.worker import Worker
from evener.errors import NoBackendError, ResolveError
from evener_conformance.kit.checklist import Checklist, CheckRequest
from evener_conformance.kit.outcome import CaseResult
from evener_conformance.kit.subject import Subject, open_subject
from evener_conformance.naive.model import find_architecture
from evener_conformance.oracle import Comparison, compare_greedy, generate

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@cache
def found() -> Subject | str:
    """The machine's accelerator, or the reason why there is none. One that is here but cannot be used is an error."""
    try:
        loaded = BackendSearch(None).load({})
    except NoBackendError as error:
        return str(error)
    subject = open_subject(loaded.backend.name)
    if not subject.device.capabilities.host_memory:
        return subject
    others = [c for c in loaded.selection.report.candidates if c.group == "evener.backends" and c.verdict != "chosen"]
    return "; ".join([f"{loaded.backend.name} was chosen", *(f"{other.name}: {other.reason}" for other in others)])


@pytest.fixture
def accelerator() -> Subject:
    subject = found()
    if isinstance(subject, str):
        pytest.skip(f"no accelerator: {subject}")
    return subject


@pytest.mark.parametrize("area", ["device", "primitives", "attention", "composites", "model"])
def test_passes_the_conformance_kit(accelerator: Subject, area: str) -> None:
    results: list[CaseResult] = []
    for check in Checklist(accelerator, CheckRequest(5, (area,))).checks:
        print(check.name, flush=True)  # with -s, the log of a process that crashed names the last one
        results += check.run()
        accelerator.device.synchronize()  # an error on the device is raised here, not in a later check or a destructor
    assert not [str(r)[:400] for r in results if r.outcome in ("failed", "unknown")]


@contextmanager
def engine(folder: Path, **overrides: object) -> Iterator[InlineClient]:
    client = start_engine(from_overrides(folder, overrides), "inline")
    assert isinstance(client, InlineClient)
    assert isinstance(client.receive(1)[0], Ready)
    try:
        yield client
    finally:
        client.close()


COMMON: dict[str, Any] = {
    "vocab_size": 1009, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048,
}  # fmt: skip
LATENT: dict[str, Any] = {
    **{k: v for k, v in COMMON.items() if k != "head_dim"}, "num_key_value_heads": 8, "kv_lora_rank": 64,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": COMMON,
    "llama": {**COMMON, "hidden_size": 288, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 32},
    "mistral": {**COMMON, "sliding_window": 48},
    "gemma3_text": {**COMMON, "sliding_window": 32, "num_key_value_heads": 1, "head_dim": 128,
                    "query_pre_attn_scalar": 128},
    "qwen3_moe": {**COMMON, "num_experts": 24, "num_experts_per_tok": 4, "moe_intermediate_size": 96,
                  "norm_topk_prob": True, "decoder_sparse_step": 1},
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "first_k_dense_replace": 4},
    "deepseek_v3": {**LATENT, "q_lora_rank": 96, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
                    "topk_group": 1, "moe_intermediate_size": 64, "first_k_dense_replace": 2},
}  # fmt: skip


def seeded(family: str, folder: Path, **other: Any) -> Any:
    """transformers' model with random weights, saved in ``folder``; ``other`` keys of its configuration."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    config = AutoConfig.for_model(family, **{**FAMILIES[family], **other})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if not name.endswith("norm.weight"):
                value.copy_(torch.randn(value.shape) * (0.1 if value.dim() == 1 else 2.0 * value.shape[-1] ** -0.5))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_greedy_tokens_equal_transformers(accelerator: Subject, family: str, captured: bool, tmp_path: Path) -> None:
    where = accelerator.device.torch_device
    model = seeded(family, tmp_path).to(where)

    def oracle(ids: Any) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([list(ids)], device=where)).logits[0].float().cpu()

    rng, result = random.Random(3), Comparison()
    prompts = [[rng.randrange(1009) for _ in range(n)] for n in (1, 5, 16, 31, 70, 130, 200, 333)]
    with engine(
        tmp_path, **{"dtype": "float32", "infer.max_seq_len": 512, "infer.max_reqs": 16, "infer.step_tokens": 256,
                     "infer.use_cuda_graph": captured, "infer.kv_memory": 1 << 30}
    ) as client:  # fmt: skip
        answers = generate(client, prompts, 48, every=20)
        compare_greedy(oracle, prompts, answers, partial(resumed, client), result)
    result.check()


def resumed(client: InlineClient, prompt: Any, count: int) -> list[int]:
    return generate(client, [list(prompt)], count, tag=f"again{len(prompt)}-{hash(tuple(prompt))}-")[0]


@pytest.mark.parametrize("random_rows", [False, True], ids=["greedy", "sampled"])
def test_captured_steps_give_the_tokens_of_eager_ones(accelerator: Subject, random_rows: bool, tmp_path: Path) -> None:
    seeded("qwen3", tmp_path)
    rng = random.Random(9)
    prompts = [[rng.randrange(1009) for _ in range(rng.randrange(1, 90))] for _ in range(13)]
    said = []
    for captured in (False, True):
        with engine(tmp_path, **{"dtype": "float32", "infer.max_seq_len": 256, "infer.max_reqs": 16,
                                 "infer.use_cuda_graph": captured, "infer.kv_memory": 1 << 30}) as client:  # fmt: skip
            for i, prompt in enumerate(prompts):
                sampling = Sampling(temperature=0.8 if random_rows and i % 2 else 0.0, seed=i)
                client.send(NewRequest(id=str(i), prompt=prompt, max_tokens=40, sampling=sampling))
            said.append(answers_of(client, len(prompts)))
    assert said[0] == said[1]


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_quantized_keys_and_values_take_half_the_memory_eager_and_captured(
    accelerator: Subject, dtype: str, tmp_path: Path
) -> None:
    seeded("qwen3", tmp_path)
    factors = {str(layer): 0.03 + layer / 1000 for layer in range(4)}
    halves = {layer: 0.5 * factor for layer, factor in factors.items()}
    cache = {"key_scaling_factor": {"0": factors}, "value_scaling_factor": {"0": halves}}
    (tmp_path / "kv_cache_scales.json").write_text(json.dumps({"kv_cache": cache}))
    rng = random.Random(9)
    prompts = [[rng.randrange(1009) for _ in range(rng.randrange(1, 90))] for _ in range(13)]
    said, sizes = [], []
    options = {"dtype": "bfloat16", "infer.max_seq_len": 256, "infer.max_reqs": 16, "infer.kv_memory": 1 << 30}
    for more in ({"infer.use_cuda_graph": False}, {"infer.use_cuda_graph": True}, None):
        stored = {} if more is None else {"infer.kv_dtype": dtype, **more}
        with engine(tmp_path, **options, **stored) as client:
            worker = client.controller.executor.worker  # type: ignore[attr-defined]  # the inline executor's
            info = worker.facts.info
            sizes.append(info.memory.block_bytes)
            rows = [row for row in info.manifest.ops if row.op == "attention"]
            assert all("/" in row.provider for row in rows), rows
            for i, prompt in enumerate(prompts):
                client.send(NewRequest(id=str(i), prompt=prompt, max_tokens=40, sampling=Sampling(temperature=0.0)))
            said.append(answers_of(client, len(prompts)))
    assert said[0] == said[1]
    assert sizes[0] == sizes[1] == sizes[2] // 2


def answers_of(client: InlineClient, requests: int) -> dict[str, list[int]]:
    """Every request's tokens, once all have ended."""
    answers: dict[str, list[int]] = {}
    ended = 0
    while ended < requests:
        for event in client.receive(None):
            if isinstance(event, Tokens):
                answers.setdefault(event.id, []).extend(event.ids)
            elif isinstance(event, Finished):
                assert event.error is None, event.error
                ended += 1
    return answers


@pytest.mark.parametrize("name", ["flash_attn", "flashinfer", "flash_mla"])
def test_a_library_that_is_installed_gives_the_tokens_of_our_own_kernels(
    accelerator: Subject, name: str, tmp_path: Path
) -> None:
    family = "deepseek_v3" if name == "flash_mla" else "qwen3"
    wide = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    seeded(family, tmp_path, **(wide if name == "flash_mla" else {"head_dim": 128}))
    rng = random.Random(3)
    prompts = [[rng.randrange(1009) for _ in range(rng.randrange(1, 300))] for _ in range(16)]
    said = []
    for asked in ({}, {"ops.attention": name}):
        keys = {"dtype": "bfloat16", "infer.max_seq_len": 512, "infer.max_reqs": 16, "infer.kv_memory": 1 << 30,
                "infer.step_tokens": 256, **asked}  # fmt: skip
        try:
            with engine(tmp_path, **keys) as client:
                said.append(generate(client, prompts, 24))
        except ResolveError as error:
            if not asked or "is not installed" not in str(error):
                raise
            pytest.skip(str(error))
    same = [
        next((at for at, (a, b) in enumerate(zip(*both, strict=True)) if a != b), len(both[0]))
        for both in zip(*said, strict=True)
    ]
    print(f"{name}: equal tokens of {len(said[0][0])} by request: {same}", flush=True)
    # In bfloat16 another order of sums may decide a tie differently; the text after it then differs.
    assert sorted(same)[len(same) // 4] >= 8, same


def check_one_launch(folder: Path, op: str, kernel: str, ways: Sequence[Mapping[str, Any]]) -> None:
    """Compare the tokens of one request at a time: eager and captured ways come in pairs, after a way without the
    kernel, which serves ``op`` in all others. Prompts end in the first split of their keys, and later. The test is
    skipped if the kernel serves nothing here."""
    rng = random.Random(3)
    prompts = [[rng.randrange(1009) for _ in range(n)] for n in (1, 16, 130, 519, 1700)]
    options = {"dtype": "bfloat16", "infer.max_seq_len": 2048, "infer.max_reqs": 2, "infer.kv_memory": 1 << 30}
    said: list[list[list[int]]] = []
    for more in ways:
        with engine(folder, **options, **more) as client:
            worker = client.controller.executor.worker  # type: ignore[attr-defined]  # the inline executor's
            rows = [row for row in worker.facts.info.manifest.ops if row.op == op]
            used = [row.provider for row in rows if kernel in row.provider]
            if not more and not used:
                pytest.skip(f"no {kernel} here: {rows}")
            assert bool(used) == (f"ops.{op}" not in more)
            said.append([generate(client, [prompt], 40, tag=f"{len(prompt)}-")[0] for prompt in prompts])
    for eager, captured in zip(said[1::2], said[2::2], strict=True):
        assert eager == captured
        same = [sum(1 for a, b in zip(*both, strict=True) if a == b) for both in zip(said[0], eager, strict=True)]
        # In bfloat16 another order of sums may decide a tie differently; the text after it then differs.
        assert sorted(same)[1] >= 8, same


ONE_LAUNCH = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "hidden_size": 512}


def test_a_layer_in_one_launch_gives_the_tokens_of_several_eager_and_captured(
    accelerator: Subject, tmp_path: Path
) -> None:
    """Where a kernel computes the whole layer of one token."""
    seeded("qwen3", tmp_path, **ONE_LAUNCH, intermediate_size=1280, num_hidden_layers=6)
    ways: list[dict[str, Any]] = [{"ops.decoder_layer": "reference"}, {"infer.use_cuda_graph": False}, {}]
    if accelerator.name == "cuda":  # captured layers do not share a launch
        apart = {"cuda.one_launch": "small"}
        ways += [{**apart, "infer.use_cuda_graph": False}, apart]
    check_one_launch(tmp_path, "decoder_layer", "one_token_layer", ways)


def test_experts_in_one_launch_give_the_tokens_of_several_eager_and_captured(
    accelerator: Subject, tmp_path: Path
) -> None:
    """Where a kernel computes all experts of one token."""
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 256, "num_hidden_layers": 4}
    seeded("qwen3_moe", tmp_path, **ONE_LAUNCH, **experts)
    ways: list[dict[str, Any]] = [{"ops.moe_block": "reference"}, {"infer.use_cuda_graph": False}, {}]
    check_one_launch(tmp_path, "moe_block", "one_token_experts", ways)


def test_latent_attention_in_one_launch_gives_the_tokens_of_several_eager_and_captured(
    accelerator: Subject, tmp_path: Path
) -> None:
    """Where a kernel computes the latent attention of one token."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "kv_lora_rank": 256, "qk_nope_head_dim": 64,
             "qk_rope_head_dim": 32, "v_head_dim": 64, "hidden_size": 512, "num_hidden_layers": 2}  # fmt: skip
    model = seeded("deepseek_v2", tmp_path, **sizes)
    with torch.no_grad():  # sharper attention and larger layers than these let rounding decide the next token
        for name, value in model.named_parameters():
            if ".layers." in name and value.dim() > 1:
                value.mul_(0.1 if ".q_proj." in name else 0.5)
    model.save_pretrained(tmp_path)
    ways: list[dict[str, Any]] = [{"ops.latent_attention_block": "reference"}, {"infer.use_cuda_graph": False}, {}]
    check_one_launch(tmp_path, "latent_attention_block", "one_token_latent", ways)


def test_a_search_of_the_largest_logit_gives_the_tokens_of_all_logits_eager_and_captured(
    accelerator: Subject, tmp_path: Path
) -> None:
    """Where a kernel finds the id of one token without all logits."""
    seeded("qwen3", tmp_path, vocab_size=20_000, hidden_size=256, num_hidden_layers=4)
    ways: list[dict[str, Any]] = [{"ops.vocab_greedy": "reference"}, {"infer.use_cuda_graph": False}, {}]
    check_one_launch(tmp_path, "vocab_greedy", "screened_greedy", ways)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_a_model_takes_what_was_planned_on_the_device(accelerator: Subject, captured: bool, tmp_path: Path) -> None:
    shape = {**COMMON, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 12, "vocab_size": 32000}
    (tmp_path / "config.json").write_text(json.dumps({**find_architecture("Qwen3ForCausalLM").tiny_config(), **shape}))
    keys = {"load": "dummy", "dtype": "bfloat16", "infer.kv_memory": "512MiB", "infer.max_seq_len": 1024,
            "infer.max_reqs": 32, "infer.step_tokens": 4096, "infer.use_cuda_graph": captured}  # fmt: skip
    # Engines of earlier tests that are not collected yet would be collected while this one is measured.
    gc.collect()
    torch.accelerator.memory.empty_cache()
    before = torch.accelerator.memory.memory_allocated()
    worker = Worker(from_overrides(tmp_path, keys), BackendSearch(accelerator.name))
    torch.accelerator.memory.reset_peak_memory_stats()
    for rows, tokens, temperature in ((1, 1000, 0.0), (32, 4096, 0.0), (32, 4096, 1.0), (32, 32, 1.0)):
        worker.execute(largest_step(worker, rows, tokens, temperature)).wait()
    measured = torch.accelerator.memory.max_memory_allocated() - before
    info: Any = worker.facts.info
    planned = info.memory
    print(f"planned {planned.total}, measured {measured}: {measured / planned.total - 1:+.2%}", flush=True)
    assert planned.measured_weights == pytest.approx(planned.weights, rel=0.05)
    assert measured == pytest.approx(planned.total, rel=0.05), planned


@pytest.mark.slow
def test_two_thousand_requests_some_aborted_leave_no_memory_behind(accelerator: Subject, tmp_path: Path) -> None:
    seeded("qwen3", tmp_path)
    rng = random.Random(1)
    with engine(tmp_path, **{"dtype": "bfloat16", "infer.max_seq_len": 512, "infer.max_reqs": 64,
                             "infer.kv_memory": 1 << 30}) as client:  # fmt: skip
        free = []
        for part in range(4):
            ids = [f"{part}-{i}" for i in range(500)]
            for i in ids:
                prompt = [rng.randrange(1009) for _ in range(rng.randrange(1, 300))]
                client.send(NewRequest(id=i, prompt=prompt, max_tokens=rng.randrange(1, 60),
                                       sampling=Sampling(temperature=rng.choice((0.0, 1.0)), seed=7)))  # fmt: skip
            for i in ids[::17]:
                client.send(Abort(i))
            answers_of(client, len(ids))
            accelerator.device.synchronize()
            free.append(accelerator.device.memory().free)
    assert free[-1] >= free[1] - (64 << 20), free

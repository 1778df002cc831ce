"""The whole engine on the real torch_npu over a fake runtime gives the reference backend's tokens. Level L3."""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch_npu
from simulator import SimulatedNpu

from evener.engine.wire.messages import NewRequest, Sampling
from evener.errors import EngineError, ResolveError
from evener_backend_ascend.chip import LATENT, Chip, chip_of
from evener_backend_ascend.graph import NpuGraphs, NpuReplay
from evener_conformance.reference.engine import RunResult, play

GREEDY = Sampling(temperature=0.0)
LATENT_SIZES = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 32, "num_key_value_heads": 32,
}  # fmt: skip
#: Multiples of 16, which 310P's product of experts needs.
EXPERT_SIZES = {"hidden_size": 48, "moe_intermediate_size": 32}
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
PAGED = ("npu::npu_fused_infer_attention_score", "npu::npu_scatter_pa_kv_cache")
BLOCKED = ("atb::_npu_reshape_and_cache", "atb::_npu_paged_attention")
NORMS = ("npu::npu_rms_norm", "npu::npu_add_rms_norm")
EXPERTS = ("npu::npu_moe_gating_top_k", "npu::npu_grouped_matmul")
ACTIVATION, TURN = "npu::npu_swiglu", "npu::npu_rotary_mul"


def requests(count: int = 4, tokens: int = 8) -> list[NewRequest]:
    """Prompts of 20 to 200 token ids; every second one begins with the same 140."""
    shared = [7 * i % 89 + 1 for i in range(140)]
    prompts = [[*(shared if i % 2 else []), *(i + 3 * n % 71 for n in range(20 + 60 * i % 150))] for i in range(count)]
    return [NewRequest(id=f"r{i}", prompt=p, max_tokens=tokens + i, sampling=GREEDY) for i, p in enumerate(prompts)]


#: Model → architecture, changes to its tiny sizes, and the vendor's kernels that must run.
MODELS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("Llama", {"head_dim": 16}, (*PAGED, *NORMS, ACTIVATION, TURN)),
    "qwen3-moe": ("Qwen3Moe", {**GROUPED, **EXPERT_SIZES}, (*PAGED, *NORMS, *EXPERTS)),
    "deepseek-v3": ("DeepseekV3", {**LATENT_SIZES, **EXPERT_SIZES}, (*PAGED, *NORMS, *EXPERTS)),
    "windows": ("Gemma3", {"head_dim": 16}, PAGED),
}
#: The same on 310P and 950: their kernels, and the reference for the rest.
OTHERS: dict[str, dict[str, tuple[str, ...]]] = {
    "310p": {
        "llama": (*BLOCKED, *NORMS, ACTIVATION), "qwen3-moe": (*BLOCKED, *NORMS, EXPERTS[1]),
        "deepseek-v3": (*NORMS, EXPERTS[1]), "windows": BLOCKED,
    },
    "950": {"deepseek-v3": (*NORMS, *EXPERTS, TURN)},
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_tokens_are_those_of_the_reference_L3(npu: SimulatedNpu, start: Any, model: str) -> None:
    family, changes, used = MODELS[model]
    want = play(start(family, changes, backend="reference"), requests())
    controller = start(family, changes, **{"backend": "ascend", "infer.use_cuda_graph": False})
    got = play(controller, requests())
    assert not got.dead, got.dead
    assert got.tokens == want.tokens
    assert got.reasons() == want.reasons()
    ran = {name for name in npu.calls if name.startswith(("npu::", "atb::"))}
    chip = _chip()
    assert ran >= set(OTHERS.get(chip.name, {}).get(model, used))
    # Where the vendor does not document a kernel, it may not run.
    own = {name.partition("::")[2] for name in ran} - {"npu_format_cast"}
    assert own <= chip.kernels


@pytest.mark.parametrize("ranks", [1, 2])
def test_int8_weights_stay_int8_and_give_the_tokens_of_the_reference_L3(
    npu: SimulatedNpu, start: Any, ranks: int
) -> None:
    changes = {**GROUPED, "quantization_config": {"quant_method": "int8-rows"}}
    want = play(start("Llama", changes, backend="reference", load="auto"), requests())
    controller = start("Llama", changes, **{"backend": "ascend", "load": "auto", "infer.tp_size": ranks})
    try:
        got = play(controller, requests())
    finally:
        controller.executor.close()
    assert got.tokens == want.tokens
    if ranks == 1:
        kernel = "npu_weight_quant_batchmatmul"
        assert bool(npu.calls[f"npu::{kernel}"]) == (kernel in _chip().kernels)


@pytest.mark.parametrize(("method", "rounds"), [("w8a8", "npu_dynamic_quant"), ("w8a8-fixed", "npu_quantize")])
def test_int8_activations_give_nearly_the_log_probabilities_of_the_reference_L3(
    npu: SimulatedNpu, start: Any, method: str, rounds: str
) -> None:
    changes = {**GROUPED, "quantization_config": {"quant_method": f"int8-rows-{method}"}}
    ids = [7 * i % 89 + 1 for i in range(140)]
    asked = [NewRequest(id="r", prompt=ids, max_tokens=1, sampling=Sampling(temperature=0.0, prompt_logprobs=0))]
    want, got = (
        play(start("Llama", changes, backend=name, load="auto"), asked).prompt_logprobs["r"]
        for name in ("reference", "ascend")
    )
    assert [each.ids for each in got] == [each.ids for each in want] and len(got) == len(ids) - 1
    found, expected = (torch.tensor([each.values[0] for each in values]) for values in (got, want))
    error = float((found - expected).square().mean().sqrt() / expected.std())
    # A scale that is missing or twice there makes this about 1.
    assert error < 0.2
    has = "npu_quant_matmul" in _chip().kernels
    assert (error > 0.01) == has, "without the kernel there is no rounding of activations"
    assert bool(npu.calls["npu::npu_quant_matmul"]) == bool(npu.calls[f"npu::{rounds}"]) == has


#: The kernel's sizes, which are those of DeepSeek V3; one layer, and small parts outside of attention.
REAL_SIZES = {
    **LATENT_SIZES, "hidden_size": 6144, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "num_hidden_layers": 1, "first_k_dense_replace": 1,
}  # fmt: skip
PROLOG = "npu::npu_mla_prolog_v3"


def test_latent_attention_in_real_sizes_by_the_fused_kernel_gives_the_tokens_of_the_reference_L3(
    npu: SimulatedNpu, start: Any
) -> None:
    """Prompts of more than 256 tokens in a step expand keys and values, from a state that the fused kernel's steps
    write, too."""
    asked = {"dtype": "bfloat16" if "bfloat16" in _chip().dtypes else "float16", "infer.step_tokens": 320}
    long = [5 * i % 97 + 1 for i in range(300)]
    wanted = [*requests(), NewRequest(id="long", prompt=long, max_tokens=8, sampling=GREEDY)]
    want = play(start("DeepseekV3", REAL_SIZES, backend="reference", **asked), wanted)
    for graph in (False, "auto"):
        npu.calls.clear()
        controller = start("DeepseekV3", REAL_SIZES, **{"backend": "ascend", "infer.use_cuda_graph": graph, **asked})
        got = play(controller, wanted)
        assert not got.dead, got.dead
        assert got.tokens == want.tokens
        assert bool(npu.calls[PROLOG]) == ("npu_mla_prolog_v3" in _chip().kernels)
    assert bool(npu.graphs.replays) == _chip().graphs


def _chip() -> Chip:
    chip = chip_of(torch_npu.npu.get_soc_version())
    assert chip is not None
    return chip


def replayed(start: Any, model: str) -> RunResult:
    """Requests of which one comes later, with captured decode steps."""
    family, changes, _ = MODELS[model]
    return play(start(family, changes, backend="ascend"), requests(), arrivals={"r3": 6})


@pytest.mark.parametrize("model", MODELS)
def test_captured_steps_give_the_tokens_of_the_reference_L3(npu: SimulatedNpu, start: Any, model: str) -> None:
    family, changes, _ = MODELS[model]
    want = play(start(family, changes, backend="reference"), requests(), arrivals={"r3": 6})
    got = replayed(start, model)
    assert not got.dead, got.dead
    assert got.tokens == want.tokens
    assert got.reasons() == want.reasons()
    # The first steps of a number of requests compute prompts.
    assert npu.graphs.replays > 10 if _chip().graphs else not npu.graphs.replays


def test_without_the_update_of_lengths_captured_steps_give_other_tokens_L3(
    npu: SimulatedNpu, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, changes, _ = MODELS["llama"]
    want = play(start(family, changes, backend="reference"), requests(), arrivals={"r3": 6})
    monkeypatch.setattr(NpuReplay, "update", lambda self, query_lens, kv_lens: None)
    got = replayed(start, "llama")
    assert (got.tokens != want.tokens) == bool(npu.graphs.replays)


@pytest.mark.parametrize("model", ["llama", "qwen3-moe", "deepseek-v3"])
def test_two_ranks_over_npu_tensors_give_the_tokens_of_the_reference_L3(start: Any, model: str) -> None:
    family, changes, _ = MODELS[model]
    want = play(start(family, changes, backend="reference"), requests())
    ranks = {"backend": "ascend", "infer.use_cuda_graph": False, "infer.tp_size": 2}
    controller = start(family, changes, **ranks)
    try:
        got = play(controller, requests())
    finally:
        controller.executor.close()
    assert not got.dead, got.dead
    assert got.tokens == want.tokens
    assert got.reasons() == want.reasons()


@pytest.mark.filterwarnings("ignore:infer.attn_type=npu is read as")
@pytest.mark.parametrize("model", ["llama", "deepseek-v3"])
def test_chitus_name_for_this_attention_is_understood_L3(npu: SimulatedNpu, start: Any, model: str) -> None:
    family, changes, _ = MODELS[model]
    asked = {"backend": "ascend", "infer.attn_type": "npu"}
    if model == "deepseek-v3" and LATENT not in _chip().kernels:
        with pytest.raises(ResolveError, match=r"ascend\.latent: the vendor documents npu_\w+ .*for 910b and 910_93"):
            start(family, changes, **asked)
        return
    got = play(start(family, changes, **asked), requests(1))
    assert got.tokens and npu.calls[BLOCKED[1] if _chip().name == "310p" else PAGED[0]]


def test_an_op_that_is_not_simulated_fails_loudly_L3(npu: SimulatedNpu) -> None:
    with pytest.raises(NotImplementedError, match="npu_gelu"):
        torch.ops.npu.npu_gelu(torch.zeros(4, device="npu"))


def test_a_capture_that_fails_at_its_end_leaves_eager_steps_as_they_were_L3(
    npu: SimulatedNpu, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch_npu itself would go on recording calls of attention, on the stream of the capture."""
    family, changes, _ = MODELS["llama"]
    want = play(start(family, changes, backend="reference"), requests())
    end = torch.npu.NPUGraph.capture_end

    def fail(graph: Any) -> None:
        end(graph)
        raise RuntimeError("a task cannot be captured")

    monkeypatch.setattr(torch.npu.NPUGraph, "capture_end", fail)
    before = torch.npu.current_stream()
    got = play(start(family, changes, backend="ascend"), requests())
    assert got.tokens == want.tokens
    assert not npu.graphs.replays and torch.npu.current_stream() == before


def test_an_older_capture_that_is_freed_during_a_capture_does_not_end_it_L3(npu: SimulatedNpu) -> None:
    x = torch.zeros(4, device="npu")
    older = [torch.npu.NPUGraph()]
    with torch.npu.graph(older[0]):
        x.add_(1)
    newer = torch.npu.NPUGraph()
    with torch.npu.graph(newer):
        x.add_(2)
        older.clear()
        gc.collect()
    newer.replay()
    assert x.cpu().tolist() == [2] * 4


@pytest.mark.parametrize(
    "segment",
    [lambda x: x.sum().item(), lambda x: x.cpu(), lambda x: x.copy_(torch.ones(4)), lambda x: x.nonzero()],
    ids=["a value", "a copy to the host", "a copy from the host", "a shape"],
)
def test_a_segment_that_waits_for_the_host_cannot_be_captured_L3(npu: SimulatedNpu, segment: Any) -> None:
    x = torch.zeros(4, device="npu")
    graphs = NpuGraphs(SimpleNamespace(module=torch.npu, name="npu 0", synchronize=torch.npu.synchronize))  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="npu 0 cannot capture it"):
        graphs.capture(lambda: segment(x))
    replay = graphs.capture(lambda: x.add_(1))
    assert x.cpu().tolist() == [0] * 4, "a capture computes nothing"
    replay()
    replay()
    assert x.cpu().tolist() == [2] * 4


def test_the_chip_is_the_one_that_was_asked_for_L3() -> None:
    numbers = {"Ascend910B2": 221, "Ascend910_9391": 250, "Ascend310P3": 202, "Ascend950PR_9589": 260}
    assert torch_npu.npu.get_soc_version() == numbers[os.environ["FAKE_ACL_CHIP"]]

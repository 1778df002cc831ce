"""Expert parallelism (``infer.ep_size``): ranks that hold whole experts give the tokens of one rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harsh_traffic import LIMITS, assert_same, traffic
from test_packed_host_experts import awq_folder, fp8_folder, made, mxfp4_folder, q4_k_m_experts, w4afp8_folder

from evener.config import from_overrides
from evener.contracts.declared import StackedWeight
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener.errors import ConfigError
from evener_conformance.mirror_communicator import MirrorCommunicator
from evener_conformance.naive.model import NaiveModel, find_architecture
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.engine import play, small_config
from evener_inspection.explanation import explain
from evener_inspection.thread_communicator import run_on_threads
from evener_offload.expert_ranks import ExpertRanks, builder_of

CPU = {**LIMITS, "backend": "cpu", "dtype": "float32", "infer.block_size": 128}


def ranks(tp: int, ep: int, pp: int = 1) -> dict[str, Any]:
    return {"infer.tp_size": tp, "infer.ep_size": ep, "infer.pp_size": pp}


def short() -> list[Any]:
    sampling = Sampling(temperature=0.0)
    return [NewRequest(id="short", prompt=[5 + 7 * i * i % 89 for i in range(11)], max_tokens=4, sampling=sampling)]


#: How a folder or file is made, of which family, and the ranks.
STORED: dict[str, tuple[Callable[[str, Path], Path], str, list[tuple[int, int]]]] = {
    "FP8 blocks": (fp8_folder, "DeepseekV3", [(2, 2), (4, 2), (4, 4)]),
    "FP8 blocks without shared experts": (fp8_folder, "Qwen3Moe", [(4, 4)]),
    "MXFP4": (mxfp4_folder, "GptOss", [(2, 2), (4, 2)]),
    "four bits, rounded activations": (w4afp8_folder, "DeepseekV3", [(2, 2)]),
    "AWQ": (awq_folder, "Qwen3Moe", [(4, 2)]),
    "GGUF": (q4_k_m_experts, "Qwen3Moe", [(2, 2)]),
    "unquantized": (made, "Mixtral", [(2, 2), (4, 2)]),
    "with biases": (made, "GptOss", [(2, 2), (4, 2)]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stored", "tp", "ep"), [(name, *each) for name, (_, _, sizes) in STORED.items() for each in sizes]
)
def test_ranks_with_their_own_experts_give_the_tokens_of_one_rank(
    stored: str, tp: int, ep: int, tmp_path: Path
) -> None:
    make, family, _ = STORED[stored]
    path = make(family, tmp_path / "model")
    want = play(build_controller(from_overrides(str(path), CPU))[0], **traffic())
    with rank_threads(from_overrides(str(path), {**CPU, **ranks(tp, ep)})) as (controller, executor):
        assert_same(play(controller, **traffic()), want)
        for worker in executor.workers:
            memory = worker.facts.info.memory
            assert memory.measured_weights + memory.measured_mapped == memory.weights + memory.mapped


@pytest.mark.parametrize(
    ("stored", "tp", "ep"), [pytest.param("FP8 blocks", 4, 2, marks=pytest.mark.slow), ("MXFP4", 2, 2)]
)
def test_a_short_text_on_ranks_with_their_own_experts(stored: str, tp: int, ep: int, tmp_path: Path) -> None:
    make, family, _ = STORED[stored]
    path, asked = str(make(family, tmp_path / "model")), short()
    want = play(build_controller(from_overrides(path, CPU))[0], asked)
    with rank_threads(from_overrides(path, {**CPU, **ranks(tp, ep)})) as (controller, executor):
        assert play(controller, asked).tokens == want.tokens
        for number, worker in enumerate(executor.workers):
            first = number // (tp // ep)
            stacks = [each for each in worker.assembly.build.weights if isinstance(each, StackedWeight)]
            assert stacks and all(each.held.start == first * each.experts for each in stacks)
            assert all(each.held.whole == ep * each.experts for each in stacks)


@pytest.mark.slow
@pytest.mark.parametrize("quant", ["q8_0", "int4"])
def test_experts_that_are_quantized_while_they_are_read_are_divided_too(quant: str, tmp_path: Path) -> None:
    path, keys = made("Qwen3Moe", tmp_path / "model"), {**CPU, "quant": quant}
    # Of attention and embeddings other ranks hold other parts, so the sums differ in their last bits.
    want = play(build_controller(from_overrides(str(path), {**keys, **ranks(1, 1)}))[0], **traffic())
    with rank_threads(from_overrides(str(path), {**keys, **ranks(2, 2)})) as (controller, _):
        assert_same(play(controller, **traffic()), want)


#: Families, and what ranks need to share the rest of their tiny models.
EVEN = {"num_attention_heads": 4, "num_key_value_heads": 4}
FAMILIES_WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "Qwen2Moe": {**EVEN, "hidden_size": 48}, "Qwen3Moe": EVEN, "Mixtral": EVEN, "GptOss": EVEN, "Llama4": EVEN,
    "Glm4Moe": EVEN, "DeepseekV2": EVEN, "DeepseekV3": EVEN, "DeepseekV32": EVEN,
    "Qwen3Next": {**EVEN, "linear_num_key_heads": 4, "linear_num_value_heads": 8},
}  # fmt: skip


#: Others have the blocks of these; ``models/tests/test_ranks.py`` has them all.
QUICK = ("Qwen2Moe", "GptOss", "Llama4", "DeepseekV3")


@pytest.mark.parametrize(
    "family", [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES_WITH_EXPERTS]
)
def test_every_family_of_experts_gives_the_logits_of_one_rank(family: str) -> None:
    """Their numbers of experts cannot be divided equally: the first group has one more."""
    config = {**find_architecture(f"{family}ForCausalLM").tiny_config(), **FAMILIES_WITH_EXPERTS[family]}
    ids = list(range(3, 15))
    one = NaiveModel(config).logits(ids, chunk=9)
    assert one.std() > 0.05
    for size, groups in ((2, 2), (4, 2)):
        made = partial(NaiveModel, config, builder=builder_of(groups))
        found = run_on_threads(size, lambda end, made=made: made(communicator=end).logits(ids, chunk=9))
        torch.testing.assert_close(found[0], one, atol=1e-5, rtol=1e-4)
        assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("Qwen3Moe", ranks(4, 3), "infer.ep_size=3: infer.tp_size=4 ranks cannot be divided into so many groups; sizes "
         "that fit: 1, 2, 4"),
        ("Qwen3Moe", ranks(1, 2), "infer.ep_size=2: infer.tp_size=1 ranks cannot be divided into so many groups; sizes "
         "that fit: 1"),
        ("Qwen3Moe", {**ranks(4, 4), "experts": 3}, "infer.ep_size=4: 3 experts cannot be divided into so many groups; "
         "sizes that fit: 1, 2"),
        ("Qwen3", ranks(2, 2), "has no experts; leave infer.ep_size out"),
        ("Qwen3Moe", {**ranks(2, 2), "infer.cpu_layer_num": 1, "backend": "simulated"},
         "infer.resident_experts hold them in host memory; leave infer.ep_size out, or these"),
    ],
)  # fmt: skip
def test_impossible_divisions_are_refused_with_the_fix(
    family: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    changes = {**EVEN, "num_experts": keys.pop("experts", 8)}
    with pytest.raises(ConfigError) as error:
        explain(small_config(tmp_path / "model", family, changes, **{"backend": "cpu", **keys}))
    assert message in str(error.value)


def test_fp8_blocks_that_ranks_cannot_share_are_divided_as_whole_experts(tmp_path: Path) -> None:
    """Qwen3-30B-A3B-FP8 has blocks of 128 × 128 and experts of 768 features: six ranks can share them."""
    sizes = {
        "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 2,
        "vocab_size": 1024, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }  # fmt: skip
    config = partial(small_config, family="Qwen3Moe", changes=sizes, backend="cpu", dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"infer.tp_size=8: 768 features in an expert \(see infer.ep_size\) in units"):
        explain(config(tmp_path / "sliced", **ranks(8, 1)))
    whole = explain(config(tmp_path / "one"))["memory"]
    mine = explain(config(tmp_path / "whole", **ranks(8, 8)))
    experts = 2 * 3 * 768 * 2048 * 128
    assert experts < whole["weights"] < 1.1 * experts
    assert experts / 8 < mine["memory"]["weights"] < 0.15 * whole["weights"]
    assert any("experts 0 to 15 of 128" in note for note in mine["notes"])


def test_a_rank_s_declared_weights_are_those_of_its_experts_only() -> None:
    config = {**find_architecture("Qwen3MoeForCausalLM").tiny_config(), **EVEN, "num_experts": 7}
    found = []
    for rank in range(4):
        end = MirrorCommunicator(4)
        end.rank = rank
        build = ExpertRanks("float32", 64, None, end, ep_size=2)
        find_architecture("Qwen3MoeForCausalLM")(config, build)
        names = [name for w in build.weights if isinstance(w, StackedWeight) for name in w.stored_parts()]
        own = {int(name.split(".experts.")[1].split(".")[0]) for name in names}
        ignored = re.compile("|".join(build.ignored))
        others = {n for n in range(7) if ignored.fullmatch(f"model.layers.1.mlp.experts.{n}.up_proj.weight_scale_inv")}
        assert own | others == set(range(7)) and not own & others
        assert not ignored.fullmatch("model.layers.1.mlp.experts.7.up_proj.weight")
        found.append(own)
    assert found == [{0, 1, 2, 3}, {0, 1, 2, 3}, {4, 5, 6}, {4, 5, 6}]

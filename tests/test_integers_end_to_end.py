"""GPTQ, AWQ, packed compressed-tensors, NVFP4, NF4 and Model Optimizer checkpoints, from their files to greedy tokens:
those of transformers with the dequantized weights, on one rank and on two, held as packed as they are stored."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from evener_convert.command import convert
from family_oracles import Logits, logits_of, make_transformers
from family_runner import ANSWER, SMALL, assert_naive_logits
from integer_files import awq_tensors, compressed_tensors, gptq_tensors, modelopt_tensors, quantized
from safetensors.torch import load_file, save_file
from stored_models import KEPT, SIZES, greedy, prompt

from evener.config import from_overrides
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener.errors import CheckpointError
from evener_conformance.naive.model import NaiveModel, find_architecture
from evener_conformance.oracle import Comparison, compare_greedy
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.engine import play
from evener_formats.plugin import evener_quant_schemes
from evener_inspection.explanation import explain

GROUP = 32
Stored = tuple[dict[str, torch.Tensor], torch.Tensor]


def gptq(bits: int, symmetric: bool, act_order: bool, form: str) -> tuple[Callable[[str, Any], Stored], dict[str, Any]]:
    def store(name: str, shape: Any) -> Stored:
        made = quantized(bits, *shape, GROUP, symmetric=symmetric, act_order=act_order, seed=len(name))
        return gptq_tensors(name.removesuffix(".weight"), made, bits, int(form == "gptq")), made.values

    settings = {"bits": bits, "group_size": GROUP, "sym": symmetric, "desc_act": act_order, "checkpoint_format": form}
    return store, {"quant_method": "gptq", **settings}


def awq(name: str, shape: Any) -> Stored:
    made = quantized(4, *shape, GROUP, seed=len(name))
    return awq_tensors(name.removesuffix(".weight"), made), made.values


def packed(bits: int, symmetric: bool, act_order: bool) -> tuple[Callable[[str, Any], Stored], dict[str, Any]]:
    def store(name: str, shape: Any) -> Stored:
        made = quantized(
            bits, *shape, GROUP, symmetric=symmetric, act_order=act_order, scale=torch.bfloat16, seed=len(name)
        )
        return compressed_tensors(name, made, bits, symmetric, act_order), made.values

    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": GROUP,
        "actorder": "group" if act_order else None,
    }  # fmt: skip
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return store, {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


def nvfp4(name: str, shape: Any) -> Stored:
    """As ModelOpt stores it: two floats of four bits a byte, a float8 scale for 16 columns, and one for all."""
    random, (rows, columns) = torch.Generator().manual_seed(len(name)), shape
    codes = torch.randint(0, 16, (rows, columns), generator=random)
    scale = (torch.rand(rows, columns // 16, generator=random) * 200 + 50).to(torch.float8_e4m3fn)
    half = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    whole = torch.tensor(1 / (500 * columns**0.5))
    numbers = torch.where(codes < 8, half[codes % 8], -half[codes % 8])
    values = numbers * (scale.float() * whole).repeat_interleave(16, 1)
    bytes_ = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    more = {f"{name.removesuffix('weight')}input_scale": torch.tensor(0.1)}
    return {name: bytes_, f"{name}_scale": scale, f"{name}_scale_2": whole, **more}, values


def nvfp4_packed(name: str, shape: Any) -> Stored:
    """As llm-compressor stores it: the scale for all is its reciprocal."""
    made, values = nvfp4(name, shape)
    tensors = {f"{name}_packed": made[name], f"{name}_scale": made[f"{name}_scale"]}
    tensors[f"{name}_global_scale"] = torch.reciprocal(made[f"{name}_scale_2"])[None]
    values = made[f"{name}_scale"].float() * torch.reciprocal(tensors[f"{name}_global_scale"])
    return tensors, _floats(made[name]) * values.repeat_interleave(16, 1)


def _floats(stored: torch.Tensor) -> torch.Tensor:
    half = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    return torch.cat((half, -half))[torch.stack((stored & 15, stored >> 4), -1).flatten(1).long()]


def nf4(name: str, shape: Any) -> Stored:
    """As bitsandbytes stores it, with scales that are numbers of a second table."""
    random, (rows, columns) = torch.Generator().manual_seed(len(name)), shape
    codes, blocks = torch.randint(0, 16, (rows * columns,), generator=random), rows * columns // 64
    table, second = torch.randn(16, generator=random).sort().values / 2, torch.rand(256, generator=random)
    own, each = torch.randint(0, 256, (blocks,), generator=random), torch.rand(-(-blocks // 256), generator=random) + 1
    absmax = (second[own] * each.repeat_interleave(256)[:blocks] + 0.5) * columns**-0.5
    state = {"quant_type": "nf4", "blocksize": 64, "shape": [rows, columns], "dtype": "float32"}
    state |= {"nested_blocksize": 256, "nested_offset": 0.5 * columns**-0.5, "nested_dtype": "float32"}
    tensors = {
        name: (codes[::2] * 16 + codes[1::2]).to(torch.uint8)[:, None], f"{name}.quant_map": table,
        f"{name}.absmax": own.to(torch.uint8), f"{name}.nested_quant_map": second,
        f"{name}.nested_absmax": each * columns**-0.5,
        f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }  # fmt: skip
    return tensors, (table[codes] * absmax.repeat_interleave(64)).reshape(rows, columns)


def factors(name: str, columns: int) -> torch.Tensor:
    """What activations are multiplied by, powers of two and a half, far enough from one to be missed."""
    return (0.5 + torch.rand(columns, generator=torch.Generator().manual_seed(len(name)))).bfloat16()


def awq_of_modelopt(name: str, shape: Any) -> Stored:
    """W4A16_AWQ: the tool moved the factors of what reads a norm alone into the norm."""
    made = quantized(4, *shape, GROUP, symmetric=True, scale=torch.bfloat16, seed=len(name))
    after_a_norm = ".experts." not in name and any(each in name for each in ("q_proj", "k_", "v_", "gate", "up_"))
    each = None if after_a_norm else factors(name, shape[1])
    return modelopt_tensors(name, made, each), made.values * (1 if each is None else each.float())


def smooth(name: str, shape: Any) -> Stored:
    """W8A8_SQ_PER_CHANNEL: int8 with a scale for each row, and factors of all layers."""
    random, (rows, columns) = torch.Generator().manual_seed(len(name)), shape
    numbers = torch.randint(-127, 128, (rows, columns), generator=random).to(torch.int8)
    scale = (torch.rand(rows, generator=random) + 0.5) / (100 * columns**0.5)
    # The factors of q, k and v are equal, and those of gate and up.
    each, stem = factors(name[:16], columns), name.removesuffix("weight")
    more = {f"{stem}input_scale": torch.tensor(0.02), f"{stem}pre_quant_scale": each}
    return {name: numbers, f"{name}_scale": scale, **more}, numbers.float() * scale[:, None] * each.float()


FLOATS = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
KINDS: dict[str, tuple[Callable[[str, Any], Stored], dict[str, Any]]] = {
    "gptq 4": gptq(4, True, False, "gptq"), "gptq 4 act": gptq(4, False, True, "gptq"),
    "gptq 3 act": gptq(3, True, True, "gptq_v2"), "gptq 8": gptq(8, False, False, "gptq"),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "packed 4": packed(4, True, False), "packed 4 act": packed(4, False, True), "packed 8": packed(8, False, False),
    "nvfp4": (nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "nvfp4 packed": (nvfp4_packed, {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
                                    "config_groups": {"group_0": {"targets": ["Linear"], "weights": FLOATS}}}),
    "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
}  # fmt: skip
#: Some or all weights have factors of columns, and are dequantized with them.
FACTORED: dict[str, tuple[Callable[[str, Any], Stored], dict[str, Any]]] = {
    "awq of modelopt": (awq_of_modelopt,
                        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": GROUP}),
    "smooth": (smooth, {"quant_method": "modelopt", "quant_algo": "W8A8_SQ_PER_CHANNEL"}),
}  # fmt: skip
#: Sizes that two ranks can cut in blocks of 64 columns.
WIDER: dict[str, dict[str, int]] = {"nf4": {"head_dim": 32, "moe_intermediate_size": 128}}


def checkpoint(folder: Path, family: str, kind: str) -> tuple[Logits, Path]:
    """What transformers computes with the dequantized weights, and the folder with the quantized ones."""
    from transformers import AutoModelForCausalLM

    config = {**find_architecture(f"{family}ForCausalLM").tiny_config(), **SIZES[family], "num_hidden_layers": 2}
    config |= {key: size for key, size in WIDER.get(kind, {}).items() if key in config}
    make_transformers(config, folder / "plain")
    tensors = load_file(folder / "plain/model.safetensors")
    store, settings = {**KINDS, **FACTORED}[kind]
    stored, numbers = {}, {}
    for name, weight in tensors.items():
        if weight.dim() != 2 or any(kept in name for kept in KEPT):
            stored[name] = numbers[name] = weight
        else:
            made, numbers[name] = store(name, weight.shape)
            stored |= made
    shutil.copytree(folder / "plain", folder / "stored")
    save_file(stored, folder / "stored/model.safetensors")
    saved = json.loads((folder / "plain/config.json").read_text())
    (folder / "stored/config.json").write_text(json.dumps(saved | {"quantization_config": settings}))
    save_file(numbers, folder / "plain/model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.float32).eval()
    return logits_of(model), folder / "stored"


@pytest.mark.parametrize(
    ("family", "kind"),
    [*(("Qwen3", kind) for kind in (*KINDS, *FACTORED)), ("Qwen3Moe", "gptq 4 act"), ("Qwen3Moe", "nvfp4"),
     *(pytest.param(*case, marks=pytest.mark.slow) for case in (
         *(("Qwen3Moe", kind) for kind in ("packed 4", "nf4", *FACTORED)),
         *(("DeepseekV3", kind) for kind in ("nvfp4", "gptq 4", "packed 4", "awq")),
         *(("Mixtral", kind) for kind in ("gptq 4", "awq", "packed 4"))))],
)  # fmt: skip
def test_logits_and_tokens_are_those_of_the_dequantized_weights(
    family: str, kind: str, tmp_path: Path, one_thread: None
) -> None:
    oracle, folder = checkpoint(tmp_path, family, kind)
    ids = prompt(family)
    naive = NaiveModel(folder, schemes=tuple(evener_quant_schemes()))
    assert_naive_logits(naive, oracle(ids), ids)
    result = Comparison()
    answer = greedy(folder, ids, ANSWER)
    compare_greedy(oracle, [ids], [answer], lambda tokens, n: greedy(folder, list(tokens), n), result)
    result.check()


@pytest.mark.parametrize(
    "kind",
    [kind if kind in ("gptq 3 act", "nvfp4", "nf4") else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS],
)
def test_the_cpu_keeps_the_numbers_packed(kind: str, tmp_path: Path) -> None:
    for family in ("Qwen3", "Qwen3Moe"):
        _, folder = checkpoint(tmp_path / family, family, kind)
        found = explain(from_overrides(str(folder), SMALL))
        # QKV, output, gate and up, and down of two layers.
        assert found["packings"]["cpu.blocks"] == 8 and not found["dequantized"]
        _, ready = build_controller(from_overrides(str(folder), SMALL))
        assert ready.info.memory.weights == found["memory"]["weights"]


@pytest.mark.parametrize(
    "kind",
    ["gptq 3 act", "nf4",
     *(pytest.param(kind, marks=pytest.mark.slow)
       for kind in ("awq", "gptq 4", "gptq 4 act", "packed 4 act", "nvfp4"))],
)  # fmt: skip
@pytest.mark.parametrize("family", ["Qwen3Moe", pytest.param("Qwen3", marks=pytest.mark.slow)])
def test_two_ranks_cut_the_groups_and_give_the_same_tokens(
    family: str, kind: str, tmp_path: Path, one_thread: None
) -> None:
    _, folder = checkpoint(tmp_path, family, kind)
    request = NewRequest(id="a", prompt=prompt(family), max_tokens=12, sampling=Sampling(temperature=0.0))
    config = from_overrides(str(folder), {**SMALL, "infer.tp_size": 2})
    with rank_threads(config) as (controller, _):
        assert play(controller, [request]).tokens["a"] == greedy(folder, prompt(family), 12)
    assert not explain(config)["dequantized"]


@pytest.mark.parametrize(
    ("kind", "ranks"), [("nvfp4", 2), ("nf4", 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("nvfp4", 1), ("nvfp4 packed", 1), ("nvfp4 packed", 2)))]
)  # fmt: skip
def test_converted_files_keep_the_numbers_packed(kind: str, ranks: int, tmp_path: Path, one_thread: None) -> None:
    _, folder = checkpoint(tmp_path, "Qwen3Moe", kind)
    split, made = {"infer.tp_size": ranks}, tmp_path / "made"
    convert(from_overrides(str(folder), split), made)
    request = NewRequest(id="a", prompt=prompt("Qwen3Moe"), max_tokens=12, sampling=Sampling(temperature=0.0))
    found = []
    for source in (folder, made):
        config = from_overrides(str(source), {**SMALL, **split})
        with rank_threads(config) as (controller, _):
            found.append((play(controller, [request]).tokens["a"], explain(config)["packings"]))
        assert not explain(config)["dequantized"]
    assert found[0] == found[1]


@pytest.mark.parametrize(("kind", "packed"), [("awq of modelopt", 4), ("smooth", 0)])
def test_weights_with_factors_of_columns_are_dequantized_and_others_stay_packed(
    kind: str, packed: int, tmp_path: Path, one_thread: None
) -> None:
    _, folder = checkpoint(tmp_path, "Qwen3", kind)
    found = explain(from_overrides(str(folder), SMALL))
    # QKV, and gate and up, of two layers; the output and down have factors.
    assert found["packings"].get("cpu.blocks", 0) == packed
    assert len(found["dequantized"]) and all("with factors of columns" in str(each) for each in found["dequantized"])
    _, ready = build_controller(from_overrides(str(folder), SMALL))
    assert ready.info.memory.weights == found["memory"]["weights"]
    request = NewRequest(id="a", prompt=prompt("Qwen3"), max_tokens=12, sampling=Sampling(temperature=0.0))
    with rank_threads(from_overrides(str(folder), {**SMALL, "infer.tp_size": 2})) as (controller, _):
        assert play(controller, [request]).tokens["a"] == greedy(folder, prompt("Qwen3"), 12)
    convert(from_overrides(str(folder), {"infer.tp_size": 2}), tmp_path / "made")
    with rank_threads(from_overrides(str(tmp_path / "made"), {**SMALL, "infer.tp_size": 2})) as (controller, _):
        assert play(controller, [request]).tokens["a"] == greedy(folder, prompt("Qwen3"), 12)


def test_blocks_of_a_flattened_weight_are_not_split_into_files_of_ranks(tmp_path: Path) -> None:
    _, folder = checkpoint(tmp_path, "Qwen3", "nf4")
    with pytest.raises(CheckpointError, match=r"convert without infer\.tp_size: ranks cut it while they load"):
        convert(from_overrides(str(folder), {"infer.tp_size": 2}), tmp_path / "made")
    assert not (tmp_path / "made").exists()

"""Integers in groups by the vendor's products: the layout holds the weights' numbers, and models stay packed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gcu_stand_ins import FUNCTIONS, LAUNCHED, install_on_simulator, launches, stand_in_ops
from integer_files import gptq_tensors, quantized
from safetensors.torch import load_file, save_file
from stand_ins import installed

from evener.config import from_overrides
from evener.contracts.ops import Bucket, OpCall
from evener.contracts.quant import QuantFormat, Rounding, WeightPart
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener_backend_gcu.device import capabilities
from evener_backend_gcu.quantized import GcuBytes, GcuIntegerExperts, GcuIntegers, GcuNibbles
from evener_conformance.kit.cases.blocks import reference_dequantize
from evener_conformance.naive.model import find_architecture
from evener_conformance.reference.engine import play

HALVES = ("float16", "bfloat16")
CPU = torch.device("cpu")


def part(rows: int, columns: int, bits: int, group: int, zeros: bool, seed: int = 1) -> WeightPart:
    """Random integers in the tensors that packings get."""
    made = quantized(bits, rows, columns, max(0, group), symmetric=not zeros, seed=seed)
    if bits == 8:
        tensors = {"weight": (made.codes - 128).to(torch.int8), "scale": made.scales.T.contiguous()}
        if group < 0:  # one for the whole tensor
            tensors["scale"] = made.scales.float().max()
        fixed = {"scale": "float32", "activation": Rounding("int8", -1)} if group < 0 else {"scale": "float16"}
        return WeightPart(f"w{seed}", rows, columns, QuantFormat("int8", group, **fixed), tensors)
    pairs = (made.codes[:, ::2] + 16 * made.codes[:, 1::2]).to(torch.uint8)
    tensors = {"weight": pairs, "scale": made.scales.T.contiguous()}
    if zeros:
        tensors["zero"] = made.zeros.T.to(torch.uint8).contiguous()
    form = QuantFormat("uint4", group, scale="float16", zero="uint8" if zeros else None)
    return WeightPart(f"w{seed}", rows, columns, form, tensors)


def call(op: str, dtype: str, **more: Any) -> OpCall:
    return OpCall(op, {"dtype": dtype, "out": dtype, **more}, Bucket(1, 9), capabilities(13, graphs=False))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("bits", "group", "zeros"),
    [(4, 64, True), (4, 128, False), (8, 0, False), (8, -1, False), (8, 64, False), (4, 64, None)],
)
def test_products_equal_those_of_dequantized_weights_L1(
    bits: int, group: int, zeros: bool | None, dtype: str, tmp_path: Path
) -> None:
    # Of the last case one part has zero points and the other has not.
    parts = [part(24, 256, bits, group, bool(zeros)), part(8, 256, bits, group, zeros is None or zeros, seed=2)]
    packing = GcuBytes() if bits == 8 else GcuNibbles()
    assert packing.supports(parts, dtype) is None
    packed = packing.pack(parts, dtype, CPU)
    assert sum(t.nbytes for t in packed.data) == packed.nbytes == packing.nbytes(parts, dtype)
    assert packed.nbytes < (0.65 if bits == 4 else 1.1) * 32 * 256
    kind = getattr(torch, dtype)
    x, bias = torch.randn(5, 256).to(kind), torch.randn(32).to(kind)
    whole = torch.cat([reference_dequantize(each) for each in parts])
    with installed(tmp_path, stand_in_ops(), functions=FUNCTIONS):
        kernel = GcuIntegers(stand_in_ops(), "gcu", 100, HALVES)
        asked = call("linear", dtype, rows=32, columns=256)
        assert kernel.supports(asked) is None
        found = kernel.build(asked)(x, packed, bias)
        assert kernel.build(asked)(x[:0], packed).shape == (0, 32)
    near = 4e-3 if dtype == "float16" else 3e-2
    torch.testing.assert_close(found.float(), x.float() @ whole.T + bias.float(), rtol=near, atol=near)


@pytest.mark.parametrize("bits", [4, 8])
def test_experts_equal_dequantized_ones_L1(bits: int, tmp_path: Path) -> None:
    stack: list[Sequence[WeightPart]] = [[part(24, 128, bits, 64, bits == 4, seed)] for seed in range(3)]
    packed = (GcuBytes() if bits == 8 else GcuNibbles()).pack_stack(stack, 3, "float16", CPU)
    x, bias = torch.randn(4, 128).half(), torch.randn(3, 24).half()
    slots = torch.tensor([[0, 2], [2, 0], [2, 3], [0, 2]], dtype=torch.int32)
    asked = call("grouped_linear", "float16", experts=3, rows=24, columns=128)
    with installed(tmp_path, stand_in_ops(), functions=FUNCTIONS):
        kernel = GcuIntegerExperts(stand_in_ops(), "gcu", 100, HALVES)
        assert kernel.supports(asked) is None and not kernel.capturable
        found = kernel.build(asked)(x, packed, slots, bias)
    for token, row in enumerate(slots.tolist()):
        for place, slot in enumerate(row):
            want = torch.zeros(24)
            if slot < 3:
                want = x[token].float() @ reference_dequantize(stack[slot][0]).T + bias[slot].float()
            torch.testing.assert_close(found[token, place].float(), want, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize(
    ("bits", "change", "reason"),
    [
        (4, {"group": 32}, "groups of 64 or 128"), (4, {"order": "act", "groups": 4}, "neighbouring columns"),
        (4, {"scale": "float8_e8m0fnu"}, "neighbouring columns"), (8, {"zero": "int8"}, "no zero points"),
        (8, {"group": 96}, "or whole rows"), (8, {"group_out": 4}, "neighbouring columns"),
    ],
)  # fmt: skip
def test_other_formats_are_refused_L1(bits: int, change: dict[str, Any], reason: str) -> None:
    packing, sound = (GcuBytes() if bits == 8 else GcuNibbles()), part(8, 256, bits, 64, zeros=False)
    changed = replace(sound, format=replace(sound.format, **change))
    assert reason in (packing.supports([changed], "float16") or "")
    assert "different formats" in (packing.supports([sound, changed], "float16") or "") or change == {"zero": "int8"}
    odd = replace(sound, columns=192)
    assert (packing.supports([odd], "float16") is None) == (bits == 8)


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_gptq_model_stays_packed_and_its_tokens_are_those_of_the_cpu_L3(
    bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    from family_oracles import make_transformers

    folder = tmp_path / "model"
    config = {
        **find_architecture("Qwen3MoeForCausalLM").tiny_config(), "hidden_size": 128, "moe_intermediate_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 1,
    }  # fmt: skip
    make_transformers(config, folder)
    stored: dict[str, torch.Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if weight.dim() != 2 or any(kept in name for kept in ("embed", "lm_head", "norm", "mlp.gate.")):
            stored[name] = weight
        else:
            rows, columns = weight.shape
            made = quantized(bits, rows, columns, 64, symmetric=True, seed=len(stored))
            stored |= gptq_tensors(name.removesuffix(".weight"), made, bits, less=1)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    settings = {"quant_method": "gptq", "bits": bits, "group_size": 64, "sym": True, "desc_act": False}
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(saved | {"quantization_config": settings}))

    def answer(backend: str) -> tuple[list[int], Any]:
        keys = {"backend": backend, "dtype": "float16", "infer.max_seq_len": 128, "infer.kv_memory": 2**22,
                "infer.block_size": 64, "executor": "inline"}  # fmt: skip
        controller, ready = build_controller(from_overrides(str(folder), keys))
        request = NewRequest(id="a", prompt=[5, 9, 17, 3], max_tokens=6, sampling=Sampling(temperature=0.0))
        try:
            return play(controller, [request]).tokens["a"], ready
        finally:
            controller.executor.close()

    install_on_simulator(tmp_path / "site", monkeypatch)
    want, _ = answer("cpu")
    with installed(tmp_path / "vendor", stand_in_ops(), functions=LAUNCHED):
        found, _ = answer("gcu")
        ran = launches()
    assert found == want
    assert ran["_C::gptq_gemm_gcu" if bits == 4 else "_C::weight_only_quant"] > 6

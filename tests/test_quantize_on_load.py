"""``quant=q8_0`` and its like on an unquantized checkpoint: the tokens of the quantized and dequantized weights, packed
in memory, one layer at a time, on one rank and on two."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evener_convert.matrices import ModelMatrices
from evener_convert.quantized import QuantizedCheckpoint
from family_oracles import make_transformers
from family_runner import SMALL, prompt_of
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from evener.config import from_overrides
from evener.contracts.conversion.quantizer import Matrix
from evener.contracts.declared import LinearWeight
from evener.contracts.quant import PackedWeight, Packing, WeightPart, block_format
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener.errors import CheckpointError, ConfigError, EvenerError
from evener.loading.checkpoint import open_checkpoint
from evener.loading.loader import load_weights
from evener_conformance.naive.model import find_architecture
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.engine import play
from evener_formats.gguf.scheme import GgufScheme
from evener_formats.quantize.blocks import BlockQuantizer
from evener_inspection.explanation import explain

SIZES: dict[str, dict[str, Any]] = {
    "Qwen3": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
              "head_dim": 16, "num_hidden_layers": 2},
    "Qwen3Moe": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
                 "moe_intermediate_size": 32, "num_hidden_layers": 2},
    "GptOss": {},
}  # fmt: skip
#: Weights that stay as they are: embeddings, heads, routers.
KEPT = ("embed_tokens", "lm_head", "mlp.gate.weight", "router", "bias", "sinks")


def in_blocks(kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def rounded(rows: torch.Tensor) -> torch.Tensor:
        form = GGMLQuantizationType[kind.upper()]
        return torch.from_numpy(np.ascontiguousarray(dequantize(quantize(rows.contiguous().numpy(), form), form)))

    return rounded


def in_eight_bits(dtype: torch.dtype, largest: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def rounded(rows: torch.Tensor) -> torch.Tensor:
        scale = rows.abs().amax(-1, keepdim=True) / largest
        numbers = rows / scale
        return (numbers.round() if dtype == torch.int8 else numbers).to(dtype).float() * scale

    return rounded


def in_four_bits(rows: torch.Tensor) -> torch.Tensor:
    """Each group with the scale of five that has the least squared error, one group after another."""
    size = next(each for each in (128, 64, 32) if rows.shape[-1] % each == 0)
    made = []
    for group in rows.reshape(-1, size):
        tried = [(group.abs().max() / largest).half().float() for largest in (7.0, 7.5, 8.0, 8.5, 9.0)]
        found = [(group / scale).round().clamp(-8, 7) * scale for scale in tried]
        made.append(min(found, key=lambda each: float((each - group).square().sum())))
    return torch.stack(made).reshape(rows.shape)


#: What each value of ``quant`` makes of a matrix; these sizes have no blocks of 256, which q5_0 takes the place of.
ROUNDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "q8_0": in_blocks("q8_0"), "q4_0": in_blocks("q4_0"), "q4_k": in_blocks("q5_0"),
    "fp8": in_eight_bits(torch.float8_e4m3fn, 448), "int8": in_eight_bits(torch.int8, 127), "int4": in_four_bits,
}  # fmt: skip


def folders(root: Path, family: str, quant: str = "q8_0") -> tuple[Path, Path]:
    """A random model, and the same with the numbers that its matrices have after they were quantized."""
    config = {**find_architecture(f"{family}ForCausalLM").tiny_config(), **SIZES[family]}
    make_transformers(config, root / "plain")
    tensors = load_file(root / "plain/model.safetensors")
    for name, weight in tensors.items():
        if weight.dim() > 1 and not any(kept in name for kept in KEPT):
            # gpt-oss stores experts as [experts, columns, rows].
            stack = weight.dim() == 3
            rounded = ROUNDED[quant](weight.mT if stack else weight)
            tensors[name] = (rounded.mT if stack else rounded).contiguous()
    shutil.copytree(root / "plain", root / "rounded")
    save_file(tensors, root / "rounded/model.safetensors", {"format": "pt"})
    return root / "plain", root / "rounded"


def greedy(folder: Path, ids: Sequence[int], count: int = 12, **more: Any) -> list[int]:
    controller, _ = build_controller(from_overrides(str(folder), {**SMALL, **more}))
    request = NewRequest(id="a", prompt=list(ids), max_tokens=count, sampling=Sampling(temperature=0.0))
    return play(controller, [request]).tokens["a"]


@pytest.mark.parametrize(
    ("family", "quant"),
    [*(("Qwen3", each) for each in ROUNDED), ("Qwen3Moe", "q8_0"), ("GptOss", "q4_0"),
     *(pytest.param(*case, marks=pytest.mark.slow)
       for case in (("Qwen3Moe", "fp8"), ("GptOss", "int8"), ("GptOss", "int4")))],
)  # fmt: skip
def test_tokens_are_those_of_the_rounded_weights(family: str, quant: str, tmp_path: Path, one_thread: None) -> None:
    plain, rounded = folders(tmp_path, family, quant)
    ids = prompt_of(find_architecture(f"{family}ForCausalLM").tiny_config()["vocab_size"])
    assert greedy(plain, ids, quant=quant) == greedy(rounded, ids)


@pytest.mark.parametrize(
    ("family", "quant"),
    [("Qwen3Moe", "int8"), ("Qwen3", "int4"),
     *(pytest.param("Qwen3", quant, marks=pytest.mark.slow) for quant in ("q8_0", "fp8"))],
)  # fmt: skip
def test_two_ranks_cut_what_was_quantized_and_give_one_ranks_tokens(
    family: str, quant: str, tmp_path: Path, one_thread: None
) -> None:
    plain, _ = folders(tmp_path, family)
    ids = prompt_of(find_architecture(f"{family}ForCausalLM").tiny_config()["vocab_size"])
    request = NewRequest(id="a", prompt=ids, max_tokens=12, sampling=Sampling(temperature=0.0))
    with rank_threads(from_overrides(str(plain), {**SMALL, "quant": quant, "infer.tp_size": 2})) as (controller, _):
        assert play(controller, [request]).tokens["a"] == greedy(plain, ids, quant=quant)


@pytest.mark.parametrize(
    ("quant", "layout"),
    [("q8_0", "cpu.blocks"), ("q4_k", "cpu.blocks"), ("fp8", "cpu.stored"), ("int8", "cpu.stored"),
     ("int4", "cpu.blocks")],
)  # fmt: skip
def test_weights_are_packed_as_they_were_quantized_and_the_plan_shows_it(
    quant: str, layout: str, tmp_path: Path
) -> None:
    plain, _ = folders(tmp_path, "Qwen3")
    found = explain(from_overrides(str(plain), {**SMALL, "quant": quant}))
    # Of two layers: QKV, output, gate and up, down.
    assert found["packings"][layout] == 8 and not found["dequantized"] and found["model"]["problem"] is None
    before = explain(from_overrides(str(plain), SMALL))["memory"]
    matrices = 2 * (64 * 64 * 2 + 2 * 32 * 64 + 3 * 64 * 96)
    bits = {"q8_0": 8.5, "q4_k": 5.5, "fp8": 8 + 32 / 64, "int8": 8 + 32 / 64, "int4": 4.5}[quant]
    saved = before["weights"] + before["mapped"] - found["memory"]["weights"] - found["memory"]["mapped"]
    assert saved == pytest.approx(matrices * (32 - bits) / 8, rel=0.05)


def test_the_engine_measures_what_the_plan_said(tmp_path: Path, one_thread: None) -> None:
    plain, _ = folders(tmp_path, "Qwen3")
    _, ready = build_controller(from_overrides(str(plain), {**SMALL, "quant": "q8_0"}))
    memory = ready.info.memory
    assert memory.measured_weights == memory.weights


class Kept(Packing):
    """Keeps parts as they are quantized, and notes this process's memory each time."""

    layout = "kept"

    def __init__(self) -> None:
        self.anonymous: list[int] = []
        self.packed: list[int] = []

    def supports(self, parts: Sequence[WeightPart], dtype: str) -> str | None:
        return None

    def nbytes(self, parts: Sequence[WeightPart], dtype: str) -> int:
        return sum(part.format.nbytes(part.rows, part.columns) for part in parts)

    def pack(self, parts: Sequence[WeightPart], dtype: str, device: torch.device) -> PackedWeight:
        self.anonymous.append(anonymous_bytes())
        self.packed.append(self.nbytes(parts, dtype))
        data = tuple(part.tensors["weight"] for part in parts)
        shape = (sum(part.rows for part in parts), parts[0].columns)
        return PackedWeight(self.layout, shape, data, self.packed[-1], tuple(part.format for part in parts))


def anonymous_bytes() -> int:
    """Bytes of this process's memory that are no pages of files."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon"))) * 1024


def test_memory_holds_what_is_packed_and_one_layer(tmp_path: Path, one_thread: None) -> None:
    # Layers of 16 MiB: the allocator gives such large pieces back at once, so what other tests used does not count.
    layers, rows, columns = 6, 2048, 2048
    random = torch.Generator().manual_seed(2)
    tensors = {f"layers.{i}.weight": torch.randn(rows, columns, generator=random) for i in range(layers)}
    save_file(tensors, tmp_path / "model.safetensors")
    del tensors
    (tmp_path / "config.json").write_text('{"architectures": ["X"]}')
    inner = open_checkpoint(tmp_path)
    found = {name: Matrix(name, shape) for name, (_, shape) in inner.headers.items()}
    quantizer = BlockQuantizer("q8_0", {}, list(found.values()))
    checkpoint = QuantizedCheckpoint(inner, quantizer, ModelMatrices(found, frozenset(), {}))
    parts = [WeightPart(f"layers.{i}.weight", rows, columns, block_format("q8_0")) for i in range(layers)]
    weights = [LinearWeight(p.name, (p,), rows, columns, "float32", layout="kept") for p in parts]
    kept, one = Kept(), rows * columns * 4
    before = anonymous_bytes()
    loaded = load_weights(weights, checkpoint, GgufScheme(), {"kept": kept}, torch.device("cpu"))
    assert loaded.allocated == sum(kept.packed) == layers * rows * columns * 34 // 32
    packed = 0
    for measured, nbytes in zip(kept.anonymous, kept.packed, strict=True):
        assert measured - before <= packed + one, "more than what is packed and one layer"
        packed += nbytes


@pytest.mark.parametrize(
    ("quant", "message"),
    [
        ("q8-0", r"(?s)quantization scheme 'q8-0'.*did you mean 'q8_0'"),
        ("gguf", r"quant=gguf, but the checkpoint is stored as 'unquantized'"),
    ],
)
def test_names_that_are_wrong_here_are_refused(quant: str, message: str, tmp_path: Path) -> None:
    plain, _ = folders(tmp_path, "Qwen3")
    with pytest.raises(EvenerError, match=message):
        explain(from_overrides(str(plain), {**SMALL, "quant": quant}))


def test_a_quantized_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    plain, _ = folders(tmp_path, "Qwen3")
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match=r"quant=q8_0 quantizes an unquantized checkpoint.*quantized already"):
        explain(from_overrides(str(plain), {**SMALL, "quant": "q8_0"}))
    assert explain(from_overrides(str(plain), {**SMALL, "quant": "fp8"}))["model"]["problem"] is None


def test_numbers_that_are_not_finite_are_refused_with_the_tensors_name(tmp_path: Path, one_thread: None) -> None:
    plain, _ = folders(tmp_path, "Qwen3")
    tensors = load_file(plain / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][3, 5] = torch.nan
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"NaN or infinite.*{name}"):
        greedy(plain, [3], quant="q4_0")


def test_rules_of_an_option_reach_the_quantizer_and_a_tied_head_can_be_quantized(
    tmp_path: Path, one_thread: None
) -> None:
    config = {**find_architecture("Qwen3ForCausalLM").tiny_config(), **SIZES["Qwen3"], "tie_word_embeddings": True}
    make_transformers(config, tmp_path / "plain")
    rules = json.dumps({"model.embed_tokens": "q8_0", "re:.*down_proj": "none"})
    more = {"quant": "q8_0", "formats.quant_rules": rules}
    found = explain(from_overrides(str(tmp_path / "plain"), {**SMALL, **more}))
    # Without the two down projections, with the head.
    assert found["packings"]["cpu.blocks"] == 7
    assert len(greedy(tmp_path / "plain", [3, 4], quant="q8_0", **{"formats.quant_rules": rules})) == 12

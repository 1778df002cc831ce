"""The loader: whole models or one error, mapped where nothing is converted, and dummy weights."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from evener.contracts.declared import LinearWeight, Slice, Span, Weight
from evener.errors import CheckpointError
from evener.layers import AttentionConfig, Builder, CausalLM, MLPConfig, RotaryConfig
from evener.loading.checkpoint import FolderCheckpoint, open_checkpoint
from evener.loading.estimate import estimate_weights
from evener.loading.loader import WeightBytes, load_weights
from evener.loading.scheme import Unquantized
from evener.ops.reference.linear import PlainPacking
from evener_conformance.reference.pinned_buffer_device import PinnedBufferDevice
from evener_inspection.dummy_weights import load_dummy

CPU = torch.device("cpu")
Write = Callable[..., Path]


class Tiny(CausalLM):
    """A family with QKV biases."""

    def attention(self, config: Mapping[str, Any]) -> list[AttentionConfig]:
        rotary = RotaryConfig.from_config(config, config["head_dim"])
        one = AttentionConfig(heads=3, kv_heads=1, head_dim=config["head_dim"], rotary=rotary, qkv_bias=True)
        return [one] * config["num_hidden_layers"]

    def mlp(self, config: Mapping[str, Any], layer: int) -> MLPConfig:
        return MLPConfig(inner=config["intermediate_size"])


class Blocked(PlainPacking):
    """Always makes a copy."""

    layout = "blocked"

    def keeps_storage(self, parts: Any) -> bool:
        return False

    def pack(self, parts: Any, dtype: str, device: torch.device) -> Any:
        packed = super().pack(parts, dtype, device)
        return type(packed)(self.layout, packed.shape, (packed.data.clone(),), packed.nbytes, packed.formats)


class WithCodes(PlainPacking):
    """Keeps the weight, and makes a byte for each number beside it."""

    layout = "with codes"

    def nbytes(self, parts: Any, dtype: str) -> int:
        return super().nbytes(parts, dtype) + sum(p.rows * p.columns for p in parts)

    def pack(self, parts: Any, dtype: str, device: torch.device) -> Any:
        packed = super().pack(parts, dtype, device)
        codes = torch.zeros(packed.shape, dtype=torch.uint8)
        data, nbytes = (packed.data, codes), packed.nbytes + codes.nbytes
        return type(packed)(self.layout, packed.shape, data, nbytes, packed.formats)


PACKINGS = {"plain": PlainPacking(), "blocked": Blocked(), "with codes": WithCodes()}


def declare(config: Mapping[str, Any], dtype: str = "bfloat16", headers: Any = None, layout: str = "plain") -> Builder:
    build = Builder(dtype, 32, (lambda name: Unquantized().part(name, headers)) if headers else None)
    Tiny(config, build)
    for weight in build.weights:
        if isinstance(weight, LinearWeight):
            weight.layout = layout
    return build


def tensors_of(config: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """What a checkpoint of ``Tiny`` stores."""
    found: dict[str, torch.Tensor] = {}
    for item in declare(config).weights:
        if isinstance(item, LinearWeight):
            found |= {part.name: torch.randn(part.rows, part.columns) for part in item.parts}
        elif isinstance(item, Weight) and len(item.sources) == 1:
            found[item.name] = torch.randn(item.shape)
        elif isinstance(item, Weight):
            found |= {name: torch.randn(12 if "q_proj" in name else 4) for name in item.sources}
    return {name: tensor.to(dtype) for name, tensor in found.items()}


def load(folder: Path, dtype: str = "bfloat16", layout: str = "plain") -> tuple[Builder, WeightBytes]:
    checkpoint = open_checkpoint(folder)
    build = declare(checkpoint.config, dtype, checkpoint.headers, layout)
    report = load_weights(build.weights, checkpoint, Unquantized(), PACKINGS, CPU, [build])
    estimate = estimate_weights(build.weights, PACKINGS, checkpoint.headers)
    assert (estimate.allocated, estimate.mapped) == (report.allocated, report.mapped)
    return build, report


def named(build: Builder, name: str) -> Any:
    return next(w.value for w in build.weights if getattr(w, "name", None) == name)


def test_every_declared_weight_is_filled_and_parts_are_stacked_in_order(write_folder: Write, config: Any) -> None:
    stored = tensors_of(config)
    build, _ = load(write_folder(stored))
    at = "model.layers.1.self_attn"
    assert torch.equal(named(build, f"{at}.qkv_proj").data, torch.cat([stored[f"{at}.{x}_proj.weight"] for x in "qkv"]))
    assert torch.equal(named(build, f"{at}.qkv_bias"), torch.cat([stored[f"{at}.{x}_proj.bias"] for x in "qkv"]))
    assert torch.equal(named(build, "model.norm.weight"), stored["model.norm.weight"])
    assert all(weight.value is not None for weight in build.weights)


def test_the_largest_matrix_is_read_before_the_others_in_their_order(write_folder: Write, config: Any) -> None:
    untied = {**config, "vocab_size": 100, "tie_word_embeddings": False}
    checkpoint = open_checkpoint(write_folder(tensors_of(untied), untied))
    read: list[str] = []
    tensor = checkpoint.tensor
    checkpoint.tensor = lambda name: read.append(name) or tensor(name)  # type: ignore[func-returns-value,method-assign]
    build = declare(checkpoint.config, headers=checkpoint.headers)
    load_weights(build.weights, checkpoint, Unquantized(), PACKINGS, CPU)
    declared = [name for item in build.weights for name in names_of(item)]
    assert declared[-1] == "lm_head.weight" and read == ["lm_head.weight", *declared[:-1]]


def names_of(item: Any) -> list[str]:
    """The stored tensors of a declared weight, in order."""
    return [part.name for part in item.parts] if isinstance(item, LinearWeight) else list(getattr(item, "sources", ()))


def test_weights_that_need_no_conversion_stay_mapped_and_the_tied_head_is_the_embedding(
    write_folder: Write, config: Any
) -> None:
    stored = tensors_of(config)
    build, report = load(write_folder(stored))
    copied = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    merged = sum(t.nbytes for name, t in stored.items() if any(part in name for part in copied))
    final_norm = stored["model.norm.weight"].numel() * 4  # held in float32
    assert report.allocated == merged + final_norm + 32 * 4 * 4  # and the rotary table
    assert report.mapped == sum(t.nbytes for t in stored.values()) - merged - stored["model.norm.weight"].nbytes
    heads = [w.value for w in build.weights if getattr(w, "name", "") == "model.embed_tokens.weight"]
    assert len(heads) == 2 and heads[0].data_ptr() == heads[1].data.data_ptr()


def test_conversion_copies_once_even_when_tied(write_folder: Write, config: Any) -> None:
    stored = tensors_of(config)
    build, report = load(write_folder(stored), "float32")
    assert report == WeightBytes(allocated=2 * sum(t.nbytes for t in stored.values()) + 32 * 4 * 4, mapped=0)
    assert torch.equal(named(build, "model.norm.weight"), stored["model.norm.weight"].float())


def test_a_packing_that_copies_a_tied_head_is_a_second_copy_that_the_estimate_counts(
    write_folder: Write, config: Any
) -> None:
    folder = write_folder(tensors_of(config))
    build, _ = load(folder, layout="blocked")
    estimate = estimate_weights(build.weights, PACKINGS, open_checkpoint(folder).headers)
    assert estimate.second_copies == 20 * 12 * 2


def test_what_a_packing_makes_beside_a_tied_head_is_counted_and_the_head_once(write_folder: Write, config: Any) -> None:
    checkpoint = open_checkpoint(write_folder(tensors_of(config)))
    counted = []
    for layout in ("plain", "with codes"):
        build = declare(checkpoint.config, "bfloat16", checkpoint.headers)
        head = next(w for w in build.weights if isinstance(w, LinearWeight) and "embed" in w.name)
        head.layout = layout
        estimate = estimate_weights(build.weights, PACKINGS, checkpoint.headers)
        report = load_weights(build.weights, checkpoint, Unquantized(), PACKINGS, CPU, [build])
        assert (estimate.allocated, estimate.mapped, estimate.second_copies) == (report.allocated, report.mapped, 0)
        counted.append(report)
    before, after = counted
    assert after == WeightBytes(allocated=before.allocated + 20 * 12, mapped=before.mapped)


def test_weights_are_not_mapped_on_a_device_with_its_own_memory(write_folder: Write, config: Any) -> None:
    stored = tensors_of(config)
    build, _ = load(write_folder(stored))
    estimate = estimate_weights(build.weights, PACKINGS, open_checkpoint(write_folder(stored)).headers, mappable=False)
    widened = stored["model.norm.weight"].nbytes  # the last norm is held in float32
    assert (estimate.allocated, estimate.mapped) == (sum(t.nbytes for t in stored.values()) + widened + 32 * 4 * 4, 0)


def test_missing_extra_and_misshapen_tensors_are_one_error_that_names_them(write_folder: Write, config: Any) -> None:
    stored = tensors_of(config)
    del stored["model.layers.0.mlp.up_proj.weight"], stored["model.layers.1.self_attn.k_proj.bias"]
    stored["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(5, 12)
    stored["model.layers.1.mlp.down_proj.weight"] = torch.zeros(120)
    stored["model.norm.weight"] = torch.zeros(13)
    stored["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(11)
    stored |= {f"vision.{i}": torch.zeros(1) for i in range(12)}
    with pytest.raises(CheckpointError) as error:
        load(write_folder(stored))
    message = str(error.value)
    for text in (
        "2 tensors are missing: ",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.self_attn.k_proj.bias",
        "12 tensors are not part of the model: vision.0, vision.1, vision.10",
        "4 tensors are of another shape",
        "model.layers.0.self_attn.k_proj.weight is [5, 12], not [4, 12]",
        "model.layers.1.mlp.down_proj.weight is [120], not [12, 10]",
        "model.norm.weight is [13], not [12]",
        "q_proj.bias + ",
        "is [11] + [4] + [4], not [20]",
        "Check that config.json belongs to these weights",
    ):
        assert text in message
    assert "vision.9" not in message


def test_an_untied_model_without_a_head_misses_it(write_folder: Write, config: Any) -> None:
    stored = tensors_of(config)
    with pytest.raises(CheckpointError, match=r"1 tensor is missing: lm_head\.weight"):
        load(write_folder(stored, {**config, "tie_word_embeddings": False}))


def test_buffers_that_old_transformers_versions_saved_are_ignored(write_folder: Write, config: Any) -> None:
    load(write_folder({**tensors_of(config), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}))


def test_an_architecture_may_ignore_tensors_by_pattern(write_folder: Write, config: Any) -> None:
    checkpoint = open_checkpoint(write_folder({**tensors_of(config), "mtp.0.weight": torch.zeros(2)}))
    build = declare(config, headers=checkpoint.headers)
    build.ignore(r"mtp\..*")
    load_weights(build.weights, checkpoint, Unquantized(), PACKINGS, CPU, [build])


def test_a_head_stored_beside_the_embedding_that_it_is_tied_to_must_be_equal(write_folder: Write, config: Any) -> None:
    stored = tensors_of(config)
    head = stored["model.embed_tokens.weight"].clone()
    load(write_folder({**stored, "lm_head.weight": head}))
    with pytest.raises(CheckpointError, match='"tie_word_embeddings": false'):
        load(write_folder({**stored, "lm_head.weight": head + 1}))


def dummy(config: Any, seed: int = 0, dtype: str = "bfloat16") -> tuple[Builder, WeightBytes]:
    build = declare(config, dtype)
    report = load_dummy(build.weights, PACKINGS, CPU, seed)
    estimate = estimate_weights(build.weights, PACKINGS, None)
    assert (estimate.allocated, estimate.mapped) == (report.allocated, report.mapped) and report.mapped == 0
    return build, report


def test_dummy_weights_follow_from_the_seed_and_the_name_alone(config: Any) -> None:
    (first, _), (again, _), (other, _) = dummy(config), dummy({**config, "num_hidden_layers": 1}), dummy(config, 1)
    name = "model.layers.0.mlp.gate_up_proj"
    assert torch.equal(named(first, name).data, named(again, name).data)
    assert not torch.equal(named(first, name).data, named(other, name).data)
    assert not torch.equal(named(first, name).data, named(first, name.replace("0", "1")).data)


def test_dummy_weights_have_the_right_scale_and_no_equal_rows(config: Any) -> None:
    build, _ = dummy({**config, "vocab_size": 5000, "hidden_size": 512, "num_attention_heads": 3}, dtype="float32")
    table = named(build, "model.embed_tokens.weight")
    assert math.isclose(table.std().item(), 0.02, rel_tol=0.02)
    assert table.unique(dim=0).shape[0] == 5000
    assert named(build, "model.norm.weight").eq(1).all()
    assert named(build, "model.layers.0.self_attn.qkv_bias").eq(0).all()


def test_a_dummy_tied_head_is_the_embedding(config: Any) -> None:
    heads = [w.value for w in dummy(config)[0].weights if getattr(w, "name", "") == "model.embed_tokens.weight"]
    assert heads[0].data_ptr() == heads[1].data.data_ptr()


def test_dummy_load_refuses_quantized_parts(config: Any) -> None:
    build = declare(config)
    linear = next(w for w in build.weights if isinstance(w, LinearWeight))
    linear.parts = tuple(
        type(p)(p.name, p.rows, p.columns, type(p.format)("int4", scale="float16")) for p in linear.parts
    )
    with pytest.raises(CheckpointError, match=r"load=dummy cannot fill .* stored as int4"):
        load_dummy(build.weights, PACKINGS, CPU)


class Opaque(FolderCheckpoint):
    """Whoever looks at a tensor here, instead of reading the file, sees nothing but noise."""

    def tensor(self, name: str) -> torch.Tensor:
        stored = super().tensor(name)
        return torch.full_like(stored, 77) if self.extent(name) is not None else stored


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("layout", ["plain", "blocked"])
def test_uploading_through_pinned_buffers_gives_the_same_weights(
    write_folder: Any, config: Any, dtype: str, layout: str
) -> None:
    folder = write_folder(tensors_of(config))
    want, _ = load(folder, dtype, layout)
    checkpoint, device = Opaque(folder), PinnedBufferDevice()
    build = declare(checkpoint.config, dtype, checkpoint.headers, layout)
    with torch.inference_mode():
        load_weights(build.weights, checkpoint, Unquantized(), PACKINGS, CPU, [build], pinned_device=device)
    for got, expected in zip(build.weights, want.weights, strict=True):
        pair = [w.value.data if isinstance(w, LinearWeight) else w.value for w in (got, expected)]
        pair = [p[0] if isinstance(p, tuple) else p for p in pair]
        assert torch.equal(*pair), got
    checkpoint.close()
    assert len(device.asked) == 1 and device.copies > 60


def test_row_slices_are_read_from_the_file_and_column_slices_from_the_mapping(write_folder: Write) -> None:
    stored = {"m": torch.randn(8, 12)}
    folder = write_folder(stored)
    for axis, want in ((0, stored["m"][3:5]), (1, stored["m"][:, 3:5])):
        cut = Slice(axis, Span(3, 5, stored["m"].shape[axis]))
        item = Weight("m", tuple(want.shape), "float32", ("m",), slices=(cut,))
        checkpoint = (Opaque if axis == 0 else FolderCheckpoint)(folder)
        load_weights([item], checkpoint, Unquantized(), PACKINGS, CPU, pinned_device=PinnedBufferDevice())
        assert torch.equal(item.value, want)
        checkpoint.close()


def test_a_file_that_ends_in_the_middle_is_an_error_that_names_it_and_the_tensor(
    write_folder: Any, config: Any
) -> None:
    folder = write_folder(tensors_of(config))
    checkpoint = open_checkpoint(folder)
    build = declare(checkpoint.config, "bfloat16", checkpoint.headers)
    (file,) = folder.glob("*.safetensors")
    checkpoint.tensor("model.norm.weight")  # the map is made while the file is whole
    os.truncate(file, file.stat().st_size - 600)
    with pytest.raises(CheckpointError, match=r"cannot read '[a-z_.0-9]+' from .*\.safetensors: it ends too early"):
        others, device = [build], PinnedBufferDevice()
        load_weights(build.weights, checkpoint, Unquantized(), PACKINGS, CPU, others, pinned_device=device)
    checkpoint.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight"]
)
def test_a_tensor_that_is_not_finite_is_refused_by_name(
    write_folder: Write, config: Any, name: str, value: float
) -> None:
    stored = tensors_of(config)
    stored[name].view(-1)[-1] = value
    with pytest.raises(CheckpointError, match=rf"1 tensor is NaN or infinite somewhere.*: {name}; fetch"):
        load(write_folder(stored))


def test_a_number_that_the_dtype_of_the_run_cannot_hold_is_refused(write_folder: Write, config: Any) -> None:
    stored = tensors_of(config, torch.float32)
    stored["model.layers.1.input_layernorm.weight"][0] = 1e6
    load(write_folder(stored), "bfloat16")
    with pytest.raises(CheckpointError, match=r"in the dtype of this run: model\.layers\.1\.input_layernorm\.weight;"):
        load(write_folder(stored), "float16")

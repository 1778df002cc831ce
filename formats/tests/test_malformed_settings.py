"""Values of a ``quantization_config`` that are malformed or unknown are refused, and the message says the key, the
value and what to do; null and absent ones are as the tools write them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from evener.contracts.checkpoint import ModelFiles
from evener.errors import CheckpointError
from evener.loading.scheme import pick_scheme
from evener_formats.described import described
from evener_formats.kv_cache.stored_scales import stored_element_type
from evener_formats.modelslim_description import FILE, Description
from evener_formats.plugin import evener_quant_schemes

SCHEMES = evener_quant_schemes()
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
ROUNDED = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def group(**changes: Any) -> dict[str, Any]:
    made = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": ROUNDED} | changes
    return {"config_groups": {"group_0": made}}


def intx(**data: Any) -> dict[str, Any]:
    dtype = {"_type": "torch.dtype", "_data": "int4"}
    return {"quant_type": {"default": {"_type": "IntxWeightOnlyConfig", "_data": {"weight_dtype": dtype} | data}}}


#: What the tools of a method write.
USUAL: Mapping[str, Mapping[str, Any]] = {
    "fp8": {"activation_scheme": "dynamic", "weight_block_size": [128, 128], "modules_to_not_convert": None},
    "gptq": {"bits": 4, "group_size": 128, "sym": True, "desc_act": False, "dynamic": None},
    "awq": {"bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
    "halves": {"quant_method": "gptq", "layout": "halves", "bits": 4, "group_size": 128},
    "compressed-tensors": {"format": "pack-quantized", "sparsity_config": {}, "transform_config": {}, **group()},
    "modelopt": {"quant_algo": "W4A16_AWQ", "group_size": 128},
    "w4afp8": {"group_size": 128},
    "bitsandbytes": {"load_in_4bit": True, "load_in_8bit": False},
    "torchao": intx(),
}
#: (method, key in the message, value in the message, settings that have it).
WRONG: tuple[tuple[str, str, str, Mapping[str, Any]], ...] = (
    *(("fp8", "weight_block_size", str(value), {"weight_block_size": value})
      for value in ([16.0], [128], [128, "128"], [1, 128], [0, 128], [128, True], 128, "128x128", {}, [])),
    *(("fp8", "activation_scheme", str(value), {"activation_scheme": value})
      for value in ("block", 1, True, ["dynamic"])),
    ("fp8", "weight_scale_semantics", "divide", {"weight_scale_semantics": "divide"}),
    *(("gptq", "bits", str(value), {"bits": value}) for value in ("4", 9, None, True, 4.0)),
    *(("gptq", "group_size", str(value), {"group_size": value}) for value in ("128", 0, -2, None)),
    *(("gptq", key, str(value), {key: value}) for key in ("sym", "desc_act") for value in ("yes", 1, None)),
    ("gptq", "checkpoint_format", "marlin", {"checkpoint_format": "marlin"}),
    ("gptq", "dynamic", "no map of rules", {"dynamic": ["re"]}),
    ("gptq", "dynamic", "not a map of settings", {"dynamic": {"a": 4}}),
    ("awq", "zero_point", "yes", {"zero_point": "yes"}), ("awq", "version", "gemv", {"version": "gemv"}),
    ("awq", "bits", "8", {"bits": 8}), ("awq", "group_size", "x", {"group_size": "x"}),
    ("halves", "bits", "3", {"bits": 3}), ("halves", "bits", "four", {"bits": "four"}),
    ("halves", "sym", "1", {"sym": 1}), ("halves", "desc_act", "true", {"desc_act": True}),
    *(("compressed-tensors", "config_groups", str(value), {"config_groups": value}) for value in ([1], "a", 3)),
    ("compressed-tensors", "config_groups", "[1]", {"config_groups": {"a": [1]}}),
    ("compressed-tensors", "weights", "[4]", group(weights=[4])),
    ("compressed-tensors", "weights", "int8", {"format": "int-quantized", **group(weights="int8")}),
    ("compressed-tensors", "targets", "Linear", group(targets="Linear")),
    ("compressed-tensors", "targets", "[3]", group(targets=[3])),
    ("compressed-tensors", "format", "sparse-24", {"format": "sparse-24"}),
    ("compressed-tensors", "sparsity_config", "[1]", {"sparsity_config": [1]}),
    ("compressed-tensors", "sparse weights", "", {"sparsity_config": {"format": "sparse-24-bitmask"}}),
    *(("compressed-tensors", key, str(value), group(weights=WEIGHTS | {key: value})) for key, value in (
        ("num_bits", "4"), ("num_bits", 1), ("type", "float"), ("strategy", "rows"), ("group_size", "32"),
        ("symmetric", "no"), ("actorder", "some"))),
    ("compressed-tensors", "input_activations", "int8", group(input_activations="int8")),
    *(("compressed-tensors", key, str(value), group(input_activations=ROUNDED | {key: value})) for key, value in (
        ("num_bits", "8"), ("num_bits", None), ("type", "integer"), ("strategy", "tokens"), ("strategy", 3),
        ("dynamic", "yes"), ("dynamic", 1), ("symmetric", "yes"), ("group_size", "128"), ("group_size", 0))),
    ("modelopt", "quant_algo", "NVFP4_SVD", {"quant_algo": "NVFP4_SVD"}),
    ("modelopt", "quant_algo", "8", {"quant_algo": 8}),
    *(("modelopt", "group_size", str(value), {"group_size": value}) for value in ("128", -1, 1.5, None)),
    ("modelopt", "quantization", "[1]", {"quantization": [1]}),
    ("modelopt", "quant_algo", "other", {"quantization": {"quant_algo": "other"}}),
    ("modelopt", "quantized_layers", "[1]", {"quant_algo": "MIXED_PRECISION", "quantized_layers": [1]}),
    ("modelopt", "quantized_layers", "NVFP4_SVD",
     {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.q_proj": {"quant_algo": "NVFP4_SVD"}}}),
    ("modelopt", "quantized_layers", "None", {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.q_proj": {}}}),
    *(("w4afp8", "group_size", str(value), {"group_size": value}) for value in ("128", 0, 3, None)),
    *(("bitsandbytes", key, str(value), {key: value})
      for key in ("load_in_4bit", "load_in_8bit") for value in ("yes", 1)),
    ("torchao", "quant_type", "int4_weight_only", {"quant_type": "int4_weight_only"}),
    ("torchao", "quant_type", "Other", {"quant_type": {"default": {"_type": "Other"}}}),
    ("torchao", "quant_type", "no config", {"quant_type": None}),
    ("torchao", "_data", "[4]", {"quant_type": {"default": {"_type": "IntxWeightOnlyConfig", "_data": [4]}}}),
    ("torchao", "weight_dtype", "int4", intx(weight_dtype="int4")),
    ("torchao", "_data", "uint4", intx(weight_dtype={"_type": "torch.dtype", "_data": "uint4"})),
)  # fmt: skip


def configured(settings: Mapping[str, Any]) -> Any:
    return pick_scheme({"quantization_config": settings}, SCHEMES)


@pytest.mark.parametrize("method", USUAL)
def test_what_the_tools_write_is_taken(method: str) -> None:
    assert configured({"quant_method": method, **USUAL[method]}).name == method


@pytest.mark.parametrize(
    ("method", "key", "value", "settings"), WRONG, ids=[f"{method} {key} {value}" for method, key, value, _ in WRONG]
)
def test_a_malformed_or_unknown_value_is_refused_by_name(
    method: str, key: str, value: str, settings: Mapping[str, Any]
) -> None:
    with pytest.raises(CheckpointError) as raised:
        configured({"quant_method": method, **USUAL[method], **settings})
    message = str(raised.value)
    assert "config.json's quantization_config" in message and key in message and value in message
    assert any(advice in message for advice in ("; use ", "correct ", "; quantize the model", "; set ")), message


@pytest.mark.parametrize("key", ["weight_block_size", "activation_scheme", "weight_scale_semantics"])
def test_null_is_as_absent(key: str) -> None:
    assert configured({"quant_method": "fp8", **USUAL["fp8"], key: None}).name == "fp8"


@pytest.mark.parametrize("activations", [None, {}, {**ROUNDED, "num_bits": 4}, {**ROUNDED, "symmetric": False},
                                         {"num_bits": 4, "type": "float", "strategy": "tensor_group",
                                          "dynamic": "local", "group_size": 16}])  # fmt: skip
def test_activations_that_no_kernel_rounds_are_no_error(activations: Any) -> None:
    configured(
        {"quant_method": "compressed-tensors", "format": "pack-quantized", **group(input_activations=activations)}
    )


@pytest.mark.parametrize("key", ["ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers"])
@pytest.mark.parametrize("value", ["lm_head", {"lm_head": True}, [3]])
def test_lists_of_exceptions_that_are_none_are_refused_where_they_decide(key: str, value: Any) -> None:
    settings = {"quant_method": "fp8", **USUAL["fp8"], key: value}
    scheme = configured(settings)
    with pytest.raises(CheckpointError, match=f"{key}: .* a list of texts; use the config.json"):
        described(scheme, settings, "model.layers.0.mlp.up_proj.weight", 256, 256)


class Described(ModelFiles):
    """A folder with a description that says ``metadata`` of the model."""

    def __init__(self, metadata: Any) -> None:
        self.path, self._text = Path("example"), {"a.weight": "W8A8", "metadata": metadata}

    def text(self, name: str) -> str | None:
        import json

        return json.dumps(self._text) if name == FILE else None


@pytest.mark.parametrize("metadata", ["quarot", [1], {"quarot": [1]}, {"quarot": "all"}, {"quarot": {"a": ["q_proj"]}}])
def test_a_description_that_does_not_say_whether_inputs_are_rotated_is_refused(metadata: Any) -> None:
    with pytest.raises(CheckpointError, match=r"rotated.*(fetch the file again|quant=int8)"):
        Description.of(Described(metadata))


@pytest.mark.parametrize("metadata", [None, {}, {"quarot": None}, {"quarot": {"a": {"layers": []}}}])
def test_a_description_without_rotations_is_read(metadata: Any) -> None:
    assert Description.of(Described(metadata)).kinds == {"a.weight": "W8A8"}


@pytest.mark.parametrize(
    ("settings", "dtype", "why"),
    [({"kv_cache_scheme": "FP8"}, "float8_e4m3fn", "FP8"), ({"kv_cache_scheme": "NVFP4"}, None, "NVFP4"),
     ({"kv_cache_scheme": [8]}, None, "[8]"), ({"kv_cache_quant_algo": 8}, None, "8"),
     ({"kv_cache_scheme": None, "kv_cache_quant_algo": "INT8"}, "int8", "INT8"), ({}, None, "")],
)  # fmt: skip
def test_what_is_said_of_the_kv_cache_is_never_passed_over(settings: Any, dtype: str | None, why: str) -> None:
    found, said = stored_element_type({"quantization_config": settings})
    assert found == dtype and why in said and bool(said) == bool(why)

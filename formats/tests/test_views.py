"""Views of this package read real files as the kit asks: split for ranks, renamed, quantized."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from evener_convert.quantized import QuantizedCheckpoint
from evener_convert.split import SplitCheckpoint, split_index
from evener_convert.weight_map import RenamedCheckpoint
from safetensors.torch import save_file

from evener.config import from_overrides
from evener.contracts.checkpoint import Headers
from evener.contracts.conversion.views import CheckpointView, ViewRequest
from evener.contracts.declared import Slice, Span, Weight
from evener.errors import CheckpointError, ConfigError
from evener.loading.checkpoint import open_checkpoint
from evener_conformance.kit.views import view_problems
from evener_models.llama import LlamaForCausalLM

SPLIT = {"version": 1, "tp_size": 2, "pp_size": 1, "pp_layer_partition": []}


def folder(path: Path, tensors: Mapping[str, torch.Tensor], file: str = "model.safetensors") -> Path:
    (path / "config.json").write_text(json.dumps(LlamaForCausalLM.tiny_config()))
    save_file(dict(tensors), path / file)
    return path


def split(path: Path, **changes: object) -> Path:
    (path / "evener_split.json").write_text(json.dumps({**SPLIT, **changes}))
    return folder(path, {"x": torch.arange(4.0)}, "rank-00001-of-00002.safetensors")


def view(cls: type[CheckpointView], path: Path, **more: object) -> CheckpointView:
    made = cls.of(ViewRequest(open_checkpoint(path), LlamaForCausalLM, **more))  # type: ignore[arg-type]
    assert made is not None
    return made


def test_a_rank_reads_its_own_file_and_its_spans_of_it(tmp_path: Path) -> None:
    made = view(SplitCheckpoint, split(tmp_path), tp=(1, 2))
    assert view_problems(made) == [] and made.tensor("x").tolist() == [0, 1, 2, 3]
    assert made.extent("x") is not None and made.architecture == "LlamaForCausalLM"
    # Of a tensor of 12 elements the rank reads 4 to 6 and 8 to 10; its file has these four.
    spans = [Span(4, 6, 12), Span(8, 10, 12)]
    weights = [Weight(str(span.start), (2,), "float32", ("x",), "noise", slices=(Slice(0, span),)) for span in spans]
    made.reslice(weights)
    assert [w.slices for w in weights] == [(Slice(0, Span(0, 2, 4)),), (Slice(0, Span(2, 4, 4)),)]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"version": 2}, CheckpointError, "has version 2, not 1; convert it again"),
        ({"tp_size": 4}, ConfigError, "was split for infer.tp_size=4 infer.pp_size=1; set these"),
        ({"pp_layer_partition": ["3", "4"]}, ConfigError, "was split with infer.pp_layer_partition=3,4; set the same"),
        ({"pp_layer_partition": 7}, CheckpointError, "pp_layer_partition 7 is no list of numbers; convert it again"),
    ],
)
def test_a_split_folder_that_does_not_fit_is_refused(
    changes: dict[str, object], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        view(SplitCheckpoint, split(tmp_path, **changes), tp=(1, 2))


def test_a_rank_whose_file_is_missing_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lacks rank-00000-of-00002.safetensors; convert the original model"):
        assert view(SplitCheckpoint, split(tmp_path), tp=(0, 2)).headers


def test_renamed_tensors_keep_their_numbers_and_places(tmp_path: Path) -> None:
    path = folder(tmp_path, {"old.x": torch.arange(4.0), "y": torch.ones(2)})
    (path / "llama_weight_map.json").write_text(r'{"old\\.(.*)": "$1"}')
    made = view(RenamedCheckpoint, path)
    assert made.headers.keys() == {"x", "y"} and view_problems(made) == []
    assert made.names("*.json") == ["config.json", "llama_weight_map.json"]


@pytest.mark.parametrize("quant", ["q8_0", "fp8"])
def test_quantized_matrices_have_the_headers_that_were_announced(quant: str, tmp_path: Path) -> None:
    headers: Headers = {
        "model.layers.0.mlp.down_proj.weight": ("float32", (64, 96)), "model.norm.weight": ("float32", (64,)),
    }  # fmt: skip
    random = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(shape, generator=random) for name, (_, shape) in headers.items()}
    made = view(QuantizedCheckpoint, folder(tmp_path, tensors), quant=quant)
    assert view_problems(made) == [] and set(made.headers.values()) != set(headers.values())
    assert made.headers["model.norm.weight"] == headers["model.norm.weight"]
    assert made.config["quantization_config"]
    assert QuantizedCheckpoint.of(ViewRequest(open_checkpoint(tmp_path), LlamaForCausalLM)) is None


def test_a_folder_split_with_equal_numbers_of_layers_is_one_without_a_partition(tmp_path: Path) -> None:
    config = from_overrides(str(tmp_path), {"infer.pp_size": 2, "infer.pp_layer_partition": "equal"})
    assert json.loads(split_index(config))["pp_layer_partition"] == []

"""Rules that rename tensors: whole names, in the file's order; null drops a tensor; other tensors are logged."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from evener_convert.weight_map import RenamedCheckpoint
from safetensors.torch import save_file

from evener.contracts.checkpoint import Checkpoint
from evener.contracts.conversion.views import ViewRequest
from evener.errors import CheckpointError
from evener.loading.checkpoint import open_checkpoint
from evener_models.llama import LlamaForCausalLM

Write = Callable[..., Path]
CONFIG = {"architectures": ["TinyForCausalLM"], "model_type": "tiny"}
STORED = {"transformer.h.0.attn.w": torch.ones(2), "transformer.h.1.attn.w": torch.zeros(3), "wte": torch.ones(1)}


@pytest.fixture
def write_folder(tmp_path: Path) -> Write:
    """``write_folder(tensors)``: a model folder with one weight file."""

    def write(tensors: Mapping[str, torch.Tensor]) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        save_file(dict(tensors), tmp_path / "model.safetensors")
        return tmp_path

    return write


def with_weight_map(checkpoint: Checkpoint, file: str | None) -> Checkpoint:
    request = ViewRequest(checkpoint, LlamaForCausalLM, weight_map=file)
    return RenamedCheckpoint.of(request) or checkpoint


def mapped(folder: Path, rules: Any) -> Checkpoint:
    (folder / "rules.json").write_text(rules if isinstance(rules, str) else json.dumps(rules))
    return with_weight_map(open_checkpoint(folder), str(folder / "rules.json"))


@pytest.mark.parametrize("name", ["layers.$1.weight", r"layers.\1.weight"])
def test_groups_of_a_rule_are_put_into_the_new_names(name: str, write_folder: Write) -> None:
    checkpoint = mapped(write_folder(STORED), {r"transformer\.h\.(\d+)\.attn\.w": name})
    assert set(checkpoint.headers) == {"layers.0.weight", "layers.1.weight", "wte"}
    assert checkpoint.tensor("layers.1.weight").tolist() == [0, 0, 0]
    assert checkpoint.architecture == "TinyForCausalLM"


@pytest.mark.parametrize(
    ("rules", "names"),
    [
        ({"transformer": "x", "wte": "e"}, {"transformer.h.0.attn.w", "transformer.h.1.attn.w", "e"}),
        ({r"transformer\.h\.0.*": "first", r"transformer\..*": None, ".*": "rest"}, {"first", "rest"}),
        ({r"transformer\..*": None, r"transformer\.h\.0.*": "first"}, {"wte"}),
    ],
)
def test_the_first_rule_that_fits_a_whole_name_wins_and_null_drops(
    rules: Mapping[str, Any], names: set[str], write_folder: Write
) -> None:
    assert set(mapped(write_folder(STORED), rules).headers) == names


def test_unused_rules_and_unmatched_tensors_are_logged(write_folder: Write, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "evener_convert.weight_map"):
        mapped(write_folder(STORED), {"wte": "e", "nothing": "x", r"tr.*\.0.*": "y"})
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "weight map: no tensor matches 'nothing'"),
        ("INFO", "weight map: 1 tensors keep their names: transformer.h.1.attn.w"),
    ]


def test_rules_of_the_model_folder_are_found_by_the_family(write_folder: Write) -> None:
    folder = write_folder(STORED)
    assert with_weight_map(open_checkpoint(folder), None).headers.keys() == STORED.keys()
    (folder / "tiny_weight_map.json").write_text('{"wte": "e"}')
    assert "e" in with_weight_map(open_checkpoint(folder), None).headers


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ("[", "cannot be used"), ("[]", "cannot be used"), ({"(": "x"}, "cannot be used"),
        ({"wte": 3}, "has no len"),
        ({"wte": "$4"}, "bad group index"), ({".*": "one"}, "one name, 'one'"),
    ],
)  # fmt: skip
def test_rules_that_cannot_be_used_are_refused(rules: Any, words: str, write_folder: Write) -> None:
    with pytest.raises(CheckpointError, match=words):
        mapped(write_folder(STORED), rules)


def test_a_file_that_is_not_there_is_named(write_folder: Write) -> None:
    with pytest.raises(CheckpointError, match=r"none\.json cannot be used: there is no such file"):
        with_weight_map(open_checkpoint(write_folder(STORED)), "none.json")


def test_a_pipe_is_refused_instead_of_waiting_for_ever(write_folder: Write, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="pipe is not a regular file"):
        with_weight_map(open_checkpoint(write_folder(STORED)), str(tmp_path / "pipe"))


def test_a_rule_whose_time_would_explode_is_linear(write_folder: Write) -> None:
    stored = {"a" * 5_000: torch.ones(1), "b": torch.ones(1)}
    checkpoint = mapped(write_folder(stored), {"(a+)+$x": "x", "(a|aa)+b": "y", "b": "c"})
    assert set(checkpoint.headers) == {"a" * 5_000, "c"}


@pytest.mark.parametrize("pattern", [r"(?=a)b", r"(a)\1", "(", "a{5000}"])
def test_a_rule_that_the_linear_syntax_does_not_have_is_an_error_that_names_the_file(
    pattern: str, write_folder: Write
) -> None:
    with pytest.raises(CheckpointError, match=r"rules\.json cannot be used: "):
        mapped(write_folder(STORED), {pattern: "x"})

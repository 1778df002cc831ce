"""Opening model folders: files that exist, files that are missing, and what to type next."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from evener.errors import CheckpointError
from evener.loading.checkpoint import open_checkpoint
from evener.plugins.catalog import Catalog

Write = Callable[..., Path]


def test_a_folder_gives_its_config_headers_and_tensors(write_folder: Write) -> None:
    tensors = {"a.weight": torch.randn(3, 4).bfloat16(), "b": torch.arange(5)}
    folder = write_folder(tensors)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    checkpoint = open_checkpoint(folder)
    assert checkpoint.headers == {"a.weight": ("bfloat16", (3, 4)), "b": ("int64", (5,))}
    assert checkpoint.architecture == "TinyForCausalLM"
    assert checkpoint.json("generation_config.json") == {"eos_token_id": [2, 3]}
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.tensor(name), tensor)


def test_tensors_stay_valid_after_close_and_share_the_file_mapping(write_folder: Write) -> None:
    checkpoint = open_checkpoint(write_folder({"a": torch.arange(6.0)}))
    first, second = checkpoint.tensor("a"), checkpoint.tensor("a")
    checkpoint.close()
    assert first.data_ptr() == second.data_ptr()
    assert first.tolist() == [0, 1, 2, 3, 4, 5]


def test_an_unknown_tensor_name_is_an_error_with_a_suggestion(write_folder: Write) -> None:
    with pytest.raises(CheckpointError, match=r"did you mean 'model\.norm\.weight'"):
        _ = open_checkpoint(write_folder({"model.norm.weight": torch.zeros(3)})).tensor("model.norm.weights").headers


@pytest.fixture
def shards(tmp_path: Path, config: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.zeros(2)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "model-2.safetensors")
    return index(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})


def index(folder: Path, weight_map: Any) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_shards_are_read_through_their_index(shards: Path) -> None:
    checkpoint = open_checkpoint(shards)
    assert set(checkpoint.headers) == {"a", "b"}
    assert checkpoint.tensor("b").tolist() == [1, 1, 1]


def test_a_missing_shard_is_named(shards: Path) -> None:
    (shards / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of the 2 weight files .*: model-2\.safetensors"):
        _ = open_checkpoint(shards).headers


@pytest.mark.parametrize(
    "name",
    [
        "../model-1.safetensors",
        "/etc/x.safetensors",
        "a/b.safetensors",
        "a\\b.safetensors",
        ".x.safetensors",
        "x.bin",
        3,
        "a\0.safetensors",
    ],
)
def test_an_index_that_points_elsewhere_is_refused(name: Any, shards: Path) -> None:
    with pytest.raises(CheckpointError, match=r"only \*\.safetensors files of the same folder"):
        _ = open_checkpoint(index(shards, {"a": name})).headers


def test_an_index_that_names_the_wrong_shard_is_refused(shards: Path) -> None:
    with pytest.raises(CheckpointError, match="in files that do not hold them: a"):
        _ = open_checkpoint(index(shards, {"a": "model-2.safetensors"})).headers


def test_a_tensor_in_two_shards_is_refused(shards: Path) -> None:
    save_file({"a": torch.zeros(2), "b": torch.ones(3)}, shards / "model-2.safetensors")
    with pytest.raises(CheckpointError, match="'a' is both in"):
        _ = open_checkpoint(shards).headers


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_without_a_map_is_refused(text: str, shards: Path) -> None:
    (shards / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="no weight_map"):
        _ = open_checkpoint(shards).headers


def test_a_folder_with_only_a_config_opens_and_asking_for_weights_names_the_option(tmp_path: Path, config: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(tmp_path).architecture == "TinyForCausalLM"
    with pytest.raises(CheckpointError, match="load=dummy"):
        _ = open_checkpoint(tmp_path).headers


@pytest.mark.parametrize(
    "name", ["training_args.bin", "model.Q4_K_M.gguf", "consolidated.safetensors", "consolidated.00.pth"]
)
def test_unsupported_weight_files_are_named_in_the_error(name: str, tmp_path: Path, config: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match="save the model as safetensors") as error:
        _ = open_checkpoint(tmp_path).headers
    assert name in str(error.value)


def test_a_file_or_a_missing_folder_is_not_a_model_folder(tmp_path: Path) -> None:
    (tmp_path / "x.xyz").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="or give the folder that holds it"):
        open_checkpoint(tmp_path / "x.xyz")
    (tmp_path / "x.gguf").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="does not exist"):
        _ = open_checkpoint(tmp_path / "nowhere").headers
    with pytest.raises(CheckpointError, match=r"no config\.json \(it holds x\.gguf; a file that"):
        _ = open_checkpoint(tmp_path).headers


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, "\x00"])
def test_a_broken_config_is_an_error_that_names_the_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        _ = open_checkpoint(tmp_path).config


@pytest.mark.parametrize("value", [None, [], "LlamaForCausalLM", [3]])
def test_a_config_without_an_architecture_says_what_to_add(value: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": value}))
    with pytest.raises(CheckpointError, match='"architectures": '):
        _ = open_checkpoint(tmp_path).architecture


def test_opening_a_folder_and_estimating_import_no_torch(write_folder: Write) -> None:
    folder = write_folder({"a": torch.zeros(2)})
    code = (
        "import sys; from evener.loading.checkpoint import open_checkpoint\n"
        "import evener.loading.scheme, evener.loading.match, evener.loading.estimate\n"
        f"open_checkpoint({str(folder)!r}).headers; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors.index.json"])
def test_a_pipe_in_a_folder_is_refused_and_not_waited_for(name: str, tmp_path: Path, config: Any) -> None:
    if name != "config.json":
        (tmp_path / "config.json").write_text(json.dumps(config))
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name} is not a regular file"):
        checkpoint = open_checkpoint(tmp_path)
        checkpoint.text("config.json")
        checkpoint.text("tokenizer_config.json")
        _ = checkpoint.headers


def test_a_device_in_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=r"config\.json is not a regular file"):
        open_checkpoint(tmp_path).text("config.json")


def test_weights_that_are_a_pipe_are_no_weights(tmp_path: Path, config: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has no weights: no model\.safetensors"):
        _ = open_checkpoint(tmp_path).headers
    os.mkfifo(tmp_path / "whole")
    with pytest.raises(CheckpointError, match="no folder or plain file"):
        open_checkpoint(tmp_path / "whole")


def test_weights_without_a_package_that_reads_them_are_an_error_that_names_one(
    write_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder({"a": torch.zeros(2)})
    monkeypatch.setattr("evener.plugins.discover.installed_catalog", Catalog)
    with pytest.raises(CheckpointError, match="pip install evener-formats"):
        _ = open_checkpoint(folder).headers

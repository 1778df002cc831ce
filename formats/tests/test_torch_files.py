"""PyTorch's own weight files: mapped tensors, shards, and nothing that runs."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from evener.errors import CheckpointError
from evener.loading.checkpoint import open_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return tmp_path


def write(folder: Path, content: object, name: str = "pytorch_model.bin") -> Path:
    torch.save(content, folder / name)
    return folder


def test_tensors_are_mapped_and_keep_their_types(folder: Path) -> None:
    stored = {"a": torch.randn(3, 4).bfloat16(), "b": torch.arange(5), "c": torch.nn.Parameter(torch.ones(2))}
    checkpoint = open_checkpoint(write(folder, stored))
    assert checkpoint.headers == {"a": ("bfloat16", (3, 4)), "b": ("int64", (5,)), "c": ("float32", (2,))}
    assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in stored.items())
    assert checkpoint.copied == frozenset()
    assert not checkpoint.tensor("c").requires_grad


def test_a_tensor_that_is_stored_with_other_strides_is_copied(folder: Path) -> None:
    checkpoint = open_checkpoint(write(folder, {"a": torch.arange(6.0).view(2, 3).t()}))
    assert checkpoint.copied == {"a"}
    assert checkpoint.tensor("a").is_contiguous() and checkpoint.tensor("a").tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_state_dict_inside_a_training_checkpoint_is_taken(folder: Path) -> None:
    checkpoint = open_checkpoint(write(folder, {"state_dict": {"a": torch.zeros(2)}, "epoch": 3}))
    assert set(checkpoint.headers) == {"a"}


def test_shards_are_read_through_their_index(folder: Path) -> None:
    write(folder, {"a": torch.zeros(2)}, "pytorch_model-1.bin")
    write(folder, {"b": torch.ones(3)}, "pytorch_model-2.bin")
    where = {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    assert open_checkpoint(folder).tensor("b").tolist() == [1, 1, 1]
    write(folder, {"a": torch.zeros(2), "b": torch.zeros(2)}, "pytorch_model-1.bin")
    with pytest.raises(CheckpointError, match="'b' is both in"):
        _ = open_checkpoint(folder).headers
    (folder / "pytorch_model-2.bin").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of the 2 weight files .*: pytorch_model-2\.bin"):
        _ = open_checkpoint(folder).headers


class Runs:
    """What a hostile file would have run."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("was-run"),))


def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(CheckpointError, match="holds more than tensors, which would need code to be run"):
        _ = open_checkpoint(write(folder, {"a": torch.zeros(2), "b": Runs()})).headers
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(CheckpointError, match=r"is not a file of torch 1\.6 or later"):
        _ = open_checkpoint(folder).headers
    assert not (folder / "was-run").exists()


@pytest.mark.parametrize(
    "content", [[torch.zeros(2)], {"a": 3}, {3: torch.zeros(2)}, {"a": torch.zeros(2).to_sparse()}]
)
def test_a_file_that_is_not_a_dict_of_dense_cpu_tensors_is_refused(content: object, folder: Path) -> None:
    with pytest.raises(CheckpointError, match="save the model"):
        _ = open_checkpoint(write(folder, content)).headers


def test_an_archive_that_would_unpack_to_more_than_the_file_is_refused_before_torch_sees_it(folder: Path) -> None:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 10_000_000)
    (folder / "pytorch_model.bin").write_bytes(raw.getvalue())
    with pytest.raises(CheckpointError, match="records that are compressed, or larger than the file"):
        _ = open_checkpoint(folder).headers

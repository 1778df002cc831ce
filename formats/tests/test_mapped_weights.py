"""Weights that lie in a mapped file, whose pages are given back; and the numbers of GGUF's blocks."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from evener.contracts.quant import BLOCKS, WeightPart, block_format
from evener.errors import CheckpointError
from evener_formats import safetensors_files
from evener_formats.gguf.block_numbers import BLOCK_NUMBERS
from evener_formats.gguf.scheme import GgufScheme
from evener_formats.safetensors_files import SafetensorsFile


def test_tensors_stay_valid_when_pages_are_given_back_and_the_file_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_files, "_GIVE_BACK", 1)
    stored = {f"w{n}": torch.randn(40, 1000).to(dtype) for n, dtype in enumerate((torch.float32, torch.bfloat16))}
    stored |= {"flags": torch.tensor([True, False]), "one": torch.tensor(3.0), "none": torch.empty(0, 4)}
    save_file(stored, tmp_path / "m.safetensors")
    file = SafetensorsFile(tmp_path / "m.safetensors")
    found = {name: file.tensor(name) for name in [*stored, *stored]}
    file.close()
    assert all(torch.equal(found[name], stored[name]) and found[name].dtype == stored[name].dtype for name in stored)


def test_a_file_that_was_cut_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(10, 1000), "b": torch.zeros(10, 1000)}, path)
    file = SafetensorsFile(path)
    path.write_bytes(path.read_bytes()[:60_000])
    assert file.tensor("a").shape == (10, 1000)
    with pytest.raises(CheckpointError, match=r"cannot read 'b' from .*m\.safetensors: the file was cut; fetch"):
        file.tensor("b")


def test_a_file_that_was_replaced_by_one_of_another_layout_is_refused(tmp_path: Path) -> None:
    path, stored = tmp_path / "m.safetensors", {"a": torch.ones(100), "b": torch.zeros(100)}
    save_file(stored, path)
    file = SafetensorsFile(path)
    assert torch.equal(file.tensor("a"), torch.ones(100))
    file.close()
    save_file({"b": torch.zeros(100), "a": torch.ones(100).int()}, path)  # as long as the first
    with pytest.raises(CheckpointError, match=r"m\.safetensors: another file is there than before; start again"):
        file.tensor("a")
    save_file(stored, path)
    assert torch.equal(file.tensor("a"), torch.ones(100))


@pytest.mark.parametrize("storage", sorted(BLOCKS))
def test_numbers_of_blocks_are_the_librarys(storage: str) -> None:
    elements, nbytes = BLOCKS[storage]
    blocks = torch.randint(256, (7, 3 * nbytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    blocks[:, 1::2] &= 0xBF  # every scale is finite
    part = WeightPart("", 7, 3 * elements, block_format(storage), {"weight": blocks})
    expected = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[storage.upper()])
    assert np.array_equal(GgufScheme().dequantize(part, "float32").numpy(), expected)
    assert torch.equal(GgufScheme().dequantize(part, "bfloat16"), torch.from_numpy(expected).bfloat16())


def test_formats_of_embeddings_need_no_library() -> None:
    """Those that llama.cpp's quantizers give an embedding whose rows are, or are not, whole blocks of 256."""
    assert {"q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q6_k"} == BLOCK_NUMBERS.keys()

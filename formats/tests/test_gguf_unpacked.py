"""GGUF's formats that no kernel reads: IQ types and ternary ones."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from gguf_files import in_iq_blocks, unpacked_file

from evener.errors import CheckpointError
from evener.loading.checkpoint import open_checkpoint
from evener_formats.gguf.block_numbers import numbers
from evener_formats.gguf.header import TYPES, UNPACKED, GgufTensor
from evener_formats.gguf.made import ExpertStack
from evener_formats.gguf.scheme import GgufScheme


def numbers_of(storage: str, blocks: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.array(dequantize(blocks.numpy(), GGMLQuantizationType[storage.upper()])))


def test_sizes_and_numbers_of_types_are_those_of_the_library() -> None:
    for number, (name, elements, nbytes) in TYPES.items():
        if name in UNPACKED:
            kind = GGMLQuantizationType[name.upper()]
            assert (number, elements, nbytes) == (int(kind), *GGML_QUANT_SIZES[kind])


@pytest.mark.parametrize("storage", UNPACKED)
def test_matrices_are_numbers_in_float32_with_the_rows_of_a_model_folder(storage: str, tmp_path: Path) -> None:
    path, blocks = unpacked_file(tmp_path / "m.gguf", storage)
    checkpoint = open_checkpoint(path)
    for name, own in (("q_proj", "attn_q"), ("v_proj", "attn_v"), ("o_proj", "attn_output")):
        want = numbers_of(storage, blocks[f"blk.0.{own}.weight"])
        if own == "attn_q":  # the file has halves of a head's rotation in turns
            want = want.view(4, -1, 2, 256).transpose(1, 2).reshape(want.shape)
        full = f"model.layers.0.self_attn.{name}.weight"
        got = checkpoint.tensor(full)
        assert checkpoint.headers[full] == ("float32", tuple(want.shape))
        assert torch.equal(got, want) and bool(got.isfinite().all()) and len(got.unique()) > 2
    assert checkpoint.config["quantization_config"] == {"quant_method": "gguf"}, "of the table's blocks"


@pytest.mark.slow
@pytest.mark.parametrize("storage", UNPACKED)
def test_the_numbers_are_those_that_ggml_makes(storage: str, ggml: ctypes.CDLL) -> None:
    blocks = in_iq_blocks(storage, 64, 1024)
    want = torch.empty(64, 1024)
    row = getattr(ggml, f"dequantize_row_{storage}")
    row(ctypes.c_void_p(blocks.data_ptr()), ctypes.c_void_p(want.data_ptr()), ctypes.c_int64(want.numel()))
    assert torch.equal(numbers(blocks, storage, UNPACKED[storage], torch.float32), want)


def test_a_stack_of_experts_becomes_numbers_and_biases_are_refused(tmp_path: Path) -> None:
    blocks = torch.stack([in_iq_blocks("iq4_nl", 6, 64, seed) for seed in range(3)])
    path = tmp_path / "blocks"
    path.write_bytes(blocks.numpy().tobytes())
    entry = GgufTensor("iq4_nl", (3, 6, 64), path, 0, blocks.numel())
    made = ExpertStack("experts", [entry])
    assert made.headers == {"experts": ("float32", (3, 64, 6))}
    want = torch.stack([numbers_of("iq4_nl", each) for each in blocks]).transpose(1, 2)
    assert torch.equal(made.tensors()["experts"], want)
    with pytest.raises(CheckpointError, match="is stored as iq4_nl, as no bias is"):
        ExpertStack("experts_bias", [GgufTensor("iq4_nl", (3, 64), path, 0, 54)])


def test_a_type_that_is_not_known_names_those_that_are(tmp_path: Path) -> None:
    path, _ = unpacked_file(tmp_path / "m.gguf", "iq4_nl")
    data = path.read_bytes()
    at = data.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 16
    assert data[at : at + 4] == bytes([GGMLQuantizationType.IQ4_NL, 0, 0, 0])
    path.write_bytes(data[:at] + bytes([GGMLQuantizationType.Q8_K, 0, 0, 0]) + data[at + 4 :])
    with pytest.raises(CheckpointError, match=r"tensor type 15, which is not supported .*iq4_xs"):
        open_checkpoint(path)


def test_blocks_in_the_layout_of_gptqmodel_are_refused_with_what_to_use() -> None:
    settings = {"quant_method": "gguf", "bits": 4, "checkpoint_format": "q_k_m"}
    with pytest.raises(CheckpointError, match=r"checkpoint_format 'q_k_m'.*use a \.gguf file"):
        GgufScheme().configured({"quantization_config": settings})

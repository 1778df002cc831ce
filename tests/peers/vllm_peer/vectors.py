"""Stands where helpers of vLLM would be with which tests read and compare the vectors that a server sends."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

#: The names of types of numbers in the API.
TYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2,
}  # fmt: skip
ORDERS = ("native", "big", "little")
#: How far the cosine of the angle between two vectors that are the same but for rounding may be from 1, by default.
_TOLERANCE = 1e-3


@dataclass
class Place:
    """Where a vector is in the bytes of an answer: a line of the header ``metadata``."""

    index: int
    embed_dtype: str
    endianness: str
    start: int
    end: int
    shape: Sequence[int]


def places(embed_dtype: str, endianness: str, shape: Sequence[int], n_request: int) -> list[Place]:
    """Where each of ``n_request`` vectors of one shape is if nothing says it: one after another."""
    size = math.prod(shape) * TYPES[embed_dtype].itemsize
    return [Place(i, embed_dtype, endianness, i * size, (i + 1) * size, shape) for i in range(n_request)]


def numbers(binary: bytes, shape: Sequence[int], embed_dtype: str, endianness: str) -> torch.Tensor:
    """The vector in ``binary``."""
    kind, order = TYPES[embed_dtype], sys.byteorder if endianness == "native" else endianness
    flat = torch.frombuffer(bytearray(binary), dtype=torch.uint8)
    if order != sys.byteorder:
        flat = flat.view(-1, kind.itemsize).flip(1).flatten()
    return flat.view(kind).reshape(tuple(shape))


def vectors(items: Sequence[Place], body: bytes) -> list[torch.Tensor]:
    """The vectors of an answer in bytes, in their order."""
    ordered = sorted(items, key=lambda item: item.index)
    return [numbers(body[item.start : item.end], item.shape, item.embed_dtype, item.endianness) for item in ordered]


def check_close(
    *, embeddings_0_lst: Sequence[Sequence[float]], embeddings_1_lst: Sequence[Sequence[float]], name_0: str,
    name_1: str, tol: float = _TOLERANCE,
) -> None:  # fmt: skip
    """Raises:
    AssertionError: there are not as many vectors, or two that belong together differ by more than ``tol``.
    """
    assert len(embeddings_0_lst) == len(embeddings_1_lst), (name_0, name_1)
    for one, other in zip(embeddings_0_lst, embeddings_1_lst, strict=True):
        assert len(one) == len(other), (name_0, name_1)
        first, second = torch.tensor(one, dtype=torch.float64), torch.tensor(other, dtype=torch.float64)
        cosine = float(first @ second / (first.norm() * second.norm()))
        assert cosine >= 1 - tol, f"{name_0} and {name_1} have the cosine {cosine}"


def stand_ins() -> dict[str, Any]:
    """Each by the name that tests import it by."""
    serial, pooling = "vllm.utils.serial_utils", "vllm.entrypoints.pooling.utils"
    return {
        f"{serial}.EMBED_DTYPES": TYPES, f"{serial}.ENDIANNESS": ORDERS, f"{serial}.binary2tensor": numbers,
        f"{pooling}.MetadataItem": Place, f"{pooling}.build_metadata_items": places,
        f"{pooling}.decode_pooling_output": vectors,
        "tests.models.utils.check_embeddings_close": check_close,
    }  # fmt: skip

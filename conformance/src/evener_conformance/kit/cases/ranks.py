"""Test cases of ops that run across ranks, on one rank whose peers hold the same data."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from evener.contracts.declared import LinearWeight
from evener.contracts.ops import OpCase
from evener.contracts.quant import WeightPart, plain
from evener_conformance.kit.cases.basic import EPS, InputFactory
from evener_conformance.mirror_communicator import MirrorCommunicator


def all_reduce(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """One, few, many and no rows; even and odd width."""
    make = InputFactory(dtype, generator)
    for size, rows, hidden in ((2, 1, 64), (4, 5, 96), (2, 70, 37), (3, 0, 16)):
        yield OpCase(
            {"communicator": MirrorCommunicator(size), "hidden": hidden, "dtype": dtype}, (make.noise(rows, hidden),)
        )


def all_gather(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """Equal shares, a last rank with a smaller share, no rows."""
    make = InputFactory(dtype, generator)
    for size, rows, columns, total in ((2, 1, 32, 64), (3, 5, 11, 31), (4, 3, 8, 32), (2, 0, 4, 8)):
        static = {"communicator": MirrorCommunicator(size), "columns": columns, "total": total, "dtype": dtype}
        yield OpCase(static, (make.noise(rows, columns),))


def all_reduce_norm(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """Both kinds of norm with a weight, an offset, one row and none."""
    make = InputFactory(dtype, generator)
    for size, rows, hidden, norm, offset in ((2, 1, 64, "rms", 0.0), (4, 5, 96, "rms", 1.0), (3, 0, 16, "rms", 0.0),
                                             (2, 7, 60, "layer", 0.0)):  # fmt: skip
        static = {
            "communicator": MirrorCommunicator(size),
            "hidden": hidden,
            "dtype": dtype,
            "eps": EPS,
            "offset": offset,
        }
        kind = "float32" if norm == "layer" else None
        weight = make.noise(hidden, dtype=kind, scale=0.2, shift=1.0 - offset)
        yield OpCase({**static, "norm": norm}, (make.noise(rows, hidden), weight))


def vocab_embedding(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """Ids of this rank and of others, its first and last row, a scale, no tokens."""
    make = InputFactory(dtype, generator)
    for size, tokens, start, rows, hidden, scale in ((2, 9, 0, 11, 16, 1.0), (3, 17, 11, 7, 36, 6.0),
                                                     (2, 0, 5, 5, 8, 1.0)):  # fmt: skip
        ids = make.ids(3 * rows, tokens)
        ids[:4] = torch.tensor([start, start + rows - 1, start + rows, max(0, start - 1)], dtype=torch.int32)[:tokens]
        static = {
            "communicator": MirrorCommunicator(size),
            "hidden": hidden,
            "dtype": dtype,
            "start": start,
            "rows": rows,
        }
        yield OpCase({**static, "scale": scale}, (ids, make.noise(rows, hidden)))


def vocab_greedy(dtype: str, generator: torch.Generator) -> Iterator[OpCase]:
    """Each rank has one logit far above the others; peers have the same, so the first rank wins; a bias, a cap. And one
    rank alone, also with a vocabulary that is large enough for kernels which search it: with each kind of norm, with a
    factor, and with a cap."""
    make = InputFactory(dtype, generator)
    for size, rank, rows, held, hidden, cap, biased, kind, factor in (
        (2, 0, 5, 40, 48, None, False, "rms", 1.0), (3, 1, 9, 33, 48, 30.0, True, "rms", 1.0),
        (2, 1, 1, 24, 48, None, False, "rms", 1.0), (2, 0, 0, 8, 48, None, False, "rms", 1.0),
        (1, 0, 3, 40, 48, None, True, "rms", 1.0), (1, 0, 1, 8321, 128, None, False, "rms", 1.0),
        (1, 0, 1, 8321, 128, None, True, "rms", 1.0), (1, 0, 5, 8321, 128, None, False, "rms", 1.0),
        (1, 0, 1, 8321, 128, None, False, "layer", 0.0625), (1, 0, 1, 8321, 128, None, False, "biased_layer", 1.0),
        (1, 0, 1, 8321, 128, 30.0, False, "bare_layer", 3.0),
    ):  # fmt: skip
        matrix = make.noise(held, hidden, scale=0.02) + 2 * torch.eye(held, hidden).to(getattr(torch, dtype))
        parts = (WeightPart("head", held, hidden, plain(dtype), {"weight": matrix}),)
        bare = (WeightPart("head", held, hidden, plain(dtype)),)
        static = {
            "communicator": MirrorCommunicator(size, rank) if size > 1 else None, "hidden": hidden, "dtype": dtype,
            "eps": EPS, "offset": 0.0, "norm": kind, "vocab": size * held, "cap": cap, "logit_scale": factor,
            "weight": LinearWeight("head", bare, held, hidden, dtype, out="float32"),
        }  # fmt: skip
        x = make.noise(rows, hidden, dtype="float32", scale=0.1)
        x += 9 * torch.eye(hidden)[make.ids(min(held, hidden), rows).long()]
        bias = make.noise(held, scale=0.1) if biased else None
        gain = make.noise(hidden, dtype="float32", scale=0.05, shift=1.0)
        if kind == "biased_layer":
            gain = torch.cat((gain, make.noise(hidden, dtype="float32", scale=0.05)))
        yield OpCase(static, (x, None if kind == "bare_layer" else gain, parts, bias))

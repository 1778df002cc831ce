"""The PTX that unpacks numbers, which no interpreter of Triton's runs, word by word."""

from __future__ import annotations

from collections.abc import Callable

import interpreted  # noqa: F401  (repairs the interpreter)
import numpy as np
import pytest
import torch

import evener_kernels_triton.jit.packed_numbers as packed

Words = np.ndarray
FLOATS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}


INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a, "shr.b32": lambda a, by: a >> by, "shl.b32": lambda a, by: a << by,
    "and.b32": lambda a, b: a & b, "xor.b32": lambda a, b: a ^ b,
    "lop3.b32": lambda a, b, c, table: (a & b) | c,  # of its table 0xEA
}  # fmt: skip
#: The number of tile ``i`` of words ``low`` and of further bits ``more``.
NUMBERS: dict[str, Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]] = {
    "TWO": lambda low, more, i: low >> 2 * i & 3,
    "THREE": lambda low, more, i: (low >> 2 * i & 3) + 4 * (more >> i & 1),
    "FOUR": lambda low, more, i: low >> 4 * i & 15,
    "FIVE": lambda low, more, i: (low >> 4 * i & 15) + 16 * (more >> i & 1),
    "SIX": lambda low, more, i: (low >> 4 * i & 15) + 16 * (more >> 2 * i & 3),
    "EIGHT": lambda low, more, i: ((((low if i < 2 else more) >> 8 * (i % 2)) & 255) ^ 128) - 128,
    "E2M1": lambda low, more, i: FLOATS[low >> 4 * i & 15],
}


def halves(words: Words, dtype: torch.dtype) -> torch.Tensor:
    """Both halves of each word as numbers: the lower one first."""
    pairs = np.stack((words & 0xFFFF, words >> np.uint32(16)), -1).astype(np.uint16)
    return torch.from_numpy(pairs.view(np.int16).copy()).view(dtype)


def computed(code: str, first: Words, second: Words, dtype: torch.dtype) -> list[torch.Tensor]:
    """What the code's five results hold, after the definitions of the few instructions that it uses."""
    held = {"$5": first, "$6": second}

    def value(word: str) -> Words:
        return held[word] if word in held else np.full_like(first, int(word, 0))

    for line in (line.strip().rstrip(";") for line in code.splitlines()):
        if line in "{}" or line.startswith(".reg"):
            continue
        name, rest = line.split(" ", 1)
        to, *words = (word.strip() for word in rest.split(","))
        a, *others = (value(word) for word in words)
        if name.startswith("fma.rn"):
            x, y, z = (halves(each, dtype).double() for each in (a, *others))
            bits = (x * y + z).to(dtype).view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
            held[to] = bits[..., 0] | bits[..., 1] << np.uint32(16)
        else:
            assert name != "lop3.b32" or words[3] == "0xEA"
            held[to] = INSTRUCTIONS[name](a, *others)
    return [halves(held[f"${i}"], dtype).float() for i in range(5)]


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_of_a_word_is_found(name: str, kind: str) -> None:
    if (name, kind) == ("E2M1", "F16"):
        return  # computed without PTX
    dtype, random = DTYPES[kind], np.random.default_rng(3)
    first, second = (random.integers(0, 1 << 32, 4096, dtype=np.uint32) for _ in range(2))
    if name in ("THREE", "FIVE"):  # further bits come from bytes
        second &= np.uint32(0x00FF00FF)
    low, more = (
        torch.from_numpy(np.stack((w & 0xFFFF, w >> np.uint32(16)), -1).astype(np.int64)) for w in (first, second)
    )
    *tiles, ones = computed(getattr(packed, f"_{name}_{kind}").value, first, second, dtype)
    assert (ones == 1).all()
    added = 0 if name in ("EIGHT", "E2M1") else {"BF16": 128, "F16": 1024}[kind]
    for i, tile in enumerate(tiles):
        assert torch.equal(tile, NUMBERS[name](low, more, i).float() + added), f"tile {i}"

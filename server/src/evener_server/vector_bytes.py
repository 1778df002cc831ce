"""Vectors as bytes: their numbers in one of several types and byte orders, as vLLM's API has them.

Types without a type of numpy are made here: bfloat16 is the upper half of a float32; the types of 8 bits are those of
"FP8 Formats for Deep Learning" (Micikevicius et al. 2022), of which ``fp8_e4m3`` has no infinity.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy as np

NumberType: TypeAlias = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
ByteOrder: TypeAlias = Literal["native", "little", "big"]

Array: TypeAlias = "np.ndarray[Any, Any]"
#: What is stored for each number.
_STORED: Mapping[str, str] = {
    "float32": "f4", "float16": "f2", "bfloat16": "u2", "fp8_e4m3": "u1", "fp8_e5m2": "u1",
}  # fmt: skip
_ORDERS: Mapping[str, str] = {"native": "=", "little": "<", "big": ">"}
#: Without the sign: a number that is none, of both types of 8 bits and of bfloat16.
_NAN_8, _NAN_16 = 0x7F, 0x7FC0


def item_size(kind: NumberType) -> int:
    """Bytes of one number."""
    return int(np.dtype(_STORED[kind]).itemsize)


def vector_bytes(vector: Array, kind: NumberType, order: ByteOrder) -> bytes:
    """The numbers of a float32 ``vector``, rounded to the nearest of ``kind``, of two to the even one. Beyond the
    largest they are infinite, or the largest itself in ``fp8_e4m3``, which has no infinity."""
    if kind == "bfloat16":
        stored = _bfloat16(vector)
    elif kind in ("fp8_e4m3", "fp8_e5m2"):
        stored = _eight_bits(vector, kind)
    else:
        with np.errstate(over="ignore"):
            stored = vector.astype(_STORED[kind])
    return bytes(stored.astype(np.dtype(_STORED[kind]).newbyteorder(_ORDERS[order])).data)


def _bfloat16(vector: Array) -> Array:
    bits = vector.astype(np.float32).view(np.uint32).astype(np.uint64)
    # Half of the last kept bit, less a little unless that bit is set: halves go to the even one.
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(vector), _NAN_16, rounded).astype(np.uint16)


def _eight_bits(vector: Array, kind: str) -> Array:
    size, limits = np.abs(vector).astype(np.float64), _limits(kind)
    # The number of limits below a number is its code. On a limit, the code on either side would do: the even one is it.
    below, at_most = np.searchsorted(limits, size, "left"), np.searchsorted(limits, size, "right")
    codes = np.where(below % 2 == 0, below, at_most)
    if kind == "fp8_e4m3":
        codes = np.minimum(codes, _NAN_8 - 1)
    codes = np.where(np.isnan(vector), _NAN_8, codes)
    return (codes + np.where(np.signbit(vector), 0x80, 0)).astype(np.uint8)


@functools.cache
def _limits(kind: str) -> Array:
    """Halfway between each number that is not negative and the next; the last is half a step beyond the largest."""
    bits, bias, end = (3, 7, _NAN_8) if kind == "fp8_e4m3" else (2, 15, 0x7C)
    power, fraction = np.divmod(np.arange(end), 2**bits)
    part = fraction / 2**bits
    values = np.where(power == 0, np.ldexp(part, 1 - bias), np.ldexp(1 + part, power - bias))
    following = np.append(values[1:], 2 * values[-1] - values[-2])
    return (values + following) / 2

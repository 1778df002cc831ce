"""How the elements of a weight are stored: ``QuantFormat``, and the tensors that a part in each format has.

Packings get parts with the tensors that are described here, whatever the checkpoint's own layout was
(``QuantScheme.arrange``). ``groups`` is the number of scales of a row, ``QuantFormat.row_scales(columns)``.

- float32, float16, bfloat16: "weight" [rows, columns].
- a key of ``BLOCKS``: "weight" uint8 [rows, bytes of a row].
- float8_e4m3fn, float8_e5m2: "weight" [rows, columns]; "scale": one number, or one for each block of ``group_out`` rows
  and ``group`` columns. Element = weight x scale.
- uint4: "weight" uint8 [rows, columns / 2], the even column of a pair in the low half of a byte, the odd one in the
  high half; "scale" [rows, groups]; if ``zero`` is "uint8", "zero" uint8 [rows, groups], from 0 to 15. Element =
  (q - zero) x scale, in float32; without zero points 8 is subtracted. The number of columns is even.
- int8: "weight" int8 [rows, columns]; "scale" as for float8; if ``zero`` is "int8", "zero" int8 in the shape of
  "scale". Element = (q - zero) x scale, in float32; without zero points nothing is subtracted.
- float4_e2m1: see ``MXFP4`` and ``NVFP4``.
- with an ``activation`` whose scale is fixed, also "activation_scale": float32, one number.
- nf4, fp4: "weight" as for uint4; "scale" float32 [rows, groups]; "table" float32 [16]. Element = table[q] x scale.

Group g of a row has columns g x ``group`` to (g + 1) x ``group``; the last group may have fewer. With the order "act"
(act-order), a part has "group_index" int32 [columns], from 0 to groups - 1: the group of each column. The columns stay
in the order of the in-features; a packing may sort them by group and gather activations in that order. If the part is
whole, which is ``groups == ceil(columns / group)``, then each group has ``group`` columns, the last one what is left.
If it was cut along the in-features, ``groups`` is larger: it has the scales of all groups, and any number of columns of
each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: Bytes per element of the dtypes that formats and state use.
DTYPE_BYTES: Mapping[str, float] = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1, "int8": 1,
    "uint8": 1, "int4": 0.5, "uint4": 0.5, "float4_e2m1": 0.5, "nf4": 0.5, "fp4": 0.5, "int32": 4, "int64": 8, "bool": 1
}  # fmt: skip


#: Block formats: elements along the in-features, and bytes, of one block, which contains its own scales. The blocks of
#: a row are contiguous, and so are rows; the layout inside a block is ggml's.
BLOCKS: dict[str, tuple[int, int]] = {
    "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q8_0": (32, 34), "q2_k": (256, 84),
    "q3_k": (256, 110), "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210),
}  # fmt: skip


#: Bytes of "factor" and "table".
_MORE_BYTES: Mapping[str, int] = {"float4_e2m1": 4, "nf4": 64, "fp4": 64}


@dataclass(frozen=True)
class Rounding:
    """How a kernel may round the activations that it multiplies with a weight: each is divided by a scale, rounded to
    the nearest element (to even if two are equally near) and multiplied by the scale again
    (``evener.ops.reference.rounding``). A kernel may also use them as they are; ``Kernel.rounds`` says what it does.

    Attributes:
        storage: element type, "float8_e4m3fn" or "int8".
        group: how many columns of a token share a scale, which is their largest magnitude divided by that of an
            element; 0: all columns, -1: the scale is fixed, the tensor "activation_scale" of the part. Parts of one
            weight, and matrices of a stack, share the largest of theirs.
    """

    storage: str
    group: int = 0

    def __str__(self) -> str:
        shared = {0: "a scale a token", -1: "a fixed scale"}
        return f"{self.storage}, {shared.get(self.group, f'a scale a token and {self.group} columns')}"


@dataclass(frozen=True)
class QuantFormat:
    """How the elements of one tensor part are stored.

    Attributes:
        storage: element type ("bfloat16", "int8", "uint4", "float8_e4m3fn", or a block type such as "q4_k"). A package
            may choose another name, for elements that are not described above; it must set ``bits`` then.
        group: how many elements along the in-features share a scale; 0: the whole row, -1: the whole tensor.
        group_out: how many rows share a scale (128 for block-scaled FP8).
        scale: element type of the scales; None: no scales.
        zero: element type of zero points that are stored as a tensor; None: there are none, or they are inside the
            blocks. A packing that does not read zero points must refuse a format that has them.
        order: "row": groups are neighbouring columns; "act": the part says each column's group (act-order).
        activation: how activations may be rounded; None: products are those of activations as they are.
        bits: stored bits per element, with scales and zero points; 0: as many as the tensors above have.
        groups: number of scales of a row, if it is not ``columns / group`` rounded up: see act-order above.
        cut: rows and columns at whose multiples a checkpoint's tensors can be cut; 0: at those of ``group_out`` and
            ``group``. It says nothing about the elements.
        stack: whether a checkpoint has a stack of such quantized parts, with a further first axis. One in place of a
            matrix is refused then, before it is read.
    """

    storage: str
    group: int = 0
    group_out: int = 1
    scale: str | None = None
    zero: str | None = None
    order: str = "row"
    activation: Rounding | None = None
    bits: float = 0.0
    groups: int = 0
    cut: tuple[int, int] = field(default=(0, 0), compare=False)
    stack: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        # A scheme may name the element type alone.
        if isinstance(self.activation, str):
            object.__setattr__(self, "activation", Rounding(self.activation))

    @property
    def elements(self) -> str:
        """Element type and how many share a scale, as "float8_e4m3fn 128 × 128"."""
        shared = {0: "by row", -1: "by tensor"}
        return self.storage + (f" {shared.get(self.group, f'{self.group_out} × {self.group}')}" if self.scale else "")

    @property
    def plain(self) -> bool:
        """True if unquantized: elements are stored in a float dtype, without scales."""
        return self.scale is None and self.storage in ("float32", "float16", "bfloat16")

    def row_scales(self, columns: int) -> int:
        """Number of scales of a row, of a part with so many columns."""
        return self.groups or (-(-columns // self.group) if self.group > 0 else 1)

    def cut_unit(self, axis: int) -> int:
        """Ranks cut a part's rows (axis 0) or columns (axis 1) at multiples of this."""
        return self.cut[axis] or max(1, (self.group_out, self.group)[axis])

    def nbytes(self, rows: int, columns: int) -> int:
        """Stored bytes of a part of ``rows`` x ``columns``."""
        fixed = 4 if self.activation is not None and self.activation.group < 0 else 0
        if self.bits or self.scale is None:
            return int(rows * columns * (self.bits or DTYPE_BYTES[self.storage] * 8)) // 8 + fixed
        scales = 1 if self.group < 0 else -(-rows // self.group_out) * self.row_scales(columns)
        each = DTYPE_BYTES[self.scale] + (DTYPE_BYTES[self.zero] if self.zero else 0)
        more = _MORE_BYTES.get(self.storage, 0) + (DTYPE_BYTES["int32"] * columns if self.order == "act" else 0)
        return int(rows * columns * DTYPE_BYTES[self.storage] + scales * each + more) + fixed


def plain(dtype: str) -> QuantFormat:
    """The format of unquantized weights of ``dtype``."""
    return QuantFormat(storage=dtype)


def block_format(storage: str) -> QuantFormat:
    """The format of parts stored in blocks; ``storage`` is a key of ``BLOCKS``."""
    elements, nbytes = BLOCKS[storage]
    return QuantFormat(storage=storage, group=elements, scale="float16", bits=nbytes * 8 / elements)


#: Four-bit floats (a sign, two bits of exponent, one of mantissa) in blocks of 32 that share a power of two (OCP
#: Microscaling Formats 1.0, 2023). Tensors: "weight" uint8 [rows, columns / 32, 16], the even number of a pair in the
#: low half of a byte; "scale" uint8 [rows, columns / 32], exponents with a bias of 127, 255 for NaN.
MXFP4 = QuantFormat(storage="float4_e2m1", group=32, scale="float8_e8m0fnu", bits=4.25)
#: The same four-bit floats in groups of 16. Tensors: "weight" uint8 [rows, columns / 2], pairs as in ``MXFP4``; "scale"
#: float8_e4m3fn [rows, columns / 16]; "factor" float32 [], which multiplies all scales.
NVFP4 = QuantFormat(storage="float4_e2m1", group=16, scale="float8_e4m3fn")

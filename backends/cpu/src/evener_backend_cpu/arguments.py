"""What tensors must be before their addresses go to C++, which cannot ask how long they are. The sizes and indices that
go with them are checked there (``native/check.h``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evener.contracts.quant import PackedWeight


def require(what: str, tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> int:
    """The address of ``tensor``, which must be contiguous and have this dtype and shape.

    Raises:
        ValueError: it is another tensor than the kernel was built for; says which of these differ.
    """
    if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(_difference(what, tensor, f"{dtype} {list(shape)}, contiguous"))
    return tensor.data_ptr()


def optional(what: str, tensor: torch.Tensor | None, dtype: torch.dtype, shape: Sequence[int]) -> int | None:
    """The same for a tensor that may be None."""
    return None if tensor is None else require(what, tensor, dtype, shape)


def require_count(what: str, tensor: torch.Tensor, dtype: torch.dtype, count: int) -> int:
    """The address of ``tensor``, which must be contiguous, of this dtype, and hold ``count`` numbers in any shape.

    Raises:
        ValueError: it is another tensor than the kernel was built for.
    """
    if tensor.dtype is not dtype or tensor.numel() != count or not tensor.is_contiguous():
        raise ValueError(_difference(what, tensor, f"{count} numbers of {dtype}, contiguous"))
    return tensor.data_ptr()


def require_indices(what: str, tensor: torch.Tensor, count: int) -> tuple[int, bool]:
    """The address of ``count`` or more indices, contiguous, and whether they are int64 instead of int32.

    Raises:
        ValueError: they are fewer, or of another dtype.
    """
    wide = tensor.dtype is torch.int64
    if not (wide or tensor.dtype is torch.int32) or tensor.numel() < count or not tensor.is_contiguous():
        raise ValueError(_difference(what, tensor, f"{count} or more of int32 or int64, contiguous"))
    return tensor.data_ptr(), wide


def require_weight(what: str, weight: PackedWeight, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Check the shape of a packed weight, and the dtype of a plain one.

    Raises:
        ValueError: it is another weight than the kernel was built for.
    """
    plain = weight.data if isinstance(weight.data, torch.Tensor) else None
    if tuple(weight.shape) != tuple(shape):
        raise ValueError(f"{what} is {list(weight.shape)}; the kernel was built for {list(shape)}")
    if plain is not None and (plain.dtype is not dtype or not plain.is_contiguous() or plain.shape != weight.shape):
        raise ValueError(_difference(what, plain, f"{dtype} {list(shape)}, contiguous"))


def _difference(what: str, tensor: torch.Tensor, wanted: str) -> str:
    strides = "" if tensor.is_contiguous() else f" with strides {list(tensor.stride())}"
    return f"{what} is {tensor.dtype} {list(tensor.shape)}{strides}; the kernel was built for {wanted}"

"""Products on the host: in float32, and rounded to their own dtype.

Of bfloat16 torch has no fast product on a processor without AVX-512, so a model of real sizes would take minutes there.
The values are the same: such products are added up in float32 anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::matmul", "aten::linear"})


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """``func`` of tensors of the host."""
    dtype = args[0].dtype if args and isinstance(args[0], torch.Tensor) else None
    narrow = dtype in (torch.bfloat16, torch.float16) and "out" not in kwargs
    if not narrow or func.name().partition(".")[0] not in _PRODUCTS:
        return func(*args, **kwargs)
    args, kwargs = tree_map(lambda each: each.float() if isinstance(each, torch.Tensor) else each, (args, kwargs))
    return func(*args, **kwargs).to(dtype)

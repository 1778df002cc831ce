"""What a kernel's arguments must be before their addresses go to a launch, which cannot ask how long they are.

The first call of each function that a kernel builds is checked against the op's schema, and each step's tensors when
they are prepared: later calls of the same function have the same shapes but for the number of rows, and cost nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from evener.contracts.declared import LinearWeight
from evener.contracts.ops import OpCall, OpFunction, OpSchema, Tensor
from evener.contracts.quant import PackedWeight
from evener.contracts.state import AttentionSpec, StateSpec, StateStep
from evener.ops.schemas import BUILTIN

_INTEGERS, _FLOATS = (torch.int32, torch.int64), (torch.float32, torch.float16, torch.bfloat16)
#: Tensors in records of weights: the static size, or the declared weight whose rows, that their last axis has.
_LAST_AXES = {
    "o_bias": "hidden", "down_bias": "down", "qkv_bias": "qkv", "gate_up_bias": "gate_up", "sinks": "heads",
    "router_bias": "experts", "correction": "experts", "copies": "experts", "kv_norm": "rank", "q_norm": "q_rank",
}  # fmt: skip
#: Those that are [size], or a whole multiple of it.
_MULTIPLES = {"norm": "hidden", "post_norm": "hidden", "q_norm": "head_dim", "k_norm": "head_dim"}


def checked(call: OpCall, run: OpFunction) -> OpFunction:
    """``run``, whose first call must have the arguments that the op's schema declares; so must every call until one
    has. Raises ValueError if they are others."""
    schema = _schemas().get(call.op)
    if schema is None:
        return run
    pending = [schema]

    def first(*inputs: Any) -> Any:
        if pending:
            check_inputs(pending[0], call.static, inputs)
            pending.clear()
        return run(*inputs)

    return first


@cache
def _schemas() -> Mapping[str, OpSchema]:
    return {schema.name: schema for schema in BUILTIN}


def check_inputs(schema: OpSchema, static: Mapping[str, Any], inputs: Sequence[Any]) -> None:
    """Compare with the schema: shapes, dtypes, devices, and which are there.

    Raises:
        ValueError: they differ; says how.
    """
    sizes: dict[str, int] = {name: value for name, value in static.items() if type(value) is int}
    where: set[torch.device] = set()
    # Views of state and the like at the end may be left out.
    for declared, value in zip(schema.inputs, (*inputs, *[None] * (len(schema.inputs) - len(inputs))), strict=True):
        if problem := _problem(declared, value, static, sizes):
            raise ValueError(f"{schema.name} was called with wrong arguments: {declared.name} is {problem}")
        where |= {t.device for t in _tensors(value)}
    if len(where) > 1:
        raise ValueError(f"{schema.name} was called with wrong arguments: tensors are on {sorted(map(str, where))}")


def _problem(declared: Tensor, value: Any, static: Mapping[str, Any], sizes: dict[str, int]) -> str:
    if value is None:
        return "" if declared.optional or declared.dtype in ("state", "int") else "missing"
    if declared.dtype == "packed":
        return _other_shape(tuple(value.shape), declared.shape, sizes)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        # A whole layer has static parameters for each of its records.
        own = static.get(declared.name)
        of = own if isinstance(own, Mapping) else static
        return next(filter(None, (_of_record(n, v, of) for n, v in value._asdict().items())), "")
    if not isinstance(value, torch.Tensor) or declared.dtype in ("state", "int"):
        return ""
    wanted = static.get("dtype", "") if declared.dtype == "*" else declared.dtype
    if wanted in ("int32", "int64"):
        fits = value.dtype in _INTEGERS
    else:
        fits = value.dtype in ((getattr(torch, wanted),) if wanted else _FLOATS)
    if not fits:
        return f"{value.dtype}, not {wanted or 'one of 16 or 32 bits'}"
    return _other_shape(tuple(value.shape), declared.shape, sizes)


def _other_shape(shape: tuple[int, ...], dims: Sequence[str | int], sizes: dict[str, int]) -> str:
    """How a shape differs from the declared one, or ""; sizes that are not static are those of the first input that has
    them."""
    if dims and dims[0] == "…":
        dims = dims[1:]
        shape, whole = shape[max(0, len(shape) - len(dims)) :], shape
    else:
        whole = shape
    wanted = [_size(str(dim), sizes) for dim in dims]
    if len(shape) != len(dims) or any(w is not None and w != n for w, n in zip(wanted, shape, strict=False)):
        right = ", ".join(str(dim if size is None else size) for dim, size in zip(dims, wanted, strict=True))
        return f"{list(whole)}, not [{right}]"
    sizes |= {str(dim): n for dim, n, w in zip(dims, shape, wanted, strict=True) if w is None}
    return ""


def _size(dim: str, sizes: Mapping[str, int]) -> int | None:
    """The size of a dimension, None if nothing says it yet: a number, a name, ``2*inner`` or ``ceil(vocab/32)``."""
    if match := re.fullmatch(r"ceil\((\w+)/(\d+)\)", dim):
        return -(-sizes[match[1]] // int(match[2])) if match[1] in sizes else None
    found = [int(part) if part.isdigit() else sizes.get(part) for part in dim.split("*")]
    product = 1
    for each in found:
        if each is None:
            return None
        product *= each
    return product


def _of_record(name: str, value: Any, static: Mapping[str, Any]) -> str:
    """What is wrong with one weight of a record, or ""."""
    declared = static.get(name)
    if isinstance(value, PackedWeight) and isinstance(declared, LinearWeight):
        rows = sum(part.rows for part in declared.parts)
        wanted = (*([declared.experts] if declared.experts else []), rows, declared.parts[0].columns)
        return "" if tuple(value.shape) == wanted else f"given {name} of {list(value.shape)}, not {list(wanted)}"
    if not isinstance(value, torch.Tensor):
        return ""
    last, multiple = _LAST_AXES.get(name), _MULTIPLES.get(name)
    size = static.get(last or "")
    size = sum(part.rows for part in size.parts) if isinstance(size, LinearWeight) else size
    if isinstance(size, int):
        return "" if value.dim() and value.shape[-1] == size else f"given {name} of {list(value.shape)}, not [{size}]"
    size = static.get(multiple or "")
    if isinstance(size, int) and size and (not value.numel() or value.numel() % size):
        return f"given {name} of {list(value.shape)}, which is no multiple of {size}"
    return ""


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, PackedWeight):
        return [value.data] if isinstance(value.data, torch.Tensor) else []
    return [value] if isinstance(value, torch.Tensor) else []


def check_step(step: StateStep) -> None:
    """Compare the tensors of a step with its counts.

    Raises:
        ValueError: a kernel would read or write outside of them.
    """
    for name, value, count in (
        ("query_start", step.query_start, step.requests + 1), ("kv_lens", step.kv_lens, step.requests),
        ("slot_mapping", step.slot_mapping, step.tokens), ("block_table", step.block_table, step.requests),
    ):  # fmt: skip
        axes = 2 if name == "block_table" else 1
        if value.dim() != axes or len(value) < count or value.dtype not in _INTEGERS or value.stride(-1) != 1:
            raise ValueError(
                f"{name} of the step is {value.dtype} {list(value.shape)} with strides {list(value.stride())}; {count} "
                "or more, of int32 or int64 and next to each other, fit"
            )


def check_state(
    spec: StateSpec, attention: AttentionSpec, *, query: torch.Tensor | None = None,
    values: Sequence[torch.Tensor] = (), tokens: int,
) -> None:  # fmt: skip
    """Compare queries, or values to write, with the layer's state.

    Raises:
        ValueError: they are of another layer, dtype or step.
    """
    wanted = [(tensor.name, value, tensor.shape) for tensor, value in zip(spec.tensors, values, strict=False)]
    if query is not None:
        wanted.append(("query", query, (attention.heads, attention.head_dim)))
    for name, value, shape in wanted:
        fits = tuple(value.shape[1:]) == shape and len(value) <= tokens
        if not fits or value.dtype is not getattr(torch, attention.dtype):
            raise ValueError(
                f"{name} is {value.dtype} {list(value.shape)}, not {attention.dtype} {[tokens, *shape]} as the layer's "
                "state and step say"
            )

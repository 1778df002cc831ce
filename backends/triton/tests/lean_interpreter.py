"""Triton's interpreter with less work for each operation, and the same results.

It runs Python for every operation of every program, and most of that is done again each time: it looks through the
whole language for what to replace whenever a function is called, makes objects for shapes and types that it had before,
and computes whether integers overflow without looking at the answer. Nothing here changes what is computed.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter

core = tl.core


def _do_not_look_for_overflow() -> None:
    """Each sum and product of integers is computed again in 64 bits and compared with the bounds of its type, for an
    assertion that the interpreter leaves out because it has ``debug`` off."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "the assertions are made"
    builder.options = replace(builder.options, sanitize_overflow=False)


def _replace_the_language_once() -> None:
    """A launch, and each call of a function within, replaces all builtins of the language by those that compute, found
    among all its members. They are the same each time, and no process that interprets kernels compiles any."""
    semantic = interpreter.interpreter_semantic

    def patch_attr(of: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner: Callable[..., Any] = getattr(member, "__wrapped__", member)  # what it wraps asks for ``_semantic``

        def computes(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        scope.set_attr(of, name, computes)

    interpreter._patch_attr = patch_attr
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": core}))
    nothing = interpreter._LangPatchScope()
    interpreter._patch_lang = lambda fn: nothing


def _know_types() -> None:
    """The table of numpy's types is made once, and not for every value."""
    pointer, table = np.dtype(np.uint64), dict[str, Any]()
    usual = interpreter._get_np_dtype

    def np_dtype(kind: Any) -> Any:
        one = kind.element_ty if isinstance(kind, tl.block_type) else kind
        if isinstance(one, tl.pointer_type):
            return pointer
        found = table.get(one.name)
        if found is None:
            found = table[one.name] = usual(one)
        return found

    interpreter._get_np_dtype = np_dtype


def _know_shapes() -> None:
    """Types of the same shape share what describes it: it never changes."""
    make_block = tl.block_type.__init__
    blocks: dict[Any, tuple[Any, int, str]] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}
    block, constant, some = tl.block_type, core.constexpr, core.tuple

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(s.value if isinstance(s, constant) else s for s in shape))
        found = blocks.get(key)
        if found is None:
            make_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
        else:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = found

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = builtins.tuple(type.shape.values) if isinstance(type, block) else ()
        found = shapes.get(key)
        if found is None:
            found = shapes[key] = some([constant(s) for s in key]), constant(math.prod(key))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = found

    tl.block_type.__init__, core.tensor.__init__ = block_type, tensor


def _widen_only_what_differs() -> None:
    """Two values of one shape, which tensors share after ``_know_shapes``, need no comparison of their axes."""
    usual = interpreter.TritonSemantic.broadcast_impl_value
    targets: dict[tuple[int, int], Any] = {}

    def broadcast(self: Any, a: Any, b: Any) -> Any:
        if a.shape is b.shape:
            return a, b
        if len(a.shape.values) != len(b.shape.values):  # also where one has no axes
            return usual(self, a, b)
        pair = id(a.shape), id(b.shape)  # shapes are kept for good, so no other gets the number of one
        if pair not in targets:
            targets[pair] = usual(self, a, b)[0].type.shape  # raises if they do not fit together
        return tuple(wide(self, one, targets[pair]) for one in (a, b))

    def wide(self: Any, one: Any, shape: Any) -> Any:
        if one.type.shape.values == shape.values:
            return one
        return self.make_tensor(self.builder.create_broadcast(one.handle, shape.values), block(one.dtype, shape.values))

    block = tl.block_type
    interpreter.TritonSemantic.broadcast_impl_value = broadcast


def _convert_bf16_by_its_bits() -> None:
    """A bfloat16 is the upper half of a float32, also where the interpreter assembles one from sign, exponent and
    significand. It cuts off what does not fit, and so does this."""
    usual, wide, narrow = interpreter._convert_float, tl.float32, tl.bfloat16

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == narrow and target == wide:
            return data.astype(np.uint32) << np.uint32(16)
        if source == wide and target == narrow and rounding is None:
            return (np.ascontiguousarray(data).view(np.uint32) >> np.uint32(16)).astype(np.uint16).reshape(data.shape)
        return usual(data, source, target, rounding)

    interpreter._convert_float = convert


def make_lean() -> None:
    """Once, after whatever else changes the interpreter."""
    _do_not_look_for_overflow()
    _know_types()
    _know_shapes()
    _widen_only_what_differs()
    _convert_bf16_by_its_bits()
    _replace_the_language_once()

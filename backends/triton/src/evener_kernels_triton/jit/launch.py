"""Kernel launches with little host time.

At each launch Triton finds the compiled kernel for the arguments, asks the driver about each pointer and prepares data
for profilers. Without graph capture that is most of a small step. A ``FastLaunchFunction`` asks Triton once for each
kind of call, and then passes addresses to the compiled kernel. A ``PreparedLaunch`` is given the arguments that never
change, and looks only at the others.

Two calls are of one kind if nothing differs that Triton specializes on (``native_specialize_impl``): the device, the
types of all values, the values of constants and options, each tensor's dtype and its address modulo 16, and of each
integer whether it is 1 or a multiple of 16 and which of int32, int64 and uint64 holds it, and of a Gluon kernel's
descriptors the dtype, the box and its layout. Triton is asked at every launch if more could matter: backends with their
own rules, tensors on another device, other types, debugging, hooks. It is not asked again when a kernel's globals or
compiler settings change between calls of one kind. Of a Triton without ``triton.knobs`` (before 3.4, from which some
vendors' builds come) it is asked every time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from types import NoneType
from typing import Any, cast

import torch
import triton
from triton.backends.compiler import BaseBackend
from triton.compiler import CompiledKernel, make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_KNOBS = getattr(triton, "knobs", None)
_RUNTIME = getattr(_KNOBS, "runtime", None)
_CHAIN = getattr(_KNOBS, "HookChain", None)
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_NOTHING: Mapping[str, Any] = {}
#: Types of constants and options: equal values of the same type are the same to a kernel.
_PLAIN = (bool, int, float, str, NoneType)
#: Skips the lazy initialization in torch's own function: a device that launched a kernel is initialized.
_RAW_DEVICE_GETTERS: dict[Any, Callable[[], int]] = {
    torch.cuda.current_device: getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
}


class FastLaunchFunction(JITFunction):  # type: ignore[misc]
    """``kernel[grid](…)`` launches as Triton does; everything else comes from ``triton.jit``."""

    #: By form (the types of the positional values, and the keywords): how values are read, and by kind
    #: the compiled kernel with its launcher, function and packed metadata.
    _forms: dict[tuple[Any, ...], tuple[Callable[..., tuple[Any, Any]], dict[Any, tuple[Any, ...]]]]

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return partial(self._launch, grid)

    def _launch(self, grid: Any, /, *args: Any, **kwargs: Any) -> Any:
        if type(grid) is not tuple or self.pre_run_hooks or _has_launch_hooks():
            return self.run(*args, grid=grid, warmup=False, **kwargs)
        values = (*args, *kwargs.values())
        written = (tuple(map(type, values)), *kwargs)
        form = self._forms.get(written)
        if form is not None:
            read, known = form
            active = driver.active
            device = active.get_current_device()
            kind, passed = read(device, *values)
            found = known.get(kind)
            if found is not None:
                kernel, run, function, metadata = found
                x, y, z = (*grid, 1, 1)[:3]
                run(x, y, z, active.get_current_stream(device), function, metadata, None, None, None, *passed)
                return kernel
        kernel = self.run(*args, grid=grid, warmup=False, **kwargs)
        if type(kernel) is CompiledKernel:
            if form is None:
                form = self._forms[written] = (_make_reader(self, args, kwargs), {})
            kind, _ = form[0](driver.active.get_current_device(), *values)
            if kind is not None:
                form[1][kind] = (kernel, kernel.run, kernel.function, kernel.packed_metadata)
        return kernel


class PreparedLaunch:
    """A kernel with its fixed arguments, by name: constants, options, sizes. A call ``(grid, *rest)`` has the three
    numbers of programs and the other arguments by position. It launches the same as ``kernel[grid](*rest, **fixed)``,
    which it calls once for each kind of ``rest``.
    """

    def __init__(self, kernel: Any, **fixed: Any) -> None:
        self._kernel, self._fixed = kernel, fixed
        #: Types of the values that ``_read`` reads; and by kind the launcher, function and packed metadata.
        self._types: tuple[type, ...] | None = None
        self._read = _ask_triton
        self._known: dict[Any, tuple[Any, ...]] = {}

    def __call__(self, grid: tuple[int, int, int], *values: Any) -> None:
        if tuple(map(type, values)) == self._types and not (self._kernel.pre_run_hooks or _has_launch_hooks()):
            active = driver.active
            ask = active.get_current_device
            device = _RAW_DEVICE_GETTERS.get(ask, ask)()
            kind, passed = self._read(device, *values)
            found = self._known.get(kind)
            if found is not None:
                run, function, metadata = found
                run(*grid, active.get_current_stream(device), function, metadata, None, None, None, *passed)
                return
        kernel = self._kernel[grid](*values, **self._fixed)
        if isinstance(self._kernel, FastLaunchFunction) and type(kernel) is CompiledKernel:
            if self._types is None:
                self._read = _make_reader(self._kernel, values, {}, self._fixed)
                self._types = tuple(map(type, values))
            if tuple(map(type, values)) == self._types:
                kind, _ = self._read(driver.active.get_current_device(), *values)
                if kind is not None:
                    self._known[kind] = kernel.run, kernel.function, kernel.packed_metadata


def fast_launch(function: Any) -> Any:
    """Decorator for the result of ``triton.jit``, or of Gluon's, of a kernel that the host launches; interpreted
    kernels stay as they are."""
    if type(function) in (JITFunction, _gluon_class()) and _RUNTIME is not None:
        # Not a wrapper: Triton and torch check for this class, and the object refers to itself (``device_caches``).
        function.__class__ = _fast_class(type(function))
        function._forms = {}
    return function


@cache
def _fast_class(kind: type[JITFunction]) -> type[JITFunction]:
    """``FastLaunchFunction``, or one that compiles as ``kind`` does."""
    return FastLaunchFunction if kind is JITFunction else type("FastLaunchFunction", (FastLaunchFunction, kind), {})


@cache
def _gluon_class() -> type | None:
    """The class of Gluon's kernels; None: this Triton has none."""
    try:
        from triton.experimental.gluon._runtime import GluonJITFunction
    except ImportError:
        return None
    return cast(type, GluonJITFunction)


def _is_descriptor(value: Any) -> bool:
    """Whether it describes a tensor that is copied in boxes."""
    kind = type(value)
    return kind.__name__ == "TensorDescriptor" and kind.__module__.startswith("triton.experimental.gluon.")


def _make_reader(
    function: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any], fixed: Mapping[str, Any] = _NOTHING
) -> Callable[..., tuple[Any, Any]]:
    """Make a function of a device and of values with the types of this call, which Triton has accepted, without the
    ``fixed`` ones. It returns the kind (None if Triton has to be asked) and the launcher's arguments, by parameter. Its
    source is generated, like Triton's binder.
    """
    here = f"is_{driver.active.get_active_torch_device().type}"
    if not hasattr(torch.Tensor, here) or not _only_common_rules():
        return _ask_triton
    names = [p.name for p in function.params]
    varying = {p.name for p in function.params if not p.is_constexpr}
    known = {p.name: p.default for p in function.params if p.has_default} | fixed
    passed = {name: _source_of(name, known[name]) for name in names if name in known}
    there, kind, lows = ["True"], ["device"], []
    for i, (name, value) in enumerate([*zip(names, args, strict=False), *kwargs.items()]):
        v, passed[name] = f"v{i}", f"v{i}"
        if name not in varying:
            if type(value) not in _PLAIN:
                return _ask_triton
            kind.append(v)
        elif type(value) in _TENSORS:
            passed[name] = f"a{i}"
            there.append(f"{v}.{here}")
            kind.append(f"{v}.dtype")
            lows.append((f"(a{i} := {v}.data_ptr())", f"a{i} & 15"))
        elif _is_descriptor(value):
            there.append(f"{v}.base.{here}")
            kind.append(f"{v}.base.dtype, (*{v}.block_shape,), {v}.layout")
        elif type(value) is int:
            kind.append(f"2 if {v} == 1 else not {v} & 15 if 0 <= {v} < {1 << 31} else integer({v})")
        elif type(value) not in _PLAIN or type(value) is str:
            return _ask_triton
    if not all(type(value) in _PLAIN for value in known.values()) or len(passed) < len(names):
        return _ask_triton
    if lows:  # usually all are 0, so the key is one number
        kind.append(f"({' | '.join(low for low, _ in lows)}) & 15 and ({', '.join(low for _, low in lows)},)")
    given = "".join(f", v{i}" for i in range(len(args) + len(kwargs)))
    launched = "".join(f"{passed[name]}, " for name in names)
    text = f"lambda device{given}: (({', '.join(kind)},), ({launched})) if {' and '.join(there)} else (None, None)"
    made: Callable[..., tuple[Any, Any]] = eval(text, {"known": known, "integer": _integer})
    return made


def _source_of(name: str, value: Any) -> str:
    """The source text of a fixed value in a generated reader."""
    return repr(value) if type(value) in (bool, int, NoneType) else f"known[{name!r}]"


def _ask_triton(device: int, *values: Any) -> tuple[Any, Any]:
    return None, None


def _integer(value: int) -> int:
    """How Triton specializes on an integer other than 1, as a number other than 2; for a small one, 0 or 1 for
    ``not value & 15``."""
    width = next((width for width, top in ((0, 31), (1, 63)) if -1 << top <= value < 1 << top), 2)
    # Triton refuses more than 64 bits, so each such value is a kind of its own.
    return 4 * width + (not value & 15) if -1 << 63 <= value < 1 << 64 else value


def _only_common_rules() -> bool:
    """Whether the backend has no specialization of its own; AMD's looks at tensor sizes."""
    own = type(make_backend(driver.active.get_current_target()))
    rules = [name for name in dir(BaseBackend) if name.endswith("_specialization")]
    return all(getattr(own, name) is getattr(BaseBackend, name) for name in rules)


def _has_launch_hooks() -> bool:
    """Whether launches are debugged or hooks are set, as by a profiler; before Triton 3.5 a hook is a function."""
    assert _RUNTIME is not None, "such a function is never launched fast"
    enter, leave = _RUNTIME.launch_enter_hook, _RUNTIME.launch_exit_hook
    if type(enter) is type(leave) is _CHAIN:
        return bool(_RUNTIME.debug or enter.calls or leave.calls)
    return bool(_RUNTIME.debug or getattr(enter, "calls", enter) or getattr(leave, "calls", leave))

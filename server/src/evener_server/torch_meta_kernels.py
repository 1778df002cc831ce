"""Torch's Python kernels for the device "meta", loaded when they are needed.

``import torch`` spends a quarter of its time on them, and on the decompositions and reference ops that they need
(``torch._meta_registrations``). A command that answers one prompt makes no tensor without data, but a package that it
loads may. The first such tensor loads the kernels, and so does the first import of another module of torch: these
expect all that ``import torch`` imports. From then on everything is as it is otherwise.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_NAME = "torch._meta_registrations"
#: The ops that make a tensor without data. All other ways lead to these, and torch has them in C++.
_MAKERS = (("empty", "memory_format"), ("empty_strided", "default"))


def load_meta_kernels_later() -> None:
    """Let the next ``import torch`` of this process leave them out. Does nothing if torch was imported."""
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _Later())


class _Later(MetaPathFinder, Loader):
    """Finds the module with the kernels, and executes it when it is needed."""

    def __init__(self) -> None:
        self._loader: Loader | None = None
        self._module: ModuleType | None = None
        self._kernels: Any = None
        self._lock = threading.RLock()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _NAME and self._loader is None:
            found = PathFinder.find_spec(fullname, path, target)
            if found is None or found.loader is None:
                return found
            self._loader = found.loader
            return ModuleSpec(fullname, self, origin=found.origin)
        if self._module is None or not fullname.startswith("torch.") or _importing_torch():
            return None
        self._load()
        # The kernels may have imported it on their way.
        there = sys.modules.get(fullname)
        return None if there is None else ModuleSpec(fullname, _Present(there))

    def exec_module(self, module: ModuleType) -> None:
        torch: Any = sys.modules["torch"]  # its import is what asks for the module
        self._kernels = torch.library.Library("aten", "IMPL", "Meta")
        for name, overload in _MAKERS:
            op = getattr(getattr(torch.ops.aten, name), overload)
            self._kernels.impl(op, self._first(op))
        self._module = module
        # For who reads from the module itself. Python asks for names of its own, with two underscores, at any time.
        module.__getattr__ = self._attribute  # type: ignore[method-assign]

    def _first(self, op: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(*arguments: Any, **named: Any) -> Any:
            self._load()
            return op(*arguments, **named)

        return kernel

    def _attribute(self, name: str) -> Any:
        module = sys.modules[_NAME]
        if not name.startswith("__"):
            self._load()
            if name in vars(module):
                return vars(module)[name]
        raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")

    def _load(self) -> None:
        with self._lock:
            module, self._module = self._module, None
            if module is None:
                return  # another thread was first, or this one is executing it
            sys.meta_path.remove(self)
            self._kernels._destroy()  # before the module is executed: it registers its own
            del module.__getattr__
            assert self._loader is not None, "it was found"
            self._loader.exec_module(module)


def _importing_torch() -> bool:
    return bool(getattr(sys.modules["torch"].__spec__, "_initializing", False))


class _Present(Loader):
    """Gives a module that is there, as it is."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__
        module.__spec__ = None  # or the import system would take that in place of the one that names this loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec

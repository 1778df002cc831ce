"""Torch's Python kernels for tensors without data, left out of ``import torch`` until something asks for more of torch.

A quarter of ``import torch`` (0.3 s, 18 MiB) registers kernels for the device "meta", for fake tensors and for torch's
compiler. An answer on a CPU uses none of them. They are registered, as ``import torch`` would have done it, before
anything that it does not load itself is imported: torch's compiler, an extension of a device, any other module of torch
or one whose name begins like that. A package that computes with meta tensors and imports nothing else of torch's says
``from torch import _meta_registrations`` and uses a name of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from threading import RLock
from types import ModuleType
from typing import Any

_NAME = "torch._meta_registrations"


def meta_kernels_later() -> None:
    """Leave them out, if torch has not been imported. A command calls this that imports torch in its own process."""
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _Later())


class _Module(ModuleType):
    """The module, not executed yet."""

    later: _Later

    def __getattr__(self, name: str) -> Any:
        # ``inspect`` looks for names like ``__wrapped__`` in every module.
        if name.startswith("__") or not self.later.finish() or name not in self.__dict__:
            raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")
        return self.__dict__[name]


class _Later(MetaPathFinder, Loader):
    """Finds the module in the place of Python's own finder, and executes it later."""

    def __init__(self) -> None:
        self._lock = RLock()
        #: Python's own, until the module is executed; and the module, once ``import torch`` has asked for it.
        self._loader: Loader | None = None
        self._module: _Module | None = None

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith("torch"):
            return None
        if name == _NAME and self._module is None:
            found = PathFinder.find_spec(name, path, target)
            if found is not None and found.loader is not None:
                self._loader, found.loader = found.loader, self
            return found
        torch = sys.modules.get("torch")
        if self._module is None or torch is None or getattr(torch.__spec__, "_initializing", False):
            return None  # in ``import torch``, or after one that failed
        self.finish()
        return _again(sys.modules[name]) if name in sys.modules else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        assert isinstance(module, _Module), "made above"
        self._module, module.later = module, self

    def finish(self) -> bool:
        """Execute the module, once; other threads wait. Whether there was a module."""
        with self._lock:
            module, loader, self._loader = self._module, self._loader, None
            if loader is not None and module is not None:
                loader.exec_module(module)
                module.__class__ = ModuleType  # type: ignore[assignment]  # it is one, and needs no more than that now
                sys.meta_path.remove(self)
        return module is not None


class _Again(Loader):
    """Gives a module that was imported while an import of it was looking for it, and steps back."""

    def __init__(self, module: ModuleType, loader: Loader | None) -> None:
        self._module, self._loader = module, loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None, "it was found by it"
        module.__spec__.loader = self._loader


def _again(module: ModuleType) -> ModuleSpec | None:
    # Python takes the spec of the module that it finds in ``sys.modules``, whichever is returned here.
    if module.__spec__ is not None:
        module.__spec__.loader = _Again(module, module.__spec__.loader)
    return module.__spec__

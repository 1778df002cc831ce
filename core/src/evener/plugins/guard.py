"""A guard that refuses ``import torch`` while descriptors and marks are read, so that start-up stays cheap."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class TorchImportRefused(ImportError):
    """Something that must be torch-free imported torch."""

    def __init__(self) -> None:
        super().__init__(
            "it imports torch, which a descriptor or a mark must not: read versions with evener.plugins.torch_marks, "
            "and import torch in the module that the descriptor's `module` names"
        )


class _RefusingLoader(Loader):
    def __init__(self) -> None:
        self.tripped = False

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        self.tripped = True
        raise TorchImportRefused()

    def exec_module(self, module: ModuleType) -> None:  # without it importlib takes its oldest path, past create_module
        raise AssertionError("create_module refused already")


class _Guard(MetaPathFinder):
    """Lets ``importlib.util.find_spec`` see torch but not import it. Only the thread that made it is guarded."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.loader = _RefusingLoader()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch" or threading.get_ident() != self._thread:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                spec.loader = self.loader
                return spec
        return None


@contextmanager
def torch_free() -> Iterator[None]:
    """Within the block this thread cannot import torch, unless it is imported already.

    Raises:
        TorchImportRefused: the block tried to, even if it caught the refusal.
    """
    guard = _Guard()
    sys.meta_path.insert(0, guard)
    try:
        yield
    finally:
        sys.meta_path.remove(guard)
    if guard.loader.tripped:
        raise TorchImportRefused()

"""Stands where the package ``vllm`` would be, so that files of tests can be imported which need a server only.

Whatever is imported from it is a class with the right name. While files are imported, everything may be done with such
a class; while a test runs, calling one raises ``OwnCode``, and the call is noted: that test is about vLLM's own code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class OwnCode(Exception):
    """A test called vLLM's own Python code, which is not here. The message names the called function."""


class _Kind(type):
    """The type of whatever is imported from the package: calls and sums go to the package, attributes are
    more of the kind."""

    package: Package
    path: str

    def __call__(cls, *_: Any, **__: Any) -> Any:
        return cls.package.called(cls.path)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls.package.thing(f"{cls.path}.{name}")

    def __setattr__(cls, name: str, value: object) -> None:
        """Nothing is kept: every call gives the same class."""

    def __bool__(cls) -> bool:
        return False

    def __iter__(cls) -> Iterator[Any]:
        """Nothing, while files are imported; a test that goes through it would check nothing."""
        cls.package.called(cls.path)
        return iter(())

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __add__(cls, _: Any) -> Any:
        return cls.package.called(cls.path)


class _Module(ModuleType):
    def __init__(self, name: str, package: Package) -> None:
        super().__init__(name)
        self._package = package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._package.thing(f"{self.__name__}.{name}")


class Package(MetaPathFinder, Loader):
    """An importer of ``roots`` and of all modules below them.

    Args:
        roots: names of packages.
        real: what is not stood in for, by its whole name.

    Attributes:
        running: whether a test runs, so that calls are refused.
        calls: the names of what was called while tests ran.
    """

    def __init__(self, roots: frozenset[str], real: Mapping[str, Any]) -> None:
        self._roots = roots
        self._things: dict[str, Any] = dict(real)
        self.running = False
        self.calls: list[str] = []

    def install(self) -> None:
        """Be asked first for every import."""
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The importer's protocol."""
        ours = any(fullname == root or fullname.startswith(f"{root}.") for root in self._roots)
        return ModuleSpec(fullname, self, is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The importer's protocol."""
        return _Module(spec.name, self)

    def exec_module(self, module: ModuleType) -> None:
        """The importer's protocol: nothing is executed."""

    def thing(self, path: str) -> Any:
        """What has this name: always the same, so that ``isinstance`` and ``pytest.raises`` can be used."""
        if path not in self._things:
            content = {"package": self, "path": path, "__new__": lambda *_, **__: self.called(path)}
            # An exception, because some are raised or expected.
            self._things[path] = _Kind(path.rpartition(".")[2], (Exception,), content)
        return self._things[path]

    def called(self, path: str) -> Any:
        """Something was called.

        Raises:
            OwnCode: a test runs.
        """
        if self.running:
            self.calls.append(path)
            raise OwnCode(path)
        return self.thing(f"{path}()")

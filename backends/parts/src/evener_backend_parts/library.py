"""Optional kernel libraries: whether they are installed, and what to type if not. Torch-free.

A library is imported only when a model's state or weights could go to it. That only happens if the user asked for it:
our own kernels come first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType


@dataclass(frozen=True)
class Library:
    """One library.

    Attributes:
        module: the module to import.
        distributions: names under which it is installed; the first is the one to install.
        min_version: the oldest version whose interface we call.
        extra: our extra that installs it; "" if no package index has a build that works.
        source: the argument for pip if there is no extra.
        architectures: variants of devices that it has kernels for ("sm_90"); empty: all that the backend serves.
        owner: the distribution of ours whose extra it is.
    """

    module: str
    distributions: tuple[str, ...]
    min_version: str
    extra: str
    source: str = ""
    architectures: tuple[str, ...] = ()
    owner: str = ""

    @property
    def install_hint(self) -> str:
        """What to type."""
        return f"pip install '{self.owner}[{self.extra}]'" if self.extra else f"pip install {self.source}"

    def refusal(self, variant: str) -> str | None:
        """Why it cannot run on a device of this variant; None once it is imported.

        A library that is installed but fails to import is also a reason, with its error: it was built for another torch
        or toolkit.
        """
        name, found = self.distributions[0], self.installed()
        if found is None:
            return f"{name} {self.min_version} or later is not installed; {self.install_hint}"
        if not self.has_kernels(variant):
            return f"{name} has kernels for {self.has_kernels_for()}, not for {variant or 'this device'}"
        if _numbers(found) < _numbers(self.min_version):
            return f"{name} {found} is too old, {self.min_version} or later is needed; {self.install_hint} --upgrade"
        try:
            self.load()
        except (ImportError, OSError) as error:
            return f"{name} {found} is installed but does not import ({error}); reinstall it for this torch"
        return None

    def installed(self) -> str | None:
        """Its version."""
        for name in self.distributions:
            try:
                return version(name)
            except PackageNotFoundError:
                continue
        return None

    def load(self) -> ModuleType:
        """The module."""
        return import_module(self.module)

    def has_kernels(self, variant: str) -> bool:
        """Whether it has kernels for devices of this variant."""
        return not self.architectures or variant in self.architectures

    def has_kernels_for(self) -> str:
        """The devices that it has kernels for, in words."""
        return ", ".join(self.architectures)


def _numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 8, 3) of "2.8.3.post2"."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()

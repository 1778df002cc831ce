"""A lazy target: ``module:attribute`` that a descriptor announces and nobody imports until it is asked for."""

from __future__ import annotations

import functools
import importlib
import os
from dataclasses import dataclass
from typing import Any

from evener.errors import ArchitectureError, DescriptorError, EvenerError


@dataclass(frozen=True, kw_only=True)
class Target:
    """One lazily imported name.

    Attributes:
        kind: ``architecture``, ``command``, ``request plugin`` or ``checkpoint reader``.
        name: the name that users type or checkpoints carry.
        path: ``module:attribute``.
        package: name of the package that announced it.
        distribution: the distribution that brought that package.
    """

    kind: str
    name: str
    path: str
    package: str
    distribution: str

    def load(self) -> Any:
        """Import the module and return the attribute.

        Raises:
            ArchitectureError: an architecture whose module fails to import or lacks the attribute.
            DescriptorError: the same for any other kind. Both carry the original cause.
        """
        prepare_torch_import()
        module, _, attribute = self.path.partition(":")
        error = ArchitectureError if self.kind == "architecture" else DescriptorError
        try:
            loaded = importlib.import_module(module)
        except EvenerError:
            raise
        except Exception as cause:
            raise error(
                f"{self.kind} {self.name!r} of {self.distribution} cannot be used: "
                f"importing {module} failed with {type(cause).__name__}: {cause}"
            ) from cause
        try:
            return functools.reduce(getattr, attribute.split("."), loaded)
        except AttributeError as cause:
            raise error(
                f"{self.kind} {self.name!r} of {self.distribution} points at {self.path!r}, "
                f"but {module} has no {attribute!r}; correct the descriptor of {self.package!r}"
            ) from cause


def prepare_torch_import() -> None:
    """Keep torch from importing every installed device extension by itself, and its threads from spinning while they
    wait; call before torch is first imported.

    The chosen backend imports its own extension. An inherited value is overwritten: the extension of a backend that was
    not chosen must not open a device.

    OpenMP's default is to spin for milliseconds, which keeps a core from the very thread that is waited for as soon as
    the machine has other work (measured with two busy neighbours on 2 cores: 930 ms a sampled step instead of 100;
    alone 22 instead of 16).
    """
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

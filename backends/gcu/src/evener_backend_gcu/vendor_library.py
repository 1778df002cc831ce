"""The vendor's op library: the compiled part of its package vllm-gcu, without the package itself."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

from evener_backend_parts.library import Library
from evener_backend_parts.vendor_ops import PublishedOps, VendorOps


@dataclass(frozen=True)
class CompiledLibrary(Library):
    """``module`` names the package that holds the shared library ``_C``. Importing that package is avoided: it may
    redirect ``torch.cuda`` for the whole process and change another engine's settings.

    Attributes:
        before: a module that must be imported first; the shared library uses its symbols.
    """

    before: str = ""

    def load(self) -> ModuleType:
        """Register the ops.

        Raises:
            ImportError: the package has no compiled part, or it does not fit this torch.
        """
        if self.before:
            importlib.import_module(self.before)
        spec = find_spec(self.module)
        folders = [] if spec is None else list(spec.submodule_search_locations or ())
        found = [path for folder in folders for path in sorted(Path(folder).glob("_C*.so"))]
        if not found:
            raise ImportError(f"{self.module} has no compiled part _C*.so in {', '.join(folders) or 'any folder'}")
        torch.ops.load_library(str(found[0]))
        return sys.modules[__name__]


VLLM_GCU = CompiledLibrary(
    "vllm_gcu", ("vllm-gcu", "vllm_gcu"), "0.9", "", "the vllm_gcu wheel of your TopsRider release",
    before="tops_extension.torch",
)  # fmt: skip


def vendor_ops() -> VendorOps:
    """The ops, and the schemas that our calls were written against."""
    return VendorOps(PublishedOps.read(Path(__file__).parent / "vllm_gcu.json"), VLLM_GCU)

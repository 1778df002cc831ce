"""The hooks of this package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from evener.contracts.hooks import hookimpl

if TYPE_CHECKING:
    from evener.contracts.quant import QuantScheme


@hookimpl
def evener_quant_schemes() -> Sequence[QuantScheme]:
    """The schemes of GGUF's block formats, of MXFP4, and of eight bits with scales."""
    from evener_formats.gguf.scheme import GgufScheme
    from evener_formats.mxfp4 import Mxfp4Scheme
    from evener_formats.scaled import CompressedTensors, Fp8Scheme

    return (GgufScheme(), Mxfp4Scheme(), Fp8Scheme(), CompressedTensors())

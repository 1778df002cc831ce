"""The hooks of this package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from evener.contracts.hooks import hookimpl

if TYPE_CHECKING:
    from evener.contracts.quant import QuantScheme


@hookimpl
def evener_quant_schemes() -> Sequence[QuantScheme]:
    """The schemes of GGUF's block formats and of MXFP4."""
    from evener_formats.gguf.scheme import GgufScheme
    from evener_formats.mxfp4 import Mxfp4Scheme

    return (GgufScheme(), Mxfp4Scheme())

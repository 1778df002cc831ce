"""The hooks of this package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from evener.contracts.hooks import hookimpl

if TYPE_CHECKING:
    from evener.contracts.quant import QuantScheme


@hookimpl
def evener_quant_schemes() -> Sequence[QuantScheme]:
    """The schemes of GGUF's block formats, of MXFP4, of eight bits with scales, and of integers in groups."""
    from evener_formats.awq import AwqScheme
    from evener_formats.bitsandbytes import BitsAndBytesScheme
    from evener_formats.compressed import CompressedTensors
    from evener_formats.gguf.scheme import GgufScheme
    from evener_formats.gptq import GptqScheme
    from evener_formats.halves import HalvesScheme
    from evener_formats.modelopt import ModelOptScheme
    from evener_formats.modelslim import ModelSlimScheme
    from evener_formats.mxfp4 import Mxfp4Scheme
    from evener_formats.scaled import Fp8Scheme
    from evener_formats.torchao import TorchaoScheme
    from evener_formats.w4afp8 import W4Afp8Scheme

    eight = (Fp8Scheme(), CompressedTensors(), ModelOptScheme(), W4Afp8Scheme())
    integers = (GptqScheme(), AwqScheme(), HalvesScheme())
    return (GgufScheme(), Mxfp4Scheme(), *eight, *integers, BitsAndBytesScheme(), TorchaoScheme(), ModelSlimScheme())

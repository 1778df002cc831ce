"""The scheme of GGUF's quantized tensors: blocks that contain their scales. Imports torch only to dequantize."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from evener.contracts.checkpoint import Checkpoint, Headers
from evener.contracts.quant import BLOCKS, MXFP4, QuantScheme, WeightPart, block_format, plain
from evener.errors import CheckpointError
from evener_formats.mxfp4 import Mxfp4Scheme

if TYPE_CHECKING:
    import torch

#: Where the float16 scales and minima of a block begin, in bytes: ggml's ``block_q4_0`` and its like.
_SCALES: Mapping[str, tuple[int, ...]] = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q2_k": (80, 82), "q3_k": (108,),
    "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,),
}  # fmt: skip


#: Reads MXFP4, which a checkpoint gives as two tensors.
_FOUR_BITS = Mxfp4Scheme()


class GgufScheme(QuantScheme):
    """A weight is one tensor, in one of GGUF's block formats or in a float dtype. In a file that knows no blocks,
    blocks are bytes: ``<name>.q4_k``, uint8 [rows, bytes of a row]. A weight in MXFP4 is stored as in ``Mxfp4Scheme``:
    ``<name>_blocks`` and ``<name>_scales``."""

    name = "gguf"

    def detect(self, config: Mapping[str, Any]) -> bool:
        settings = config.get("quantization_config")
        return isinstance(settings, Mapping) and settings.get("quant_method") == self.name

    def configured(self, config: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> QuantScheme:
        settings = config.get("quantization_config")
        form = settings.get("checkpoint_format") if isinstance(settings, Mapping) else None
        if form is not None:
            raise CheckpointError(
                f"config.json's quantization_config has quant_method gguf, checkpoint_format {str(form)[:40]!r}, which "
                "is GPTQModel's own layout of GGUF's blocks; use a .gguf file, or quantize the model with gptq"
            )
        return self

    def part(self, name: str, headers: Headers) -> WeightPart | None:
        if "scale" in _FOUR_BITS.tensors(name, headers):
            return _FOUR_BITS.part(name, headers)
        stored = _stored_name(name, headers)
        if stored not in headers:
            return None
        dtype, shape = headers[stored]
        if stored != name:
            dtype = stored.rpartition(".")[2]
            shape = _elements(stored, headers[stored], *BLOCKS[dtype])
        # Three axes are a stack of matrices; no file has them in blocks, but a quantizer makes them.
        rows, columns = shape[-2:] if len(shape) in (2, 3) else (0, 0)
        form = block_format(dtype) if dtype in BLOCKS else plain(dtype)
        if dtype not in BLOCKS and not form.plain:
            raise CheckpointError(
                f"{name} is stored as {dtype}, which is neither one of the blocks {', '.join(BLOCKS)} nor a dtype of "
                "unquantized weights; fetch the files again"
            )
        return WeightPart(name, rows, columns, replace(form, stack=len(shape) == 3))

    def tensors(self, name: str, headers: Headers) -> Mapping[str, str]:
        found = _FOUR_BITS.tensors(name, headers)
        return found if "scale" in found else {"weight": _stored_name(name, headers)}

    def dequantize(self, part: WeightPart, dtype: str) -> torch.Tensor:
        import torch

        if part.format == MXFP4:
            return _FOUR_BITS.dequantize(part, dtype)
        stored = part.tensors["weight"]
        if part.format.plain:
            return stored.to(getattr(torch, dtype))
        from evener_formats.gguf.block_numbers import numbers

        return numbers(stored, part.format.storage, BLOCKS[part.format.storage], getattr(torch, dtype))

    def cut(self, part: WeightPart, axis: Literal["out", "in"], start: int, stop: int) -> WeightPart:
        if part.format == MXFP4:
            return _FOUR_BITS.cut(part, axis, start, stop)
        extent = part.rows if axis == "out" else part.columns
        if not 0 <= start < stop <= extent:
            raise CheckpointError(f"cannot cut {start}..{stop} out of the {extent} {axis}-features of {part.name}")
        weight = part.tensors.get("weight")
        if axis == "out":
            return replace(part, rows=stop - start, tensors={} if weight is None else {"weight": weight[start:stop]})
        elements, nbytes = BLOCKS.get(part.format.storage, (1, 1))
        if start % elements or stop % elements:
            raise CheckpointError(
                f"cannot cut {start}..{stop} out of the in-features of {part.name}: it is stored in blocks of "
                f"{elements}; use multiples of {elements} up to {part.columns}"
            )
        cut = {} if weight is None else {"weight": weight[:, start // elements * nbytes : stop // elements * nbytes]}
        return replace(part, columns=stop - start, tensors=cut)

    def numbers(self, part: WeightPart) -> Iterator[torch.Tensor]:
        import torch

        if part.format == MXFP4:
            yield from _FOUR_BITS.numbers(part)
            return
        stored = part.tensors["weight"]
        if part.format.plain:
            yield stored
            return
        blocks = stored.unflatten(-1, (-1, BLOCKS[part.format.storage][1]))
        for at in _SCALES[part.format.storage]:
            yield blocks[..., at : at + 2].contiguous().view(torch.float16)

    def examples(self, name: str, seed: int) -> Iterator[tuple[Mapping[str, Any], Headers, Mapping[str, torch.Tensor]]]:
        import torch

        random, config = torch.Generator().manual_seed(seed), {"quantization_config": {"quant_method": self.name}}
        for storage, (elements, nbytes) in BLOCKS.items():
            blocks = torch.randint(256, (6, 3 * nbytes), generator=random, dtype=torch.uint8)
            blocks[:, 1::2] &= 0xBF  # so that every float16 scale, at any even offset, is below 2
            yield config, {name: (storage, (6, 3 * elements))}, {name: blocks}
        for dtype in ("float32", "float16", "bfloat16"):
            numbers = torch.randn(6, 10, generator=random).to(getattr(torch, dtype))
            yield config, {name: (dtype, (6, 10))}, {name: numbers}
        for _, headers, tensors in _FOUR_BITS.examples(name, seed):
            if len(tensors) == 2:
                yield config, headers, tensors


def _stored_name(name: str, headers: Headers) -> str:
    return next((found for form in BLOCKS if (found := f"{name}.{form}") in headers), name)


def _elements(name: str, header: tuple[str, tuple[int, ...]], elements: int, nbytes: int) -> tuple[int, ...]:
    """The shape in elements of blocks that are stored as bytes.

    Raises:
        CheckpointError: they are no whole blocks.
    """
    dtype, shape = header
    if dtype != "uint8" or len(shape) not in (2, 3) or shape[-1] % nbytes:
        raise CheckpointError(
            f"{name} is stored as {dtype} {list(shape)}; it must be uint8 with rows of {nbytes} bytes a block; convert "
            "the model again"
        )
    return (*shape[:-1], shape[-1] // nbytes * elements)

"""The unquantized scheme, and how a checkpoint's scheme is picked. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from evener.contracts.checkpoint import Checkpoint, Headers
from evener.contracts.quant import QuantScheme, WeightPart, plain
from evener.errors import CheckpointError, UnknownNameError

if TYPE_CHECKING:
    import torch

_METHODS = ("quantization_config", "compression_config")


class Unquantized(QuantScheme):
    """Each weight is one matrix, in the dtype that it is stored in."""

    name = "unquantized"

    def detect(self, config: Mapping[str, Any]) -> bool:
        return not any(config.get(key) for key in _METHODS)

    def part(self, name: str, headers: Headers) -> WeightPart | None:
        if name not in headers:
            return None
        dtype, shape = headers[name]
        if not plain(dtype).plain:
            raise CheckpointError(
                f"{name} is stored as {dtype}, but config.json has no quantization_config that says how to read it; "
                "use the config.json that was published with these weights"
            )
        # A tensor with three axes is a stack of matrices.
        rows, columns = shape[-2:] if len(shape) in (2, 3) else (0, 0)
        return WeightPart(name, rows, columns, plain(dtype))

    def tensors(self, name: str, headers: Headers) -> Mapping[str, str]:
        return {"weight": name}

    def dequantize(self, part: WeightPart, dtype: str) -> torch.Tensor:
        import torch

        return part.tensors["weight"].to(getattr(torch, dtype))

    def cut(self, part: WeightPart, axis: Literal["out", "in"], start: int, stop: int) -> WeightPart:
        extent = part.rows if axis == "out" else part.columns
        if not 0 <= start < stop <= extent:
            raise CheckpointError(f"cannot cut {start}..{stop} out of the {extent} {axis}-features of {part.name}")
        tensors = {role: t.narrow(int(axis == "in"), start, stop - start) for role, t in part.tensors.items()}
        rows, columns = (stop - start, part.columns) if axis == "out" else (part.rows, stop - start)
        return replace(part, rows=rows, columns=columns, tensors=tensors)

    def examples(self, name: str, seed: int) -> Iterator[tuple[Mapping[str, Any], Headers, Mapping[str, torch.Tensor]]]:
        import torch

        noise = torch.randn(6, 10, generator=torch.Generator().manual_seed(seed))
        for made in (noise, noise.half(), noise.bfloat16()):
            yield {}, {name: (str(made.dtype).removeprefix("torch."), (6, 10))}, {name: made}


def scheme_of(name: str, scheme: QuantScheme, headers: Headers) -> QuantScheme:
    """The scheme that reads the tensor ``name``: ``scheme``, except for a vector (a norm, a bias), which no scheme
    quantizes."""
    return Unquantized() if name in headers and len(headers[name][1]) == 1 else scheme


def pick_scheme(config: Mapping[str, Any], schemes: Sequence[QuantScheme], quant: str = "auto",
                checkpoint: Checkpoint | None = None) -> QuantScheme:  # fmt: skip
    """The scheme that reads a checkpoint, configured for it.

    Args:
        config: its ``config.json``.
        schemes: those of the installed packages.
        quant: a scheme's name, "none" for unquantized weights, or "auto" to detect it.
        checkpoint: what ``config`` belongs to.

    Raises:
        UnknownNameError: no installed package has the scheme ``quant``.
        CheckpointError: no scheme fits the checkpoint, or more than one does, or ``quant`` does not.
    """
    known = {"none": Unquantized(), **{each.name: each for each in schemes if each.name != Unquantized.name}}
    stored = _method(config)
    if quant != "auto":
        if quant not in known:
            hint = "Or leave quant=auto; for more of them type: pip install evener-formats"
            raise UnknownNameError("quantization scheme", quant, known, hint)
        if not known[quant].detect(config):
            raise CheckpointError(f"quant={quant}, but the checkpoint is stored as {stored!r}; leave quant=auto")
        return known[quant].configured(config, checkpoint)
    fits = [s for s in schemes if s.detect(config)] or [s for s in (known["none"],) if s.detect(config)]
    if len(fits) > 1:
        names = " and ".join(repr(scheme.name) for scheme in fits)
        raise CheckpointError(f"the schemes {names} both fit this checkpoint; choose one with quant=<name>")
    if not fits:
        raise CheckpointError(
            f"the checkpoint is quantized with {stored!r}, which no installed package reads "
            f"(installed: {', '.join(sorted(each.name for each in known.values()))}); "
            "install a package that registers it, or use an unquantized checkpoint"
        )
    return fits[0].configured(config, checkpoint)


def _method(config: Mapping[str, Any]) -> str:
    key, found = next(((key, config[key]) for key in _METHODS if config.get(key)), ("", Unquantized.name))
    return str(found.get("quant_method") or found.get("format") or key if isinstance(found, Mapping) else found)

"""The scheme "bitsandbytes": four-bit numbers of a table of 16, NF4 or FP4, and int8, as bitsandbytes saves them.

With four bits, a weight ``<name>`` [rows, columns] is stored as uint8 [rows x columns / 2, 1], the first number of a
pair in the high half of a byte; ``<name>.quant_map`` float32 [16] is the table; ``<name>.absmax`` has a scale for each
block of the flattened weight, float32, or uint8 numbers of a second table (``nested_quant_map``, ``nested_absmax`` for
each 256). The shape is JSON text in ``<name>.quant_state.bitsandbytes__nf4``.

With eight bits (LLM.int8), ``<layer>.weight`` is int8 [rows, columns] and ``<layer>.SCB`` float32 [rows] the largest
magnitude of each row; ``<layer>.weight_format`` is 0. Activations are not rounded. Imports torch only to read weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from evener.contracts.checkpoint import Checkpoint, Headers
from evener.contracts.quant import QuantFormat, QuantScheme, WeightPart
from evener.errors import CheckpointError
from evener_formats.beside import Along, Axes, BesideScheme
from evener_formats.rules import flag

if TYPE_CHECKING:
    import torch

_KINDS, _STATE = ("nf4", "fp4"), ".quant_state.bitsandbytes__"
#: Bytes of a state's text at most.
_LONGEST = 4096
#: Columns that share a scale.
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class State:
    """What a weight's state says.

    Attributes:
        kind: "nf4" or "fp4".
        rows, columns: the weight's shape.
        block: numbers that share a scale.
        nested: scales that share one, if they are stored as numbers of a table; else 0.
        offset: is added to those.
    """

    kind: str
    rows: int
    columns: int
    block: int
    nested: int = 0
    offset: float = 0.0


class BitsAndBytesScheme(BesideScheme):
    """``"quant_method": "bitsandbytes"`` with ``load_in_4bit`` or ``load_in_8bit``.

    Args:
        states: by the weight's name.
    """

    name = "bitsandbytes"

    def __init__(self, states: Mapping[str, State] | None = None) -> None:
        self._states = states or {}

    def detect(self, config: Mapping[str, Any]) -> bool:
        settings = config.get("quantization_config")
        return isinstance(settings, Mapping) and settings.get("quant_method") == self.name

    def configured(self, config: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> QuantScheme:
        for key in ("load_in_4bit", "load_in_8bit"):
            flag(config["quantization_config"], key, False)
        states = {}
        for stored, (kind, shape) in checkpoint.headers.items() if checkpoint else ():
            name, found, _ = stored.partition(_STATE)
            if found and kind == "uint8" and len(shape) == 1 and shape[0] <= _LONGEST:
                assert checkpoint is not None
                states[name] = _state(stored, bytes(checkpoint.tensor(stored).tolist()))
        return BitsAndBytesScheme(states)

    def tensors(self, name: str, headers: Headers) -> Mapping[str, str]:
        if name not in self._states:
            stem = name.removesuffix(".weight")
            eight = {"weight": name, "largest": f"{stem}.SCB", "layout": f"{stem}.weight_format"}
            return {role: each for role, each in eight.items() if role == "weight" or each in headers}
        state = self._states[name]
        ends = {"packed": "", "table": ".quant_map", "scale": ".absmax", "state": f"{_STATE}{state.kind}"}
        if state.nested:
            ends |= {"nested table": ".nested_quant_map", "nested scale": ".nested_absmax"}
        return {role: name + end for role, end in ends.items()}

    def part(self, name: str, headers: Headers) -> WeightPart | None:
        if name not in self._states:
            return self._eight_bits(name, headers) or super().part(name, headers)
        state, roles = self._states[name], self.tensors(name, headers)
        count = state.rows * state.columns
        blocks = count // state.block
        scales = "uint8" if state.nested else "float32"
        wanted = {
            "packed": ("uint8", count // 2), "table": ("float32", 16), "scale": (scales, blocks),
            "nested table": ("float32", 256), "nested scale": ("float32", -(-blocks // (state.nested or 1))),
        }  # fmt: skip
        wrong = []
        for role, (kind, numbers) in wanted.items():
            if role in roles:
                found, shape = headers.get(roles[role], ("nothing", ()))
                fits = (found, math.prod(shape)) == (kind, numbers)
                wrong += [] if fits else [f"{roles[role]} is {found} {list(shape)}"]
        if wrong or state.columns % state.block:
            raise CheckpointError(
                f"{name} does not fit its state, {state.rows} x {state.columns} in blocks of {state.block} columns"
                f"{': ' if wrong else ''}{'; '.join(wrong)}; fetch the files again"
            )
        form = QuantFormat(state.kind, group=state.block, scale="float32")
        return WeightPart(name, state.rows, state.columns, form)

    def _eight_bits(self, name: str, headers: Headers) -> WeightPart | None:
        """The part of a weight of eight bits; None: it is none."""
        roles = self.tensors(name, headers)
        if name not in headers or "largest" not in roles:
            return None
        (kind, shape), (scale, scales) = headers[name], headers[roles["largest"]]
        fits = (kind, scale) == ("int8", "float32") and len(shape) == 2 and min(shape) > 0
        if not fits or scales not in ((shape[0],), (shape[0], 1)):
            raise CheckpointError(
                f"{name} is stored as {kind} {list(shape)} with {roles['largest']} {scale} {list(scales)}; eight bits "
                "are int8 [rows, columns] and float32 [rows]; fetch the files again"
            )
        return WeightPart(name, shape[0], shape[1], QuantFormat("int8", scale="float32"))

    def axes(self, part: WeightPart) -> Mapping[str, Axes]:
        if part.format.storage == "int8":
            return {"weight": Axes(Along(0), Along(1)), "largest": Axes(Along(0))}
        return {"weight": Axes(Along(0), Along(1, 2)), "scale": Axes(Along(0), Along(1, part.format.group))}

    def cut(self, part: WeightPart, axis: Literal["out", "in"], start: int, stop: int) -> WeightPart:
        eight = "largest" in part.tensors
        return super().cut(part if eight else self.arrange(part), axis, start, stop)

    def arrange(self, part: WeightPart) -> WeightPart:
        if "largest" in part.tensors:
            stored = part.tensors
            if "layout" in stored and bool((stored["layout"] != 0).any()):
                raise CheckpointError(
                    f"{part.name} is stored in an order of bytes for one kind of GPU (weight_format); load it with "
                    "bitsandbytes 0.45 or later and save it again"
                )
            scale = stored["largest"].reshape(part.rows, 1) / 127
            return replace(part, tensors={"weight": stored["weight"], "scale": scale})
        if part.format.plain or "packed" not in part.tensors:
            return part
        stored, state, groups = part.tensors, self._states[part.name], part.columns // part.format.group
        scale = stored["scale"].flatten()
        if state.nested:
            each = stored["nested scale"].float().flatten().repeat_interleave(state.nested)[: len(scale)]
            scale = stored["nested table"].float().flatten()[scale.long()] * each + state.offset
        data = stored["packed"].reshape(part.rows, -1)
        tensors = {
            "weight": data >> 4 | data << 4, "scale": scale.float().reshape(part.rows, groups),
            "table": stored["table"].float().flatten(),
        }  # fmt: skip
        return replace(part, tensors=tensors)

    def examples(self, name: str, seed: int) -> Iterator[tuple[Mapping[str, Any], Headers, Mapping[str, torch.Tensor]]]:
        import torch

        random, rows, columns = torch.Generator().manual_seed(seed), 6, 256
        for kind, block, nested in (("nf4", 64, 0), ("fp4", 32, 0), ("nf4", 64, 256)):
            blocks = rows * columns // block
            state = {"quant_type": kind, "blocksize": block, "shape": [rows, columns], "dtype": "bfloat16"}
            tensors = {
                name: torch.randint(0, 256, (rows * columns // 2, 1), generator=random).to(torch.uint8),
                f"{name}.quant_map": torch.rand(16, generator=random) * 2 - 1,
                f"{name}.absmax": torch.rand(blocks, generator=random) + 0.5,
            }
            if nested:
                state |= {"nested_blocksize": nested, "nested_offset": 0.75, "nested_dtype": "float32"}
                tensors[f"{name}.absmax"] = torch.randint(0, 256, (blocks,), generator=random).to(torch.uint8)
                tensors[f"{name}.nested_quant_map"] = torch.rand(256, generator=random) * 2 - 1
                tensors[f"{name}.nested_absmax"] = torch.rand(-(-blocks // nested), generator=random) / 4
            text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
            tensors[f"{name}{_STATE}{kind}"] = text
            yield {"quantization_config": {"quant_method": self.name, "load_in_4bit": True}}, _headers(tensors), tensors
        stem = name.removesuffix(".weight")
        tensors = {
            name: torch.randint(-127, 128, (rows, columns), generator=random).to(torch.int8),
            f"{stem}.SCB": torch.rand(rows, generator=random) + 0.5,
            f"{stem}.weight_format": torch.tensor(0, dtype=torch.uint8),
        }
        yield {"quantization_config": {"quant_method": self.name, "load_in_8bit": True}}, _headers(tensors), tensors


def _headers(tensors: Mapping[str, torch.Tensor]) -> Headers:
    return {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}


def _state(name: str, text: bytes) -> State:
    """
    Raises:
        CheckpointError: it is not what such a state says.
    """
    try:
        found = json.loads(text)
        rows, columns = (int(size) for size in found["shape"])
        nested = int(found["nested_blocksize"]) if "nested_blocksize" in found else 0
        offset = float(found.get("nested_offset", 0))
        state = State(str(found["quant_type"]), rows, columns, int(found["blocksize"]), nested, offset)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{name} is no state of a weight ({error!r}); fetch the files again") from error
    sizes = (state.rows, state.columns)
    if (
        state.kind not in _KINDS
        or state.block not in _BLOCKS
        or min(sizes) < 1
        or max(sizes) > 1 << 31
        or not (0 <= state.nested <= 1 << 20 and math.isfinite(state.offset))
    ):
        raise CheckpointError(f"{name} says {state}, which is not read; fetch the files again")
    return state

"""Which element type a run's keys and values are stored in, and with which scales. Torch-free."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from evener.contracts.declared import StateSlot
from evener.contracts.quantized.state import QuantizedState, StateAnswer, StateRequest, unscaled
from evener.contracts.state import StateProvider, StateSpec
from evener.errors import CheckpointError, ConfigError
from evener_formats.kv_cache.scale_file import FILE_NAME, parse_scales, read_scale_file
from evener_formats.kv_cache.scales import LARGEST, Scales, Shares, layer_numbers
from evener_formats.kv_cache.stored_scales import (
    model_fingerprint,
    scale_tensors,
    stored_element_type,
    stored_scales,
)

log = logging.getLogger(__name__)

#: Values of ``infer.kv_dtype`` and their dtypes.
ELEMENT_TYPES = {"bfloat16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "int8": "int8"}
_NAMES = {dtype: name for name, dtype in ELEMENT_TYPES.items()}
#: Kinds of state that hold keys and values.
_KINDS = ("full", "window", "chunk")
#: What latents are stored in, without scales; layers declare them so.
_LATENTS = ("bfloat16", "float8_e4m3fn")
#: Scales for random weights, which nobody calibrates: the largest key or value is about 8.
_RANDOM_MAXIMUM = 8.0


@dataclass
class _Notes:
    """What was decided, for the manifest and the log."""

    rank: int
    texts: list[str] = field(default_factory=list)

    def say(self, text: str, level: int = logging.INFO) -> None:
        """Note it, and log it once a run."""
        self.texts.append(text)
        if self.rank == 0:
            log.log(level, "%s", text)


def choose_state(request: StateRequest) -> StateAnswer:
    """Decide in which element type keys and values are stored. Sets ``spec`` and ``scales`` of their slots.

    Raises:
        ConfigError: what was asked for has nothing to apply to, or lacks scales.
        CheckpointError: scales are missing, broken, or of another model.
    """
    every = list({id(slot): slot for stage in request.stages for slot in stage}.values())
    slots = [slot for slot in every if slot.spec.kind in _KINDS and slot.spec.per == "token"]
    notes = _Notes(request.rank)
    read = [re.escape(name) for slot in slots for name in scale_tensors(slot.name, request.headers)]
    latents = any(slot.spec.kind == "latent" for slot in every)
    dtype = _element_type(slots, latents, request, notes)
    if dtype not in LARGEST:
        if request.scales is not None:
            raise ConfigError(f"infer.kv_scales={request.scales} was given, but keys and values are stored as "
                              f"{dtype or 'computed'}, without scales; set infer.kv_dtype=fp8_e4m3 or int8, or leave "
                              "infer.kv_scales out")  # fmt: skip
        for slot in slots if dtype else ():
            slot.spec = _stored_as(slot.spec, dtype, None)
        return StateAnswer(notes.texts, read)
    scales = _scales(slots, request, dtype, notes)
    for number, slot in zip(layer_numbers([slot.name for slot in slots]), slots, strict=True):
        factor = LARGEST[scales.dtype] / LARGEST[dtype]
        heads = [tensor.shape[0] for tensor in slot.spec.tensors]
        found = scales.of_layer(number, request.rank, request.ranks, heads)
        slot.scales = tuple(tuple(scale * factor for scale in each) for each in found)
        slot.spec = _stored_as(slot.spec, dtype, slot.attention.dtype)
    return StateAnswer(notes.texts, read)


def _stored_as(spec: StateSpec, dtype: str, wide: str | None) -> StateSpec:
    return replace(spec, tensors=tuple(replace(tensor, dtype=dtype, wide=wide) for tensor in spec.tensors))


def _element_type(slots: Sequence[StateSlot], latents: bool, request: StateRequest, notes: _Notes) -> str:
    """The dtype of keys and values; empty: the compute dtype. ``latents``: whether the model keeps some."""
    wanted, why = ELEMENT_TYPES.get(request.dtype), f"infer.kv_dtype={request.dtype}"
    automatic = wanted is None
    if automatic:
        wanted, why = stored_element_type(request.checkpoint.config) if request.headers else (None, "")
        if why and wanted is None:
            notes.say(f"the KV cache has the compute dtype: {why} in config.json is not read here")
    if wanted is None:
        return ""
    if automatic and not slots:
        return ""
    if latents and wanted not in _LATENTS:
        raise ConfigError(f"{why}, but latents (MLA) are stored without scales, in bfloat16 or fp8_e4m3; set one of "
                          "these")  # fmt: skip
    if not slots and not latents:
        raise ConfigError(f"{why}, but this model keeps no keys, values or latents; leave it out")
    if not slots:
        notes.say(f"latents are stored as {_NAMES[wanted]}: {why}")
        return ""
    best = _best_provider(slots[0], request)
    if isinstance(best, QuantizedState) and (other := best.replaced.get(wanted)) is not None:
        notes.say(f"the KV cache is stored as {_NAMES[other]} instead of {_NAMES[wanted]} ({why}), which {best.name} "
                   "does not store", logging.WARNING)  # fmt: skip
        wanted = other
    if automatic and wanted in LARGEST and not all(_is_served(slot, wanted, request) for slot in slots):
        notes.say(f"the KV cache has the compute dtype: {why} asks for {_NAMES[wanted]}, which no installed kernel "
                   f"stores here; infer.kv_dtype={_NAMES[wanted]} forces it")  # fmt: skip
        return ""
    notes.say(f"keys and values are stored as {_NAMES[wanted]}: {why}")
    return wanted


def _best_provider(slot: StateSlot, request: StateRequest) -> StateProvider | None:
    """Of the providers that serve the slot unquantized, the one with the highest priority."""
    able = request.device.capabilities
    fit = [
        each for each in request.providers
        if slot.spec.kind in each.kinds and each.supports(slot.spec, slot.attention, able) is None
    ]  # fmt: skip
    return max(fit, key=lambda each: each.priority, default=None)


def _is_served(slot: StateSlot, dtype: str, request: StateRequest) -> bool:
    """Whether a kernel serves the slot's state with elements of ``dtype``."""
    spec = _stored_as(slot.spec, dtype, slot.attention.dtype)
    return any(
        spec.kind in each.kinds and unscaled(each, spec) is None
        and each.supports(spec, slot.attention, request.device.capabilities) is None for each in request.providers
    )  # fmt: skip


def _scales(slots: Sequence[StateSlot], request: StateRequest, dtype: str, notes: _Notes) -> Scales:
    """The scales of the model: of the file that was named, of the one in its folder, of its tensors, or 1."""
    numbers = list(layer_numbers([slot.name for slot in slots]))
    layers = {number: slot.name for number, slot in zip(numbers, slots, strict=True)}
    checkpoint, found = request.checkpoint, None
    if request.scales is not None:
        found = read_scale_file(Path(request.scales))
    elif request.headers:
        text = checkpoint.text(FILE_NAME)
        made_for = stored_element_type(checkpoint.config)[0] or "float8_e4m3fn"
        found = (parse_scales(text, checkpoint.where(FILE_NAME)) if text is not None
                 else stored_scales(checkpoint, layers, made_for))  # fmt: skip
    if found is None:
        return _without_scales(layers, request, dtype, notes)
    _check_model(found, layers, checkpoint.config)
    notes.say(f"scales of keys and values: {found.where}")
    return found


def _without_scales(layers: Mapping[int, str], request: StateRequest, dtype: str, notes: _Notes) -> Scales:
    scale = 1.0
    if dtype == "int8" and request.headers:
        raise ConfigError(
            "the KV cache is to be stored as int8, but there are no scales of keys and values, and without them int8 "
            f"is of no use; make them with `evener calibrate {request.checkpoint.path} --text FILE`, and give "
            "infer.kv_scales=FILE; or set infer.kv_dtype=fp8_e5m2, which needs none"
        )
    if dtype == "int8":
        scale = _RANDOM_MAXIMUM / LARGEST[dtype]
        notes.say(f"random weights: scales of keys and values are {scale:.4f}")
    elif dtype == "float8_e4m3fn":
        notes.say(
            "keys and values are stored as fp8_e4m3 with scales of 1, because none were found: numbers above 448 are "
            "cut off; `evener calibrate` makes scales, infer.kv_scales=FILE reads them", logging.WARNING,
        )  # fmt: skip
    share = Shares((scale,))
    return Scales(dtype, dict.fromkeys(layers, (share, share)), "no scales")


def _check_model(scales: Scales, layers: Mapping[int, str], config: Mapping[str, object]) -> None:
    text = config.get("text_config")
    count = (text if isinstance(text, Mapping) else config).get("num_hidden_layers")
    known = set(layers) | (set(range(count)) if isinstance(count, int) and count <= 10_000 else set())
    if extra := sorted(set(scales.layers) - known):
        raise CheckpointError(
            f"{scales.where} has scales of {len(scales.layers)} layers, among them layer {extra[0]}, which the model "
            f"of {len(layers)} attention layers does not have; make the file again with `evener calibrate`"
        )
    if scales.fingerprint and scales.fingerprint != model_fingerprint(config):
        raise CheckpointError(
            f"{scales.where} was made for another model: its fingerprint is {scales.fingerprint[:40]}, and this "
            f"model's is {model_fingerprint(config)}; make it again with `evener calibrate`"
        )

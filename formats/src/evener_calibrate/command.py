"""The command ``evener calibrate``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evener.cli.command import Command, read_config
from evener.errors import ConfigError, EngineError
from evener_calibrate.text import read_text
from evener_formats.kv_cache.scale_file import FILE_NAME, format_scales
from evener_formats.kv_cache.scales import LARGEST, Scales, Shares, layer_numbers
from evener_formats.kv_cache.stored_scales import model_fingerprint

if TYPE_CHECKING:
    import torch

    from evener.config.schema import Config
    from evener.contracts.declared import StateSlot
    from evener_calibrate.observer import Observer

#: Characters of text that are read for each token that is wanted.
_CHARACTERS = 16
_ELEMENTS = "float8_e4m3fn"


def main(argv: list[str]) -> int:
    """Calibrate, and write the file. Returns 0."""
    command = Command("calibrate", "Run a model over a text, and write the scales of its keys and values, for a KV "
                      "cache in eight bits.")  # fmt: skip
    command.option("--text", metavar="FILE", help="the text, in UTF-8; like what the model will be used for")
    command.option("--out", metavar="FILE", default=FILE_NAME, help=f"where to save ({FILE_NAME}); one in the model's "
                   "folder is found by itself")  # fmt: skip
    command.option("--tokens", metavar="N", type=int, default=16384, help="read at most N tokens of the text (16384)")
    command.option("--window", metavar="N", type=int, default=2048, help="tokens that see each other (2048)")
    command.option("--percentile", metavar="P", type=float, default=None,
                   help="cut off what is larger than P of a hundred numbers, as 99.99; default: nothing")  # fmt: skip
    command.option("--heads", action="store_true", help="one scale for each head, instead of one for each layer")
    arguments, config = read_config(command, argv)
    if arguments.text is None:
        raise ConfigError("evener calibrate needs a text: add --text FILE")
    if config.infer.tp_size * config.infer.pp_size > 1:
        raise ConfigError("evener calibrate runs on one device: leave infer.tp_size and infer.pp_size out; the scales "
                          "serve any number of ranks")  # fmt: skip
    if arguments.tokens < 1 or arguments.window < 1:
        raise ConfigError("--tokens and --window are numbers of tokens, at least 1")
    if arguments.percentile is not None and not 0 < arguments.percentile <= 100:
        raise ConfigError(f"--percentile {arguments.percentile:g} is not over 0 and at most 100; write it as in 99.99")
    text = read_text(Path(arguments.text).expanduser(), arguments.tokens * _CHARACTERS, "--text")
    scales, model_type, count = calibrate(
        config, text, arguments.tokens, arguments.window, arguments.percentile, arguments.heads
    )
    out = Path(arguments.out).expanduser()
    part = out.with_name(f"{out.name}.part")
    part.write_text(format_scales(scales, model_type))
    os.replace(part, out)  # an interrupted run leaves no half file behind
    print(f"scales of {len(scales.layers)} layers from {count} tokens: {out}")
    return 0


def calibrate(
    config: Config, text: str, tokens: int, window: int, percentile: float | None = None, per_head: bool = False
) -> tuple[Scales, str, int]:
    """The scales for keys and values of ``config``'s model, the model's type, and how many tokens were computed.

    Args:
        text: that the model reads.
        tokens: as many of its tokens at most.
        window: so many tokens see each other.
        percentile: as ``Observer.limits``.
        per_head: one scale for each head, not for each layer.

    Raises:
        ConfigError: the text has no tokens, or the state no room for a window.
        EngineError: the model computes NaN.
        EvenerError: as starting the engine would.
    """
    from evener.backend_search import BackendSearch
    from evener.engine.worker.worker import Worker
    from evener.frontend.tokenizer import Tokenizer
    from evener.loading.checkpoint import open_checkpoint, open_files
    from evener_calibrate.observer import Observer
    from evener_calibrate.windows import Windows

    files = open_files(config.tokenizer) if config.tokenizer else open_checkpoint(config.model)
    tokenizer = Tokenizer.of(files)
    if tokenizer is None:
        raise ConfigError(f"{config.tokenizer or config.model} has no tokenizer; give its folder: tokenizer=DIR")
    ids = tokenizer.encode(text)[:tokens]
    if not ids:
        raise ConfigError("--text has no tokens; give a text like what the model will be used for")
    worker = Worker(config, BackendSearch(config.backend))
    windows = Windows(worker, window)
    seen: dict[str, tuple[Observer, Observer]] = {
        slot.name: (Observer(slot.spec.tensors[0].shape[0]), Observer(slot.spec.tensors[1].shape[0]))
        for slot in windows.slots
    }
    starts = range(0, len(ids), windows.length)

    def see(slot: StateSlot, key: torch.Tensor, value: torch.Tensor) -> None:
        for observer, numbers in zip(seen[slot.name], (key, value), strict=True):
            observer.see(numbers)

    for start in _with_progress(starts):
        try:
            windows.run(ids[start : start + windows.length], see)
        except ValueError as error:
            raise EngineError(f"calibration stopped at token {start}: {error}; set dtype=float32") from error
    config_json = worker.assembly.checkpoint.config
    numbers = layer_numbers(list(seen))
    layers = {
        number: (_shares(key, percentile, per_head), _shares(value, percentile, per_head))
        for number, (key, value) in zip(numbers, seen.values(), strict=True)
    }
    scales = Scales(_ELEMENTS, layers, "calibration", model_fingerprint(config_json))
    return scales, str(config_json.get("model_type", "")), len(ids)


def _shares(observer: Observer, percentile: float | None, per_head: bool) -> Shares:
    limits = observer.limits(percentile)
    # Of a head that is always 0 any scale is right.
    found = [(limit or 1.0) / LARGEST[_ELEMENTS] for limit in (limits if per_head else [max(limits)])]
    return Shares(tuple(found), per_head)


def _with_progress(starts: Sequence[int]) -> Iterable[int]:
    """The same, with a progress bar on standard error if that is a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(starts, "calibrating", console=console, disable=not console.is_terminal)

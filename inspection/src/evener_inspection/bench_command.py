"""``evener bench-engine``: times an engine's steps without a server, of all layers or of some."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from evener.cli.command import Command, print_result, read_config
from evener.errors import ConfigError
from evener_inspection.engine_bench import Bench, run_bench
from evener_inspection.step_times import Load

#: More than any device computes at a time; and repeats of a batch.
_MOST_REQUESTS, _MOST_TOKENS, _MOST_REPEATS = 4096, 1 << 20, 1000


def main(argv: list[str], environ: Mapping[str, str] | None = None) -> int:
    """Print the times. Returns 0.

    Raises:
        ConfigError: a wrong option; or torchrun has started several ranks.
        EvenerError: the engine does not start.
    """
    command = Command("bench-engine", "Time an engine's steps on random prompts, without a server; with infer.layers "
                      "of some layers, to estimate a model that this machine does not hold.")  # fmt: skip
    command.option("--batch-size", metavar="N,N", default="1", help="requests of each batch (default 1)")
    command.option("--input-len", metavar="N", default="512", help="tokens of each prompt (default 512)")
    command.option("--output-len", metavar="N", default="64", help="decode steps of each batch (default 64)")
    command.option("--repeats", metavar="N", default="3", help="how often each batch runs (default 3)")
    command.option("--json", action="store_true", help="print JSON")
    environ = os.environ if environ is None else environ
    if (ranks := environ.get("WORLD_SIZE", "1")) != "1":
        raise ConfigError(f"evener bench-engine starts its ranks itself, once for each measurement, but torchrun has "
                          f"started {ranks}: leave torchrun out, and set infer.tp_size={ranks}")  # fmt: skip
    arguments, config = read_config(command, argv, environ)
    prompt = _number("--input-len", arguments.input_len, _MOST_TOKENS)
    steps = _number("--output-len", arguments.output_len, _MOST_TOKENS)
    sizes = [_number("--batch-size", each, _MOST_REQUESTS) for each in arguments.batch_size.split(",")]
    bench = Bench(tuple(Load(size, prompt, steps) for size in dict.fromkeys(sizes)),
                  _number("--repeats", arguments.repeats, _MOST_REPEATS))  # fmt: skip
    found = run_bench(config, bench)
    print_result(arguments, found, lambda: "\n".join(render(found)))
    return 0


def _number(option: str, text: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 8 and 1 <= int(text) <= most):
        raise ConfigError(f"{option} {text} is not valid; it takes a number from 1 to {most}")
    return int(text)


def render(found: Mapping[str, Any]) -> Iterator[str]:
    """The result of ``run_bench`` for a person."""
    layers, whole = len(found["layers"]), found["layer_count"]
    ran = "all layers" if layers == whole else f"{layers} of {whole} layers"
    ranks = found["tp_size"] * found["pp_size"]
    where = f"{found['device']}" + (f" × {ranks}" if ranks > 1 else "")
    yield f"{found['model']}: {ran}, {found['dtype']}, {found['weights']} weights, on {where}"
    yield ""
    yield "measured" if layers == whole else f"measured, with {ran} only"
    yield from _table(
        ("batch", "prompt", "prefill ms", "prompt tok/s", "step ms", "p90", "decode tok/s", "MB a step", "GB/s"),
        [(row["batch_size"], row["input_len"], 1e3 * row["prefill_s"], row["prefill_tok_s"], row["step_ms"],
          row["step_p90_ms"], row["decode_tok_s"], (row["step_weight_bytes"] + row["step_state_bytes"]) / 1e6,
          row["read_gb_s"]) for row in found["rows"]],
    )  # fmt: skip
    if "by_layer" in found["rows"][0]:
        counts = {each["kind"]: len(each["layers"]) for each in found["kinds"]}
        yield ""
        yield "one layer, by the difference between runs"
        yield from _table(
            ("batch", "kind", "in the model", "prefill ms", "step ms"),
            [(row["batch_size"], each["kind"], counts.get(each["kind"], ""), each["prefill_ms"],
              each["step_ms"]) for row in found["rows"] for each in row["by_layer"]],
        )  # fmt: skip
        yield ""
        yield f"estimated for all {whole} layers, not measured"
        yield from _table(
            ("batch", "prefill ms", "step ms", "decode tok/s"),
            [(row["batch_size"], None if (s := row["estimate"]["prefill_s"]) is None else 1e3 * s,
              row["estimate"]["step_ms"], row["estimate"]["decode_tok_s"]) for row in found["rows"]],
        )  # fmt: skip
    yield ""
    yield from (f"note: {note}" for note in found["notes"])


def _table(heads: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Iterator[str]:
    """Columns for a terminal, numbers to the right."""
    cells = [heads, *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(heads))]
    text = [isinstance(value, str) for value in rows[0]]
    for row in cells:
        padded = (c.ljust(w) if left else c.rjust(w) for c, w, left in zip(row, widths, text, strict=True))
        yield "  ".join(padded).rstrip()


def _cell(value: object) -> str:
    if value is None:
        return "not known"
    return f"{value:,.3f}" if isinstance(value, float) and value < 100 else (
        f"{value:,.0f}" if isinstance(value, float) else str(value))  # fmt: skip

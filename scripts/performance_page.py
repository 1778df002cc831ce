"""Tables and plot of ``docs/performance.md``, and tables of the lab's pages, from the records in ``docs/results``.

    python scripts/performance_page.py [--check]

A table stands in a page between ``<!-- table: NAME -->`` and ``<!-- end -->``. NAME is a device of ``DEVICES``, with
one table for all its records, or a file of ``docs/results``. ``make docs`` calls this too, and ``make check`` fails if
a page is not fresh.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/performance.md"
#: Pages with generated tables.
PAGES = (PAGE, ROOT / "docs/lab/mixed-load.md", ROOT / "docs/lab/serving.md")
PLOT = ROOT / "docs/performance-sweep.svg"
RESULTS = ROOT / "docs/results"
SWEEP = "cpu-zen4-serving"
PERPLEXITY = "perplexity"
CALIBRATED = "calibrated"
MIXED = "h200-mixed-load"

#: Keys that every record with a peer has; ``docs/results/README.md`` explains them.
COMPARISON = ("device", "model", "case", "metric", "unit", "better", "ours", "version", "peer", "theirs", "date",
              "command")  # fmt: skip
Record = Mapping[str, Any]


class Device(NamedTuple):
    """The table of one device: its records are those of ``files`` whose ``device`` begins with ``name``."""

    name: str
    files: tuple[str, ...]


#: By the name of the table.
DEVICES: Mapping[str, Device] = {
    "h200": Device("NVIDIA H200", ("h200", "h200-fp8", "h200-four-bits", "h200-first-start")),
    "h200-x2": Device("2 × NVIDIA H200", ("h200-x2",)),
    "h100": Device("NVIDIA H100", ("h100-first-token", "h100-fp8")),
    "h200-and-host": Device("NVIDIA H200", ("h100-hybrid", "h100-stages")),
    "h100-and-host": Device("NVIDIA H100", ("h100-hybrid", "h100-stages")),
    "cpu-zen4": Device("AMD EPYC (Zen 4)", ("cpu-zen4", "cpu-kv-files")),
    "cpu-zen5": Device("AMD EPYC (Zen 5)", ("cpu-zen5", "cpu-levels", "cpu-start")),
    "cpu-xeon": Device("Intel(R) Xeon(R)", ("cpu-levels", "cpu-start")),
    "cpu-avx2": Device("AMD EPYC", ("cpu-avx2", "cpu-start-avx2")),
}


def main(argv: Sequence[str]) -> int:
    """Write the page and the plot, or check them; 0 if they are what they should be."""
    parser = argparse.ArgumentParser(
        description="Write the tables and the plot of docs/performance.md, and tables of the lab's pages."
    )
    parser.add_argument("--check", action="store_true", help="only say what would change")
    check = parser.parse_args(argv).check
    stale = [path for path, text in generated().items() if not path.is_file() or path.read_text("utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'is stale; type: make docs' if check else 'written'}")
        if not check:
            path.write_text(generated()[path], "utf-8")
    return 1 if check and stale else 0


def generated() -> dict[Path, str]:
    """The pages with fresh tables, and the plot, by path."""
    return {**{page: with_tables(page.read_text("utf-8")) for page in PAGES}, PLOT: plot(records(SWEEP))}


def records(name: str) -> list[dict[str, Any]]:
    """The records of ``docs/results/NAME.jsonl``, in the order of the file."""
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text("utf-8").splitlines()]


def with_tables(text: str) -> str:
    """``text`` with each marked table made anew from its records.

    Raises:
        ValueError: a table has a start but no end.
    """
    starts, tables = text.count("<!-- table: "), re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
    fresh, made = tables.subn(lambda match: f"{match[1]}\n{table(match[2])}\n\n{match[3]}", text)
    if made != starts:
        raise ValueError(f"{starts} tables start in a page and {made} end; add <!-- end --> behind each")
    return fresh


def table(name: str) -> str:
    """Markdown of the records of a device, or of one file."""
    own = {SWEEP: sweep_rows, PERPLEXITY: perplexity_rows, CALIBRATED: calibrated_rows, MIXED: mixed_rows}
    cells = own[name](records(name)) if name in own else comparison_rows(device_records(name))
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def device_records(name: str) -> list[dict[str, Any]]:
    """A device's records, grouped by model and by the format of its weights; without those that name another
    ``page``."""
    device = DEVICES[name]
    found = [row for file in device.files for row in records(file)]
    found = [row for row in found if row["device"].startswith(device.name) and "page" not in row]
    models = [row["model"] for row in found]
    bases = [model.partition(",")[0] for model in models]
    return sorted(found, key=lambda row: (bases.index(row["model"].partition(",")[0]), models.index(row["model"])))


def comparison_rows(rows: Sequence[Record]) -> list[tuple[str, ...]]:
    """Ours beside the peer's. The ratio says how many times as fast evener is, whatever the unit."""
    head = ("model", "case", "ours", "peer", "×", "of the floor", "date")
    cells: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for row in rows:
        peer = f"{row['peer']}: {number(row['theirs'], row['unit'])}"
        case, ours = f"{row['case']}: {row['metric']}", f"{number(row['ours'], row['unit'])} {row['unit']}"
        share = f"{_gain(row, row['floor'], row['ours']):.0%}" if "floor" in row else ""
        times = f"{_gain(row, row['theirs'], row['ours']):.2f}"
        cells.append((row["model"], case, ours, peer, times, share, row["date"]))
    return cells


def perplexity_rows(rows: Sequence[Record]) -> list[tuple[str, ...]]:
    """Ours beside llama.cpp's, and how far it is from it."""
    head = ("model", "case", "evener", "llama.cpp", "difference", "date")
    cells: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for row in rows:
        far = f"{row['ours'] / row['theirs'] - 1:+.2%}"
        cells.append((row["model"], row["case"], f"{row['ours']:.3f}", f"{row['theirs']:.3f}", far, row["date"]))
    return cells


def calibrated_rows(rows: Sequence[Record]) -> list[tuple[str, ...]]:
    """A model quantized with a text, beside itself, and beside rounding to nearest."""
    head = ("model", "case", "unquantized", "with a text", "to nearest", "tokens of text", "date")
    cells: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for row in rows:
        numbers = (f"{row[key]:.3f}" for key in ("unquantized", "ours", "theirs"))
        cells.append((row["model"], row["case"], *numbers, f"{row['calibration_tokens']:,}", row["date"]))
    return cells


def _gain(row: Record, before: float, after: float) -> float:
    """How many times as fast ``after`` is as ``before``, by what is better in this row."""
    return before / after if row["better"] == "lower" else after / before


def sweep_rows(rows: Sequence[Record]) -> list[tuple[str, ...]]:
    """Servers under load: throughput, and medians and 99th percentiles of three latencies."""
    head = ("requests/s", "server", "output tokens/s", *(f"{name}, ms" for name in ("TTFT", "ITL", "E2E")), "date")
    cells: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for row in rows:
        latencies = (f"{row[f'p50_{key}_ms']}, {row[f'p99_{key}_ms']}" for key in ("ttft", "itl", "e2el"))
        rate, made = f"{row['request_rate']:g}", str(row["output_throughput"])
        cells.append((rate, row["engine"], made, *latencies, row["date"]))
    return cells


def mixed_rows(rows: Sequence[Record]) -> list[tuple[str, ...]]:
    """Requests that arrive while others are answered, for each load and token budget of a step."""
    head = ("load", "requests/s", "step tokens", "between tokens, ms", "p99 / median", "first token, ms", "tokens/s",
            "refused")  # fmt: skip
    cells: list[tuple[str, ...]] = [head, ("---",) * len(head)]
    for row in rows:
        between, first = (f"{row[f'{key}_p50_ms']:,.1f}, {row[f'{key}_p99_ms']:,.1f}" for key in ("itl", "ttft"))
        load = row["load"] if isinstance(row["load"], str) else f"{row['load']:.0%}"
        rate, limit = f"{row['requests_s']:.1f}", str(row.get("limit") or row["budget"])
        budget = f"{int(limit):,}" if limit.isdigit() else limit
        made, refused = f"{row['computed_tokens_s']:,}", str(row["refused"])
        cells.append((load, rate, budget, between, f"{row['p99_to_p50']:.2f}", first, made, refused))
    return cells


def number(value: float, unit: str) -> str:
    """Milliseconds to a hundredth, all else to four digits: 16.50; 13,697; 245; 2.1."""
    if unit == "ms":
        return f"{value:.2f}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


#: Value in a record and label of each panel of the plot.
PANELS = (
    ("output_throughput", "output tokens/s"),
    ("p50_ttft_ms", "time to first token, median, ms"),
    ("p50_itl_ms", "time between tokens, median, ms"),
)
#: Readable on white and on black.
COLORS = ("#2f81f7", "#d9822b", "#3fa34d", "#a371f7")
STYLE = (
    "text{font:12px sans-serif;fill:#1f2328}.axis{stroke:#1f2328}.grid{stroke:#1f2328;opacity:.15}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.axis,.grid{stroke:#e6edf3}}"
)
WIDTH, HEIGHT, LEFT, TOP, GAP = 240, 180, 50, 54, 70


def plot(rows: Sequence[Record]) -> str:
    """An SVG of three panels: throughput and latencies by request rate, a line for each server."""
    servers = list(dict.fromkeys(row["engine"] for row in rows))
    full = LEFT + len(PANELS) * (WIDTH + GAP)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {full} {TOP + HEIGHT + 50}" role="img">']
    parts += [f"<title>Latencies and throughput by request rate</title><style>{STYLE}</style>"]
    for index, server in enumerate(servers):
        x = LEFT + index * 290
        parts.append(
            f'<circle cx="{x}" cy="14" r="5" fill="{COLORS[index]}"/><text x="{x + 10}" y="18">{server}</text>'
        )
    top_rate = max(row["request_rate"] for row in rows)
    for panel, (key, label) in enumerate(PANELS):
        left, highest = LEFT + panel * (WIDTH + GAP), _round_up(max(row[key] for row in rows))
        parts += _axes(left, highest, label, sorted({row["request_rate"] for row in rows}), top_rate)
        for index, server in enumerate(servers):
            points = [
                (left + row["request_rate"] / top_rate * WIDTH, TOP + HEIGHT * (1 - row[key] / highest))
                for row in rows
                if row["engine"] == server
            ]
            path, color = " ".join(f"{x:.1f},{y:.1f}" for x, y in points), COLORS[index]
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>' for x, y in points]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes(left: int, highest: float, label: str, rates: Sequence[float], top_rate: float) -> list[str]:
    bottom, right = TOP + HEIGHT, left + WIDTH
    parts = [f'<text x="{left}" y="{TOP - 12}">{label}</text>']
    for part in (0.25, 0.5, 0.75, 1.0):
        y = bottom - part * HEIGHT
        parts.append(f'<line class="grid" x1="{left}" y1="{y:g}" x2="{right}" y2="{y:g}"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:g}" text-anchor="end">{highest * part:g}</text>')
    parts.append(f'<path class="axis" d="M{left} {TOP}V{bottom}H{right}" fill="none"/>')
    for rate in rates:
        x = left + rate / top_rate * WIDTH
        parts.append(f'<text x="{x:g}" y="{bottom + 18}" text-anchor="middle">{rate:g}</text>')
    parts.append(f'<text x="{left + WIDTH / 2:g}" y="{bottom + 38}" text-anchor="middle">requests/s sent</text>')
    return parts


def _round_up(value: float) -> float:
    """The next 1, 2, 4 or 8 times a power of ten, so that quarters are short numbers."""
    power = 10 ** (len(str(int(value))) - 1)
    return next(float(power * factor) for factor in (1, 2, 4, 8, 10) if power * factor >= value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Plots of results; the only module that needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any


def _axes(count: int) -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("plots need matplotlib: pip install matplotlib, or leave them out") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, count, figsize=(5 * count, 3.6), layout="constrained")
    return figure, axes


def sweep(rows: list[dict[str, Any]], to: Path | IO[str]) -> None:
    """Plot throughput, time to first token and time between tokens over the load, one line for each engine.

    Args:
        to: a picture's file, or where text goes: as SVG.
    """
    by_rate = any(row["request_rate"] is not None for row in rows)
    key, name = ("request_rate", "requests/s sent") if by_rate else ("concurrency", "requests under way at most")
    figure, axes = _axes(3)
    panels = (
        ("output_throughput", "output tokens/s"),
        ("median_ttft_ms", "time to first token, median, ms"),
        ("median_itl_ms", "time between tokens, median, ms"),
    )
    for axis, (value, label) in zip(axes, panels, strict=True):
        for engine in dict.fromkeys(str(row["engine"]) for row in rows):
            points = sorted(
                (float(row[key] or row["requests"]), float(row[value]))
                for row in rows
                if row["engine"] == engine and value in row
            )
            axis.plot([x for x, _ in points], [y for _, y in points], marker="o", label=engine)
        axis.set_xlabel(name)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
    axes[0].legend(fontsize="small")
    figure.savefig(to, format=to.suffix[1:] if isinstance(to, Path) else "svg")

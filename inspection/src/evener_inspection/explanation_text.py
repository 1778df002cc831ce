"""An explanation as text for a terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any


def render(found: dict[str, Any], width: int) -> str:
    """The explanation as text for a terminal of ``width`` columns."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = io.StringIO()
    console = Console(file=out, width=width, no_color=True, highlight=False, markup=False, soft_wrap=False)
    console.print("\n".join(_header_lines(found)))
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("op", "tokens", "sites", "provider", "why not the others"):
        table.add_column(column, overflow="fold")
    for row in found["ops"]:
        reasons = "\n".join(f"{each['provider']}: {each['reason']}" for each in row["refused"])
        provider = "\n".join(filter(None, (f"{row['provider']} {row['version']}", row.get("why"))))
        table.add_row(*map(Text, (row["op"], ", ".join(row["tokens"]), str(row["sites"]), provider, reasons)))
    console.print(table)
    console.print("\n".join(_footer_lines(found)))
    return out.getvalue()


def _header_lines(found: dict[str, Any]) -> Iterator[str]:
    model, backend = found["model"], found["backend"]
    yield f"model:        {model['architecture']} in {model['dtype']}, weights: {model['weights']}"
    yield f"backend:      {backend['name']} {backend['version']} ({backend['reason']}), {backend['device']}"
    for row in found["stages"]:
        first, end = row["layers"]
        yield (
            f"stage {row['stage']}:      layers {first} to {end - 1} on {row['backend']}, {row['device']}: "
            f"{row['memory']['total'] / (1 << 20):.1f} of {row['memory']['free'] / (1 << 20):.1f} MiB; {row['graphs']}"
        )
    for group in found["state"]:
        window = f" of {group['window']}" if group["window"] else ""
        yield (
            f"state:        {group['layers']} layers {group['kind']}{window} ({', '.join(group['tensors'])}): "
            f"{group['provider']}, blocks of {group['block_size']} tokens, "
            f"{group['layer_bytes_per_block']} bytes in each layer"
        )
        yield from (f"              not {each['provider']}: {each['reason']}" for each in group["refused"])
    yield "packings:     " + (", ".join(f"{n} x {layout}" for layout, n in found["packings"].items()) or "none")
    yield from (f"              {line}" for line in [*found["dequantized"], *found["activations"]])
    own = found["communicator"]
    who = own["package"] or "torch.distributed"
    yield f"communicator: {who}" if own["used"] else "communicator: none, there is one rank"
    graphs = found["graphs"]
    yield f"graphs:       {graphs['package'] or 'none'}, {graphs['reason']}"


def _footer_lines(found: dict[str, Any]) -> Iterator[str]:
    yield from (f"note: {note}" for note in found["notes"])
    if found["fallbacks"]:
        yield f"on the reference: {', '.join(found['fallbacks'])}"
    yield "memory:"
    yield from (f"  {line}" for line in found["memory"]["lines"])
    yield found["memory"]["problem"] or "it fits"
    if found["model"]["problem"]:
        yield f"but {found['model']['problem']}"

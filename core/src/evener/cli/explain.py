"""``evener explain``: op by op what a run of one model would use here, the memory that it would take, and why."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evener.cli.command import Command, read_config
from evener.config.schema import Config
from evener.errors import CheckpointError
from evener.search import Search

if TYPE_CHECKING:
    from evener.engine.assembly import Assembly

#: Files that hold weights, or say where they are.
_WEIGHTS = ("*.safetensors*", "*.bin*", "*.gguf")
_WEIGHTS_OF = {"auto": "read from its files", "dummy": "random numbers"}


def main(argv: list[str]) -> int:
    """Print the explanation. 0 if the model fits and its weights are its own, 1 if not; of files headers are read."""
    command = Command("explain", "Show what a run of a model would use here, op by op, its memory, and why.")
    command.option("--json", action="store_true", help="for programs")
    # A look is no run: ranks that somebody started do not matter.
    arguments, config = read_config(command, argv, ranks=False)
    found = explain(config)
    width = shutil.get_terminal_size((120, 24)).columns
    print(json.dumps(found, indent=2) + "\n" if arguments.json else render(found, width), end="")
    return 0 if found["memory"]["problem"] is None and found["model"]["problem"] is None else 1


def explain(config: Config) -> dict[str, Any]:
    """What a run of ``config`` would use, as plain data. A folder without weight files is explained as it is described.

    Raises:
        EvenerError: as starting the engine would; that the model does not fit, or that its weights have other names or
            shapes, is part of the answer.
    """
    search = Search(config.backend)
    from evener.distributed.planned import Planned
    from evener.distributed.world import Ranks, World
    from evener.engine.assembly import assemble, capture_offer
    from evener.engine.provision import outline

    described = config.load == "auto" and not _has_weights(Path(config.model))
    infer = config.infer
    ranks = Ranks(
        World.of(0, infer.tp_size, infer.pp_size), tp=Planned("tp", infer.tp_size) if infer.tp_size > 1 else None
    )
    a = assemble(dataclasses.replace(config, load="dummy") if described else config, search, ranks=ranks)
    resolved, plan = outline(a)
    largest = resolved.step_tokens, resolved.max_seq_len
    manifest = a.resolver.manifest.to_json()
    refused = {row["provider"]: row for row in manifest["ops"] if row["op"] == "attention"}
    offer, graphs = capture_offer(a)
    backend = a.loaded.backend
    return {
        "model": {
            "path": config.model, "architecture": a.checkpoint.architecture, "dtype": resolved.dtype,
            "weights": "described by config.json alone" if described else _WEIGHTS_OF[config.load],
            "problem": _misfit(a),
        },
        "backend": {
            "name": backend.name, "version": backend.version, "reason": a.loaded.selection.reason,
            "device": a.device.name,
        },
        "state": list(_state(a, refused)),
        "ops": [row for row in manifest["ops"] if row["op"] != "attention"],
        "attention": [row for row in manifest["ops"] if row["op"] == "attention"],
        "packings": manifest["packings"],
        "dequantized": manifest["dequantized"],
        "communicator": _communicator(a),
        "graphs": {"package": None if offer is None else offer.package, "reason": graphs},
        "memory": {**plan.to_json(), "lines": [*plan.lines(), *_scratch(a, *largest)]},
        "fallbacks": manifest["fallbacks"],
        "notes": manifest["notes"],
        "config": resolved.to_json(),
    }  # fmt: skip


def _has_weights(path: Path) -> bool:
    return not path.is_dir() or any(any(path.glob(pattern)) for pattern in _WEIGHTS)


def _misfit(a: Assembly) -> str | None:
    """Which tensors are missing, left over or misshapen, by the files' headers; None if none, or if none is read."""
    from evener.loading.match import beside, check_match

    try:
        if a.headers:
            check_match(a.build.weights, a.headers, a.scheme, where=str(a.checkpoint.path), **beside(a.build, a.others))
    except CheckpointError as error:
        return str(error)
    return None


def _state(a: Assembly, rows: dict[str, Any]) -> Iterator[dict[str, Any]]:
    size = a.geometry.block_size
    labels = {offer.value: offer.label for offer in a.resolver.market.states}
    for group in a.geometry.groups:
        provider = labels.get(group.provider, "reference")
        yield {
            "kind": group.spec.kind, "window": group.spec.window, "layers": len(group.slots), "per": group.spec.per,
            "tensors": [f"{t.name} {list(t.shape)} {t.dtype}" for t in group.spec.tensors], "provider": provider,
            "block_size": size, "layer_bytes_per_block": group.provider.bytes_per_block(group.spec, size),
            "graph": group.provider.graph, "refused": rows[provider]["refused"],
        }  # fmt: skip


def _scratch(a: Assembly, step: int, longest: int) -> list[str]:
    """Who asks for the largest scratch inside the workspace, where anybody does: at a step of so many tokens, of
    sequences of at most so many."""
    asked = [(g.provider.workspace(g.spec, g.attention, step, longest), g.provider.name) for g in a.geometry.groups]
    nbytes, who = max((a.resolver.workspace, a.resolver.largest), *asked)
    return [f"of the workspace {nbytes / (1 << 20):.1f} MiB are scratch of {who}"] if nbytes else []


def _communicator(a: Assembly) -> dict[str, Any]:
    infer = a.config.config.infer
    ranks, offer = infer.tp_size * infer.pp_size * infer.dp_size, a.loaded.communicator()
    return {"ranks": ranks, "package": None if offer is None else offer.package, "used": ranks > 1}


def render(found: dict[str, Any], width: int) -> str:
    """The explanation as text for a terminal of ``width`` columns."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = io.StringIO()
    console = Console(file=out, width=width, no_color=True, highlight=False, markup=False, soft_wrap=False)
    console.print("\n".join(_head(found)))
    table = Table(box=box.SIMPLE, pad_edge=False)
    for column in ("op", "tokens", "sites", "provider", "why better ones lost"):
        table.add_column(column, overflow="fold")
    for row in found["ops"]:
        reasons = "\n".join(f"{each['provider']}: {each['reason']}" for each in row["refused"])
        provider = "\n".join(filter(None, (f"{row['provider']} {row['version']}", row.get("why"))))
        table.add_row(*map(Text, (row["op"], ", ".join(row["tokens"]), str(row["sites"]), provider, reasons)))
    console.print(table)
    console.print("\n".join(_tail(found)))
    return out.getvalue()


def _head(found: dict[str, Any]) -> Iterator[str]:
    model, backend = found["model"], found["backend"]
    yield f"model:        {model['architecture']} in {model['dtype']}, weights: {model['weights']}"
    yield f"backend:      {backend['name']} {backend['version']} ({backend['reason']}), {backend['device']}"
    for group in found["state"]:
        window = f" of {group['window']}" if group["window"] else ""
        yield (
            f"state:        {group['layers']} layers {group['kind']}{window} ({', '.join(group['tensors'])}): "
            f"{group['provider']}, blocks of {group['block_size']} tokens, "
            f"{group['layer_bytes_per_block']} bytes in each layer"
        )
        yield from (f"              not {each['provider']}: {each['reason']}" for each in group["refused"])
    yield "packings:     " + (", ".join(f"{n} x {layout}" for layout, n in found["packings"].items()) or "none")
    yield from (f"              {line}" for line in found["dequantized"])
    own = found["communicator"]
    who = own["package"] or "torch.distributed"
    yield f"communicator: {who}" if own["used"] else "communicator: none, one rank needs none"
    graphs = found["graphs"]
    yield f"graphs:       {graphs['package'] or 'none'}, {graphs['reason']}"


def _tail(found: dict[str, Any]) -> Iterator[str]:
    yield from (f"note: {note}" for note in found["notes"])
    if found["fallbacks"]:
        yield f"on the reference: {', '.join(found['fallbacks'])}"
    yield "memory:"
    yield from (f"  {line}" for line in found["memory"]["lines"])
    yield found["memory"]["problem"] or "it fits"
    if found["model"]["problem"]:
        yield f"but {found['model']['problem']}"

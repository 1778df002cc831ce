"""``evener explain``: the kernel that would run each op of a model here, the memory plan, and the reasons."""

from __future__ import annotations

import shutil

from evener.cli.command import Command, print_result, read_config
from evener_inspection.explanation import explain
from evener_inspection.explanation_text import render


def main(argv: list[str]) -> int:
    """Print the explanation. Returns 0 if the model fits and its weights match, 1 if not. Reads only file headers."""
    command = Command("explain", "Show which kernel would run each op of a model here, the memory plan, and why.")
    command.option("--json", action="store_true", help="print JSON")
    # This starts no engine, so torchrun's ranks do not matter.
    arguments, config = read_config(command, argv, ranks=False)
    found = explain(config)
    print_result(arguments, found, lambda: render(found, shutil.get_terminal_size((120, 24)).columns))
    return 0 if found["memory"]["problem"] is None and found["model"]["problem"] is None else 1

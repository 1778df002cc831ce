"""``evener config``: the resolved value of every key for one model on this machine, and why; or the list of keys."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec

from evener.cli.command import Command, print_result, read_config
from evener.config.schema import key_specs
from evener.config.stages import config_of_stage
from evener.errors import ConfigError
from evener.key_spec import format_value

if TYPE_CHECKING:
    from evener.config.resolve import ResolvedConfig


def main(argv: list[str]) -> int:
    """Print the resolved configuration, or with ``--keys`` every key that exists."""
    command = Command("config", "Show the resolved value of every option for a model on this machine, and why.")
    command.option("--json", action="store_true", help="print JSON")
    command.option("--keys", action="store_true", help="list every key with its values and meaning; needs no model")
    arguments, words = command.parse(argv)
    if arguments.keys:
        if words:
            raise ConfigError(f"evener config --keys takes no other argument: leave out {words[0]!r}")
        rows = keys()
        print_result(arguments, rows, lambda: _table(rows))
        return 0
    # This starts no engine, so torchrun's ranks do not matter.
    arguments, config = read_config(command, argv, ranks=False)
    from evener.config.checkpoint import facts_of
    from evener.config.resolve import DeviceFacts, resolve_config
    from evener.engine.worker.assembly import find_architecture
    from evener.loading.checkpoint import open_checkpoint
    from evener.plugins.choose import choose
    from evener.plugins.discover import installed_catalog
    from evener.plugins.load import load

    checkpoint = open_checkpoint(config.model)
    config = config_of_stage(config, 0)
    loaded = load(choose(installed_catalog(), config.backend), config.options)
    model = facts_of(config.model, checkpoint.config, find_architecture(loaded, checkpoint).max_positions)
    device = DeviceFacts.of(loaded.open_device(), loaded.backend.name)
    resolved = resolve_config(config, model, device)
    if config.backend is None:
        resolved = resolved.with_value("backend", loaded.backend.name, loaded.selection.reason)
    print_result(arguments, msgspec.to_builtins(resolved.values()), lambda: aligned(resolved))
    return 0


def aligned(resolved: ResolvedConfig) -> str:
    """The rows of a configuration as aligned lines of text."""
    cells = [(key, format_value(found.value), found.reason) for key, found in resolved.values().items()]
    wide = [max(len(cell[column]) for cell in cells) for column in (0, 1)]
    return "\n".join(f"{key:<{wide[0]}}  {value:<{wide[1]}}  {reason}".rstrip() for key, value, reason in cells)


def keys() -> list[dict[str, Any]]:
    """Every key that can be set here: first the core's, then the options of installed packages."""
    from evener.config.packages import Packages

    specs = {**key_specs(), **Packages().options}
    rows: list[dict[str, Any]] = []
    for key, spec in specs.items():
        required = spec.default is dataclasses.MISSING
        rows.append({
            "key": key, "takes": spec.takes(), "default": None if required else spec.default,
            "required": required, "help": spec.help,
        })  # fmt: skip
    op = {"key": "ops.<op>", "takes": "a package, or reference", "default": None, "required": False}
    return [*rows, {**op, "help": "The package whose kernel computes this op."}]


def _table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        default = "required" if row["required"] else f"default {format_value(row['default'])}"
        lines.append(f"{row['key']}\n    {row['help']}\n    It takes {row['takes']}; {default}.")
    return "\n".join(lines)

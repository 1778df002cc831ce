"""Writes the documents that are made from the source (contracts, configuration, commands, supported models) and the
tables of ``docs/performance.md`` and ``docs/support.md``.

``--check`` writes nothing and fails if a document is not what it would write.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import inspect
import io
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from unittest import mock

from docs_from_source import class_text, inline, module_text
from evener_calibrate import descriptor as calibration
from evener_convert import descriptor as converter
from evener_encoders import descriptor as encoders
from evener_quantize import descriptor as quantizer
from performance_page import generated as performance
from support_page import generated as support

from evener.cli.main import BUILTIN_NAMES, find_command
from evener.config.schema import key_specs
from evener.contracts.descriptor import Descriptor
from evener.contracts.ops import OpSchema, Tensor
from evener.ops.schemas import BUILTIN
from evener_conformance import descriptor as conformance
from evener_deploy import descriptor as deploy
from evener_generation import descriptor as generation
from evener_inspection import descriptor as inspection
from evener_inspection.models_command import facts
from evener_models import descriptor
from evener_offload import descriptor as offload
from evener_server import descriptor as server

ROOT = Path(__file__).resolve().parent.parent
CONTRACTS = ROOT / "core/src/evener/contracts"
#: The contracts in the order in which an implementer meets them.
MODULES = (
    "descriptor", "parts", "probe", "hooks", "device", "ops", "state", "interfaces", "quant", "storage", "architecture",
    "builder", "pooling", "checkpoint", "communicator", "graph", "experts", "placement", "connector", "request_plugin",
    "outputs", "media", "encoder", "declared", "sizes", "statics", "weights", "tokenizer", "generation.chat",
    "generation.parsers", "generation.parsed", "grammar.library", "generation.drafter", "generation.drafts", "writing",
    "conversion.quantizer", "conversion.views", "quantized.state", "adapters",
)  # fmt: skip
#: What families are made of, and the files in ``evener.layers``.
LAYERS = {
    "CausalLM": "causal_lm", "AttentionConfig": "decoder", "MLPConfig": "decoder", "MoEConfig": "experts",
    "LatentConfig": "latent", "RotaryConfig": "rotary", "TemperatureConfig": "rotary", "LogNConfig": "rotary",
    "Builder": "builder",
}  # fmt: skip
#: Every command, in the order in which they are met.
COMMANDS = (
    "run", "chat", "client", "serve", "explain", "why-not", "bench-engine", "tune", "convert", "quantize", "calibrate",
    "config", "plugins", "doctor", "models", "deploy", "new", "conformance", "first-contact", "evidence", "version",
    "completion",
)  # fmt: skip
MADE = "<!-- Made by scripts/generate_docs.py from the source; edit that, then type: make docs -->"


def main() -> int:
    """Write or check; 0 if the documents are what they should be."""
    parser = argparse.ArgumentParser(description="Write the documents that are made from the source.")
    parser.add_argument("--check", action="store_true", help="only say what would change")
    check = parser.parse_args().check
    stale = [path for path, text in generated().items() if not path.is_file() or path.read_text("utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'is stale; type: make docs' if check else 'written'}")
        if not check:
            path.write_text(generated()[path], "utf-8")
    return 1 if check and stale else 0


def generated() -> dict[Path, str]:
    """Every document that is made here, by path."""
    pages = {
        "contracts": contracts,
        "configuration": configuration,
        "cli": commands,
        "supported-models": supported_models,
    }
    return {**{ROOT / f"docs/{name}.md": make() for name, make in pages.items()}, **performance(), **support()}


def supported_models() -> str:
    """Every architecture of ``evener-models``, with the state that its tiny model declares."""
    tables = [_architectures(each.architectures) for each in (descriptor, encoders)]
    return "\n".join(
        (
            "# Supported models", "", MADE, "",
            "The architectures of `evener-models`, by the name under `architectures` in a checkpoint's `config.json`.",
            "`evener models` lists what is installed on your machine; [model-author.md](model-author.md) shows how",
            "to add one.", "",
            "**State** lists the kinds of state of the family's tiny test model. **Oracle** is the implementation that",
            "this model is compared with in float32: logits (whole prompt, in chunks, after a prefix hit) and 64",
            "greedy tokens. It is transformers, or, where transformers lacks the family, our *own* in plain torch,",
            "written from published facts alone (`tests/test_families.py`). Which real checkpoints were run:",
            "[support.md](support.md#models).", "", tables[0], "",
            "## Encoders of texts", "",
            "They make [vectors and scores](serving.md#embeddings-and-scores) and generate nothing. Vectors of texts",
            "and scores of pairs are compared with transformers' in float32 (`tests/test_encoders.py`).", "",
            tables[1], "",
        )
    )  # fmt: skip


def _architectures(registered: Mapping[str, str]) -> str:
    """The table of some architectures."""
    rows = []
    for name, target in sorted(registered.items()):
        module, _, attribute = target.partition(":")
        family = getattr(importlib.import_module(module), attribute)
        said = facts(family)
        about = module_text(ROOT / "models/src" / f"{module.replace('.', '/')}.py").splitlines()[0]
        where = f"`models/src/{module.replace('.', '/')}.py`"
        rows.append((f"`{said['family']}`", f"`{name}`", about, said["state"], said["oracle"], where))
    return _table(("family", "architecture", "what it is", "state", "oracle", "where"), rows)


def contracts() -> str:
    """The reference of the contracts."""
    files = {path.relative_to(CONTRACTS).with_suffix("") for path in CONTRACTS.rglob("*.py") if path.stem != "__init__"}
    found = {".".join(file.parts) for file in files}
    if found != set(MODULES):
        raise SystemExit(f"MODULES in {__file__} and the files in {CONTRACTS} differ: {sorted(found ^ set(MODULES))}")
    parts = [
        "# Contracts", MADE,
        "What a package implements. Everything is imported from `evener.contracts.<module>`; no module imports torch.\n"
        "**required** methods are abstract; (optional) ones say what their default does. `T` is a step's token count, "
        "`R` its output rows.\n"
        "A dataclass takes its fields by position or by name: `Marks(True)`. One marked *arguments by name only* takes "
        'them by name: `Option(type=str, default="blaze", help="The chip.")`.\n'
        "How they fit together: [architecture.md](architecture.md). By example: "
        "[backend-author.md](backend-author.md), [model-author.md](model-author.md).",
        "\n".join(f"- [{name}](#{name.replace('.', '')})" for name in MODULES)
        + "\n- [layers](#layers)\n- [built-in ops](#built-in-ops)",
    ]  # fmt: skip
    for name in MODULES:
        file = CONTRACTS / f"{name.replace('.', '/')}.py"
        parts.append(f"## {name}\n\n{module_text(file)}")
    parts.append(
        "## layers\n\nWhat families are made of, imported from `evener.layers`; by example: "
        "[model-author.md](model-author.md)."
    )
    parts += [class_text(CONTRACTS.parent / f"layers/{file}.py", name) for name, file in LAYERS.items()]
    parts.append("## Built-in ops")
    parts.append(
        "The meaning of an op is its reference, in plain torch, in `evener.ops.reference`; a composite's is its "
        "expansion in `evener.ops.composites`. Lower-case names in shapes are static parameters. `*` is the call "
        "site's dtype."
    )
    parts += ["### Primitive ops", *(_op(schema) for schema in BUILTIN if not schema.composite)]
    parts += ["### Composite ops", *(_op(schema) for schema in BUILTIN if schema.composite)]
    return "\n\n".join(parts) + "\n"


def _op(schema: OpSchema) -> str:
    module, _, function = schema.reference.partition(":")
    more = inspect.getdoc(getattr(importlib.import_module(module), function))
    lines = [f"#### `{schema.name}`", "", inline(schema.doc), *([inline(more)] if more else []), ""]
    lines += [f"- static: {_list(f'`{name}` ({text})' for name, text in schema.static.items())}"]
    lines += [f"- in: {_list(map(_tensor, schema.inputs))}", f"- out: {_list(map(_tensor, schema.outputs))}"]
    lines += [f"- {text}" for text in ("touches state" if schema.state else "",) if text]
    if not schema.composite:
        tolerance = (f"{dtype} {relative:g} / {absolute:g}" for dtype, (relative, absolute) in schema.tolerance.items())
        lines.append(f"- tolerance (relative / absolute): {_list(tolerance)}")
    return "\n".join(lines)


def _tensor(tensor: Tensor) -> str:
    shape = f"[{', '.join(map(str, tensor.shape))}]" if tensor.shape else ""
    marks = [word for word, on in (("donated", tensor.donated), ("or None", tensor.optional)) if on]
    return f"`{tensor.name}` {' '.join(filter(None, (tensor.dtype, shape)))}".replace("* [", "[") + "".join(
        f", {mark}" for mark in marks
    )


def _list(items: Iterable[str]) -> str:
    return "; ".join(items)


def configuration() -> str:
    """The reference of keys and commands."""
    keys = [
        (f"`{key}`", spec.takes(), "required" if spec.default is dataclasses.MISSING else _default(spec.default),
         spec.help + (f" Not built yet: only {_supported(spec.supported)}." if spec.missing else ""))
        for key, spec in key_specs().items()
    ]  # fmt: skip
    keys.append(("`ops.<op>`", "a kernel, a package, or reference", "none", "The package or kernel for this op."))
    options = [
        (f"`{name}.{key}`", _NOUNS[option.type] + (f": {', '.join(option.choices)}" if option.choices else ""),
         _default(option.default), option.help)
        for name, descriptor in _descriptors().items() for key, option in descriptor.options.items()
    ]  # fmt: skip
    parts = [
        "# Configuration", MADE,
        "`evener serve MODEL_DIR` needs no key. `evener config MODEL_DIR` shows each key's resolved value, and why; "
        "`evener config --keys` prints this page for your installed packages.\n\n"
        "There are three ways to set a key: `infer.max_reqs=8` or `--infer.max-reqs 8` on the command line, and "
        '`LLM(folder, **{"infer.max_reqs": 8})` in Python. A YAML file of keys: `--config FILE` or `CONFIG_NAME=FILE`. '
        "An unknown key or value is an error that suggests the nearest one.",
        "## Keys", _table(("key", "takes", "default", "what for"), keys),
        "## Options of packages in this repository", _table(("key", "takes", "default", "what for"), options),
        "## Environment", _table(("variable", "what for"), ENVIRONMENT),
        "## Commands", "See [cli.md](cli.md).",
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def commands() -> str:
    """The reference of the command line."""
    found = {*BUILTIN_NAMES, *server.commands, *inspection.commands, *conformance.commands, *converter.commands,
             *quantizer.commands, *calibration.commands, *deploy.commands}  # fmt: skip
    if found != set(COMMANDS):
        raise SystemExit(f"COMMANDS in {__file__} and those that there are differ: {sorted(found ^ set(COMMANDS))}")
    parts = [
        "# Commands", MADE,
        "`evener COMMAND --help` says the same. Commands that take a MODEL take every key as well "
        "([configuration.md](configuration.md)).\n\nExit codes: 0 success, 1 failure, 2 wrong usage or configuration, "
        "130 interrupted. A message says what was asked, what is wrong and what to type next; `EVENER_DEBUG=1` adds "
        "the stack trace.",
        'Shell completion: `eval "$(evener completion bash)"` in `~/.bashrc`, or with `zsh` in `~/.zshrc`; for fish: '
        "`evener completion fish | source`.",
        *(f"## `evener {name}`\n\n{command_help(name)}" for name in COMMANDS),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


_NOUNS: Mapping[type, str] = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
ENVIRONMENT = (
    ("`EVENER_BACKEND`", "The backend, as `--backend`, which has priority."),
    ("`EVENER_DISABLE_PLUGINS`", "Packages to ignore: names or distributions, separated by commas."),
    ("`EVENER_PLUGINS`", "Only packages of these distributions are used; empty: none."),
    ("`EVENER_PROBE_TIMEOUT`", "Time limit for each backend's probe, in seconds."),
    ("`EVENER_CPU_ISA`", "What `cpu.isa=auto` means: `avx2`, …; torch's own kernels have `ATEN_CPU_CAPABILITY`."),
    ("`EVENER_DEBUG`", "1: show errors with their stack traces."),
    ("`CONFIG_NAME`", "A YAML file of keys, as `--config`."),
    ("`XDG_CACHE_HOME`", "Folder for probe results and compiled kernels; default `~/.cache`."),
)


def _descriptors() -> dict[str, Descriptor]:
    """Descriptors of the server, structured output, the offload package and the backends of this repository; what else
    is installed is left out."""
    ours = {path.parent.name: path.parent for path in ROOT.glob("backends/*/pyproject.toml")}
    found = {entry.name: entry.load() for entry in entry_points(group="evener.backends") if entry.name in ours}
    return {each.name: each for each in (server, generation, offload)} | dict(sorted(found.items()))


def _supported(values: tuple[Any, ...]) -> str:
    return " and ".join(_default(value) for value in values)


def _default(value: object) -> str:
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return "none" if value is None or value == () else f"`{value}`"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def command_help(name: str) -> str:
    """What ``evener NAME --help`` says, as Markdown. Python's own layout differs between its versions."""
    out = io.StringIO()
    with mock.patch.object(argparse.ArgumentParser, "format_help", _format_help), contextlib.redirect_stdout(out):
        run: Callable[[list[str]], int] = find_command(name)
        with contextlib.suppress(SystemExit):
            run(["--help"])
    return out.getvalue().strip()


def _format_help(parser: argparse.ArgumentParser) -> str:
    rows = []
    for action in parser._actions:
        value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
        rows.append((f"`{', '.join(action.option_strings)}{value}`", action.help or ""))
    usage = parser.usage or f"{parser.prog} [options]"
    return f"{parser.description}\n\n```text\n{usage}\n```\n\n" + _table(("option", "what for"), rows)


if __name__ == "__main__":
    sys.exit(main())

"""``evener why-not NAME``: explains why everything with this name was or wasn't used.

NAME may be a backend, another package or its distribution, an op, a kernel, a state provider, a packing, a quantization
scheme, an architecture, a command, a request plugin, a file ending, a source of models, or an option value that a
package claims. With a model, the answer says at which of the model's call sites, and for how many tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from evener.cli.command import Command, print_result, read_config
from evener.errors import ConfigError, EvenerError, UnknownNameError, did_you_mean

if TYPE_CHECKING:
    from evener.plugins.catalog import Catalog
    from evener.plugins.choose import Assessment, Selection
    from evener.plugins.report import PackageRecord

#: Fields of a descriptor, and what one entry of each is called.
_DESCRIPTOR_FIELDS: Mapping[str, str] = {
    "ops": "kernels for op", "op_schemas": "op", "states": "state provider", "state_kinds": "kind of state",
    "formats": "quantization scheme", "architectures": "architecture", "commands": "command",
    "request_plugins": "request plugin", "checkpoints": "checkpoint reader", "model_sources": "source of models",
    "options": "option", "tool_parsers": "tool parser", "reasoning_parsers": "reasoning parser", "grammars": "grammar",
    "executors": "executor", "weight_files": "weight file reader", "quantizers": "quantizer",
    "pooling_readers": "pooling reader", "tokenizer_readers": "tokenizer reader", "chat_readers": "chat reader",
    "adapter_readers": "adapter reader", "drafters": "drafter", "draft_policies": "draft policy",
    "worker_drafters": "worker drafter", "pooling_parts": "part of pooling", "stage_parts": "part of stages",
    "media_parts": "part of media", "launchers": "launcher",
    "step_limits": "step limit", "grammar_masks": "maker of masks", "placements": "placement of experts",
    "cache_listeners": "cache listener",
}  # fmt: skip
#: Providers that are part of the core.
_BUILTIN_PROVIDERS = ("reference", "expanded")


@dataclass(frozen=True)
class Answer:
    """One thing with that name. ``verdict``: that of its package as in ``evener doctor`` (``chosen``, ``refused``,
    ``broken``, ``disabled``), or ``offered``, or with a model ``used`` or ``passed over``."""

    what: str
    name: str
    package: str
    verdict: str
    reasons: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"{self.what} {self.name} ({self.package}): {self.verdict}"
        yield from (f"  {line}" for reason in self.reasons for line in reason.splitlines())


def main(argv: list[str]) -> int:
    """Print the answers. Returns 0 if anything has the name."""
    command = Command("why-not", "Explain why a backend, package, op, kernel, scheme, ... was or wasn't used. The exit "
                      "code is 0, or 2 if nothing has that name.", False,
                      "NAME [MODEL [key=value ...]]")  # fmt: skip
    command.option("--backend", help="use this backend, as if a run asked for it")
    command.option("--json", action="store_true", help="print JSON")
    arguments, words = command.parse(argv)
    if not words:
        raise ConfigError("evener why-not needs a name: evener why-not NAME [MODEL] [key=value ...]; "
                          "`evener plugins` lists packages, `evener explain MODEL` lists ops")  # fmt: skip
    name, rest = words[0], words[1:]
    backend = [] if arguments.backend is None else [f"backend={arguments.backend}"]
    answers, known, assessed = _installed(name, arguments.backend)
    # Torch and the chosen packages are imported only if the descriptors do not have the answer.
    usable = {answer.what for answer in answers if answer.verdict in ("chosen", "installed")}
    if rest:
        uncalled = [Answer("op", name, rest[0], "not called")] if "op" in usable else []
        answers = [*(_in_model(name, [*rest, *backend], known) or uncalled), *answers]
    elif "op" in usable and "kernels for op" not in usable:
        what_then = f"the reference or smaller ops compute it; for one model: evener why-not {name} MODEL"
        answers.insert(0, Answer("kernels for op", name, "no chosen package", "none", (what_then,)))
    elif not answers and assessed.selection is not None:
        answers += _loaded(name, assessed.selection, known)
    if not answers:
        near = did_you_mean(name, known).endswith("?")
        install = "" if near else f"If it is a backend, install it: pip install evener-backend-{name.lower()}"
        raise UnknownNameError("name", name, known, install + "".join(assessed.report.unusable_hints))
    found = {"name": name, "answers": [asdict(answer) for answer in answers]}
    print_result(arguments, found, lambda: "\n".join(line for answer in answers for line in answer.lines()))
    return 0


def _installed(name: str, backend: str | None) -> tuple[list[Answer], set[str], Assessment]:
    """Answers from packages and their descriptors, every name in them, and the assessment of the backends."""
    from evener.builtin import BUILTINS
    from evener.plugins.choose import assess, requested_backend
    from evener.plugins.discover import installed_catalog
    from evener.plugins.probe import ProbeRun

    catalog = installed_catalog(builtins=BUILTINS)
    named, _ = requested_backend(backend)
    assessed = assess(catalog, backend, probes=ProbeRun.start(catalog.backends, only=named))
    known = {each.name for each in assessed.report.candidates}
    known |= {each.distribution for each in assessed.report.candidates}
    descriptors = [package.descriptor for package in catalog.packages]
    known |= {word for each in descriptors for field in _DESCRIPTOR_FIELDS for word in getattr(each, field)}
    return [*_packages(name, assessed), *_announced(name, catalog, assessed)], known, assessed


def _packages(name: str, assessed: Assessment) -> Iterator[Answer]:
    from evener.plugins.catalog import NOUNS
    from evener.plugins.discover import normalized

    for each in assessed.report.candidates:
        if name == each.name or normalized(name) == normalized(each.distribution):
            yield Answer(
                NOUNS[each.group], each.name, _package(each), each.verdict, tuple(_verdict_reasons(each, assessed))
            )


def _verdict_reasons(found: PackageRecord, assessed: Assessment) -> Iterator[str]:
    """The reason of the verdict, then the steps that led to it, each once."""
    steps = [f"{step.name}: {'yes' if step.ok else 'no'}" + f"; {step.detail}" * bool(step.detail)
             for step in found.steps]  # fmt: skip
    error = assessed.report.error if found.verdict not in ("chosen", "installed") else None
    yield from dict.fromkeys(filter(None, (found.reason, *steps, error)))


def _announced(name: str, catalog: Catalog, assessed: Assessment) -> Iterator[Answer]:
    candidates = {(each.group, each.name): each for each in assessed.report.candidates}
    for package in catalog.packages:
        of = candidates[package.group, package.name]
        reason = f"{package}: {of.reason}" if of.reason else str(package)
        for field, what in _DESCRIPTOR_FIELDS.items():
            if name in getattr(package.descriptor, field):
                yield Answer(what, name, _package(of), of.verdict, (reason,))
        for spelling, meaning in package.descriptor.aliases.items():
            if name in (spelling, spelling.partition("=")[2]):
                yield Answer("spelling", spelling, _package(of), of.verdict, (f"means {meaning}", reason))


def _package(found: PackageRecord) -> str:
    return f"{found.distribution} {found.version}"


def _loaded(name: str, selection: Selection, known: set[str]) -> Iterator[Answer]:
    """Answers about kernels and state providers of the chosen packages; whether they support a model's sizes is known
    only with the model."""
    from evener.plugins.load import load

    loaded = load(selection)
    device = loaded.open_device()
    ask = f"for a model's sizes: evener why-not {name} MODEL"
    for kernel in loaded.kernels(device):
        known.add(kernel.value.name)
        layouts = [packing.layout for packing in kernel.value.packings]
        known.update(layouts)
        package = f"{kernel.distribution} {kernel.version}"
        if _matches(name, f"{kernel.package}/{kernel.value.name}"):
            priority = f"priority {kernel.value.priority}"
            yield Answer(f"kernel for {kernel.value.op}", kernel.value.name, package, "offered", (priority, ask))
        if name in layouts:
            reader = f"read by {kernel.value.name}"
            yield Answer(f"packing for {kernel.value.op}", name, package, "offered", (reader, ask))
    for state in loaded.state_providers(device):
        known.add(state.value.name)
        if _matches(name, f"{state.package}/{state.value.name}"):
            serves = f"state of kinds {', '.join(sorted(state.value.kinds))}, priority {state.value.priority}"
            package = f"{state.distribution} {state.version}"
            yield Answer("state provider", state.value.name, package, "offered", (serves, ask))


def _in_model(name: str, words: list[str], known: set[str]) -> list[Answer]:
    """Answers from one model's manifest, or the reason why the model cannot run."""
    _, config = read_config(Command("why-not", ""), words, ranks=False)
    from evener_inspection.explanation import explain

    try:
        found = explain(config)
    except EvenerError as error:
        return [Answer("model", config.model, "this run", "refused", (str(error),))]
    rows = [*found["ops"], *found["attention"]]
    known |= {row["op"] for row in rows}
    known |= {word for row in rows for each in (row, *row["refused"]) for word in each["provider"].split("/")}
    answers = list(_from_rows(name, rows))
    for layout, weights in found["packings"].items():
        if name == layout:
            answers.append(Answer("packing", name, config.model, "used", (f"for {weights} weights",)))
    lines = [line for line in found["dequantized"] if name in line]
    return answers + [Answer("storage", name, config.model, "dequantized", (line,)) for line in lines]


def _from_rows(name: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[Answer]:
    """For an op: which provider serves it, and why not the others. For a provider: where it is used or passed over."""
    for row in rows:
        where = f"at {', '.join(row['tokens'])} tokens, " if row["tokens"] else ""
        where += f"{row['sites']} site" + "s" * (row["sites"] != 1)
        if name == row["op"]:
            lost = tuple(f"not {each['provider']}: {each['reason']}" for each in row["refused"])
            no_kernel = ("no chosen package has a kernel for it",) if row["provider"] in _BUILTIN_PROVIDERS else ()
            yield Answer(f"{row['op']} {where}:", row["provider"], row["version"], "used", lost or no_kernel)
            continue
        if _matches(name, row["provider"]):
            yield Answer(f"{row['op']} {where}:", row["provider"], row["version"], "used")
        for each in row["refused"]:
            if _matches(name, each["provider"]):
                served = f"{row['provider']} serves"
                yield Answer(f"{row['op']} {where}:", each["provider"], served, "passed over", (each["reason"],))


def _matches(name: str, provider: str) -> bool:
    """Whether ``name`` is a provider's label, its package's name or its own name."""
    return name == provider or name in provider.split("/")

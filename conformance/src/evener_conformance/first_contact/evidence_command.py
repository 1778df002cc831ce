"""``evener evidence``: check an evidence file and add it to a folder of results; show what the results say."""

from __future__ import annotations

import json
from pathlib import Path

import importlib_metadata
from rich.console import Console
from rich.table import Table

from evener.cli.command import Command
from evener.errors import ConfigError, did_you_mean
from evener.plugins.discover import NAME
from evener_conformance.first_contact.evidence_file import Evidence, read
from evener_conformance.first_contact.levels import package_of, reached, read_records
from evener_conformance.first_contact.parts import NEEDED_FOR_A_LEVEL, PARTS
from evener_conformance.first_contact.wheel import wheel_hash

_VERBS = ("add", "show")


def command() -> Command:
    """The command's options."""
    summary = "Check an evidence file and add it to a folder of results, or show what these say."
    found = Command("evidence", summary, False, "add FILE | show")
    found.option("--to", metavar="FOLDER", default="docs/results", help="the folder of results (default: docs/results)")
    found.option("--wheel", metavar="WHEEL", help="(add) refuse the file if it is not of this wheel")
    return found


def main(argv: list[str]) -> int:
    """Run one verb."""
    arguments, words = command().parse(argv)
    verb, folder = (words[0] if words else ""), Path(arguments.to)
    if verb not in _VERBS:
        raise ConfigError(f"evener evidence takes a verb, not {verb!r}{did_you_mean(verb, _VERBS)}; type: evener "
                          "evidence add FILE, or evener evidence show")  # fmt: skip
    if not folder.is_dir():
        raise ConfigError(f"--to {folder}: there is no such folder; name the folder of your results")
    if verb == "show":
        _show(folder)
        return 0
    if len(words) != 2:
        raise ConfigError("evener evidence add takes one file: evener evidence add FILE")
    evidence = read(Path(words[1]))
    check(evidence, Path(arguments.wheel) if arguments.wheel else None)
    path = add(evidence, Path(words[1]).read_bytes(), folder)
    print(f"{path}: {evidence.wheel.distribution} {evidence.wheel.version}, "
          + (f"level {evidence.level}" if evidence.level else "which did not pass, so it shows no level"))  # fmt: skip
    return 0


def check(evidence: Evidence, wheel: Path | None = None) -> None:
    """Refuse a file whose claims do not follow from what is in it.

    Raises:
        ConfigError: it was made with another version of the kit, claims more than its parts show, or is of another
            wheel than ``wheel``.
    """
    mine = importlib_metadata.version("evener-conformance")
    theirs = evidence.versions.get("evener-conformance", "")
    if theirs != mine:
        raise ConfigError(
            f"the file was made with evener-conformance {theirs or 'of no version'}, and {mine} is installed; type: "
            f"pip install evener-conformance=={theirs or mine}"
        )
    if not NAME.fullmatch(evidence.backend) or not NAME.fullmatch(
        evidence.wheel.distribution.lower().replace(".", "-")
    ):
        raise ConfigError(f"{evidence.backend!r} of {evidence.wheel.distribution!r} is no name of a backend")
    if len(evidence.wheel.sha256) != 64 or set(evidence.wheel.sha256) - set("0123456789abcdef"):
        raise ConfigError("the file names no hash of the backend's wheel")
    if evidence.level:
        _check_level(evidence)
    if wheel is not None and (evidence.wheel.changed or wheel_hash(wheel) != evidence.wheel.sha256):
        how = "from files that differ from its wheel" if evidence.wheel.changed else "from another wheel"
        raise ConfigError(f"the backend was installed {how}, not from {wheel}; install that wheel and run "
                          "`evener first-contact` again")  # fmt: skip


def _check_level(evidence: Evidence) -> None:
    parts = {part.name: part for part in evidence.parts}
    if unknown := sorted(parts.keys() - {each.name for each in PARTS}):
        raise ConfigError(f"the file has a part {unknown[0]!r}, which first contact does not have")
    for name in NEEDED_FOR_A_LEVEL:
        part = parts.get(name)
        if (part is None or part.outcome != "passed") and not (evidence.pretended and name == "engine"):
            seen = part.outcome if part else "not there"
            raise ConfigError(f"the file claims level {evidence.level}, but its part {name!r} is {seen}")
    for part in evidence.parts:
        if part.outcome in ("failed", "not run") or part.counts.get("failed"):
            raise ConfigError(f"the file claims level {evidence.level}, but its part {part.name!r} did not pass")
    if evidence.level == "L5" and (evidence.simulated or evidence.pretended):
        raise ConfigError("the file claims level L5, but its device is simulated or was not asked for")


def add(evidence: Evidence, data: bytes, folder: Path) -> Path:
    """Keep the file, and write its record where the last one of this backend on this device was; returns its path.

    Raises:
        ConfigError: the folder cannot be written, or holds a file that is no list of records.
    """
    name = f"evidence/{evidence.backend}-{evidence.date}-{evidence.seal[:8]}.json"
    lines = folder / f"support-{evidence.backend}.jsonl"
    old = read_records([lines]) if lines.is_file() else []
    new = {
        "subject": evidence.wheel.distribution, "check": "first contact", "outcome": _outcome(evidence),
        **({"level": evidence.level} if evidence.level else {}),
        "device": _describe_device(evidence),
        "software": ", ".join(f"{name} {evidence.versions[name]}" for name in sorted(evidence.versions)),
        "date": evidence.date, "command": evidence.command,
        "wheel": evidence.wheel.sha256 + (" (changed after it was installed)" if evidence.wheel.changed else ""),
        "file": name,
    }  # fmt: skip
    same = ("subject", "check", "device")
    kept = [each for each in old if any(each.get(key) != new[key] for key in same)]
    try:
        (folder / "evidence").mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
        part = lines.with_suffix(".part")
        part.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in (*kept, new)))
        part.replace(lines)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from error
    return folder / name


def _describe_device(evidence: Evidence) -> str:
    name, variant = evidence.device.get("name", ""), evidence.device.get("variant", "")
    return f"{name}{' in place of ' if evidence.pretended and variant else ' '}{variant}".strip()


def _outcome(evidence: Evidence) -> str:
    cases = sum(part.counts.get("passed", 0) for part in evidence.parts)
    wrong = [part.name for part in evidence.parts if part.outcome in ("failed", "not run")]
    if evidence.level:
        return f"passed: {len(evidence.parts)} parts, {cases} cases"
    return f"failed: {', '.join(wrong)}; {cases} cases passed" if wrong else f"incomplete: {cases} cases passed"


def _show(folder: Path) -> None:
    records = read_records(sorted(folder.glob("support-*.jsonl")))
    table = Table(box=None, pad_edge=False)
    for name in ("package", "level", "date", "device"):
        table.add_column(name)
    for package in dict.fromkeys(package_of(each) for each in records if "level" in each):
        found = reached(records, package)
        if found.highest:
            table.add_row(package, ", ".join(found.levels), found.date, "; ".join(found.devices))
    Console(highlight=False).print(table)

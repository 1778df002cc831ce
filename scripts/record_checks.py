"""Runs the checks that docs/support.md names, and writes what came of each into ``docs/results``.

    python scripts/record_checks.py                  # the names of the checks
    python scripts/record_checks.py NAME... [--out DIR]

The checks are in ``scripts/checks.yaml``, by name: ``file`` (``cpu`` → ``support-cpu.jsonl``), ``subject``, ``check``,
``command``, and optionally ``limits`` (what it cannot show), ``device`` (where this is not the processor), and the
``level`` of evidence that it shows of ``package`` (default: the subject). A record takes the place of the last one of
the same subject and check. The exit code is 1 if a check failed; its record says so.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import cast

from omegaconf import OmegaConf

ROOT = Path(__file__).resolve().parent.parent
# At the end: this folder has a module named like one of Python's own, profile.
sys.path.append(str(ROOT / "benchmarks"))

from machine import cpu_name  # noqa: E402

CHECKS = ROOT / "scripts/checks.yaml"
RESULTS = ROOT / "docs/results"
#: Whose versions a record gives, where they are installed.
SOFTWARE = ("torch", "triton", "transformers")
#: The last line of pytest, without its time.
PYTEST = re.compile(r"=+ ((?:\d+ \w+(?:, )?)+) in [\d.]+s.* =+")

Check = Mapping[str, str]


def read_checks(path: Path = CHECKS) -> dict[str, Check]:
    """The checks by name.

    Raises:
        ValueError: a check has a key too few or too many.
    """
    found = cast("dict[str, Check]", OmegaConf.to_container(OmegaConf.load(path)))
    needed = {"file", "subject", "check", "command"}
    known = needed | {"limits", "device", "level", "package"}
    for name, check in found.items():
        if not needed <= set(check) <= known:
            raise ValueError(f"{path.name}: [{name}] needs {sorted(needed)} and may have {sorted(known - needed)}")
    return found


def software() -> str:
    """System, Python and the versions of ``SOFTWARE``."""
    words = [f"{platform.system()} {platform.machine()}", f"Python {platform.python_version()}"]
    for name in SOFTWARE:
        try:
            words.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(words)


def outcome(code: int, output: str) -> str:
    """What came of a command: pytest's counts where it was pytest, and whether the exit code was 0."""
    counts = PYTEST.findall(output)
    word = "passed" if code == 0 else f"failed with exit code {code}"
    return f"{word}: {counts[-1]}" if counts else word


def run(check: Check) -> tuple[int, str]:
    """Exit code and output of a check's command, which is shown as it comes."""
    # The interpreter that runs this, and the scripts beside it.
    environ = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    command = shlex.split(check["command"])
    with subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return process.returncode, "".join(lines[-200:])


def record(check: Check, code: int, output: str) -> dict[str, str]:
    """One line of a file in ``docs/results``."""
    words = {"subject": check["subject"], "check": check["check"], "outcome": outcome(code, output)}
    words["device"] = check.get("device") or f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores"
    words |= {"software": software(), "date": datetime.date.today().isoformat(), "command": check["command"]}
    return words | {key: check[key] for key in ("level", "package", "limits") if key in check}


def write(path: Path, new: Mapping[str, str]) -> None:
    """Put a record where the last one of its subject and check was, or at the end."""
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    old = [json.loads(line) for line in lines]
    same = [index for index, each in enumerate(old) if all(each[key] == new[key] for key in ("subject", "check"))]
    if same:
        old[same[0]] = dict(new)
    else:
        old.append(dict(new))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in old), "utf-8")


def main(argv: Sequence[str]) -> int:
    """Run checks and write their records; 0 if all passed."""
    parser = argparse.ArgumentParser(description="Run checks of docs/support.md and write docs/results.")
    parser.add_argument("names", nargs="*", help="checks of scripts/checks.yaml; without any, list them")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the support-*.jsonl files")
    options = parser.parse_args(argv)
    checks = read_checks()
    if unknown := set(options.names) - set(checks):
        parser.error(f"no check {', '.join(sorted(unknown))}; known: {', '.join(checks)}")
    if not options.names:
        for name, check in checks.items():
            print(f"{name:24} {check['subject']}: {check['check']}")
    failed = []
    for name in options.names:
        code, output = run(checks[name])
        write(options.out / f"support-{checks[name]['file']}.jsonl", record(checks[name], code, output))
        failed += [name] if code else []
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""``make test-tools``: quantize small models with the quantization tools themselves, and read what they wrote.

    python scripts/run_tools.py                          # every tool; docs/results/tools.jsonl is written
    python scripts/run_tools.py torchao                  # one tool, all its cases; its records are written anew
    python scripts/run_tools.py gptqmodel gptq-4 awq-gemm  # these cases; nothing is recorded

Each tool has an environment of its own in the cache, with what ``tools-requirements.yaml`` lists, and under it the
packages of this one. It writes its checkpoints with ``tests/tools/with_TOOL.py``; the tests there read them. The exit
code is 1 if a tool cannot be installed or run, or a test fails.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import os
import shutil
import site
import subprocess
import sys
import venv
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from peer_results import Record, read_records, write_records

ROOT = Path(__file__).resolve().parent.parent
# At the end: this folder has a module named like one of Python's own, profile.
sys.path.append(str(ROOT / "benchmarks"))

from machine import cpu_name  # noqa: E402

REQUIREMENTS = ROOT / "scripts/tools-requirements.yaml"
CONSTRAINTS = ROOT / "constraints.txt"
RECORDS = ROOT / "docs/results/tools.jsonl"
WRITERS = ROOT / "tests/tools"
#: What sources are built with; one of them also needs the first to say its version.
_BUILT = ("pypcre", "gptqmodel", "autoawq")


def main(argv: Sequence[str]) -> int:
    """Install, write, read and record; 0 if all tests passed."""
    tools = cast("dict[str, list[str]]", OmegaConf.to_container(OmegaConf.load(REQUIREMENTS)))
    parser = argparse.ArgumentParser(description="Read checkpoints that quantization tools write.")
    parser.add_argument("tool", nargs="?", choices=sorted(tools), help="default: all of them")
    parser.add_argument("case", nargs="*", help="cases of this tool; nothing is recorded then")
    options = parser.parse_args(argv)
    chosen = [options.tool] if options.tool else sorted(tools)
    written = cache() / "checkpoints"
    try:
        for tool in chosen:
            python = environment(tool, tools[tool])
            write(python, tool, written / tool, options.case)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"make test-tools: {error}", file=sys.stderr)
        return 1
    report = cache() / "report.xml"
    failed = read(written, chosen, report)
    if not failed and not options.case:
        record(report, chosen)
    return failed


def cache() -> Path:
    """The folder of everything that is made here: ``$XDG_CACHE_HOME/evener/tools``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evener/tools"


def environment(tool: str, requirements: Sequence[str]) -> Path:
    """The interpreter of a tool's environment, which is made if it is not there or has other versions.

    Raises:
        OSError: the cache cannot be written.
        subprocess.CalledProcessError: pip failed.
    """
    folder = cache() / tool
    python, stamp = folder / "bin/python", folder / "requirements.sha256"
    facts = [*requirements, sys.version, CONSTRAINTS.read_text("utf-8"), *site.getsitepackages()]
    wanted = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    if stamp.is_file() and stamp.read_text("utf-8") == wanted:
        return python
    print(f"installing {tool} into {folder}", flush=True)
    venv.create(folder, clear=True)
    # torch, transformers, pip and the rest come from this environment; what the tool needs comes first.
    ours = "\n".join(f"import site; site.addsitedir({path!r})" for path in site.getsitepackages())
    (packages,) = folder.glob("lib/python3*/site-packages")
    (packages / "zz_development.pth").write_text(ours + "\n", "utf-8")
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--no-deps"]
    pip += ["--no-build-isolation", "--constraint", str(CONSTRAINTS)]
    # Those without a wheel come last, in the order in which they need each other.
    late = sorted((each for each in requirements if _name(each) in _BUILT), key=lambda each: _BUILT.index(_name(each)))
    for each in ([each for each in requirements if each not in late], *([each] for each in late)):
        if each:
            subprocess.run([*pip, *each], check=True)
    stamp.write_text(wanted, "utf-8")
    return python


def write(python: Path, tool: str, folder: Path, cases: Sequence[str]) -> None:
    """Have a tool write its checkpoints, into an empty folder.

    Raises:
        subprocess.CalledProcessError: its program came to no end. Cases that failed are in ``written.json``.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(f"{tool} writes its checkpoints", flush=True)
    # Nothing is asked of the hub, and other threads would only wait. Some tools write logs where they run.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive"}
    command = [str(python), "-W", "ignore", str(WRITERS / f"with_{tool}.py"), str(folder), *cases]
    with (folder / "output.txt").open("w") as output:
        subprocess.run(command, check=True, cwd=folder, env=environ, stdout=output, stderr=subprocess.STDOUT)


def read(written: Path, tools: Sequence[str], report: Path) -> int:
    """Run the tests over the checkpoints of ``tools``; pytest's exit status."""
    command = [sys.executable, "-m", "pytest", "-m", "tools", "-q", str(WRITERS), f"--junitxml={report}"]
    # The older form has the tests' properties.
    command += ["-o", "junit_family=xunit1", "-k", " or ".join(f"{tool}-" for tool in tools)]
    environ = os.environ | {"EVENER_TOOL_CHECKPOINTS": str(written)}
    return subprocess.run(command, cwd=ROOT, env=environ).returncode


def record(report: Path, tools: Sequence[str]) -> None:
    """Write what the tests of ``tools`` said; records of other tools stay."""
    kept = [each for each in read_records(RECORDS) if each["tool"] not in tools] if RECORDS.is_file() else []
    device = f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores"
    common = {"model": "two layers, random", "device": device, "date": datetime.date.today().isoformat()}
    common["command"] = "make test-tools"
    new = [each | common for each in outcomes(report)]
    write_records(RECORDS, sorted(kept + new, key=lambda each: str(each["tool"])), {})


def outcomes(report: Path) -> list[Record]:
    """What pytest's XML says of each case, all of which have passed."""
    found: list[Record] = []
    for test in ElementTree.parse(report).iter("testcase"):
        words: dict[str, Any] = {each.get("name", ""): each.get("value") for each in test.iter("property")}
        found.append({key: words[key] for key in ("tool", "version", "case")} | {"outcome": "passed"})
    return found


def _name(requirement: str) -> str:
    return requirement.partition("==")[0]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

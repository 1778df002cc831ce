"""One mutant and the kit, in a child process with a time limit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mutation.mutant import Mutant

ROOT = Path(__file__).resolve().parent.parent.parent
CAUGHT, SURVIVED, NOT_BUILT, EQUAL = "caught", "survived", "not built", "equal code"
#: What a child says of checks without a case that the kernel takes.
NO_CASE = "no case passed"


@dataclass(frozen=True)
class Verdict:
    """What came of a mutant.

    Attributes:
        outcome: CAUGHT; SURVIVED; NOT_BUILT: it does not compile, so it is no mutant; EQUAL: the compiler made the same
            library as without it, so it is equivalent.
        by: the case that failed, or how the child ended.
        seconds: wall time.
        answer: what the child printed; empty if it ended before.
    """

    outcome: str
    by: str
    seconds: float
    answer: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """Where trials of one backend run.

    Attributes:
        sources: folder that holds the backend's packages, from the root of the repository. Each trial gets a copy with
            the mutated file, in front of everything else.
        spec: specification of ``kit_child``, without what depends on the mutant.
        paths: further folders of Python's path.
        environ: further variables.
        limit: seconds of processor time of one trial. It may take ten times as long on a busy machine.
    """

    sources: str
    spec: Mapping[str, Any]
    paths: Sequence[Path] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    limit: float = 300.0

    def run(self, mutant: Mutant | None, **more: Any) -> Verdict:
        """Run the kit on the backend with the mutant (None: as it is); ``more``: of the child's specification."""
        with tempfile.TemporaryDirectory(prefix="mutant-") as scratch:
            overlay = Path(scratch) / "src"
            shutil.copytree(ROOT / self.sources, overlay, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            if mutant is not None:
                path = overlay / Path(mutant.file).relative_to(self.sources)
                path.write_text(mutant.apply(path.read_text("utf-8")), "utf-8")
            spec = {**self.spec, "limit": self.limit, **more}
            return self._child(spec, overlay, Path(scratch))

    def _child(self, spec: Mapping[str, Any], overlay: Path, scratch: Path) -> Verdict:
        folders = [overlay, *self.paths, ROOT / "scripts", *sorted(ROOT.glob("*/src")),
                   *sorted(ROOT.glob("backends/*/src"))]  # fmt: skip
        environ = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, folders)), "XDG_CACHE_HOME": str(scratch / "cache"),
            "OMP_WAIT_POLICY": "passive", "PYTHONDONTWRITEBYTECODE": "1", **self.environ,
        }  # fmt: skip
        start = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "mutation.kit_child", json.dumps(spec)], cwd=scratch, env=environ, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, errors="replace", start_new_session=True,
        )  # fmt: skip
        try:
            out, errors = process.communicate(timeout=10 * self.limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks too
            process.communicate()
            return Verdict(CAUGHT, f"the kit did not end within {10 * self.limit:g} s", time.monotonic() - start)
        found = judge(process.returncode, out, errors, time.monotonic() - start)
        # Paths from the root of the repository: records do not depend on where it lies.
        return replace(found, by=found.by.replace(str(overlay), self.sources).replace(f"{ROOT}{os.sep}", ""))


def judge(code: int, out: str, errors: str, seconds: float) -> Verdict:
    """The verdict from how the child ended and what it printed."""
    lines = out.strip().splitlines()
    if code < 0:
        check = "".join(f", in {line}" for line in errors.strip().splitlines()[-1:])  # the child names each check
        return Verdict(CAUGHT, f"the kit was ended by {signal.Signals(-code).name}{check}", seconds)
    if code or not lines:
        last = errors.strip().splitlines()[-1:] or [f"exit code {code}"]
        return Verdict(CAUGHT, f"the kit ended with an error: {last[0]}", seconds)
    answer = json.loads(lines[-1])
    if "checks" in answer:
        return Verdict(SURVIVED, "", seconds, answer)
    if "unbuilt" in answer:
        return Verdict(NOT_BUILT, answer["unbuilt"], seconds, answer)
    if "wrong" not in answer:
        return Verdict(EQUAL, "", seconds, answer)
    return Verdict(CAUGHT if answer["wrong"] else SURVIVED, answer["wrong"], seconds, answer)

"""The default kit on one backend, in a process of its own, until the first case that is wrong.

    python -m mutation.kit_child '{"backend": "cpu", "seed": 1, "first": ["linear"]}'

The specification has:

- ``backend``, ``seed``, ``dtypes`` (all if left out), ``imports`` (modules to import before the kit);
- ``first``: names of checks that run before the others, because a mutant of their code is most likely found there. A
  check that fails makes the whole kit fail, so the order cannot change the verdict;
- ``only``: names of the checks to run, no others; in this order if each names one;
- ``list``: the names of all checks are the answer, as ``checks``;
- ``limit``: seconds of processor time, after which the process ends with SIGXCPU; a mutant may compute without end;
- ``library``: the CPU backend's kernels are compiled first. A hash here is that of the library without a mutant: the
  kit does not run if the mutant's is the same;

The last line of the output is an object: ``wrong`` (the case and the reason; empty if the kit passes), ``seconds`` of
each check that ran, ``library`` (the hash) or ``unbuilt`` (what the compiler said).
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import resource
import sys
import time
from typing import Any

from mutation.trial import NO_CASE

#: Address space: a mutant may ask for any amount of memory.
_MOST_BYTES = 24 << 30


def main(spec: dict[str, Any]) -> dict[str, Any]:
    """Run the checks; see above."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if "limit" in spec:
        limit = math.ceil(spec["limit"])
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    found: dict[str, Any] = {}
    if "library" in spec:
        found |= _library()
        if "unbuilt" in found or found["library"] == spec["library"]:
            return found
    for name in spec.get("imports", ()):
        importlib.import_module(name)
    return found | _run_kit(spec)


def _library() -> dict[str, str]:
    from evener_backend_cpu import isa, native_library

    built = native_library.load(isa.usable())
    if isinstance(built, native_library.Native):
        return {"library": hashlib.sha256(built.path.read_bytes()).hexdigest()}
    return {"unbuilt": built.reason}


def _run_kit(spec: dict[str, Any]) -> dict[str, Any]:
    from evener_conformance.kit.checklist import Checklist, CheckRequest
    from evener_conformance.kit.outcome import REQUIRED
    from evener_conformance.kit.subject import open_subject

    request = CheckRequest(spec["seed"], dtypes=tuple(spec.get("dtypes", ())))
    checks = Checklist(open_subject(spec["backend"]), request).checks
    if spec.get("list"):
        return {"checks": [check.name for check in checks]}
    first, only = set(spec.get("first", ())), spec.get("only")
    ordered = sorted(checks, key=lambda check: not check.names & first)  # stable
    if only is not None:
        wanted = {name: index for index, name in enumerate(only)}
        places = [min((wanted[n] for n in {c.name, *c.names} & wanted.keys()), default=-1) for c in checks]
        numbered = zip(places, checks, strict=True)
        ordered = [c for place, c in sorted(numbered, key=lambda each: each[0]) if place >= 0]
    passed, seconds, wrong = 0, dict[str, float](), ""
    for check in ordered:
        print(check.name, file=sys.stderr, flush=True)
        start = time.monotonic()
        for case in check.run():
            passed += case.outcome == "passed"
            if case.outcome == "failed" or (case.outcome == "unknown" and case.area in REQUIRED):
                wrong = f"{check.name}: {case.case}: {case.detail}"
                break
        seconds[check.name] = round(time.monotonic() - start, 2)
        if wrong:
            break
    if not passed and not wrong:
        wrong = NO_CASE
    return {"wrong": wrong, "seconds": seconds}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))

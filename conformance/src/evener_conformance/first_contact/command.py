"""``evener first-contact``: what a person with the hardware runs, once."""

from __future__ import annotations

import secrets
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path

from evener.cli.command import Command
from evener.errors import ConfigError
from evener_conformance.command import package_options
from evener_conformance.core_version import check_core_version
from evener_conformance.first_contact.evidence_file import write
from evener_conformance.first_contact.journal import journal_seed
from evener_conformance.first_contact.parts import PARTS
from evener_conformance.first_contact.run import ContactRequest, first_contact


def command() -> Command:
    """The command's options."""
    summary = "Try a backend on its hardware, part by part, and write one evidence file (docs/first-contact.md)."
    found = Command("first-contact", summary, False, "--backend NAME [package.key=value ...]")
    found.option("--backend", metavar="NAME", help="the backend to try", required=True)
    found.option("--out", metavar="FILE", help="the evidence file; default: evidence-BACKEND-DATE.json in this folder")
    found.option("--pretend", action="store_true", help="without the hardware, as `evener conformance --pretend`")
    found.option("--part", action="append", default=[], metavar="NAME",
                 help=f"only this part; may be repeated: {', '.join(each.name for each in PARTS)}")  # fmt: skip
    found.option("--limit", type=float, default=600.0, metavar="SECONDS",
                 help="end a part's process when one check takes longer (default: 600)")  # fmt: skip
    found.option("--jobs", type=int, default=1, metavar="N",
                 help="check kernels in N processes at a time, all on the same device (default: 1)")  # fmt: skip
    found.option("--resume", action="store_true",
                 help="go on with an interrupted run of the same --out: keep what ended")  # fmt: skip
    found.option("--seed", type=int, help="seed of the random inputs; default: a new one")
    return found


def main(argv: list[str]) -> int:
    """Run the parts and write the file. 0 if the run shows a level of evidence, 1 if not."""
    arguments, words = command().parse(argv)
    check_core_version()
    if not arguments.limit > 0:
        raise ConfigError(f"--limit {arguments.limit:g}: it takes a number of seconds above 0")
    if arguments.jobs < 1:
        raise ConfigError(f"--jobs {arguments.jobs}: it takes a number of processes from 1 on")
    date = datetime.now(timezone.utc).date().isoformat()
    out = Path(arguments.out or f"evidence-{arguments.backend}-{date}.json")
    if not out.resolve().parent.is_dir():
        raise ConfigError(f"--out {out}: the folder {out.parent} does not exist")
    seed = arguments.seed
    if seed is None:
        seed = journal_seed(out) if arguments.resume else secrets.randbelow(2**31)
    request = ContactRequest(
        arguments.backend, arguments.pretend, package_options(words), frozenset(arguments.part), arguments.limit, seed,
        arguments.jobs, out, arguments.resume, shlex.join(["evener", "first-contact", *argv]),
    )  # fmt: skip
    evidence = first_contact(request, lambda text: print(text, end="", file=sys.stderr, flush=True))
    write(out, evidence)
    reached = f"level {evidence.level}" if evidence.level else "no level of evidence: a part failed or was not run"
    print(f"{out}: {reached}. Its texts have no paths, names of users or hosts, or addresses; read it, then send it to "
          "the backend's author, or type: evener evidence add " + shlex.quote(str(out)))  # fmt: skip
    return 0 if evidence.level else 1

"""``make test-peers``: drive ``evener serve`` with programs of others, and write what came of it into ``docs/results``.

    python scripts/run_peers.py                      # vLLM's own tests of the HTTP API, then the clients
    python scripts/run_peers.py vllm --only chat     # those whose id has "chat"; nothing is written
    python scripts/run_peers.py vllm --again chat    # those, in place of what the last run says of them
    python scripts/run_peers.py vllm --judge     # judge the last run again, after a change of the reviewed list
    python scripts/run_peers.py clients
    python scripts/run_peers.py deploy       # `evener deploy` on Ray Serve, and routers; not part of the whole
    python scripts/run_peers.py operators    # Prometheus and systemd (apt-get install prometheus systemd); not either

The exit code is 1 if a test of vLLM fails for a reason that nobody has judged, if a judgement is out of date, or if a
client fails.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from model_sources import SOURCES, models_root, problem
from peer_results import (
    LEFT_OUT,
    Record,
    deploy_page,
    judge,
    page,
    read_records,
    read_reviewed,
    shortened,
    write_records,
)
from peer_sources import ROOT, TESTS, VLLM, PeerError, Places, install, install_deploy, install_grafana

# At the end: this folder has a module named like one of Python's own, profile.
sys.path.append(str(ROOT / "benchmarks"))

from machine import cpu_name

RESULTS = ROOT / "docs/results"
TEST_RECORDS = RESULTS / "peers-vllm-tests.jsonl"
CLIENT_RECORDS = RESULTS / "peers-clients.jsonl"
DEPLOY_RECORDS, DEPLOY_PAGE = RESULTS / "peers-deploy.jsonl", RESULTS / "deploy.md"
DEPLOY_TESTS = "tests/peers/test_deploy.py"
OPERATOR_RECORDS, OPERATOR_TESTS = RESULTS / "peers-operators.jsonl", "tests/peers/test_operators.py"
PAGE = RESULTS / "peers.md"
REVIEWED = ROOT / "tests/peers/vllm_reviewed.yaml"
#: Seconds that one test of vLLM may take.
_LIMIT = 600
_INI = "[pytest]\nasyncio_default_fixture_loop_scope = function\naddopts = --import-mode=prepend\n"


def main(argv: Sequence[str]) -> int:
    """Run what was asked for; 0 if everything is as it was judged."""
    parser = argparse.ArgumentParser(description="Drive evener serve with programs of others.")
    choices = ("vllm", "clients", "deploy", "operators")
    parser.add_argument("what", nargs="?", choices=choices, help="default: the first two")
    parser.add_argument("--only", metavar="TEXT", help="with 'vllm': tests with this in their id; nothing is written")
    parser.add_argument("--judge", action="store_true", help="with 'vllm': judge the last run of all of them again")
    parser.add_argument("--again", metavar="TEXT", help="with 'vllm': run these again, and judge all as the last run")
    options = parser.parse_args(argv)
    special = sum(map(bool, (options.only, options.again, options.judge)))
    if special and (options.what != "vllm" or special > 1):
        parser.error("--only, --again and --judge are about vLLM's tests; type for example: vllm --only TEXT")
    places = Places.default()
    model, larger = (models_root() / SOURCES[name].name for name in ("smollm2", "qwen2.5"))
    for name in ("smollm2",) if options.what in ("deploy", "operators") else ("smollm2", "qwen2.5"):
        if (reason := problem(SOURCES[name], models_root())) is not None:
            parser.error(f"{models_root() / SOURCES[name].name}: {reason}; run 'make models ONLY={name}'")
    try:
        if options.what == "deploy":
            install_deploy(places)
            return run_deploy(model)
        if options.what == "operators":
            install_grafana(places)
            return run_clients(model, OPERATOR_RECORDS, OPERATOR_TESTS, argument=options.what)
        install(places)
        failed = _drive(options, places, model, larger)
    except (PeerError, OSError, subprocess.CalledProcessError) as error:
        print(f"make test-peers: {error}", file=sys.stderr)
        return 1
    if not options.only and TEST_RECORDS.is_file() and CLIENT_RECORDS.is_file():
        PAGE.write_text(page(read_records(TEST_RECORDS), read_records(CLIENT_RECORDS)), "utf-8")
    return 1 if failed else 0


def _drive(options: argparse.Namespace, places: Places, model: Path, larger: Path) -> int:
    """Run and judge what was asked for; the number of problems.

    Raises:
        PeerError: vLLM's tests could not be run, or there is no run to judge.
    """
    problems = 0
    if options.what != "clients":
        whole, some = places.root / "vllm-all.jsonl", places.root / "vllm-some.jsonl"
        report = some if options.only else whole
        if options.judge and not report.is_file():
            raise PeerError(f"{report} is not there: no run to judge; type: python scripts/run_peers.py vllm")
        if options.again:
            run_vllm(places, model, larger, some, options.again)
            merge(whole, some)
        elif not options.judge:
            run_vllm(places, model, larger, report, options.only)
        problems += judge_vllm(report, model, larger, complete=not options.only)
    if options.what != "vllm":
        problems += run_clients(model)
    return problems


def run_vllm(places: Places, model: Path, larger: Path, report: Path, only: str | None) -> None:
    """Run vLLM's tests; ``report`` gets a line for each.

    Raises:
        PeerError: pytest could not run them to the end.
    """
    (places.vllm / "pytest.ini").write_text(_INI, "utf-8")
    # The stand-ins of vLLM's modules; the server finds its own packages as this process does.
    paths = [str(ROOT / "tests/peers"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "passive"}
    command = [str(places.python), "-m", "pytest", "-c", "pytest.ini", "--rootdir", ".", "-p", "vllm_peer.plugin"]
    command += [f"--peer-evener={Path(sys.executable).with_name('evener')}", f"--peer-model={model}"]
    command += [f"--peer-larger={larger}", f"--peer-report={report}", f"--timeout={_LIMIT}"]
    command += ["--continue-on-collection-errors", "-p", "no:cacheprovider", "--tb=no", "-q", "--disable-warnings"]
    command += ["-r", "N", TESTS, *(["-k", only] if only else [])]
    # 1: tests failed, which they do. Why stands in the report.
    if (code := subprocess.run(command, cwd=places.vllm, env=environ).returncode) not in (0, 1):
        report.unlink(missing_ok=True)
        raise PeerError(f"vLLM's tests were not run to the end: pytest's exit status is {code}")


def merge(whole: Path, some: Path) -> None:
    """Put what ``some`` says of the tests that ran into ``whole``, in place of what that says of them."""
    new = read_records(some)
    ran = {each["test"] for each in new if each["outcome"] != LEFT_OUT}
    old = [each for each in read_records(whole) if each["test"] not in ran] if whole.is_file() else []
    known = {each["test"] for each in old}
    write_records(whole, old + [each for each in new if each["test"] not in known], {})


def judge_vllm(report: Path, model: Path, larger: Path, complete: bool) -> int:
    """Judge what ``report`` says, and write the records of a complete run without problems; the number of problems:
    failures that nobody has judged, and judgements that are out of date."""
    read = read_records(report)
    left_out = [each["test"] for each in read if each["outcome"] == LEFT_OUT]
    seen = [
        each | {"message": _without_folders(each["message"], report, model)}
        for each in read
        if each["outcome"] != LEFT_OUT
    ]
    records, problems = judge(seen, read_reviewed(REVIEWED))
    if not complete:
        problems = [each for each in problems if each.startswith("not judged")]
        for record in records:
            print(f"{record['outcome']:16} {record['test']}  {record.get('what', '')}")
    elif left_out:
        problems.append(f"{len(left_out)} tests have not run yet, the first is {left_out[0]}")
    counts = Counter(record["outcome"] for record in records)
    print(f"vLLM {VLLM}: {', '.join(f'{count} {outcome}' for outcome, count in counts.most_common())}")
    for each in problems:
        print(each)
    if complete and not problems:
        models = f"{model.name}, or {larger.name} for Qwen's, zephyr and gpt-oss,"
        common = {"peer": f"vLLM {VLLM}", "model": models, **_where(), "command": "make test-peers"}
        write_records(TEST_RECORDS, shortened(records), common)
    return len(problems)


def run_deploy(model: Path) -> int:
    """The tests of several servers behind one address, and the page of them; 1 if any failed."""
    failed = run_clients(model, DEPLOY_RECORDS, DEPLOY_TESTS, argument="deploy")
    if not failed:
        DEPLOY_PAGE.write_text(deploy_page(read_records(DEPLOY_RECORDS)), "utf-8")
    return failed


def run_clients(model: Path, records: Path = CLIENT_RECORDS, *tests: str, argument: str = "") -> int:
    """The tests marked ``peers``, ``tests`` or all but those with an argument of their own; pytest's exit status."""
    chosen = tests or ("tests/peers", *(f"--ignore={other}" for other in (DEPLOY_TESTS, OPERATOR_TESTS)))
    what = "make test-peers" + (f" ARGS={argument}" if argument else "")
    with tempfile.TemporaryDirectory() as temp:
        report = Path(temp) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "peers", "-q", *chosen]
        # The older form has the tests' properties.
        done = subprocess.run([*command, f"--junitxml={report}", "-o", "junit_family=xunit1"], cwd=ROOT)
        if done.returncode == 0:
            common = {"model": model.name, **_where(), "command": what}
            write_records(records, client_records(report), common)
    return done.returncode


def client_records(report: Path) -> list[Record]:
    """What pytest's XML says of each client: its name and what it does, from the test's properties, and the outcome."""
    records = []
    for case in ElementTree.parse(report).iter("testcase"):
        words = {each.get("name"): each.get("value") for each in case.iter("property")}
        expected = case.find("skipped")
        outcome = "passed" if expected is None else str(expected.get("message"))
        figures = {"figures": words["figures"]} if "figures" in words else {}
        records.append({"client": words["client"], "what": words["what"], "outcome": outcome, **figures})
    return records


def _without_folders(message: str, report: Path, model: Path) -> str:
    """An error as it would be on any machine."""
    for folder, name in (model.parent, "MODELS"), (report.parent, "PEERS"), (Path.home(), "~"):
        message = message.replace(str(folder), name)
    return message


def _where() -> Record:
    return {"device": f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores", "date": datetime.date.today().isoformat()}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

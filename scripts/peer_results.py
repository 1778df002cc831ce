"""What came of the tests and clients of others: each outcome judged, its record, and the page that sums them up.

A test of vLLM that does not pass here is *missing* a feature, *different* on purpose or for a reason outside evener, or
about vLLM's own Python code. Which of them, and why, stands in ``tests/peers/vllm_reviewed.yaml``, unless the test says
so itself: its server needs a feature that is not there, or it called vLLM's code.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

PASSED, MISSING, DIFFERENT, NOT_RUN, OWN = "passed", "missing", "different", "not run", "vLLM's own code"
#: A test that a run of some left out.
LEFT_OUT = "left out"
OUTCOMES = (PASSED, MISSING, DIFFERENT, NOT_RUN, OWN)
_SHOWN = 300

Seen = Mapping[str, Any]
Record = dict[str, Any]


@dataclass(frozen=True)
class Reviewed:
    """Why some tests do not pass, as a person has judged.

    Attributes:
        outcome: MISSING, DIFFERENT, NOT_RUN or OWN.
        what: the feature, or the difference in a few words.
        why: the reason for a difference.
        tests: matches the whole id of each of these tests.
        error: found in the error of each; None: they pass, but only because every such request is refused.
        may_pass: on a machine that is fast enough.
    """

    outcome: str
    what: str
    why: str
    tests: re.Pattern[str]
    error: re.Pattern[str] | None
    may_pass: bool = False

    def covers(self, seen: Seen) -> bool:
        """Whether this is about what was seen."""
        if not self.tests.fullmatch(seen["test"]):
            return False
        if self.error is None:
            return bool(seen["outcome"] == "passed")
        return seen["outcome"] == "failed" and self.error.search(seen["message"]) is not None


def read_reviewed(path: Path) -> list[Reviewed]:
    """The list of ``path``.

    Raises:
        ValueError: an entry has a key too few or too many.
    """
    found = []
    for number, entry in enumerate(cast("list[dict[str, Any]]", OmegaConf.to_container(OmegaConf.load(path))), start=1):
        outcome = next((each for each in OUTCOMES if each in entry and each != PASSED), None)
        known = {outcome, "tests", "error", "passes", "may pass"} | ({"why"} if outcome == DIFFERENT else set())
        needed = known - {"error", "passes", "may pass"}
        if outcome is None or not needed <= entry.keys() <= known or ("error" in entry) == ("passes" in entry):
            raise ValueError(
                f"{path.name}: entry {number} has the keys {sorted(entry)}; it needs 'tests', one of {MISSING!r},"
                f" {DIFFERENT!r} (with 'why'), {NOT_RUN!r} and \"{OWN}\", and either 'error' or 'passes: true'"
            )
        tests = "|".join(f"(?:{each})" for each in entry["tests"])
        error = re.compile(entry["error"]) if "error" in entry else None
        fast = bool(entry.get("may pass", False))
        found.append(Reviewed(outcome, entry[outcome], entry.get("why", ""), re.compile(tests), error, fast))
    return found


def judge(seen: Iterable[Seen], reviewed: Sequence[Reviewed]) -> tuple[list[Record], list[str]]:
    """A record of each test, and what a person has to look at: failures that nobody has judged, and judgements that
    nothing bears out any more."""
    records, problems, used = [], [], set()
    for each in seen:
        entry = next((entry for entry in reviewed if entry.covers(each)), None)
        used.add(entry)
        record = _judged(each, entry)
        if record is None:
            problems.append(f"not judged yet: {each['test']}: {each['message'][:_SHOWN]}")
        else:
            records.append(record)
    lacking = {record["what"] for record in records if record["outcome"] == MISSING and "seen" in record}
    for entry in reviewed:
        if entry not in used and not entry.may_pass:
            problems.append(f"covers nothing any more: {entry.what}: {entry.tests.pattern}")
        elif entry in used and entry.error is None and entry.what not in lacking:
            problems.append(f"no longer missing, so these tests do pass: {entry.what}: {entry.tests.pattern}")
    return records, problems


def _judged(seen: Seen, entry: Reviewed | None) -> Record | None:
    test, message = seen["test"], seen["message"].strip()
    if seen["outcome"] == "skipped" and not seen["called"] and not seen["missing"]:
        return {"test": test, "outcome": NOT_RUN, "what": message.removeprefix("Skipped: ")}
    if entry is not None and entry.outcome == OWN:
        return {"test": test, "outcome": OWN}
    if entry is not None:
        record = {"test": test, "outcome": entry.outcome, "what": entry.what}
        record |= {"why": entry.why} if entry.why else {}
        return record | ({"seen": message[:_SHOWN]} if entry.error else {"why": "passes because all are refused"})
    if seen["missing"]:
        return {"test": test, "outcome": MISSING, "what": seen["missing"], "seen": "its server needs it"}
    if seen["called"] or (seen["outcome"] == "passed" and not seen["served"]):
        return {"test": test, "outcome": OWN}
    return {"test": test, "outcome": PASSED} if seen["outcome"] == "passed" else None


def shortened(records: Iterable[Record]) -> list[Record]:
    """One record a file in place of those of tests of vLLM's own code."""
    kept = [record for record in records if record["outcome"] != OWN]
    own = Counter(_file(record) for record in records if record["outcome"] == OWN)
    return kept + [{"test": file, "outcome": OWN, "tests": count} for file, count in sorted(own.items())]


def page(tests: Sequence[Record], clients: Sequence[Record]) -> str:
    """The page of both, in Markdown."""
    total: Counter[str] = Counter()
    files: dict[str, Counter[str]] = {}
    for record in tests:
        count = record.get("tests", 1)
        total[record["outcome"]] += count
        files.setdefault(_file(record), Counter())[record["outcome"]] += count
    first = tests[0]
    able = total[PASSED] + total[MISSING] + total[DIFFERENT]
    return "\n".join(
        [
            "# Tests and clients of others",
            "",
            "`make test-peers` writes this page: it runs programs of others against `evener serve` with a small model.",
            "",
            "## Clients",
            "",
            *_table(
                ("client", "what it does", "outcome"),
                ((record["client"], record["what"], record["outcome"]) for record in clients),
            ),
            "",
            f"## Tests of {first['peer']}",
            "",
            f"Its own tests of the HTTP API, unchanged, with {first['model']} under the name of each test's model, on"
            f" {first['date']}. A failed test is counted as missing or different only if [a reviewed"
            " list](../../tests/peers/vllm_reviewed.yaml) has it with its error; any other failure fails the command.",
            "",
            "These models were not trained to call tools or to reason. Where a test's server has parsers, the chat"
            " template shows the model [examples](../../tests/peers/vllm_peer/template.jinja) of both, and calls have"
            " the form that it copies from them (Llama 3's), whatever parser the test names. Under gpt-oss' name the"
            " examples and the answers have [that model's format](../../tests/peers/vllm_peer/harmony.jinja), harmony.",
            "",
            *_table(("outcome", "tests"), ((outcome, str(total[outcome])) for outcome in OUTCOMES)),
            "",
            f"Of the {able} tests that are about a server and can run here, {total[PASSED] / able:.0%} pass.",
            "",
            "- **missing**: evener does not have this feature.",
            "- **different**: evener does it otherwise, or the test depends on its model.",
            "- **not run**: the test needs something that is not here, such as a GPU; its record says what.",
            "- **vLLM's own code**: the test calls vLLM's Python classes and is not about a server.",
            "",
            "### By file",
            "",
            "Files with nothing but tests of vLLM's own code are left out.",
            "",
            *_table(
                ("file", *OUTCOMES),
                (
                    (f"`{file}`", *(str(counts[outcome] or "") for outcome in OUTCOMES))
                    for file, counts in sorted(files.items())
                    if set(counts) != {OWN}
                ),
            ),
            "",
            "### Missing features",
            "",
            *_table(("feature", "tests"), _counted(tests, MISSING, "what")),
            "",
            "### Differences",
            "",
            *_table(("difference", "why", "tests"), _counted(tests, DIFFERENT, "what", "why")),
            "",
        ]
    )


def deploy_page(records: Sequence[Record]) -> str:
    """The page about several servers behind one address, from the records of its tests."""
    first = records[0]
    names = ("client", "what", "outcome", "figures")
    rows = [tuple(str(each.get(name, "")) for name in names) for each in records]
    return "\n".join([
        "# Several servers behind one address", "",
        f"Written by `{first['command']}` from [peers-deploy.jsonl](peers-deploy.jsonl): {first['date']}, "
        f"{first['device']}, {first['model']} in each server. [deploy.md](../deploy.md) says how to do the same.", "",
        *_table(("program", "what it does", "outcome", "figures"), rows), "",
    ])  # fmt: skip


def read_records(path: Path) -> list[Record]:
    """The records of a file, one a line."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def write_records(path: Path, records: Iterable[Record], common: Record) -> None:
    """Write records, each with what they have in common."""
    lines = [json.dumps(record | common, ensure_ascii=False) + "\n" for record in records]
    path.write_text("".join(lines), "utf-8")


def _file(record: Record) -> str:
    return str(record["test"]).partition("::")[0].removeprefix("tests/entrypoints/")


def _counted(records: Iterable[Record], outcome: str, *keys: str) -> list[tuple[str, ...]]:
    counts = Counter(tuple(record[key] for key in keys) for record in records if record["outcome"] == outcome)
    return [(*words, str(count)) for words, count in counts.most_common()]


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    cells = [head, ("---",) * len(head), *rows]
    return [f"| {' | '.join(row)} |" for row in cells]

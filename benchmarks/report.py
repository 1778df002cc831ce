"""A page about runs of ``serving.py``: plots, tables, what changed since another run. One HTML file, nothing else.

    python benchmarks/report.py sweep.jsonl --out report.html
    python benchmarks/report.py after.jsonl --compare before.jsonl --answers after.csv before.csv --out report.html

``sweep.jsonl`` is what ``--out-json`` wrote, a CSV file what ``--output-csv`` wrote. ``serving.py --report FILE`` makes
the same page of its own run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any

import after_stdlib  # noqa: F401
from compare import Change, Difference, changes, differences, load_of, read_answers, read_rows
from serving_metrics import METRICS

_NAMES = {"ttft": "time to the first token", "tpot": "time for each later token", "itl": "time between events",
          "e2el": "time of the whole answer"}  # fmt: skip
_SHOWN = 20
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #1a7f37; --bad: #b3261e }
@media (prefers-color-scheme: dark) { :root { --good: #57d98a; --bad: #ff8a80 } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem; margin-bottom: 0 } h2 { font-size: 1.15rem; margin-top: 2.2rem }
figure { margin: 1rem 0; background: #fff; border-radius: 8px; padding: .5rem; overflow-x: auto }
figure svg { display: block; width: 100%; min-width: 44rem; height: auto }
.wide { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
td.text { text-align: left; white-space: pre-wrap; max-width: 28rem }
.good { color: var(--good) } .bad { color: var(--bad) } .note { opacity: .75 }
"""


def page(
    rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any], changed: Sequence[Change] = (),
    answers: tuple[int, Sequence[Difference]] | None = None,
) -> str:  # fmt: skip
    """The page of these rows.

    Args:
        rows: of ``serving.py``.
        about: the machine and the model.
        changed: since another run.
        answers: how many were compared with another run's, and those that differ.
    """
    parts = [_head(about), _plots(rows), _rates(rows), _times(rows)]
    if changed:
        parts.append(_changes(changed))
    if answers is not None:
        parts.append(_answers(*answers))
    title = escape(f"Serving {about.get('model') or ''}".strip())
    return (f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<meta name="viewport" content="width='
            f'device-width">\n<title>{title}</title>\n<style>{_STYLE}</style>\n<h1>{title}</h1>\n'
            + "\n".join(parts) + "\n</html>\n")  # fmt: skip


def _head(about: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in (about.get("versions") or {}).items())
    facts = [f"{about.get('cpu')}, {about.get('cores')} cores", about.get("system"), versions, about.get("when")]
    return f'<p class="note">{escape("; ".join(str(fact) for fact in facts if fact))}</p>'


def _plots(rows: Sequence[Mapping[str, Any]]) -> str:
    from plot import sweep

    file = StringIO()
    sweep([dict(row) for row in rows], file)
    # Without the declaration of an XML file of its own.
    _, begin, picture = file.getvalue().partition("<svg")
    return f"<h2>Over the load</h2>\n<figure>{begin}{picture}</figure>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML."""
    lines = ["<tr>" + "".join(f"<th>{name}</th>" for name in head)]
    lines += ["<tr>" + "".join(cell if cell.startswith("<td") else f"<td>{cell}</td>" for cell in row) for row in rows]
    return '<div class="wide"><table>\n' + "\n".join(lines) + "\n</table></div>"


def _where(row: Mapping[str, Any]) -> str:
    return escape(f"{row['engine']}, {load_of(row)}")


def _rates(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ["", "requests", "failed", "requests/s", "output tokens/s", "tokens/s", "good requests/s", "others' cores"]
    found = [
        [
            _where(row), f"{row['completed']}", f"{row['failed']}", f"{row['request_throughput']:.2f}",
            f"{row['output_throughput']:.1f}", f"{row['total_token_throughput']:.1f}",
            f"{row['goodput']:.2f}" if "goodput" in row else "", ", ".join(f"{x:g}" for x in row["others_cores"]),
        ]
        for row in rows
    ]  # fmt: skip
    return "<h2>Rates</h2>\n" + _table(head, found)


def _times(rows: Sequence[Mapping[str, Any]]) -> str:
    parts = ["<h2>Times in milliseconds</h2>"]
    for metric in METRICS:
        end = f"_{metric}_ms"
        kinds = list(dict.fromkeys(key.removesuffix(end) for row in rows for key in row if key.endswith(end)))
        if kinds:
            found = [[_where(row), *(f"{row[k + end]:.1f}" if k + end in row else "" for k in kinds)] for row in rows]
            parts.append(f"<h3>{_NAMES[metric]}</h3>\n" + _table(["", *kinds], found))
    return "\n".join(parts)


def _changes(changed: Sequence[Change]) -> str:
    rows = [
        [
            escape(each.point), each.unit, f"{each.was:.2f}", f"{each.now:.2f}",
            f'<td class="{"good" if each.part >= 0 else "bad"}">{each.part:+.1%}</td>',
        ]
        for each in changed
    ]  # fmt: skip
    return "<h2>Since the other run</h2>\n" + _table(["", "figure", "was", "is", "better by"], rows)


def _answers(both: int, found: Sequence[Difference]) -> str:
    text = f"<h2>Answers</h2>\n<p>{both - len(found)} of {both} answers are equal to those of the other run.</p>"
    if not found:
        return text
    rows = [
        [f'<td class="text">{escape(cell[:400])}</td>' for cell in (each.prompt, each.was, each.now)] + [str(each.same)]
        for each in found[:_SHOWN]
    ]
    return text + "\n" + _table(["prompt", "was", "is", "equal characters"], rows)


def main(argv: list[str]) -> int:
    """Write the page."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("run", type=Path, help="JSON lines of serving.py --out-json")
    made.add_argument("--compare", type=Path, metavar="FILE", help="the same of another run")
    made.add_argument("--answers", type=Path, nargs=2, metavar="FILE", help="--output-csv of the run, and of the other")
    made.add_argument("--out", type=Path, required=True, metavar="FILE", help="the page")
    args = made.parse_args(argv)
    rows = read_rows(args.run)
    changed = changes(rows, read_rows(args.compare)) if args.compare else []
    answers = differences(*map(read_answers, args.answers)) if args.answers else None
    args.out.write_text(page(rows, rows[0], changed, answers), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Pages are complete where they must be, and claims come with their results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from docs_blocks import DOCS
from performance_page import COMPARISON, DEVICES, PAGE, RESULTS, device_records, records, table, with_tables

from evener import errors

_CHECK = {"subject", "check", "outcome", "device", "software", "date", "command"}


def test_every_error_class_has_a_place_in_troubleshooting() -> None:
    text = (DOCS / "troubleshooting.md").read_text("utf-8")
    shown = {name for heading in re.findall(r"^### (.+)$", text, re.MULTILINE) for name in heading.split(", ")}
    classes = {name for name, value in vars(errors).items()
               if isinstance(value, type) and issubclass(value, errors.EvenerError)}  # fmt: skip
    assert shown == classes


def test_the_operators_pages_lead_to_each_other() -> None:
    guide = (DOCS / "operator.md").read_text("utf-8")
    for name in ("serving", "configuration", "troubleshooting", "from-other-engines", "performance"):
        assert f"({name}.md)" in guide


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.jsonl")), ids=lambda path: path.stem)
def test_each_result_says_what_was_measured_where_when_and_by_which_command(path: Path) -> None:
    for line in path.read_text("utf-8").splitlines():
        record = json.loads(line)
        if path.name.startswith("support-"):
            assert record.keys() >= _CHECK
        elif path.parent == RESULTS:
            assert record.keys() >= {"device", "model", "date", "command"}
            assert "theirs" not in record or record.keys() >= set(COMPARISON)


def test_a_ratio_says_how_many_times_as_fast_we_are_whatever_the_unit() -> None:
    for name, unit, floor in (("h200", "ms", True), ("cpu-zen5", "tokens/s", False)):
        record, row = records(name)[0], table(name).splitlines()[2]
        ours, theirs = record["ours"], record["theirs"]
        times = theirs / ours if unit == "ms" else ours / theirs
        assert record["unit"] == unit and times > 1
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[0] == record["model"] and cells[2].endswith(unit) and f"{theirs:g}" in cells[3], row
        assert float(cells[4]) == pytest.approx(times, abs=0.006), row
        assert cells[5] == (f"{record['floor'] / ours:.0%}" if floor else ""), row


def test_the_performance_page_has_one_table_for_each_device_and_begins_with_them() -> None:
    found = re.findall(r"<!-- table: (\S+) -->", PAGE.read_text("utf-8"))
    assert found[: len(DEVICES)] == list(DEVICES) and not set(found[len(DEVICES) :]) & set(DEVICES)


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_s_table_comes_after_at_most_two_sentences(name: str) -> None:
    section = PAGE.read_text("utf-8").partition(f"<!-- table: {name} -->")[0].rpartition("\n## ")[2]
    prose = " ".join(section.splitlines()[1:])
    assert 0 < len(re.findall(r"[.:!?](?= |$)", prose.strip())) <= 2, prose


def test_each_comparison_of_a_device_s_files_is_in_one_table_and_rows_of_a_model_are_together() -> None:
    files = {file for device in DEVICES.values() for file in device.files}
    shown = [json.dumps(row) for name in DEVICES for row in device_records(name)]
    assert sorted(shown) == sorted(json.dumps(row) for file in files for row in records(file) if "page" not in row)
    for name in DEVICES:
        models = [row["model"] for row in device_records(name)]
        assert len(set(models)) == sum(a != b for a, b in zip(models, [None, *models], strict=False)), name


def test_a_table_of_the_performance_page_without_an_end_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"add <!-- end --> behind each"):
        with_tables(PAGE.read_text("utf-8") + "<!-- table: h200 -->\n")


def test_cells_of_the_support_page_are_short_and_each_claim_leads_to_its_results() -> None:
    for line in (DOCS / "support.md").read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("| ") else []
        assert all(len(cell.split()) <= 25 for cell in cells), line
        if any(re.fullmatch(r"\d{4}-\d\d-\d\d", cell) for cell in cells):
            assert "](results/" in cells[-1], line


def test_cells_of_the_features_page_are_short() -> None:
    cells = [
        cell
        for line in (DOCS / "features.md").read_text("utf-8").splitlines()
        if line.startswith("| ")
        for cell in line.split("|")
    ]
    assert [cell for cell in cells if len(cell.split()) > 25] == []

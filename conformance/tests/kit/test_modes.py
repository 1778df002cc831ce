"""The other modes of ``evener conformance``: what is served, and how long kernels take."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from evener_conformance.command import main


def asked(mode: str, folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, dict[str, Any]]:
    """The command's output and its result file."""
    file = folder / "result.json"
    given = ["--backend", "cpu", "--mode", mode, "--op", "rms_norm", "--seed", "3", "--json", str(file), *words]
    assert main(given) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    assert found["mode"] == mode
    return capsys.readouterr().out, found


def test_support_says_in_which_types_an_op_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, found = asked("support", tmp_path, capsys)
    heading, row = (next(line for line in out.splitlines() if line.startswith(word)) for word in ("op ", "rms_norm "))
    types = sorted({c["dtype"] for c in found["cases"]} - {""})
    assert heading.split() == ["op", "provider", *types, "why", "not"] and {"float32", "bfloat16"} <= set(types)
    cases = [c for c in found["cases"] if c["dtype"] == "float32"]
    assert cases and f"{len(cases)} of {len(cases)}" in row


def test_perf_times_a_kernel_beside_the_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, found = asked("perf", tmp_path, capsys, "--dtype", "float32")
    assert [re.match(r"\d+ rows", c["case"])[0] for c in found["cases"]] == ["1 rows", "16 rows", "129 rows"]  # type: ignore[index]
    for case in found["cases"]:
        assert re.fullmatch(r"[\d.]+ us, the reference [\d.]+ us: [\d.]+ times as fast", case["detail"])
        assert case["outcome"] == "passed" and case["case"].split()[0] in out

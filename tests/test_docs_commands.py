"""The commands that ``docs/from-other-engines.md`` gives for those of other projects: each does what its row says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from docs_blocks import DOCS
from served import Served, eventually
from source_tree import ROOT
from warm import warm

pytestmark = pytest.mark.model
PAGE = DOCS / "from-other-engines.md"
PORT = "21002"
WORDS = {"runs", "serves", "client", "make", "parsed", "tested", "nothing", "not yet"}
_ROW = re.compile(r"^\| (?P<there>.+?) \| (?P<here>.*?) ?\| (?P<known>[^|]+) \|$", re.MULTILINE)
_CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Row:
    """One row: the command there, the command here, and the proof."""

    there: str
    here: str
    known: str

    @property
    def word(self) -> str:
        """The first of the page's words that ``known`` begins with; empty if none."""
        return next((word for word in WORDS if re.match(rf"{word}\b", self.known)), "")

    @property
    def command(self) -> str:
        """The command here."""
        found = _CODE.search(self.here)
        return found[1] if found else ""

    def __str__(self) -> str:
        return self.command or self.there[:60]


ROWS = [
    Row(**match.groupdict())
    for match in _ROW.finditer(PAGE.read_text("utf-8").split("\n## chitu\n")[1])
    if match["there"] not in ("there", "---")
]


def rows(*words: str) -> list[Row]:
    return [row for row in ROWS if row.word in words]


def test_every_row_says_how_its_command_is_known() -> None:
    assert len(ROWS) > 60
    for row in ROWS:
        assert row.word, f"{row.there}: {row.known!r} begins with none of {WORDS}"
        assert bool(row.command) >= (row.word in ("runs", "serves", "client", "make", "parsed")), row
        if row.word == "tested":
            assert (ROOT / row.known.partition("`")[2].rstrip("`")).is_file(), row
        if row.word == "not yet":
            assert not row.here and row.known != "not yet", f"{row.there}: say which topic, and no command"


@pytest.fixture
def folder(tmp_path: Path, smollm2_dir: Path) -> Path:
    """Where commands run: the files that they name are there."""
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    (tmp_path / "data.csv").write_text("prompt\nHow are you?\nWhat is the time?\n")
    (tmp_path / "question.txt").write_text("What is the capital of France?\n")
    (tmp_path / "config.yaml").write_text(f"model: {smollm2_dir}\ninfer.max_seq_len: 1024\nrequest.max_new_tokens: 8\n")
    return tmp_path


def environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("EVENER_", "CONFIG_NAME"))}
    return {**kept, "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}", "NO_PROXY": "127.0.0.1"}


def shell(command: str, model: Path, folder: Path, port: str = PORT) -> subprocess.CompletedProcess[str]:
    text = command.replace("MODEL_DIR", shlex.quote(str(model))).replace(PORT, port)
    mine = environment()
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text], cwd=folder, env={**mine, "PATH": f"{warm()}:{mine['PATH']}"},
        capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("row", [row for row in rows("serves", "runs", "parsed") if " run MODEL_DIR" in row.here
                                 or " serve MODEL_DIR" in row.here], ids=str)  # fmt: skip
def test_the_keys_of_a_command_are_taken(row: Row, smollm2_dir: Path) -> None:
    from evener.config import from_overrides

    words = shlex.split(row.command)
    at = words.index("MODEL_DIR")
    keys = [word for word in words[at + 1 :] if "=" in word and not word.startswith("--")]
    assert from_overrides(str(smollm2_dir), dict(key.split("=", 1) for key in keys))


@pytest.mark.slow
@pytest.mark.parametrize("row", rows("runs"), ids=str)
def test_a_command_runs(row: Row, smollm2_dir: Path, folder: Path) -> None:
    done = shell(row.command, smollm2_dir, folder)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("row", rows("serves"), ids=str)
def test_a_command_serves(row: Row, smollm2_dir: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = row.command.replace("MODEL_DIR", shlex.quote(str(smollm2_dir))).replace(PORT, "0")
    # The same program, also where torch was installed without its scripts.
    text = re.sub(r"^torchrun\b", "python -m torch.distributed.run", text)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", environment()["PATH"])
    with Served("bash", "-c", f"exec {text}") as served:
        assert served.get("/ready").status_code == 200
        served.stop()


@pytest.fixture(scope="module")
def server(smollm2_dir: Path) -> Iterator[Served]:
    with Served.model(smollm2_dir, "infer.max_seq_len=2048", "infer.kv_memory=256MiB") as served:
        yield served
        # Those of a request that has just met its end token return with the step that was under way.
        eventually(lambda: served.stats()["blocks_used"] == 0)


@pytest.mark.slow
@pytest.mark.parametrize("row", rows("client"), ids=str)
def test_a_client_is_answered(row: Row, server: Served, smollm2_dir: Path, folder: Path) -> None:
    done = shell(row.command, smollm2_dir, folder, server.url.rpartition(":")[2])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("target", sorted({row.command for row in rows("make")}))
def test_make_knows_a_target(target: str) -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert any(line.startswith(f"{target} ") for line in done.stdout.splitlines()), done.stdout

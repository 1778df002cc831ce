"""What a command says when memory, the disk or open files run out: one line, and the answer is not lost."""

from __future__ import annotations

import errno
import json
import subprocess
from pathlib import Path

import pytest
from served import EVENER, PATIENCE, tiny_model

from evener.cli.main import main


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def limited(limit: str, *words: str | Path, to: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``evener`` under ``ulimit limit``; its output goes to the file ``to``."""
    command = f'ulimit {limit}; exec "$0" "$@"' + (f" >{to}" if to else "")
    return subprocess.run(
        ["bash", "-c", command, EVENER, *map(str, words)], capture_output=True, text=True, timeout=PATIENCE, check=False
    )


@pytest.mark.parametrize(
    "command", ["version", *(pytest.param(each, marks=pytest.mark.slow) for each in ("doctor", "plugins"))]
)
def test_a_full_disk_under_the_output_is_one_line(command: str) -> None:
    done = limited("-n 1024", command, to="/dev/full")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: OSError: [Errno 28] No space left on device; the disk is full: free space on it"
    ]


@pytest.mark.slow
def test_a_run_takes_less_memory_under_a_limit_of_the_address_space(tiny: Path) -> None:
    words = ("run", tiny, "load=dummy", "--prompt", "hello", "--max-tokens", "2", "--ignore-eos")
    done = limited("-v 4000000", *words, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["completion_tokens"] == 2


def test_too_little_memory_is_one_line_that_says_what_to_do(tiny: Path) -> None:
    done = limited("-v 500000", "run", tiny, "load=dummy", "--prompt", "hello")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "memory ran out: close programs, lift `ulimit -v`" in done.stderr


def test_a_full_disk_loses_no_answer(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: Path, *_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    words = ["run", str(tiny), "load=dummy", f"outputs={tmp_path}", "--prompt", "hello", "--max-tokens", "2", "--json"]
    save = Path.write_text
    monkeypatch.setattr(Path, "write_text", lambda p, *a, **k: (save if p.name == "config.yaml" else full)(p, *a, **k))
    assert main([*words, "--ignore-eos", "infer.max_seq_len=64", "infer.kv_memory=1MiB"]) == 2
    said = capsys.readouterr()
    assert json.loads(said.out)["completion_tokens"] == 2
    assert f"error: outputs={tmp_path} cannot be written: No space left on device; set another folder" in said.err

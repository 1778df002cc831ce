"""Entry points are read once a start: by ``LLM``, by ``evener serve`` in one process and by commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from warm import warm

from evener_conformance.distributions import install_reference_backend
from evener_conformance.reference.engine import small_config
from evener_conformance.tiny_tokenizer import write_tiny_tokenizer

#: Counts searches for distributions that look for entry points; one for a single distribution's version has its name.
COUNTED = """
import atexit, importlib_metadata, logging, os, signal, sys
plain, reads = importlib_metadata.Distribution.discover, []

def discover(**given):
    if "name" not in given:
        reads.append(given)
    return plain(**given)

importlib_metadata.Distribution.discover = discover
atexit.register(lambda: print("reads:", len(reads)))
model = sys.argv[1]
KEYS = {"backend": "reference", "load": "dummy", "dtype": "float32", "infer.max_seq_len": 64, "infer.kv_memory": "1MiB",
        "infer.max_reqs": 2, "infer.step_tokens": 16, "executor": "inline"}
WORDS = [f"{key}={value}" for key, value in KEYS.items()]
"""
PROGRAMS = {
    "LLM": "from evener import LLM\nLLM(model, **KEYS).close()\n",
    "serve": """
class StopWhenServing(logging.Handler):
    def emit(self, record):
        if record.getMessage().startswith("serving "):
            os.kill(os.getpid(), signal.SIGTERM)

from evener.cli.main import main
from evener_server.process import logger
logger.addHandler(StopWhenServing())
assert main(["serve", model, *WORDS, "serve.port=0"]) == 0
""",
    "explain": "from evener.cli.main import main\nassert main(['explain', model, *WORDS]) == 0\n",
    "unknown command": "from evener.cli.main import main\nassert main(['srve']) == 2\n",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's folder, with a tokenizer; the reference backend lies beside it."""
    folder = tmp_path_factory.mktemp("discovery")
    install_reference_backend(folder / "site")
    small_config(folder / "model", changes={"vocab_size": 300})
    write_tiny_tokenizer(folder / "model")
    return folder / "model"


@pytest.mark.parametrize(
    "start", [pytest.param(each, marks=pytest.mark.slow) if each == "LLM" else each for each in PROGRAMS]
)
def test_a_start_reads_entry_points_once(start: str, model: Path) -> None:
    # ``LLM`` in a new Python, where what modules read as they are imported counts, too.
    program = sys.executable if start == "LLM" else warm() / "python"
    path = os.pathsep.join(filter(None, [str(model.parent / "site"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [program, "-c", COUNTED + PROGRAMS[start], str(model)],
        capture_output=True, text=True, check=False, timeout=120, cwd=model.parent,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "reads: 1", done.stdout

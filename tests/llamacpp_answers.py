"""Asking llama.cpp, which has an environment of its own (``make llamacpp``)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def llamacpp(asked: object) -> list[float]:
    """What llama.cpp answers to a question of ``scripts/llamacpp_logprobs.py``."""
    built = Path.home() / ".cache/evener/llamacpp/bin/python"
    python = Path(os.environ.get("EVENER_BENCH_PYTHON_LLAMACPP", built))
    assert python.exists(), f"{python} is missing; run 'make llamacpp'"
    done = subprocess.run(
        [python, ROOT / "scripts/llamacpp_logprobs.py"], input=json.dumps(asked), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer: list[float] = json.loads(done.stdout)
    return answer

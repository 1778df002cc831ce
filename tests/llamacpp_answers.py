"""Asking llama.cpp, which has an environment of its own (``make llamacpp``)."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def llamacpp(asked: object) -> list[float]:
    """What llama.cpp answers to a question of ``scripts/llamacpp_logprobs.py``."""
    answer: list[float] = json.loads(_run("scripts/llamacpp_logprobs.py", json.dumps(asked)))
    return answer


def requantized(source: Path, target: Path, kind: str) -> None:
    """Let llama.cpp write a GGUF file anew in another type, such as "IQ4_NL"."""
    _run("benchmarks/requantize.py", "", str(source), str(target), kind)


def _run(script: str, given: str, *words: str) -> str:
    """What a script prints that llama.cpp's Python runs."""
    built = Path.home() / ".cache/evener/llamacpp/bin/python"
    python = Path(os.environ.get("EVENER_BENCH_PYTHON_LLAMACPP", built))
    assert python.exists(), f"{python} is missing; run 'make llamacpp'"
    done = subprocess.run([python, ROOT / script, *words], input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout

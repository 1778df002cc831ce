"""Perplexity of a model after `evener quantize`, with and without the help of a text.

    python benchmarks/calibrated.py MODEL_DIR --text FILE --work FOLDER [--methods gptq,awq] [--out FILE.jsonl]

Windows and the share of tokens that are scored are as in ``perplexity.py``. What helps is the rest of the text, behind
the part that the windows are taken from. The quantized models stay in ``--work``; those that are there are not made
again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

from machine import cpu_name, record, versions
from perplexity import ours, perplexity, windows_of

#: Characters for one token at most: the windows are within so many times their tokens.
_CHARACTERS = 12


def quantized(model: Path, made: Path, words: list[str]) -> Path:
    """The model after `evener quantize` with these options."""
    if not made.exists():
        subprocess.run([sys.executable, "-m", "evener", "quantize", str(model), str(made), *words], check=True)
    return made


def main() -> int:
    """Print one JSON line a method; 1 if one is not better with the text."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for the quantized models")
    parser.add_argument("--methods", default="gptq,awq")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16384, help="of the text that helps")
    parser.add_argument("--out", type=Path, help="file to which the lines are appended")
    asked = parser.parse_args()
    text, behind = asked.text.read_text("utf-8"), asked.context * asked.windows * _CHARACTERS
    asked.work.mkdir(parents=True, exist_ok=True)
    data = asked.work / "data.txt"
    data.write_text(text[behind:], "utf-8")
    keys = {"dtype": "float32"}

    def of(model: Path) -> float:
        return round(perplexity(ours(model, windows_of(model, text, asked.context, asked.windows), keys)), 4)

    plain, worse = of(asked.model), False
    software = f"Python {platform.python_version()}, torch {versions()['torch']}"
    for method in asked.methods.split(","):
        words = ["--method", method, "--quiet"]
        near = of(quantized(asked.model, asked.work / f"{method}-nearest", [*words, "--nearest"]))
        window = ["--data", str(data), "--tokens", str(asked.tokens), "--window", str(asked.context)]
        helped = of(quantized(asked.model, asked.work / method, [*words, *window]))
        settings = json.loads((asked.work / method / "config.json").read_text())["quantization_config"]
        worse |= not plain < helped < near
        found: dict[str, Any] = {
            "device": cpu_name(), "model": f"{asked.model.resolve().name}, {method} of {settings['bits']} bits in "
            f"groups of {settings['group_size']}", "case": f"{asked.windows} windows of {asked.context} tokens",
            "metric": "perplexity", "unit": "", "better": "lower", "ours": helped, "theirs": near,
            "difference": round(helped / near - 1, 5), "unquantized": plain, "calibration_tokens": asked.tokens,
            "version": f"evener {versions()['evener']}", "peer": "rounding to nearest (--nearest)",
            "text_sha256": hashlib.sha256(text.encode()).hexdigest(), "date": date.today().isoformat(),
            "command": f"python benchmarks/calibrated.py MODEL_DIR --text FILE --work FOLDER --methods {method} "
            f"--context {asked.context} --windows {asked.windows} --tokens {asked.tokens}", "software": software,
        }  # fmt: skip
        record(found, asked.out)
    return int(worse)


if __name__ == "__main__":
    sys.exit(main())

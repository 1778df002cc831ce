"""Time the start and decode steps of a model of 8-bit weights on a GPU. Random weights are written into a folder, read
like any checkpoint, and removed.

    python benchmarks/stored_steps.py qwen3-8b fp8-block [FOLDER] [--cases 1x128] [--beside cuda.one_launch=all]

``--beside``: everything once more with this setting, from the same files.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from gpu_check import CASES, cases_of, measure, say, start
from quantized_checkpoint import write


def main(model: str, form: str, folder: Path, cases: Sequence[tuple[int, int]], beside: str) -> None:
    """Print a row for each case."""
    began = time.perf_counter()
    write(model, form, folder)
    say(f"{model} {form}: written in {time.perf_counter() - began:.1f} s")
    for settings in ([], [beside]) if beside else ([],):
        began = time.perf_counter()
        llm = start(folder, True, ["load=auto", "infer.max_seq_len=2048", *settings])
        say(f"{model} {form} {' '.join(settings)}: ready after {time.perf_counter() - began:.1f} s")
        for batch, prompt in cases:
            measure(llm, " ".join([model, form, *settings]), "graphs", batch, prompt, folder)
        llm.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("form")
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--cases", default="", help="such as 1x128,16x128 (default: all)")
    parser.add_argument("--beside", default="", metavar="KEY=VALUE")
    asked = parser.parse_args()
    target = asked.folder or Path(tempfile.mkdtemp(prefix="stored-"))
    try:
        main(asked.model, asked.form, target / "model", cases_of(asked.cases) or CASES, asked.beside)
    finally:
        shutil.rmtree(target / "model", ignore_errors=True)

"""Time the start and decode steps of a model of 8-bit weights on a GPU. Random weights are written into a folder, read
like any checkpoint, and removed.

    python benchmarks/stored_steps.py qwen3-8b fp8-block [FOLDER]
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

from gpu_check import measure, say, start
from quantized_checkpoint import write

#: Requests, and tokens of each prompt: the cases of the peers' figures.
CASES = ((1, 128), (16, 128), (64, 512), (256, 512))


def main(model: str, form: str, folder: Path) -> None:
    """Print a row for each case."""
    began = time.perf_counter()
    write(model, form, folder)
    written = time.perf_counter()
    llm = start(folder, True, ["load=auto", "infer.max_seq_len=2048"])
    say(f"{model} {form}: written in {written - began:.1f} s, ready after {time.perf_counter() - written:.1f} s")
    for batch, prompt in CASES:
        measure(llm, f"{model} {form}", "graphs", batch, prompt, folder)
    llm.close()


if __name__ == "__main__":
    target = Path(sys.argv[3] if len(sys.argv) > 3 else tempfile.mkdtemp(prefix="stored-"))
    try:
        main(sys.argv[1], sys.argv[2], target / "model")
    finally:
        shutil.rmtree(target / "model", ignore_errors=True)

"""Tuning files for models whose shapes are public, with random weights.

    python benchmarks/tune.py [MODEL ...] [--out FOLDER] [--limit SECONDS] [-- KEY=VALUE ...]

MODEL is a name of ``model_configs.py``. For each, FOLDER (or $OUT) gets the file of ``evener tune``, ``<model>.json``,
and its output, ``tune-<model>.log``. If a model fails or takes too long, its measurements so far are kept and the next
one runs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import after_stdlib  # noqa: F401
from model_configs import CONFIGS, write

#: Models, their ops that take most of a step, and the step sizes for which there are several kernels.
MODELS = {
    "qwen3-8b": ("attention_block,mlp_block,head", "1,2,4,8,16,32"),
    "qwen3-30b-a3b": ("attention_block,moe_block,head", "1,2,4,8,16,32,64,256"),
    "qwen3-0.6b": ("attention_block,mlp_block,head", "1,2,4,8,16,32"),
    "deepseek-v2-lite": ("latent_attention_block,moe_block,head", "1,2,4,8,16,32,64,256"),
}
KEYS = ("load=dummy", "dtype=bfloat16", "infer.max_reqs=256", "infer.max_seq_len=1024", "infer.step_tokens=8192")


def main(argv: Sequence[str]) -> int:
    """Tune the models one after another; 0 if all of them succeeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(CONFIGS)}")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "tuning")))
    parser.add_argument("--limit", type=int, default=240, help="seconds a model may take")
    parser.add_argument("--ops", default="", help="such as mlp_block,head (default: those of MODELS)")
    parser.add_argument("--buckets", default="", help="such as 1,16 (default: those of MODELS)")
    own = list(argv)
    keys = own[own.index("--") + 1 :] if "--" in own else []
    args = parser.parse_args(own[: own.index("--")] if "--" in own else own)
    unknown = set(args.models) - set(CONFIGS)
    if unknown:
        parser.error(f"no model {sorted(unknown)[0]!r}; there are {', '.join(CONFIGS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    return max([tune(model, args, keys) for model in args.models or MODELS])


def tune(model: str, args: argparse.Namespace, keys: Sequence[str]) -> int:
    """Tune one model in its own process; returns the exit status."""
    ops, buckets = MODELS.get(model, ("", ""))
    log, began = args.out / f"tune-{model}.log", time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, log.open("w") as file:
        command = [
            sys.executable, "-m", "evener", "tune", str(write(model, Path(folder) / model)), *KEYS, *keys, "--context",
            "256", "--out", str(args.out / f"{model}.json"), "--op", args.ops or ops, "--buckets",
            args.buckets or buckets,
        ]  # fmt: skip
        child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            code = child.wait(args.limit)
        except subprocess.TimeoutExpired:
            child.kill()
            code = child.wait()
    print(f"== {model}: {'ok' if code == 0 else f'FAILED ({code})'} after {time.perf_counter() - began:.0f} s")
    print("\n".join(line[:200] for line in log.read_text(errors="replace").splitlines()[-40:]), flush=True)
    return abs(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

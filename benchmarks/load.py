"""Start from weights in files: seconds until the engine is ready, and host memory that is not file-backed.

    python benchmarks/load.py MODEL [--times 2] [KEY=VALUE ...]

MODEL is a name of ``model_configs.py``: random weights are written to safetensors files of 4 GB, with the names and
shapes of transformers; the files are then in the page cache. Each start is a new process; the first may compile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import after_stdlib  # noqa: F401
from model_configs import CONFIGS, write

SHARD = 4 << 30
KEYS = {"dtype": "bfloat16", "infer.max_seq_len": "4096", "infer.max_reqs": "256", "infer.step_tokens": "8192"}


def main(argv: Sequence[str]) -> int:
    """Write the weights, and start as often as asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(CONFIGS))
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="configuration of evener")
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.folder:
        return start(args.folder, {**KEYS, **dict(key.split("=", 1) for key in args.keys)})
    with tempfile.TemporaryDirectory() as name:
        folder, began = write(args.model, Path(name) / args.model), time.perf_counter()
        total = fill(folder)
        print(f"{args.model}: {total / 1e9:.1f} GB written after {time.perf_counter() - began:.1f} s", flush=True)
        again = [sys.executable, __file__, args.model, *args.keys, "--folder", str(folder)]
        return max(subprocess.run(again).returncode for _ in range(args.times))


def fill(folder: Path) -> int:
    """Write random weights for the configuration in ``folder``; returns their bytes."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
        empty = model.state_dict()
    if json.loads((folder / "config.json").read_text())["tie_word_embeddings"]:
        del empty["lm_head.weight"]
    where = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    index: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def save() -> None:
        name = f"model-{len(set(index.values())) + 1}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, name))
        shard.clear()

    for key, value in empty.items():
        shard[key] = torch.empty(value.shape, dtype=value.dtype, device=where).normal_(0, 0.02).cpu()
        if sum(each.nbytes for each in shard.values()) >= SHARD:
            save()
    save()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return sum(value.nbytes for value in empty.values())


def start(folder: Path, keys: dict[str, str]) -> int:
    """Start once in this process."""
    most, done, began = 0, threading.Event(), time.perf_counter()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.02):
            most = max(most, anonymous())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    from evener import LLM

    llm = LLM(folder, **keys)
    ready = time.perf_counter() - began
    done.set()
    watcher.join()
    found = {"ready_s": round(ready, 1), "in_worker_s": llm.info.start_seconds, "device": llm.info.device,
             "anonymous_GB": round(most / 1e9, 2)}  # fmt: skip
    llm.close()
    print(json.dumps(found), flush=True)
    return 0


def anonymous() -> int:
    """Bytes of this process's memory that are not file-backed."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

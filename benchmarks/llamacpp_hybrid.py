"""Time llama.cpp on a model of experts that is larger than the device, beside ``hybrid.py``.

    python benchmarks/llamacpp_hybrid.py MODEL --bench PATH/llama-batched-bench --host-layers 21 [--form q4_k_m]
        [--try "-ub 512"] [--try "-ub 2048 --no-op-offload"]

It writes a GGUF file with random weights of MODEL (a name of ``model_configs.py``; Qwen 3 with experts), which
``hybrid.py --file`` reads too, and runs llama.cpp's own ``llama-batched-bench`` on it. All layers are on the device,
but the experts of the last ``--host-layers`` layers stay in host memory (``-ot``, ``--override-tensor``): those of
``infer.cpu_layer_num``. Take as many as ``hybrid.py`` left on the host for the same cap; each row says how much memory
of the device was used. Every case is run with each of the settings that ``--try`` names, and a row is the fastest of
``--repeats``. ``q4_k_m`` gives the matrices the types that llama.cpp's own program gives them: the value and down
projections of half the layers, and the head, have Q6_K. Weights have mean 0, each layer's are others, and embeddings
are large beside what layers add: so 128 tokens of one request choose 60% of a layer's experts, and 16 such requests
all.
Rows go to standard output, and to llamacpp_hybrid.jsonl in ``--out`` or $OUT.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import after_stdlib  # noqa: F401
import gguf
import numpy as np
from machine import record
from model_configs import CONFIGS

#: Bytes that are drawn once, and used again and again: the speed does not depend on the values. Each tensor begins at
#: another one of so many blocks.
DRAWN, SHIFTS = 64 << 20, 1 << 12
#: Name, shape (slowest first) and type.
Tensor = tuple[str, tuple[int, ...], gguf.GGMLQuantizationType]


def main(argv: Sequence[str]) -> int:
    """Write the file if it is not there, run all cases, and print a row for each."""
    args = parser().parse_args(argv)
    config = {**CONFIGS[args.model], **({"num_hidden_layers": args.layers} if args.layers else {})}
    path = args.folder / f"{args.model}-{args.form}.gguf"
    args.folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        write(path, config, args.form)
    if args.bench is None:
        return 0
    wanted: dict[int, list[int]] = {}
    for case in args.cases.split(","):
        batch, prompt = (int(n) for n in case.split("x"))
        wanted.setdefault(batch, []).append(prompt)
    failed = 0
    for options in args.tries or [""]:
        used = Used()
        for batch, prompts in wanted.items():
            try:
                rows = list(run(args, path, config["num_hidden_layers"], batch, prompts, options.split()))
            except (Failed, subprocess.TimeoutExpired) as error:  # other settings may still be measured
                failed = 1
                print(f"{options!r}, {batch} requests: {error}"[:4000], file=sys.stderr, flush=True)
                continue
            for prompt in prompts:
                best = [row for row in rows if row["pp"] == prompt]
                facts = {
                    "engine": "llama.cpp", "model": args.model, "form": args.form, "host_layers": args.host_layers,
                    "layers": config["num_hidden_layers"], "bs": batch, "inp": prompt, "steps": args.steps,
                    "threads": args.threads, "options": options,
                    "prompt_ms": round(min(row["t_pp"] for row in best) * 1e3, 2),
                    "step_ms": round(min(row["t_tg"] for row in best) / args.steps * 1e3, 3),
                    "device_mib": used.most,
                }  # fmt: skip
                record(facts, args.out / "llamacpp_hybrid.jsonl")
    return failed


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", choices=sorted(name for name in CONFIGS if CONFIGS[name]["model_type"] == "qwen3_moe"))
    made.add_argument("--bench", type=Path, help="llama.cpp's llama-batched-bench; without it, the file is written")
    made.add_argument("--form", choices=("bf16", "q4_k_m"), default="q4_k_m")
    made.add_argument("--layers", type=int, help="of the model; default: as many as it has")
    made.add_argument("--host-layers", type=int, default=0, help="layers whose experts stay in host memory")
    made.add_argument("--cases", default="1x128,16x128,1x1024", help="requests x tokens of each prompt")
    made.add_argument("--steps", type=int, default=24, help="decode steps that are timed")
    made.add_argument("--repeats", type=int, default=3, help="of each case; the fastest is reported")
    made.add_argument("--threads", type=int, default=os.cpu_count())
    made.add_argument(
        "--try",
        action="append",
        dest="tries",
        metavar="OPTIONS",
        help="of llama-batched-bench, as '-ub 512 --no-op-offload'",
    )
    made.add_argument("--limit", type=float, help="seconds that a process may take")
    made.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where the file is written")
    made.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    return made


class Failed(Exception):
    """llama.cpp's program failed, or said nothing."""


def run(
    args: argparse.Namespace, path: Path, layers: int, batch: int, prompts: Sequence[int], options: Sequence[str]
) -> list[Mapping[str, Any]]:
    """The rows that ``llama-batched-bench`` prints for so many requests, run in a process of its own.

    Raises:
        Failed: it failed, or printed too few rows.
    """
    numbers = "|".join(str(layer) for layer in range(layers - args.host_layers, layers))
    lengths = [prompt for prompt in prompts for _ in range(args.repeats)]
    command = [
        str(args.bench), "-m", str(path), "-ngl", "999", "-fa", "on", "-t", str(args.threads), "-b", "2048",
        "-ub", "2048", "-c", str(batch * (max(prompts) + args.steps) + 256), "-npp", ",".join(map(str, lengths)),
        "-ntg", str(args.steps), "-npl", str(batch), "--output-format", "jsonl", *options,
    ]  # fmt: skip
    if numbers:
        command += ["-ot", rf"blk\.({numbers})\.ffn_.*_exps\.=CPU"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=args.limit)
    if done.returncode:
        raise Failed(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    rows = [json.loads(line) for line in (done.stdout + done.stderr).splitlines() if line.startswith('{"n_kv_max"')]
    if len(rows) < len(lengths):
        raise Failed(f"{' '.join(command)} printed {len(rows)} rows:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return rows


class Used:
    """The most memory of NVIDIA's device that was in use, MiB, looked at twice a second; None without its driver."""

    def __init__(self) -> None:
        self.most: int | None = None
        if shutil.which("nvidia-smi"):
            threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", "500"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():
                self.most = max(self.most or 0, int(line))


def write(path: Path, config: Mapping[str, Any], form: str) -> None:
    """Write a GGUF file of random weights. It has no tokenizer: llama.cpp's program draws token ids."""
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(32768)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(float(config["rope_theta"]))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    tensors = list(tensors_of(config, form))
    for name, shape, kind in tensors:
        writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes_of(shape, kind), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    drawn = {kind: draw(kind, 0.02) for kind in {kind for _, _, kind in tensors}}
    rng = np.random.default_rng(1)
    for name, shape, kind in tensors:
        nbytes = nbytes_of(shape, kind)
        if name.endswith("norm.weight"):
            data = np.ones(shape, np.float32).view(np.uint8)
        elif name.endswith("ffn_gate_inp.weight"):  # each layer chooses experts of its own
            data = (rng.standard_normal(shape, dtype=np.float32) * 0.02).view(np.uint8)
        else:
            large = name == "token_embd.weight"
            apart = int(rng.integers(SHIFTS)) * gguf.GGML_QUANT_SIZES[kind][1]
            data = np.resize(draw(kind, 1.0, 2) if large else drawn[kind], apart + nbytes)[apart:]
        writer.write_tensor_data(data.reshape(-1))
    writer.close()


def tensors_of(config: Mapping[str, Any], form: str) -> Iterator[Tensor]:
    """All tensors of the file, in its order."""
    kinds = gguf.GGMLQuantizationType
    usual, better = (kinds.BF16, kinds.BF16) if form == "bf16" else (kinds.Q4_K, kinds.Q6_K)
    wide, layers, head = config["hidden_size"], config["num_hidden_layers"], config["head_dim"]
    query, key = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    experts, inner = config["num_experts"], config["moe_intermediate_size"]
    yield "token_embd.weight", (config["vocab_size"], wide), usual
    yield "output_norm.weight", (wide,), kinds.F32
    yield "output.weight", (config["vocab_size"], wide), better
    for layer in range(layers):
        more = better if layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2 else usual
        for name, shape, kind in (
            ("attn_norm", (wide,), kinds.F32),
            ("attn_q", (query, wide), usual),
            ("attn_k", (key, wide), usual),
            ("attn_v", (key, wide), more),
            ("attn_output", (wide, query), usual),
            ("attn_q_norm", (head,), kinds.F32),
            ("attn_k_norm", (head,), kinds.F32),
            ("ffn_norm", (wide,), kinds.F32),
            ("ffn_gate_inp", (experts, wide), kinds.F32),
            ("ffn_gate_exps", (experts, inner, wide), usual),
            ("ffn_up_exps", (experts, inner, wide), usual),
            ("ffn_down_exps", (experts, wide, inner), more),
        ):
            yield f"blk.{layer}.{name}.weight", shape, kind


def nbytes_of(shape: Sequence[int], kind: gguf.GGMLQuantizationType) -> int:
    """Bytes of a tensor in the file."""
    values, nbytes = gguf.GGML_QUANT_SIZES[kind]
    return int(np.prod(shape)) // values * nbytes


def draw(kind: gguf.GGMLQuantizationType, spread: float, seed: int = 0) -> np.ndarray[Any, Any]:
    """Random weights of mean 0 with this standard deviation in a type, as bytes: whole blocks."""
    rng = np.random.default_rng(seed)
    kinds = gguf.GGMLQuantizationType
    if kind == kinds.F32:
        return (rng.standard_normal(1024, dtype=np.float32) * spread).view(np.uint8)
    if kind == kinds.BF16:
        values = rng.standard_normal(DRAWN // 4, dtype=np.float32) * spread
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    _, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (DRAWN // nbytes, nbytes), dtype=np.uint8)
    if kind == kinds.Q4_K:  # d and dmin come first; d * scale * 7.5 is dmin * min on average
        blocks[:, :4] = np.array([spread / 258, 7.5 * spread / 258], np.float16).view(np.uint8)
    elif kind == kinds.Q6_K:  # d comes last
        blocks[:, -2:] = np.array([spread / 1366], np.float16).view(np.uint8)
    else:
        raise ValueError(f"no random blocks of {kind.name}")
    return blocks.reshape(-1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

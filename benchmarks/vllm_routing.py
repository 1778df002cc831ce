"""Count the experts that vLLM 0.24.0 chooses with its own random weights, without vLLM: the draws of its dummy loader
and its router's arithmetic, by torch on a GPU.

    python benchmarks/vllm_routing.py [--out FILE.jsonl]

vLLM's loader draws each parameter with one seed, uniform in ±1e-3 (``initialize_dummy_weights``). With
``quantization="fp8"`` it draws the router of Qwen3 experts twice: first the quantized weight, then, because the module
above it has the router too, its e4m3 elements and its scale, as if these were weights. docs/lab/experts.md has the
places in vLLM's source. A record has the mean number of different experts that groups of 16, 64 and 256 tokens choose:
of the first layer, whose input is the embedding; attention and experts add about a thousandth to it. Two records can be
compared with what was counted in vLLM (six experts) and timed in it (as many as even routing chooses).
"""

from __future__ import annotations

import argparse
import json
from datetime import datetime, timezone
from pathlib import Path

import torch

SEED, RANGE, EPS, TOKENS, VOCAB, HIDDEN = 1234, 1e-3, 1e-6, 4096, 102_400, 2048
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
WAYS = {
    "Qwen3-30B-A3B, FP8, router drawn twice": (128, 8),
    "Qwen3-30B-A3B, FP8, router drawn once": (128, 8),
    "Qwen3-30B-A3B, bfloat16": (128, 8),
    "DeepSeek-V2-Lite, bfloat16": (64, 6),
}


def drawn(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A parameter as ``initialize_single_dummy_weight`` draws it."""
    generator = torch.Generator(device).manual_seed(SEED)
    given = torch.float16 if dtype is FP8 else dtype
    return torch.empty(shape, dtype=given, device=device).uniform_(-RANGE, RANGE, generator=generator).to(dtype)


def chosen(way: str, device: torch.device) -> torch.Tensor:
    """The experts [TOKENS, top] of tokens with random ids."""
    experts, top = WAYS[way]
    generator = torch.Generator(device).manual_seed(0)
    ids = torch.randint(100, 90_000, (TOKENS,), generator=generator, device=device)
    # Numbers of a tensor depend on their place in it, and a little on its size: both vocabularies begin alike.
    x = drawn(device, BF16, VOCAB, HIDDEN)[ids].float()
    x = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)).to(BF16) * drawn(device, BF16, HIDDEN)
    if "FP8" in way:
        scale = (x.float().abs().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
        wide = (x.float() / scale).to(FP8).float()
        if "twice" in way:
            router, factor = drawn(device, FP8, experts, HIDDEN).float(), drawn(device, torch.float32, 1)
        else:
            router = drawn(device, BF16, experts, HIDDEN).float()
            factor = router.abs().max() / 448
            router = (router / factor).to(FP8).float()
        logits = ((wide @ router.T) * scale * factor).to(BF16)
    else:
        logits = (x.float() @ drawn(device, BF16, experts, HIDDEN).float().T).to(BF16)
    if "DeepSeek" in way:  # ``grouped_topk`` keeps the scores in bfloat16
        scores = torch.softmax(logits, dim=-1)
    else:  # ``topk_softmax``: exp of the difference to the largest, in float32
        wide = logits.float()
        scores = torch.exp(wide - wide.amax(-1, keepdim=True))
    # Of equal scores the lowest ids win.
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :top]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file to append the rows to")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cuda")
    for way in WAYS:
        experts = chosen(way, device)
        different = {
            str(size): round(sum(len(group.unique()) for group in experts.split(size)) / (TOKENS // size), 1)
            for size in (1, 16, 64, 256)
        }
        row = {
            "benchmark": "vllm_routing", "model": way, "different": different, "first": experts[0].tolist(),
            "device": torch.cuda.get_device_name(), "date": datetime.now(timezone.utc).date().isoformat(),
            "software": f"torch {torch.__version__.partition('+')[0]}", "command": "python benchmarks/vllm_routing.py",
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

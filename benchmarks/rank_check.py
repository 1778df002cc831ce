"""Ranks on several accelerators of one machine: sums over them, timed inside captures, and tokens against one rank's.

    python benchmarks/rank_check.py [sums] [tokens] [--ranks 2] [--stages 1]

``sums``: the backend's communicator and the library's alone, for sizes from a decode step's to a prefill's: right
numbers, equal bits on all ranks, microseconds a sum in a captured row of them. ``tokens``: random small models of
several families, one rank against all of them, which share every layer and, with ``--stages``, are stages too;
captured where the device can (with --eager: both).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import after_stdlib  # noqa: F401

KIB = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 16384)
IN_A_ROW = 40
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "hidden_size": 512,
         "intermediate_size": 1024, "vocab_size": 4099}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": HEADS,
    "Qwen2": HEADS,
    "Qwen3Moe": {**HEADS, "moe_intermediate_size": 256},
    "DeepseekV3": {"num_attention_heads": 8, "num_key_value_heads": 8},
}


def main(argv: Sequence[str]) -> int:
    """Run what was asked for; 0 if all of it was right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["sums", "tokens"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_args(argv)
    wrong = 0
    for part in args.parts:
        wrong += {"sums": sums, "tokens": tokens}[part](args)
    return 1 if wrong else 0


def sums(args: argparse.Namespace) -> int:
    """One process a rank."""
    ranks = args.ranks
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        started = [context.Process(target=_rank, args=(r, ranks, f"file://{folder}/meet")) for r in range(ranks)]
        for process in started:
            process.start()
        for process in started:
            process.join(120)
            process.kill()
    return sum(process.exitcode != 0 for process in started)


def _rank(rank: int, ranks: int, meet: str) -> None:
    import torch

    from evener.search import Search

    loaded = Search(None).load({})
    device = loaded.open_device(rank)
    device.select()
    offer = loaded.communicator()
    assert offer is not None, "no package brings a communicator"
    ours = offer.value("tp", range(ranks), rank, ranks, meet)
    plain = offer.value("plain", range(ranks), rank, ranks, meet)
    where = device.torch_device
    graphs = loaded.graph_capture(device)
    assert graphs is not None
    for dtype in (torch.bfloat16, torch.float32):
        for kib in KIB:
            count = kib * 1024 // dtype.itemsize
            mine = torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(where, dtype)
            whole = plain.all_gather(mine[None], dim=0)
            wanted, row = whole.float().sum(0), {"ranks": ranks, "KiB": kib, "dtype": str(dtype)}
            for name, end in (("ours_us", ours), ("library_us", plain)):
                got = end.all_reduce(mine.clone())
                off = float((got.float() - wanted).abs().max())
                everybody = plain.all_gather(got[None], dim=0)
                same = all(torch.equal(everybody[0], other) for other in everybody)
                assert off < (0.1 if dtype is torch.bfloat16 else 1e-5) and same, f"{name} {row}: {off}, {same}"
                row[name] = round(_captured(end, mine.clone(), device, graphs.value), 2)
            if rank == 0:
                print(json.dumps(row), flush=True)
    for end in (ours, plain):
        end.barrier()


def _captured(end: Any, tensor: Any, device: Any, graphs: Any) -> float:
    """Microseconds of one sum among many in a capture."""
    import torch

    def segment() -> None:
        for _ in range(IN_A_ROW):
            end.all_reduce(tensor.mul_(0.25))

    with torch.inference_mode():
        segment()
        replay = graphs.capture(segment)
        for _ in range(3):
            replay()
        device.synchronize()
        end.barrier()
        device.synchronize()
        began = time.perf_counter()
        for _ in range(10):
            replay()
        device.synchronize()
    return (time.perf_counter() - began) / 10 / IN_A_ROW * 1e6


def tokens(args: argparse.Namespace) -> int:
    """Random prompts through one rank and through all; for how many models answers differ."""
    wrong = 0
    for family in args.families:
        for captured in (False, True) if args.eager else (True,):
            with tempfile.TemporaryDirectory() as folder:
                one, more = (
                    _answers(Path(folder) / f"{ranks}-{stages}", family, ranks, stages, captured)
                    for ranks, stages in ((1, 1), (args.ranks, args.stages))
                )
            same = sum(a == b for a, b in zip(one, more, strict=True))
            wrong += same < len(one)
            row = {"family": family, "ranks": args.ranks, "stages": args.stages, "captured": captured}
            print(json.dumps({**row, "answers": len(one), "same": same}), flush=True)
    return wrong


def _answers(folder: Path, family: str, ranks: int, stages: int, captured: bool) -> list[list[int]]:
    import random

    from evener import LLM, SamplingParams
    from evener.testing.naive import find_architecture

    shape = {**find_architecture(f"{family}ForCausalLM").tiny_config(), **FAMILIES[family]}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(shape))
    keys: dict[str, Any] = {"load": "dummy", "dtype": "float32", "infer.max_seq_len": 256, "infer.max_reqs": 8,
                            "infer.step_tokens": 64, "infer.tp_size": ranks, "infer.pp_size": stages}  # fmt: skip
    if not captured:
        keys["infer.use_cuda_graph"] = False
    rng = random.Random(4)
    prompts = [[rng.randrange(3, shape["vocab_size"]) for _ in range(n)] for n in (3, 17, 90, 150)]
    greedy = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, detokenize=False)
    warm = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=48, ignore_eos=True, detokenize=False)
    with LLM(folder, **keys) as llm:
        return [o.outputs[0].token_ids for params in (greedy, warm) for o in llm.generate(prompts, params)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

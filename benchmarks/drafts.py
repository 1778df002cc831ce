"""What speculative decoding gains at several loads: answers with drafts, without, and switched by the engine.

    python benchmarks/drafts.py MODEL [--draft-model FOLDER] [--streams 1,4,16] [--texts repeats,new]
        [--tokens 64] [--drafts 8] [--set KEY=VALUE ...]

MODEL is a folder with real weights. Two texts are continued greedily by so many streams at once, each with a number of
its own before the text: one that begins to repeat what it has said twice (``repeats``), and one with nothing to repeat
(``new``). Three engines answer in turns: ``off`` has no drafter; ``on`` has drafts in each step that can have some;
``switched`` measures which is faster, as a server does. The drafter is ``ngram``, or with ``--draft-model`` that model.
Of each engine the fastest turn counts, and the one with the least processor time. ``switched`` learns in the first
turns, which are not timed. ``equal`` says how many answers of both engines with drafts are those of ``off``; one stream
must be equal, and with more, rounding may differ. Writes one line of JSON for each text and number of streams to
standard output and, with ``--out``, to that file.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import after_stdlib  # noqa: F401
from machine import OtherProcesses, record

ROOT = Path(__file__).resolve().parent.parent
#: The engine without drafts, the one with drafts in each step, and the one that measures which is faster.
MODES = ("off", "on", "switched")


def main(argv: Sequence[str]) -> int:
    """Time both texts at each load in the three modes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", default="1,4,16", help="numbers of answers at once, with commas between them")
    parser.add_argument("--texts", default="repeats,new", help="which of the two, with commas between them")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--drafts", type=int, default=8, help="infer.draft_tokens")
    parser.add_argument("--draft-model", type=Path, help="infer.draft_model, in place of infer.drafter=ngram")
    parser.add_argument("--turns", type=int, default=3, help="turns that are timed")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="configuration of evener")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    for row in measure(args):
        record(row, args.out)
    return 0


def texts() -> dict[str, str]:
    """The two texts."""
    code = (ROOT / "core/src/evener/engine/batching/step_limit.py").read_text()[:700]
    return {"repeats": f"{code}\n\n{code}\n\n{code[:60]}", "new": "Once upon a time, in a small town by the sea,"}


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One row for each text and number of streams."""
    loads = [int(part) for part in args.streams.split(",")]
    with ExitStack() as stack:
        engines = {mode: stack.enter_context(engine(args, mode, max(loads))) for mode in MODES}
        for name in args.texts.split(","):
            for streams in loads:
                prompts = [f"{at + 1}. {texts()[name]}" for at in range(streams)]
                with OtherProcesses() as others:
                    best = in_turns(engines, prompts, args.tokens, args.turns)
                yield row(args, engines["off"].info.device, name, streams, best) | {"others_cores": others.cores}


def engine(args: argparse.Namespace, mode: str, streams: int) -> Any:
    """An engine in this process, so that the processor time of a turn is its own."""
    from evener import LLM

    shared: dict[str, Any] = {"infer.max_seq_len": 1024, "infer.max_reqs": streams, "executor": "inline"}
    shared |= dict(pair.split("=", 1) for pair in args.set)
    if mode != "off":
        drafter = {"infer.draft_model": args.draft_model} if args.draft_model else {"infer.drafter": "ngram"}
        shared |= {**drafter, "infer.draft_tokens": args.drafts}
    llm: Any = LLM(args.model, **shared)
    if mode == "on":
        llm._client.controller.scheduler.drafts._payoff = None
    return llm


@dataclass
class Best:
    """The least that the turns of an engine took, the answers of its last turn, and what it did in all of them."""

    seconds: float = float("inf")
    processor: float = float("inf")
    answers: Sequence[Sequence[int]] = ()
    drafted: int = 0
    accepted: int = 0


def in_turns(engines: dict[str, Any], prompts: list[str], tokens: int, turns: int) -> dict[str, Best]:
    """Each engine answers, one after the other, for so many turns after two that are not timed: they fill the prefix
    cache, build kernels, and the engine that measures has compared both ways by then."""
    from evener import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    best = {mode: Best() for mode in engines}
    for turn in range(-2, turns):
        for mode, llm in engines.items():
            stats, found = llm._client.controller.scheduler.stats, best[mode]
            drafted, accepted = stats.drafted_tokens, stats.accepted_tokens
            began, processor = time.perf_counter(), time.process_time()
            outputs = llm.generate(prompts, params)
            seconds, processor = time.perf_counter() - began, time.process_time() - processor
            if turn >= 0:
                found.seconds, found.processor = min(found.seconds, seconds), min(found.processor, processor)
                found.drafted += stats.drafted_tokens - drafted
                found.accepted += stats.accepted_tokens - accepted
            found.answers = [output.outputs[0].token_ids for output in outputs]
    return best


def row(args: argparse.Namespace, device: str, name: str, streams: int, best: dict[str, Best]) -> dict[str, Any]:
    """A record of one text and number of streams."""
    off, made = best["off"], streams * args.tokens
    equal = {mode: sum(a == b for a, b in zip(best[mode].answers, off.answers, strict=True)) for mode in MODES[1:]}
    if streams == 1 and min(equal.values()) == 0:
        raise SystemExit(f"the answers to {name!r} differ")
    settings = "".join(f" --set {pair}" for pair in args.set) + (" --draft-model FOLDER" if args.draft_model else "")
    return {
        "device": device, "model": args.model.name, "text": name, "streams": streams,
        "drafter": args.draft_model.name if args.draft_model else "ngram", "draft_tokens": args.drafts,
        **{f"{mode}_tokens_per_second": round(made / best[mode].seconds, 1) for mode in MODES},
        **{f"{mode}_ratio": round(off.seconds / best[mode].seconds, 2) for mode in MODES[1:]},
        **{f"{mode}_processor_ratio": round(off.processor / best[mode].processor, 2) for mode in MODES[1:]},
        **{f"{mode}_drafted": best[mode].drafted for mode in MODES[1:]},
        **{f"{mode}_accepted": best[mode].accepted for mode in MODES[1:]},
        "equal": equal, "date": datetime.date.today().isoformat(),
        "command": f"python benchmarks/drafts.py MODEL --streams {args.streams} --texts {args.texts} "
                   f"--tokens {args.tokens} --drafts {args.drafts} --turns {args.turns}{settings}",
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

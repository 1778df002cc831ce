"""Checking a tiny model end to end: the engine's greedy tokens on the backend against the naive engine's."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from evener.config import from_overrides
from evener.engine.processes.local_clients import InlineClient
from evener.engine.processes.start import set_up_controller
from evener.engine.wire.messages import Ready
from evener.engine.worker.inline_executor import InlineExecutor
from evener.engine.worker.worker import Worker
from evener_conformance.kit.outcome import CaseResult, Check, format_backend_exception
from evener_conformance.kit.subject import OpenedBackend, Subject
from evener_conformance.naive.model import NaiveModel
from evener_conformance.oracle import Comparison, compare_greedy, generate

FAMILY = "LlamaForCausalLM"
_SHAPE = {
    "vocab_size": 211, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
}  # fmt: skip
#: The same with biases, and with two groups of state.
WINDOWED: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 24,
    "layer_types": ["full_attention", "sliding_attention"],
}  # fmt: skip
#: Where another token was chosen, the oracle's two best logits may be this far apart, relative to the largest logit.
_TIE = {"float32": 1e-4, "bfloat16": 0.06, "float16": 0.01}


class _AlreadyLoaded:
    """A search that is over."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    def load(self, options: Any) -> OpenedBackend:
        return OpenedBackend(self._subject)


def engine(subject: Subject, folder: Path, dtype: str, **overrides: Any) -> InlineClient:
    """An engine in this process on the subject's device, over dummy weights of the tiny model in ``folder``."""
    small = {
        "backend": subject.name, "load": "dummy", "dtype": dtype, "infer.max_reqs": 5, "infer.max_seq_len": 384,
        "infer.step_tokens": 48, "infer.kv_memory": 8 << 20, "infer.threads": 1,
    }  # fmt: skip
    config = from_overrides(str(folder), {**small, **overrides})
    worker = Worker(config, _AlreadyLoaded(subject))  # type: ignore[arg-type]
    executor = InlineExecutor(worker)
    return InlineClient(set_up_controller(config, executor, worker.facts), Ready(info=worker.facts.info))


def write_tiny_model(subject: Subject, folder: Path, shape: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Write the tiny model's ``config.json``, with ``shape`` in it; returns it."""
    wanted = {"architectures": [FAMILY], **(shape or {})}
    config = {**subject.loaded.architectures[wanted["architectures"][0]].load().tiny_config(), **_SHAPE, **wanted}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return config


def prompts(seed: int) -> list[list[int]]:
    """Prompts with lengths around those of blocks and steps."""
    rng = random.Random(seed)
    return [[rng.randrange(211) for _ in range(n)] for n in (1, 15, 16, 17, 47, 49, 128, 129, 200, 3)]


def model_results(check: Check, subject: Subject, dtypes: Sequence[str], seed: int) -> Iterator[CaseResult]:
    """Check tokens in each compute dtype, and the engine's memory figures."""
    if FAMILY not in subject.loaded.architectures:
        yield check.result("greedy tokens", "unknown", f"no package brings {FAMILY}; type: pip install evener-models")
        return
    for dtype in dtypes:
        with tempfile.TemporaryDirectory() as name:
            try:
                yield from _tokens(check, subject, Path(name), dtype, seed)
            except AssertionError as error:
                yield check.result("greedy tokens", "failed", str(error), dtype)
            except Exception as error:  # the backend's; it is the finding
                yield check.result("greedy tokens", "failed", format_backend_exception(error), dtype)


def _tokens(check: Check, subject: Subject, folder: Path, dtype: str, seed: int) -> Iterator[CaseResult]:
    config = write_tiny_model(subject, folder)
    client = engine(subject, folder, dtype, seed=seed % 1000)
    client.receive(1)
    naive, result, asked = NaiveModel(config, dtype, seed=seed % 1000), Comparison(), prompts(seed)
    largest = max(float(naive.logits(p).abs().max()) for p in asked[:3])
    try:
        answers = generate(client, asked, 24, every=7)
        resume = partial(_resumed, client)
        compare_greedy(lambda ids: naive.logits(ids).float(), asked, answers, resume, result, _TIE[dtype] * largest)
        again = generate(client, asked, 24, tag="again")
    finally:
        client.close()
    if dtype == "float32":
        result.check()
    detail = f"{result.tokens} tokens, {len(result.ties)} ties"
    yield check.result("greedy tokens", "passed", detail, dtype)
    if dtype == "float32":
        differ = describe_divergence(asked, {"at first": answers, "again": again})
        yield check.result(
            "the same prompts again, from the prefix cache", "failed" if differ else "passed", differ, dtype
        )


def describe_divergence(asked: Sequence[Sequence[int]], said: Mapping[str, Sequence[Sequence[int]]]) -> str:
    """Where two runs' answers to the same prompts differ: both answers, from the token before the first difference, and
    which other prompts differ too; empty if all are equal."""
    (one, first), (two, second) = said.items()
    differ = [i for i, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]]
    if not differ:
        return ""
    mine, other = first[differ[0]], second[differ[0]]
    at = next((i for i, pair in enumerate(zip(mine, other, strict=False)) if pair[0] != pair[1]), len(mine))
    seen = slice(max(0, at - 1), at + 4)
    more = f"; the answers to prompts {differ[1:]} differ too" if differ[1:] else ""
    return (
        f"prompt {differ[0]} of {len(asked[differ[0]])} tokens: the answers differ from token {at} on; "
        f"from token {seen.start} {one} {mine[seen]}, {two} {other[seen]}{more}"
    )


def _resumed(client: InlineClient, prompt: Sequence[int], count: int) -> list[int]:
    return generate(client, [list(prompt)], count, tag=f"again{len(prompt)}-{hash(tuple(prompt))}-")[0]

"""The one runner of the table of families.

A row's oracle makes a checkpoint. The naive engine reads it, and so does the real one on the CPU backend, in float32.
Both give the oracle's logits; what the real engine says about them, over its own messages, are the log-probabilities of
the whole vocabulary at every prompt token and behind every generated one. 64 greedy tokens are the oracle's by the rule
of ``evener_conformance.oracle``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import count
from pathlib import Path

import torch
from family_table import Row

from evener.config import from_overrides
from evener.contracts.media import MediaPrompt
from evener.engine.controller.controller import Controller
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener_conformance.naive.model import NaiveModel
from evener_conformance.oracle import Comparison, compare_greedy
from evener_conformance.reference.engine import RunResult, play

PROMPT, ANSWER, AGAIN, BLOCK, SNAPSHOT = 41, 64, 16, 16, 32
SMALL = {"backend": "cpu", "dtype": "float32", "infer.max_seq_len": 128, "infer.max_reqs": 4, "infer.threads": 1,
         "infer.kv_memory": 2**24, "infer.block_size": BLOCK, "infer.snapshot_every": SNAPSHOT}  # fmt: skip
#: What the naive engine calls keys that change what is computed.
CHOICES = {"infer.mla_absorb": "absorb", "infer.index_topk": "index_top"}


def prompt_of(vocab: int, length: int = PROMPT) -> list[int]:
    """Random ids, the same for a length every time; none is among the first three, which end or begin texts."""
    return torch.randint(3, vocab, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def assert_naive_logits(naive: NaiveModel, theirs: torch.Tensor, ids: Sequence[int], tolerance: float = 1e-4) -> None:
    """Logits of the naive engine are the oracle's [n, vocab], with the prompt in one piece and in chunks."""
    assert theirs.std() > 0.5, "the model is too flat to show a difference"
    for chunk in (None, 7):
        torch.testing.assert_close(naive.logits(ids, chunk), theirs, atol=tolerance, rtol=1e-4)


def check(row: Row, folder: Path) -> Comparison:
    """Everything that a row has to show; returns how many tokens were compared, and the ties among them."""
    oracle = lru_cache(maxsize=None)(row.oracle(row.config, folder))

    def logits(tokens: Sequence[int]) -> torch.Tensor:
        return oracle(tuple(tokens))

    engine = Engine(row, folder)
    ids = prompt_of(engine.vocab)
    choices = {CHOICES[key]: value for key, value in row.keys.items()}
    assert_naive_logits(NaiveModel(folder, **choices), logits(ids), ids, row.tolerance)

    chunked = engine.run({"chunked": (ids, ANSWER, True)}, step_tokens=7)
    again = {"whole": (ids, 2, True), "beside": (ids[:20], 9, False), "cached": (ids, AGAIN, False)}
    whole = engine.run(again, step_tokens=128)
    assert (chunked.cached["chunked"], whole.cached["whole"], whole.cached["cached"]) == (0, 0, SNAPSHOT)
    for played in (chunked, whole):
        for name, tokens in played.tokens.items():
            prompt = ids[:20] if name == "beside" else ids
            engine.assert_logits(played, name, logits([*prompt, *tokens[:-1]]), row.tolerance)

    result = Comparison()
    answers = [chunked.tokens["chunked"], whole.tokens["cached"]]
    compare_greedy(logits, [ids, ids], answers, engine.resume, result)
    result.check()
    return result


class Engine:
    """The real engine over a checkpoint, and what it says of every token's distribution."""

    def __init__(self, row: Row, folder: Path) -> None:
        self.controller: Controller = build_controller(from_overrides(str(folder), {**SMALL, **row.keys}))[0]
        self.vocab: int = row.text["vocab_size"]
        self._ids = count()

    def run(self, asked: Mapping[str, tuple[Sequence[int] | MediaPrompt, int, bool]], step_tokens: int) -> RunResult:
        """Play greedy requests, by name (prompt, tokens, whether its prompt is scored), ``step_tokens`` a step."""
        self.controller.scheduler.step_tokens = step_tokens
        return play(self.controller, [self._request(name, *each) for name, each in asked.items()])

    def _request(self, name: str, prompt: Sequence[int] | MediaPrompt, tokens: int, scored: bool) -> NewRequest:
        sampling = Sampling(temperature=0.0, logprobs=self.vocab, prompt_logprobs=self.vocab if scored else None)
        ids, media = (prompt.ids, prompt.media) if isinstance(prompt, MediaPrompt) else (prompt, ())
        return NewRequest(id=name, prompt=list(ids), max_tokens=tokens, sampling=sampling, media=list(media))

    def resume(self, tokens: Sequence[int], length: int) -> list[int]:
        """The greedy answer to ``tokens``, for ``compare_greedy``."""
        name = f"resumed{next(self._ids)}"
        return self.run({name: (tokens, length, False)}, 128).tokens[name]

    def assert_logits(self, played: RunResult, name: str, theirs: torch.Tensor, tolerance: float) -> None:
        """A request's log-probabilities are the last rows of the oracle's logits [n, vocab]; a scored prompt's, all."""
        said = [*played.prompt_logprobs[name], *played.logprobs[name]]
        # So many log-probabilities come as rows of logits: those of the prompt, then those of samples.
        ours = torch.frombuffer(bytearray(played.pooled[name]), dtype=torch.float32).view(len(said), self.vocab)
        ours = ours.log_softmax(-1)
        for row, each in zip(ours, said, strict=True):
            torch.testing.assert_close(torch.tensor(each.values), row[each.ids], atol=1e-4, rtol=1e-4)
        assert len(ours) in (len(theirs), len(played.tokens[name]))
        wanted = theirs[-len(ours) :].log_softmax(-1)
        torch.testing.assert_close(ours, wanted, atol=tolerance, rtol=1e-4, msg=lambda text: f"{name}: {text}")

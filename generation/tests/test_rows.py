"""What a front end reads in the rows that an engine sends beside tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from evener_pooling.rows import TokenRows

from evener.contracts.outputs import PromptOutputs
from evener.engine.wire.messages import TokenLogprobs, Tokens
from evener.errors import RequestError
from evener.frontend.frontend import Frontend
from evener.plugins.catalog import Catalog
from evener.sampling_params import SamplingParams

VOCABULARY = 40
OUTPUTS = PromptOutputs(kind="hidden", ranges=[(0, 2)])


def logprobs(seed: int) -> np.ndarray[Any, Any]:
    logits = np.random.default_rng(seed).normal(size=VOCABULARY).astype(np.float32)
    return logits - np.log(np.exp(logits).sum())


def entry(row: np.ndarray[Any, Any], token: int) -> TokenLogprobs:
    best = int(row.argmax())
    return TokenLogprobs(ids=[token, best], values=[float(row[token]), float(row[best])])


@pytest.mark.parametrize("prompt_count", [2, VOCABULARY])
def test_logits_of_prompt_and_samples_follow_the_rows_of_prompt_outputs(prompt_count: int) -> None:
    params = SamplingParams(logprobs=-1, prompt_logprobs=prompt_count, prompt_outputs=OUTPUTS)
    reader = TokenRows(params, (VOCABULARY, prompt_count), (4, 3), VOCABULARY, final_norm=True)
    of_prompt, of_samples, hidden = [logprobs(1), logprobs(2)], [logprobs(3)], bytes(range(64))
    sent = [row + 5 for row in (of_prompt if prompt_count == VOCABULARY else []) + of_samples]  # logits: any shift
    event = Tokens(
        id="a", ids=[9], logprobs=[entry(of_samples[0], 9)], prompt_logprobs=[entry(row, 7) for row in of_prompt],
        pooled=hidden + b"".join(row.tobytes() for row in sent),
    )  # fmt: skip
    samples, prompt, rest = reader.read(event)
    assert rest == hidden and len(samples) == 1 and len(prompt) == 2
    assert next(iter(samples[0])) == 9 and samples[0] == pytest.approx(dict(enumerate(of_samples[0])), abs=1e-5)
    for found, row in zip(prompt, of_prompt, strict=True):
        assert next(iter(found)) == 7 and len(found) == (VOCABULARY if prompt_count == VOCABULARY else 2)
        assert found == pytest.approx({token: row[token] for token in found}, abs=1e-5)


def test_named_tokens_need_no_rows_however_many_log_probabilities_are_asked_for_beside_them() -> None:
    frontend = Frontend(max_model_len=100, vocab_size=VOCABULARY)
    params = SamplingParams(logprobs=30, logprob_ids=[3], detokenize=False)
    assert frontend.prepare([1, 2], params).rows is None


@pytest.mark.parametrize("wanted", [{"logprobs": -1}, {"prompt_logprobs": 21}, {"prompt_outputs": OUTPUTS}])
def test_without_the_package_a_request_for_rows_is_refused_and_others_are_not(
    wanted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = Catalog.lazy_imports
    monkeypatch.setattr(
        Catalog, "lazy_imports", lambda self, kind: {} if kind == "part of pooling" else others(self, kind)
    )
    frontend = Frontend(max_model_len=100, vocab_size=VOCABULARY)
    with pytest.raises(RequestError, match="not installed; type: pip install evener-generation"):
        frontend.prepare([1, 2], SamplingParams(detokenize=False, **wanted))
    frontend.prepare([1, 2], SamplingParams(detokenize=False, logprobs=20, prompt_logprobs=20))

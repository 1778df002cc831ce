"""Beam search beside transformers': the algorithm alone, on an engine, and over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from evener_beam.search import BeamOptions, BeamSearch
from evener_beam.stream import BeamStream

from evener.async_llm import AsyncLLM
from evener.config import from_overrides
from evener.errors import RequestError

VOCABULARY, MOST = 37, 9
OPTIONS = [
    BeamOptions(beams, penalty, early)
    for beams, penalty, early in itertools.product((2, 4), (-1.0, 0.0, 1.0, 2.5), (True, False, "never"))
]


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    made = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        made.lm_head.weight.mul_(25)  # no two texts are as likely as each other
    return made


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("beams")
    model.save_pretrained(path)
    return path


def prompts() -> list[list[int]]:
    chance = random.Random(5)
    return [[chance.randrange(3, VOCABULARY) for _ in range(size)] for size in (3, 7, 20)]


def theirs(model: Any, prompt: list[int], options: BeamOptions, stops: list[int]) -> list[list[int]]:
    """transformers' texts without the padding behind their end."""
    found = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), num_beams=options.beams, do_sample=False,
        num_return_sequences=options.beams, max_new_tokens=MOST, length_penalty=options.length_penalty,
        early_stopping=options.early_stopping, eos_token_id=stops, pad_token_id=0,
    )  # fmt: skip
    texts = [row[len(prompt) :].tolist() for row in found]
    ends = [min([i for i, token in enumerate(text) if token in stops], default=len(text) - 1) for text in texts]
    return [text[: end + 1] for text, end in zip(texts, ends, strict=True)]


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "stops", [pytest.param([2], marks=pytest.mark.slow), [2, 5, 9, 11]], ids=["one stop token", "four"]
)
def test_the_algorithm_returns_the_texts_of_transformers(model: Any, stops: list[int], number: int) -> None:
    prompt = prompts()[number]
    for options in OPTIONS:
        search = BeamSearch(options, stops, MOST)
        while not search.done:
            rows = torch.tensor([[*prompt, *beam.ids] for beam in search.running])
            with torch.no_grad():
                logprobs = model(rows).logits[:, -1].log_softmax(-1)
            best = logprobs.topk(search.needed)
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            search.advance([dict(zip(ids, values, strict=True)) for ids, values in pairs])
        assert [list(beam.ids) for beam in search.finished] == theirs(model, prompt, options, stops), options


@pytest.mark.parametrize("cache", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_on_an_engine_it_returns_the_texts_of_transformers_one_computed_token_a_beam_and_leaves_nothing_open(
    model: Any, folder: Path, cache: bool
) -> None:
    async def search() -> list[list[list[int]]]:
        keys = {"dtype": "float32", "infer.kv_memory": "4MiB", "infer.prefix_cache": cache}
        config = from_overrides(str(folder), keys)
        llm = await AsyncLLM.start(config, "thread")
        try:

            async def one(number: int, prompt: list[int], options: BeamOptions) -> list[list[int]]:
                stream = BeamStream(llm, f"r{number}", prompt, options, n=options.beams, stops=[2], max_tokens=MOST)
                async with stream:
                    return [delta.token_ids async for delta in stream]

            asked = list(enumerate(itertools.product(prompts(), OPTIONS[::5])))
            found = await asyncio.gather(*(one(number, *each) for number, each in asked))
            stats = await llm.stats()
            assert llm.num_open == 0 and stats.blocks_used == 0
            # Whole prompts for the first steps; one token for each request of the others, a fork.
            assert stats.forks == stats.finished - len(asked)
            prompt_tokens = sum(len(prompt) for _, (prompt, _) in asked)
            assert stats.computed_tokens + stats.cached_tokens == prompt_tokens + stats.forks
            return found
        finally:
            await llm.close()

    expected = [theirs(model, prompt, options, [2]) for prompt, options in itertools.product(prompts(), OPTIONS[::5])]
    assert asyncio.run(search()) == expected


def test_more_beams_than_the_engine_has_likeliest_tokens_for_are_refused() -> None:
    with pytest.raises(RequestError, match="num_beams is 20; this model's search has at most 19"):
        BeamStream(Any, "r", [1], BeamOptions(20), n=1, stops=[2], max_tokens=4)  # type: ignore[arg-type]

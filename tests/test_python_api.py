"""``LLM`` and ``AsyncLLM`` on real engines: what a program of a user relies on."""

from __future__ import annotations

import asyncio
import math
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import PATIENCE, tiny_model

import evener
from evener import LLM, SamplingParams
from evener.async_llm import AsyncLLM
from evener.config import from_overrides
from evener.engine.sampling.pending import PendingStep
from evener.engine.wire.plan import Plan
from evener.engine.worker.assembly import Assembly
from evener.engine.worker.weights import load_stage
from evener.engine.worker.worker import Worker
from evener.errors import ConfigError, ContextLengthError, EngineDeadError, EvenerError, RequestError

SMALL = {"infer.kv_memory": 2**26, "infer.max_seq_len": 256, "infer.max_reqs": 8}
TINY = {"load": "dummy", "infer.kv_memory": 2**22, "infer.max_seq_len": 1024, "infer.max_reqs": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm(smollm2_dir: Path) -> Iterator[LLM]:
    with LLM(smollm2_dir, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with only ``config.json``."""
    folder = tiny_model(tmp_path_factory.mktemp("bare") / "bare", tokenizer=False)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    return folder


def test_strings_and_ids_are_prompts_and_outputs_keep_their_order(llm: LLM) -> None:
    texts = ["The capital of France is", "One, two, three,"]
    outputs = llm.generate(texts, GREEDY)
    assert [output.prompt for output in outputs] == texts
    assert "Paris" in outputs[0].outputs[0].text and " four" in outputs[1].outputs[0].text
    for output in outputs:
        (sample,) = output.outputs
        assert output.finished and sample.finish_reason == "length" and len(sample.token_ids) == 8
        assert sample.logprobs is None
    ids = [output.prompt_token_ids for output in outputs]
    again = llm.generate(ids, GREEDY)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in outputs]
    (flat,) = llm.generate(ids[1], GREEDY)
    assert flat.prompt_token_ids == ids[1] and flat.outputs[0].text == outputs[1].outputs[0].text
    (single,) = llm.generate(texts[0], GREEDY)
    assert single.outputs[0].text == outputs[0].outputs[0].text


def test_every_prompt_may_have_parameters_of_its_own(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (1, 5)]
    assert [len(o.outputs[0].token_ids) for o in llm.generate(["a b c", "d e f"], params)] == [1, 5]
    with pytest.raises(RequestError, match="2 prompts and 1 SamplingParams"):
        llm.generate(["a", "b"], params[:1])


def test_temperature_0_is_deterministic_alone_and_in_company(llm: LLM) -> None:
    prompts = ["The sky is", "My name is", "Water boils at", "Dogs and cats"]
    together = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    assert together == [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]


def test_a_seed_fixes_the_samples_and_n_of_them_differ(llm: LLM) -> None:
    def sample(seed: int) -> list[list[int]]:
        (output,) = llm.generate("Once upon a time", SamplingParams(temperature=1.5, seed=seed, n=3, max_tokens=6))
        return [each.token_ids for each in output.outputs]

    first = sample(1)
    assert first == sample(1) and first != sample(2) and len(set(map(tuple, first))) == 3


def test_logprobs_are_dicts_of_the_raw_distribution_whatever_is_sampled(llm: LLM) -> None:
    hot = SamplingParams(temperature=2.0, top_k=5, seed=3, max_tokens=4, logprobs=4, ignore_eos=True)
    (output,) = llm.generate("The capital of France is", hot)
    sample = output.outputs[0]
    assert sample.logprobs is not None and len(sample.logprobs) == 4
    (cold,) = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=1, logprobs=4))
    assert cold.outputs[0].logprobs is not None
    for token, entry in zip(sample.token_ids, sample.logprobs, strict=True):
        assert next(iter(entry)) == token, "the sampled token comes first"
        assert 4 <= len(entry) <= 5 and all(value <= 0 for value in entry.values())
        assert sum(math.exp(value) for value in entry.values()) <= 1.0001
    # Neither temperature nor top_k changes what the model said of the first token.
    likeliest = cold.outputs[0].logprobs[0]
    assert {id: sample.logprobs[0][id] for id in likeliest} == pytest.approx(likeliest, abs=1e-3)


def test_chat_goes_through_the_template_and_takes_one_conversation_or_several(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "What is the capital of France?"}]
    (answer,) = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=20))
    assert "Paris" in answer.outputs[0].text and answer.outputs[0].finish_reason == "stop"
    assert answer.prompt is not None and answer.prompt.endswith("<|im_start|>assistant\n")
    both = llm.chat([conversation, conversation], GREEDY)
    assert [output.outputs[0].text for output in both] == [answer.outputs[0].text[: len(both[0].outputs[0].text)]] * 2


def test_ids_without_text_and_without_a_stop_at_eos(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "What is the capital of France?"}]
    (stopped,) = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=20))
    on = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    (output,) = llm.chat(conversation, on)
    sample, ids = output.outputs[0], stopped.outputs[0].token_ids
    assert sample.text == "" and sample.finish_reason == "length" and len(sample.token_ids) == 20
    assert len(ids) < 20 and sample.token_ids[: len(ids)] == ids


def test_a_stop_string_ends_a_sample_and_is_told(llm: LLM) -> None:
    (output,) = llm.generate("One, two, three,", SamplingParams(temperature=0, max_tokens=20, stop=["ve, s"]))
    sample = output.outputs[0]
    assert sample.text == " four, fi" and (sample.finish_reason, sample.stop_reason) == ("stop", "ve, s")


def test_wrong_requests_are_told_before_any_of_them_runs(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match="256 tokens"):
        llm.generate(["fine", "word " * 400], GREEDY)
    with pytest.raises(RequestError, match="integers from 0"):
        llm.generate([[1, 10**6]], GREEDY)
    with pytest.raises(RequestError, match="temperature"):
        SamplingParams(temperature=-1)
    assert len(llm.generate("still fine", GREEDY)) == 1


def test_a_folder_with_only_its_config_runs_on_made_up_weights(bare: Path) -> None:
    with LLM(bare, **TINY) as llm:
        assert llm.tokenizer is None
        (output,) = llm.generate([5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True, detokenize=False))
        assert len(output.outputs[0].token_ids) == 5
        assert len(llm.generate([[1], [2, 3]])) == 2, "without parameters, text is not asked for where there is none"
        with pytest.raises(RequestError, match="no tokenizer"):
            llm.generate("text")
    with pytest.raises(EvenerError, match="safetensors"):
        LLM(bare, **{**TINY, "load": "auto"})


def test_two_llms_in_one_process_and_one_outlives_the_other(tiny: Path, bare: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
    with LLM(tiny, **TINY) as one:
        other = LLM(bare, **{**TINY, "seed": 7})
        before = one.generate([1, 2, 3], params)[0].outputs[0].token_ids
        assert other.generate([1, 2, 3], params)[0].outputs[0].token_ids != before, "another seed, other weights"
        other.close()
        other.close()
        with pytest.raises(EngineDeadError, match="closed"):
            other.generate([1], params)
        assert one.generate([1, 2, 3], params)[0].outputs[0].token_ids == before


def test_a_wrong_key_or_value_names_the_right_one(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'infer\.max_reqs'"):
        LLM(tiny, **{"infer.max_req": 2})
    with pytest.raises(ConfigError, match="did you mean 'float32'"):
        LLM(tiny, dtype="flaot32")


async def test_the_async_engine_streams_and_a_closed_or_aborted_stream_holds_no_block(tmp_path: Path) -> None:
    # A minute's work on the fastest machine: the engine goes on where a busy one gives this thread no time.
    params = SamplingParams(temperature=0, max_tokens=100_000, ignore_eos=True, detokenize=False)
    keys = {**TINY, "infer.max_seq_len": 2**17, "infer.kv_memory": 2**27}
    llm = await AsyncLLM.start(from_overrides(str(tiny_model(tmp_path / "tiny", positions=2**17)), keys), "thread")
    try:
        short = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        pieces = [delta async for delta in llm.stream("hello", short)]
        assert sum(len(delta.token_ids) for delta in pieces) == 5 and pieces[-1].finish_reason == "length"
        states = [output async for output in llm.generate("hello", short)]
        assert states[-1].finished and states[-1].outputs[0].text == "".join(delta.text for delta in pieces)

        stream = await llm.submit([1, 2, 3], params, request_id="mine")
        first = await anext(stream)
        assert first.token_ids and first.request_id == "mine"
        assert (await llm.stats()).blocks_used > 0
        llm.abort("mine")
        ends = [delta.finish_reason async for delta in stream]
        assert ends[-1] == "abort"
        await idle(llm)

        async with await llm.submit([1, 2, 3], params) as left:
            await anext(left)
        await idle(llm)
    finally:
        await llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        await llm.stats()


async def idle(llm: AsyncLLM) -> None:
    """Wait until nothing is open and no block is held."""

    async def look() -> None:
        while (stats := await llm.stats()).running or stats.waiting or stats.blocks_used:
            await asyncio.sleep(0)

    await asyncio.wait_for(look(), PATIENCE)


def test_the_package_has_types_and_a_version() -> None:
    assert (Path(evener.__file__).parent / "py.typed").exists()


def test_ranks_in_one_process_run_where_a_debugger_sees_them_and_give_the_tokens_of_one(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[int] = set()
    execute = Worker.execute

    def watched(worker: Worker, plan: Plan) -> PendingStep:
        seen.add(worker.assembly.ranks.world.rank)
        return execute(worker, plan)

    with LLM(tiny, dtype="float32", **TINY) as alone:
        expected = [output.outputs[0].text for output in alone.generate(["a horse", "two horses"], GREEDY)]
    monkeypatch.setattr(Worker, "execute", watched)
    with LLM(tiny, dtype="float32", executor="inline", **TINY, **{"infer.tp_size": 2}) as llm:
        assert [output.outputs[0].text for output in llm.generate(["a horse", "two horses"], GREEDY)] == expected
    assert seen == {0, 1}


@pytest.mark.parametrize("ranks", [{"infer.tp_size": 2}, {"infer.pp_size": 2}], ids=["parts", "stages"])
def test_an_error_of_a_rank_in_this_process_is_raised_with_its_traceback_and_leaves_no_thread(
    ranks: dict[str, int], tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    execute = Worker.execute

    def in_a_kernel(worker: Worker, plan: Plan) -> PendingStep:
        # The other rank has gone ahead and waits for this one, in a sum or for a stage's rows.
        if worker.assembly.ranks.world.rank == (1 if "infer.tp_size" in ranks else 0) and plan.id == 1:
            raise ZeroDivisionError("a kernel's own")
        return execute(worker, plan)

    with LLM(tiny, dtype="float32", executor="inline", **TINY, **ranks) as llm:
        monkeypatch.setattr(Worker, "execute", in_a_kernel)
        with pytest.raises(ZeroDivisionError, match="a kernel's own") as caught:
            llm.generate("a horse", GREEDY)
    assert "in_a_kernel" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert [record.exc_info and record.exc_info[1] for record in caplog.records if record.name == "evener.ranks"] == [
        caught.value
    ]
    assert not rank_names()


def test_a_rank_in_this_process_that_cannot_start_is_the_error_and_the_other_ends(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(a: Assembly) -> Any:
        if a.ranks.world.rank == 1:
            raise ZeroDivisionError("a loader's own")
        return load_stage(a)

    monkeypatch.setattr("evener.engine.worker.worker.load_stage", broken)
    with pytest.raises(ZeroDivisionError, match="a loader's own"):
        LLM(tiny, dtype="float32", executor="inline", **TINY, **{"infer.tp_size": 2})
    assert not rank_names()


def rank_names() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("evener-rank")]

"""``AsyncLLM`` on an engine without a model. Nothing here waits by the clock."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evener import AsyncLLM, SamplingParams
from evener.engine.wire.messages import FromController
from evener.errors import CheckpointError, EngineDeadError, EngineError, MemoryPlanError, OverloadedError, RequestError
from evener_conformance.fake_engine import FakeEngine

FOUR = SamplingParams(max_tokens=4)
ENDLESS = SamplingParams(max_tokens=100)


@asynccontextmanager
async def serving(folder: Path, engine: FakeEngine, **more: Any) -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM(engine, model_dir=folder, **more)
    await llm.wait_ready()
    try:
        yield llm
    finally:
        await llm.close()


async def text_of(llm: AsyncLLM, prompt: str, params: SamplingParams = FOUR) -> str:
    return "".join([delta.text async for delta in llm.stream(prompt, params)])


async def test_a_stream_gives_deltas_and_generate_everything_so_far(tiny_dir: Path) -> None:
    async with serving(tiny_dir, FakeEngine(cached=1)) as llm:
        deltas = [delta async for delta in llm.stream("ab", FOUR, request_id="me")]
        assert "".join(delta.text for delta in deltas) == "abab"
        assert [delta.finish_reason for delta in deltas][-1] == "length"
        assert all(delta.finish_reason is None and delta.request_id == "me" for delta in deltas[:-1])
        outputs = [output async for output in llm.generate("ab", SamplingParams(n=2, max_tokens=4))]
        assert outputs[-1].finished
        assert [sample.text for sample in outputs[-1].outputs] == ["abab", "abab"]
        assert outputs[-1].num_cached_tokens == 1
        assert all("abab".startswith(output.outputs[0].text) for output in outputs)
        assert not any(output.finished for output in outputs[:-1])
        assert llm.num_open == 0


async def test_a_chat_goes_through_the_template(tiny_dir: Path) -> None:
    async with serving(tiny_dir, FakeEngine()) as llm:
        stream = await llm.submit_chat([{"role": "user", "content": "hi"}])
        assert stream.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert "".join([delta.text async for delta in stream]) == "user\nhi"


async def test_64_streams_wake_the_event_loop_once_per_step(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    async with serving(tiny_dir, engine) as llm:
        engine.hold()
        streams = [await llm.submit(f"prompt {i}", SamplingParams(max_tokens=40)) for i in range(64)]
        wakes = 0
        wake = llm._loop.call_soon_threadsafe

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal wakes
            wakes += 1
            return wake(*args, **kwargs)

        monkeypatch.setattr(llm._loop, "call_soon_threadsafe", counted)
        engine.release()

        async def read(stream: Any) -> str:
            return "".join([delta.text async for delta in stream])

        texts = await asyncio.gather(*(read(stream) for stream in streams))
        monkeypatch.undo()
        assert texts == [(f"prompt {i}" * 40)[:40] for i in range(64)]
        assert wakes <= 45  # 64 * 40 tokens in 40 steps


async def test_a_slow_reader_gets_merged_deltas(tiny_dir: Path) -> None:
    async with serving(tiny_dir, FakeEngine()) as llm:
        stream = await llm.submit("ab", SamplingParams(max_tokens=20, logprobs=0))
        await llm.drain()
        (delta,) = [delta async for delta in stream]
        assert (delta.text, delta.finish_reason, len(delta.token_ids)) == ("ab" * 10, "length", 20)
        assert len(delta.logprobs or []) == 20


async def test_closing_a_stream_aborts_the_request(tiny_dir: Path) -> None:
    engine = FakeEngine()
    async with serving(tiny_dir, engine) as llm:
        engine.hold()
        stream = await llm.submit("ab", ENDLESS, request_id="gone")
        await stream.aclose()
        assert engine.aborted_ids == ["gone"]
        assert [delta async for delta in stream] == []
        assert await llm.drain()
        assert (engine.open_ids, llm.num_open) == ([], 0)


async def test_a_generator_that_is_closed_early_aborts_the_request(tiny_dir: Path) -> None:
    engine = FakeEngine(hold_after=2)
    async with serving(tiny_dir, engine) as llm:
        generator = llm.stream("ab", ENDLESS, request_id="gone")
        await generator.__anext__()
        await generator.aclose()  # type: ignore[attr-defined]
        assert await llm.drain()
        assert engine.aborted_ids == ["gone"]


async def test_cancelling_a_task_that_reads_aborts_the_request(tiny_dir: Path) -> None:
    engine = FakeEngine()
    async with serving(tiny_dir, engine) as llm:
        engine.hold()
        stream = await llm.submit("ab", ENDLESS, request_id="gone")
        task = asyncio.ensure_future(stream.__anext__())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.aborted_ids == ["gone"]


async def test_an_aborted_request_ends_its_stream_with_that_reason(tiny_dir: Path) -> None:
    engine = FakeEngine()
    async with serving(tiny_dir, engine) as llm:
        engine.hold()
        stream = await llm.submit("ab", SamplingParams(n=2, max_tokens=50), request_id="x")
        llm.abort("x")
        llm.abort("unknown")
        assert [delta.finish_reason async for delta in stream] == ["abort", "abort"]


async def test_a_stop_string_tells_the_engine_and_ends_the_stream(tiny_dir: Path) -> None:
    engine = FakeEngine()
    async with serving(tiny_dir, engine) as llm:
        assert await text_of(llm, "one END ", SamplingParams(max_tokens=100, stop="END")) == "one "
        assert engine.open_ids == []


async def test_an_invalid_request_is_an_error_before_the_first_delta(tiny_dir: Path) -> None:
    engine = FakeEngine()
    async with serving(tiny_dir, engine) as llm:
        for prompt in ("", [9999], "x" * 5000):
            with pytest.raises(RequestError):
                await llm.submit(prompt)
        assert engine.sent == []


async def test_more_requests_than_may_wait_are_refused(tiny_dir: Path) -> None:
    engine = FakeEngine(info_overrides={"max_reqs": 2})
    async with serving(tiny_dir, engine, max_queue=1) as llm:
        engine.hold()
        first = await llm.submit("ab", SamplingParams(n=2, max_tokens=9))
        await llm.submit("ab", FOUR)
        with pytest.raises(OverloadedError, match="3 samples are open and 3 are allowed"):
            await llm.submit("ab", FOUR)
        with pytest.raises(RequestError, match="at most 3 are taken"):
            await llm.submit("ab", SamplingParams(n=4))
        await first.aclose()
        engine.release()
        await llm.idle.wait()
        assert await text_of(llm, "ab") == "abab"


async def test_room_is_held_while_a_request_is_prepared_and_given_back_if_it_is_not_submitted(tiny_dir: Path) -> None:
    engine = FakeEngine(info_overrides={"max_reqs": 2})
    async with serving(tiny_dir, engine, max_queue=1) as llm:
        with llm.reserve(2) as room:
            with pytest.raises(OverloadedError, match="2 samples are open and 3 are allowed"):
                await llm.submit("ab", SamplingParams(n=2))
            with pytest.raises(RequestError, match="prompt asks for 4 samples"):
                llm.reserve(4, "prompt")
            engine.hold()
            await llm.submit("ab", SamplingParams(n=2, max_tokens=9), reservation=room)
            await llm.submit("ab", FOUR)
        with pytest.raises(OverloadedError, match="3 samples are open"):
            llm.reserve(1)
        engine.release()
        await llm.idle.wait()
        with pytest.raises(RequestError), llm.reserve(3) as room:
            await llm.submit("", reservation=room)
        with llm.reserve(3):
            pass


async def test_a_failed_request_is_an_error_delta_or_an_exception(tiny_dir: Path) -> None:
    engine = FakeEngine()
    async with serving(tiny_dir, engine) as llm:
        engine.hold()
        stream = await llm.submit("ab", FOUR, request_id="x")
        engine.fail("x", "too hot", 503)
        (delta,) = [delta async for delta in stream]
        assert (delta.finish_reason, delta.error, delta.status) == ("error", "too hot", 503)

        async def consume() -> None:
            async for _ in llm.generate("ab", FOUR, request_id="y"):
                pass

        task = asyncio.ensure_future(consume())
        while "y" not in engine.open_ids:
            await asyncio.sleep(0)
        engine.fail("y", "too hot")
        with pytest.raises(EngineError, match="request y: too hot"):
            await task


async def test_a_dead_engine_ends_every_stream_and_refuses_new_requests(tiny_dir: Path) -> None:
    engine = FakeEngine()
    async with serving(tiny_dir, engine) as llm:
        engine.hold()
        streams = [await llm.submit("ab", FOUR) for _ in range(3)]
        engine.die("worker 0 was killed")
        for stream in streams:
            (delta,) = [delta async for delta in stream]
            assert (delta.finish_reason, delta.status) == ("error", 503)
            assert "worker 0 was killed" in (delta.error or "")
        assert (llm.alive, llm.ready, llm.dead_reason) == (False, False, "worker 0 was killed")
        with pytest.raises(EngineDeadError, match="worker 0 was killed"):
            await llm.submit("ab")


async def test_a_channel_that_breaks_is_a_dead_engine(tiny_dir: Path) -> None:
    class Broken(FakeEngine):
        def receive(self, timeout: float | None) -> list[FromController]:
            if self.sent:
                raise ConnectionResetError("pipe")
            return super().receive(timeout)

    async with serving(tiny_dir, Broken()) as llm:
        # A receive that was under way when the request came may still deliver.
        *_, last = [delta async for delta in llm.stream("ab", FOUR)]
        assert "ConnectionResetError: pipe" in (last.error or "")
        assert not llm.alive


async def test_draining_lets_open_requests_end_and_refuses_new_ones(tiny_dir: Path) -> None:
    engine = FakeEngine()
    async with serving(tiny_dir, engine) as llm:
        engine.hold()
        stream = await llm.submit("ab", FOUR)
        assert not await llm.drain(timeout=0)
        assert not llm.ready
        with pytest.raises(EngineDeadError, match="shutting down"):
            await llm.submit("ab")
        engine.release()
        assert await llm.drain()
        assert "".join([delta.text async for delta in stream]) == "abab"


async def test_closing_ends_open_streams_and_the_engine(tiny_dir: Path) -> None:
    engine = FakeEngine()
    async with serving(tiny_dir, engine) as llm:
        engine.hold()
        stream = await llm.submit("ab", FOUR)
        await llm.close()
        assert [delta.finish_reason async for delta in stream][-1] in ("abort", "error")
        assert engine.closed
        assert not llm._reader.is_alive()


async def test_engine_is_alive_but_rejects_requests_before_ready(tiny_dir: Path) -> None:
    engine = FakeEngine(auto_ready=False)
    llm = AsyncLLM(engine, model_dir=tiny_dir)
    assert (llm.alive, llm.ready, llm.info, llm.num_open) == (True, False, None, 0)
    with pytest.raises(EngineDeadError, match="not ready yet"):
        await llm.submit("ab")
    engine.become_ready()
    await llm.wait_ready()
    assert llm.ready
    assert llm.info is not None and llm.info.served_name == "fake"
    await llm.close()


async def test_a_tokenizer_that_cannot_be_used_ends_the_start_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    llm = AsyncLLM(FakeEngine(), model_dir=tmp_path)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        await llm.wait_ready()
    assert not llm.alive
    await llm.close()


async def test_a_start_up_error_of_the_engine_is_raised_unchanged(tiny_dir: Path) -> None:
    class TooBig(FakeEngine):
        def receive(self, timeout: float | None) -> list[FromController]:
            raise MemoryPlanError("12 GiB are wanted, 8 GiB are there")

    llm = AsyncLLM(TooBig(), model_dir=tiny_dir)
    with pytest.raises(MemoryPlanError, match="12 GiB"):
        await llm.wait_ready()
    await llm.close()


async def test_starting_uses_the_config_and_waits_until_it_is_ready(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from evener.config import from_overrides

    modes: list[str] = []

    def start_engine(config: Any, mode: str) -> FakeEngine:
        modes.append(mode)
        return FakeEngine()

    monkeypatch.setitem(sys.modules, "evener.engine.processes.start", SimpleNamespace(start_engine=start_engine))
    llm = await AsyncLLM.start(from_overrides(tiny_dir, {"serve.max_queue": 7}), mode="thread")
    assert (llm.ready, llm.max_queue, modes) == (True, 7, ["thread"])
    assert await text_of(llm, "ab") == "abab"
    await llm.close()


async def test_an_engine_that_dies_while_it_starts_is_closed(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from evener.config import from_overrides

    engine = FakeEngine(auto_ready=False)
    engine.die("no memory")
    start = SimpleNamespace(start_engine=lambda config, mode: engine)
    monkeypatch.setitem(sys.modules, "evener.engine.processes.start", start)
    with pytest.raises(EngineDeadError, match="no memory"):
        await AsyncLLM.start(from_overrides(tiny_dir, {}))
    assert engine.closed

"""``python dynamo_contract.py MODEL``: what Dynamo's ``LLMEngine`` promises, of our engine, with Dynamo's own contexts.

Writes what it saw to standard output, as JSON. The model has random weights.
"""

from __future__ import annotations

import asyncio
import json
import sys
from array import array
from typing import Any

from dynamo._core import Context
from dynamo.common.backend.engine import LLMEngine
from dynamo.llm.exceptions import InvalidArgument

from evener_deploy.dynamo_engine import EvenerEngine

KEYS = ("load=dummy", "dtype=float32", "infer.kv_memory=16MiB", "infer.max_reqs=1", "infer.block_size=16")
PROMPT = list(range(3, 40))


def request(prompt: Any, tokens: int) -> dict[str, Any]:
    stops = {"max_tokens": tokens, "ignore_eos": True}
    return {"token_ids": prompt, "stop_conditions": stops, "sampling_options": {"temperature": 0.0}}


async def collect(engine: LLMEngine, asked: dict[str, Any], context: Context) -> list[dict[str, Any]]:
    return [chunk async for chunk in engine.generate(asked, context)]


async def ended(task: asyncio.Task[list[dict[str, Any]]]) -> str:
    """How a request ended."""
    return str((await asyncio.wait_for(task, 60))[-1]["finish_reason"])


async def aborts(engine: EvenerEngine) -> dict[str, Any]:
    """One request runs and two wait; all have one id, as clients may choose it. They are given up one after another."""
    contexts = [Context("chosen-by-the-client") for _ in range(3)]
    first = engine.generate(request(PROMPT, 3000), contexts[0])
    begun = await anext(first)

    async def rest() -> list[dict[str, Any]]:
        return [begun, *[chunk async for chunk in first]]

    running = asyncio.ensure_future(rest())
    waiting = [asyncio.ensure_future(collect(engine, request(PROMPT, 3000), each)) for each in contexts[1:]]
    await asyncio.sleep(0)  # one is given up before the engine knows of it, the other while it waits
    contexts[1].stop_generating()
    await engine.abort(contexts[1])
    found = {"new": await ended(waiting[0]), "others_go_on": not running.done() and not waiting[1].done()}
    assert engine._llm is not None
    while (await engine._llm.stats()).waiting < 1:
        await asyncio.sleep(0.001)
    contexts[2].stop_generating()
    await engine.abort(contexts[2])
    found["waiting"] = await ended(waiting[1])
    found["others_go_on"] &= not running.done()
    contexts[0].stop_generating()
    await engine.abort(contexts[0])
    found["running"] = await ended(running)
    await engine.abort(contexts[0])  # of what has ended
    while engine._llm.num_open:  # the engine says when it has let go of them; the test's own limit ends this
        await asyncio.sleep(0.001)
    return found


async def main(model: str) -> dict[str, Any]:
    engine, worker = await EvenerEngine.from_args([model, *KEYS, "--namespace", "here", "--discovery-backend", "mem"])
    seen: dict[str, Any] = {"is_llm_engine": isinstance(engine, LLMEngine), "namespace": worker.namespace}
    try:
        config = await engine.start(7)
        assert config.llm is not None
        seen["block_size"], seen["context"] = config.llm.kv_cache_block_size, config.llm.context_length
        seen["blocks"], seen["most"] = config.llm.total_kv_blocks, config.llm.max_num_seqs
        seen["sources"] = [type(each).__name__ for each in await engine.kv_event_sources()]
        whole = await collect(engine, request(PROMPT, 8), Context())
        packed = await collect(engine, request(array("i", PROMPT).tobytes(), 8), Context())
        ids = [[token for chunk in each for token in chunk["token_ids"]] for each in (whole, packed)]
        seen["tokens"], seen["packed_is_equal"] = len(ids[0]), ids[0] == ids[1]
        seen["indices"] = sorted({chunk["index"] for chunk in whole})
        seen["ends"] = sum("finish_reason" in chunk for chunk in whole)
        seen["reason"], seen["usage"] = whole[-1]["finish_reason"], whole[-1]["completion_usage"]
        both = await asyncio.gather(*(collect(engine, request(PROMPT, 8), Context()) for _ in range(4)))
        seen["at_once_is_equal"] = all([t for c in each for t in c["token_ids"]] == ids[0] for each in both)
        seen["aborted"] = await aborts(engine)
        try:
            await collect(engine, request(PROMPT, 8) | {"multi_modal_data": {"image_url": ["data:"]}}, Context())
        except InvalidArgument as error:
            seen["refused"] = str(error)
        seen["after"] = len(await collect(engine, request(PROMPT, 1), Context()))
    finally:
        await engine.cleanup()
        await engine.cleanup()
    broken, _ = await EvenerEngine.from_args([model])  # its folder has no weights
    try:
        await broken.start(8)
    except Exception as error:
        seen["start_fails"] = str(error)
    await broken.cleanup()
    return seen


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1]))))

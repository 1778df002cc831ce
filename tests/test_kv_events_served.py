"""``server.kv_events`` from its keys to the sockets: a server says which blocks of a prompt it can reuse."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from served import Served, free_port, tiny_model
from warm import CHILDREN, warm

from evener import LLM, SamplingParams

KEYS = ("load=dummy", "dtype=float32", "infer.kv_memory=4194304", "infer.block_size=16", "infer.threads=1")


@pytest.fixture
def subscribe() -> Iterator[Any]:
    """A SUB socket that is connected before the server listens, so that it misses nothing."""
    context = zmq.Context()
    opened: list[zmq.Socket[bytes]] = []

    def connect(port: int) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.SUB)
        opened.append(socket)
        socket.setsockopt(zmq.RCVTIMEO, 60_000)
        socket.setsockopt(zmq.RECONNECT_IVL, 10)
        socket.setsockopt(zmq.SUBSCRIBE, b"kv")
        socket.connect(f"tcp://127.0.0.1:{port}")
        return socket

    yield connect
    for socket in opened:
        socket.close(0)
    context.destroy(0)


def test_a_server_announces_the_blocks_of_a_prompt_that_it_then_finds_in_its_cache(
    tmp_path: Path, subscribe: Any
) -> None:
    port, replays = free_port(), free_port()
    socket = subscribe(port)
    addresses = (f"server.kv_events=tcp://127.0.0.1:{port}", f"server.kv_events_replay=tcp://127.0.0.1:{replays}")
    with Served.warm(tiny_model(tmp_path / "m"), *KEYS, *addresses, "server.kv_events_topic=kv") as served:
        body = {"prompt": "a prompt of more than two blocks of sixteen tokens", "max_tokens": 1, "temperature": 0}
        ids = served.http.post("/tokenize", json={"prompt": body["prompt"]}).json()["tokens"]
        for _ in range(2):
            assert served.http.post("/v1/completions", json=body).status_code == 200
        # The subscriber may be connected too late for the first: then the replay has it.
        with socket.context.socket(zmq.DEALER) as question:
            question.setsockopt(zmq.RCVTIMEO, 60_000)
            question.setsockopt(zmq.LINGER, 0)
            question.connect(f"tcp://127.0.0.1:{replays}")
            question.send_multipart([b"", bytes(8)])
            _, number, payload = question.recv_multipart()
        _, (event, *more), rank = msgspec.msgpack.decode(payload)
        assert (int.from_bytes(number, "big"), more, rank) == (0, [], 0)
        whole = (len(ids) // 16) * 16
        assert event["type"] == "BlockStored" and event["token_ids"] == ids[:whole] and event["block_size"] == 16
        assert len(event["block_hashes"]) == whole // 16 >= 2
        assert served.stats()["cached_tokens"] == whole
        served.http.post("/v1/completions", json={**body, "prompt": "another one, and as long as the one before it"})
        while (message := socket.recv_multipart())[1] == number:
            pass
        assert message[0] == b"kv" and msgspec.msgpack.decode(message[2])[1][0]["type"] == "BlockStored"


def test_an_engine_that_was_closed_leaves_its_address_to_the_next_one(tmp_path: Path) -> None:
    model, address = tiny_model(tmp_path / "m"), f"tcp://127.0.0.1:{free_port()}"
    keys = dict(each.split("=") for each in KEYS)
    for _ in range(2):
        with LLM(model, **keys, **{"server.kv_events": address}) as llm:
            assert len(llm.generate([5] * 20, SamplingParams(max_tokens=1))) == 1


def test_events_without_a_prefix_cache_or_at_a_wrong_address_are_refused_at_the_start(tmp_path: Path) -> None:
    model, environ = tiny_model(tmp_path / "m"), {**os.environ, CHILDREN: str(warm() / "python")}
    for settings, words in (
        (("server.kv_events=tcp://127.0.0.1:*", "infer.prefix_cache=false"), "infer.prefix_cache is false"),
        (("server.kv_events=nonsense",), "server.kv_events=nonsense cannot be used"),
        (("server.kv_events_replay=tcp://127.0.0.1:*",), "server.kv_events_replay needs server.kv_events"),
    ):
        command = [warm() / "evener", "serve", model, "serve.port=0", *KEYS, *settings]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
        assert done.returncode == 2 and words in done.stderr, done.stderr

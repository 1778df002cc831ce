"""Two servers and what a router does with them: the prompt is computed by one and answered by the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from served import Served, free_port, tiny_model

KEYS = ("load=dummy", "dtype=float32", "infer.kv_memory=8388608", "infer.block_size=16", "infer.threads=1")
#: What vLLM's example router sends to the first server.
FIRST = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
         "remote_host": None, "remote_port": None}  # fmt: skip


def metric(served: Served, name: str) -> float:
    lines = served.http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"evener:{name}_total"))


def route(first: Served, second: Served, body: dict[str, Any]) -> dict[str, Any]:
    """As a router does: one token of the first server, then the whole answer of the second."""
    asked = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": FIRST}
    params = first.http.post("/v1/completions", json=asked).json()["kv_transfer_params"]
    answer = second.http.post("/v1/completions", json={**body, "kv_transfer_params": params})
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.slow
def test_a_router_sends_a_prompt_to_one_server_and_gets_the_answer_of_another(tmp_path: Path) -> None:
    model, ports = tiny_model(tmp_path / "m"), (free_port(3), free_port(3))
    (tmp_path / "key").write_text("a key that both of them share")
    shared = f"offload.kv_key_file={tmp_path / 'key'}"
    keys = [(*KEYS, shared, f"offload.kv_transfer=127.0.0.1:{own}", f"offload.kv_peers=127.0.0.1:{peer}")
            for own, peer in (ports, ports[::-1])]  # fmt: skip
    text = "a prompt of so many words that it fills several blocks of sixteen tokens, "
    with Served.warm(model, *keys[1]) as second:
        with Served.warm(model, *keys[0]) as first:
            for number in range(3):
                body = {"prompt": f"{number}: {text * 3}", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
                answer = route(first, second, body)
                alone = first.http.post("/v1/completions", json=body).json()
                assert answer["choices"][0]["text"] == alone["choices"][0]["text"]
                assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 224
            assert metric(second, "kv_transfer_hits") == 3 and metric(second, "kv_transfer_failures") == 0
            assert metric(second, "kv_transfer_received_bytes") > 0 and metric(first, "kv_transfer_held") == 3
            # A client that names another address reaches nothing.
            params = {"do_remote_prefill": True, "remote_host": "169.254.169.254", "remote_port": 80}
            body["prompt"] = f"elsewhere: {text * 3}"
            answer = second.http.post("/v1/completions", json={**body, "kv_transfer_params": params}).json()
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            body["prompt"] = f"lost: {text * 3}"
            asked = {**body, "max_tokens": 1, "kv_transfer_params": FIRST}
            params = first.http.post("/v1/completions", json=asked).json()["kv_transfer_params"]
            alone = first.http.post("/v1/completions", json=body).json()
        # The first server is gone before its blocks were fetched.
        answer = second.http.post("/v1/completions", json={**body, "kv_transfer_params": params}).json()
        assert answer["choices"][0]["text"] == alone["choices"][0]["text"]
        assert metric(second, "kv_transfer_failures") == 2

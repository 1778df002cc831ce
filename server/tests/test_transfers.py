"""``kv_transfer_params``: what a router asks of the server that computes a prompt, and of the one that answers it."""

from __future__ import annotations

from typing import Any

import pytest

from evener.config.resolve import ResolvedValue
from evener.engine.wire.messages import NewRequest
from evener_conformance.fake_engine import FakeEngine

SHARES = {"config": {"offload.kv_transfer": ResolvedValue("10.0.0.1:21100", "as asked")}}
#: What routers made for vLLM send to the first server.
ASKS = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
        "remote_host": None, "remote_port": None}  # fmt: skip


def sent(api: Any) -> NewRequest:
    found = [message for message in api.engine.sent if isinstance(message, NewRequest)]
    assert isinstance(found[-1], NewRequest)
    return found[-1]


@pytest.mark.parametrize("kind", ["chat", "complete"])
def test_a_servers_answer_is_accepted_by_the_other_server(kind: str, make_api: Any) -> None:
    api = make_api(FakeEngine(info_overrides=SHARES))
    answer = getattr(api, kind)(max_tokens=1, kv_transfer_params=ASKS).json()
    first, params = sent(api), answer["kv_transfer_params"]
    assert first.transfer == "hold"
    assert (params["remote_host"], params["remote_port"]) == ("10.0.0.1", 21100)
    assert params["remote_request_id"] == first.id == answer["id"]
    response = getattr(api, kind)(kv_transfer_params=params)
    assert sent(api).transfer == f"10.0.0.1:21100/{first.id}"
    assert "kv_transfer_params" not in response.json() and "x-ignored-fields" not in response.headers


def test_a_server_without_transfers_says_that_the_fields_have_no_effect(make_api: Any) -> None:
    api = make_api()
    response = api.complete(kv_transfer_params={"do_remote_decode": True, "prompt_token_ids": [3], "other": 1})
    names = {"do_remote_decode", "prompt_token_ids", "other"}
    assert {name.split(".")[1] for name in response.headers["x-ignored-fields"].split(", ")} == names
    assert sent(api).transfer == "" and "kv_transfer_params" not in response.json()


@pytest.mark.parametrize(
    ("params", "more", "says"),
    [
        ({"do_remote_decode": True, "do_remote_prefill": True}, {}, "contradict each other"),
        ({"do_remote_decode": True}, {"n": 2}, "one prompt and one answer"),
        ({"do_remote_decode": True}, {"prompt": ["a", "b"]}, "one prompt and one answer"),
        ({"do_remote_prefill": True, "remote_host": "a"}, {}, "needs remote_host and remote_port"),
        ({"do_remote_prefill": True, "remote_host": "a" * 300, "remote_port": 1}, {}, "at most 253"),
        ({"do_remote_prefill": True, "remote_host": "a", "remote_port": 0}, {}, "1"),
    ],
)
def test_wrong_parameters_are_refused(params: Any, more: Any, says: str, make_api: Any, error: Any) -> None:
    response = make_api(FakeEngine(info_overrides=SHARES)).complete(kv_transfer_params=params, **more)
    assert response.status_code == 400 and says in error(response)["message"]
    assert error(response)["param"].startswith("kv_transfer_params")

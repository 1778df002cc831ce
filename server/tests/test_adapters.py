"""Adapters over HTTP: who may load them, how requests name them, and what the engine is told."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from evener.contracts.adapters import AdapterLimits
from evener.contracts.pooling import PoolingSettings
from evener.engine.wire.messages import Command, LoadAdapter, NewRequest, UnloadAdapter
from evener.errors import ConfigError
from evener_conformance.fake_engine import FakeEngine
from evener_server.api_keys import ApiKeys
from evener_server.app import create_app
from evener_server.command import main
from evener_server.key_file import ApiKey, digest_of
from evener_server.options import ServerOptions

LIMITS = AdapterLimits(targets={"layers.0.q_proj.weight": (6, 4)}, rank=4, loaded=3)
SURFACES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/chat/completions/batch": {"messages": [[{"role": "user", "content": "hi"}]], "max_tokens": 2},
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/invocations": {"prompt": "hello", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 16},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
}


def write(folder: Path, value: float = 1.0, rank: int = 2) -> Path:
    folder.mkdir(parents=True)
    name = "base_model.model.layers.0.q_proj.lora_"
    halves = {"A": np.full((rank, 4), value, np.float32), "B": np.full((6, rank), value, np.float32)}
    save_file({f"{name}{half}.weight": data for half, data in halves.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 4}))
    return folder


@pytest.fixture
def adapters(tmp_path: Path) -> Path:
    """The operator's folder."""
    root = tmp_path / "adapters"
    write(root / "sql")
    write(root / "team" / "chat", 2.0)
    return root


@pytest.fixture
def serve(make_api: Callable[..., Any], adapters: Path) -> Callable[..., Any]:
    def make(engine: FakeEngine | None = None, **settings: Any) -> Any:
        settings.setdefault("options", ServerOptions(lora_folder=str(adapters)))
        return make_api(engine or FakeEngine(info_overrides={"adapters": LIMITS}), **settings)

    return make


def load(api: Any, name: str, path: str, **fields: Any) -> httpx.Response:
    return api.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **fields})  # type: ignore[no-any-return]


def asked(api: Any) -> list[str]:
    """Adapter of each request that the engine got."""
    return [message.adapter for message in api.engine.sent if isinstance(message, NewRequest)]


@pytest.mark.parametrize("path", SURFACES)
def test_every_surface_that_generates_takes_an_adapter_as_its_model(path: str, serve: Callable[..., Any]) -> None:
    api = serve()
    answer = load(api, "sql", "sql")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    (loaded,) = [message for message in api.engine.sent if isinstance(message, LoadAdapter)]
    for model in ("sql", "fake"):
        response = api.post(path, {"model": model, **SURFACES[path]})
        assert response.status_code == 200, response.text
        assert response.json()["model"] == model
    assert asked(api) == [loaded.id, ""]
    salts = [message.cache_salt for message in api.engine.sent if isinstance(message, NewRequest)]
    assert salts == [loaded.id, ""]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_streams_and_beams_have_the_adapter_too(path: str, serve: Callable[..., Any], sse: Any) -> None:
    api = serve()
    load(api, "sql", "sql")
    chunks = sse(api.post(path, {"model": "sql", "stream": True, **SURFACES[path]}))
    assert {chunk["model"] for chunk in chunks[:-1]} == {"sql"}
    assert set(asked(api)) != {""} and "" not in asked(api)


def test_beam_search_has_the_adapter(serve: Callable[..., Any]) -> None:
    api = serve()
    load(api, "sql", "sql")
    response = api.complete(model="sql", use_beam_search=True, n=2, max_tokens=2, temperature=0)
    assert response.status_code == 200, response.text
    assert asked(api) and "" not in asked(api)


def test_embeddings_have_the_adapter(serve: Callable[..., Any]) -> None:
    engine = FakeEngine(info_overrides={"adapters": LIMITS, "hidden_size": 4, "pooling": PoolingSettings()})
    api = serve(engine)
    load(api, "sql", "sql")
    response = api.post("/v1/embeddings", {"model": "sql", "input": "hello"})
    assert response.status_code == 200 and response.json()["model"] == "sql"
    assert asked(api) and "" not in asked(api)


def test_adapters_are_listed_with_the_model_as_their_parent(serve: Callable[..., Any], adapters: Path) -> None:
    api = serve()
    load(api, "sql", "sql")
    load(api, "chat", str(adapters / "team" / "chat"))
    cards = {card["id"]: card for card in api.get("/v1/models").json()["data"]}
    assert list(cards) == ["fake", "sql", "chat"]
    assert [card["parent"] for card in cards.values()] == [None, "fake", "fake"]
    assert cards["chat"]["root"] == str(adapters / "team" / "chat")
    assert api.get("/v1/models/sql").json() == cards["sql"]
    assert api.get("/v1/models/other").status_code == 404


def test_an_unloaded_adapter_is_gone(serve: Callable[..., Any], error: Any) -> None:
    api = serve()
    load(api, "sql", "sql")
    answer = api.post("/v1/unload_lora_adapter", {"lora_name": "sql"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert isinstance(api.engine.sent[-1], UnloadAdapter) and api.engine.sent[-1].id == api.engine.sent[-2].id
    response = api.complete(model="sql")
    assert response.status_code == 404 and error(response)["code"] == "model_not_found"
    again = api.post("/v1/unload_lora_adapter", {"lora_name": "sql"})
    assert again.status_code == 404 and error(again)["param"] == "lora_name"


def test_an_adapter_is_replaced_in_place_if_that_is_asked_for(serve: Callable[..., Any], error: Any) -> None:
    api = serve()
    load(api, "sql", "sql")
    refused = load(api, "sql", "team/chat")
    assert refused.status_code == 400 and "already loaded" in error(refused)["message"]
    assert load(api, "sql", "team/chat", load_inplace=True).status_code == 200
    # The new one is there before the old one goes: a request may come between.
    first, second, gone = api.engine.sent
    assert isinstance(gone, UnloadAdapter) and gone.id == first.id != second.id
    api.complete(model="sql")
    assert asked(api) == [second.id]


def test_an_adapter_with_the_same_numbers_keeps_its_cached_prefixes(serve: Callable[..., Any]) -> None:
    api = serve()
    load(api, "sql", "sql")
    api.post("/v1/unload_lora_adapter", {"lora_name": "sql"})
    load(api, "sql", "sql")
    load(api, "other", "sql")
    first, _, again, other = api.engine.sent
    assert first.id == again.id != other.id


@pytest.mark.parametrize("path", ["", "..", "nowhere", "sql/adapter_config.json", "/", "/etc", "../adapters2", "a\x00b",
                                  "x" * 4096, "out", "loop"])  # fmt: skip
def test_only_folders_below_the_operator_s_are_read(path: str, serve: Callable[..., Any], adapters: Path) -> None:
    write(adapters.with_name("adapters2"))
    (adapters / "out").symlink_to(adapters.with_name("adapters2"))
    (adapters / "loop").symlink_to(adapters / "loop")
    api = serve()
    response = load(api, "a", path)
    assert response.status_code in (400, 404) and response.json()["error"]["param"] == "lora_path"
    assert api.engine.sent == []


def test_a_folder_that_cannot_be_used_is_the_client_s_mistake(
    serve: Callable[..., Any], adapters: Path, error: Any
) -> None:
    write(adapters / "wide", rank=8)
    api = serve()
    response = load(api, "wide", "wide")
    assert response.status_code == 400
    assert "infer.max_lora_rank=8" in error(response)["message"] and error(response)["param"] == "lora_path"
    os.remove(adapters / "wide" / "adapter_config.json")
    os.mkfifo(adapters / "wide" / "adapter_config.json")
    assert "not a regular file" in error(load(api, "wide", "wide"))["message"]


@pytest.mark.parametrize("name", ["fake", "alias", "", "a\nb", "x" * 257])
def test_names_that_an_adapter_cannot_have(name: str, serve: Callable[..., Any], adapters: Path, error: Any) -> None:
    api = serve(options=ServerOptions(lora_folder=str(adapters), model_aliases="alias"))
    response = load(api, name, "sql")
    assert response.status_code == 400 and error(response)["param"] == "lora_name"


def test_no_more_adapters_than_the_host_has_room_for(serve: Callable[..., Any], error: Any) -> None:
    api = serve()
    answers = [load(api, f"a{number}", "sql") for number in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 400]
    assert "infer.max_cpu_loras" in error(answers[-1])["message"]


def test_a_folder_is_not_read_for_a_name_that_is_taken(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    api = serve()
    assert load(api, "sql", "sql").status_code == 200
    monkeypatch.setattr("evener_adapters.loaded._read", lambda folder, limits: pytest.fail("it was read"))
    assert load(api, "sql", "sql").status_code == 400


def test_without_the_operator_s_folder_there_is_no_such_route(serve: Callable[..., Any], adapters: Path) -> None:
    api = serve(options=ServerOptions())
    assert load(api, "sql", str(adapters / "sql")).status_code == 404 and api.engine.sent == []


def test_an_engine_without_places_says_what_to_start_it_with(serve: Callable[..., Any], error: Any) -> None:
    response = load(serve(FakeEngine()), "sql", "sql")
    assert response.status_code == 400 and "infer.max_loras=1" in error(response)["message"]


def test_a_server_with_keys_loads_only_for_admins(serve: Callable[..., Any], adapters: Path) -> None:
    api = serve()
    keys = ApiKeys(["sk-1", ApiKey(name="boss", digest=digest_of(b"sk-2"), admin=True)])
    app = create_app(api.llm, keys=keys, options=ServerOptions(lora_folder=str(adapters)))

    async def ask(**headers: str) -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            body = {"lora_name": "sql", "lora_path": "sql"}
            return (await client.post("/v1/load_lora_adapter", json=body, headers=headers)).status_code

    assert api.run(ask()) == 401 and api.run(ask(authorization="Bearer sk-1")) == 403 and api.engine.sent == []
    assert api.run(ask(authorization="Bearer sk-2")) == 200


def test_the_adapters_of_the_configuration_are_there_at_the_start(serve: Callable[..., Any], adapters: Path) -> None:
    api = serve(options=ServerOptions(), lora_modules=(f"sql={adapters / 'sql'}",))
    assert [card["id"] for card in api.get("/v1/models").json()["data"]] == ["fake", "sql"]
    assert api.complete(model="sql").status_code == 200
    assert asked(api) == [api.engine.sent[0].id]


def test_a_beam_search_keeps_its_adapter_when_another_takes_its_name(
    serve: Callable[..., Any], adapters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = serve()
    load(api, "sql", "sql")
    first, send = api.engine.sent[-1].id, api.engine.send

    def replace_after_the_first(message: Any) -> None:
        send(message)
        if isinstance(message, NewRequest) and len(asked(api)) == 1:
            api.llm.adapters.load("sql", adapters / "team" / "chat", replace=True)
            api.llm.adapters.unload("sql")

    monkeypatch.setattr(api.engine, "send", replace_after_the_first)
    answer = api.complete(model="sql", num_beams=2, max_tokens=3, ignore_eos=True)
    assert answer.status_code == 200, answer.text
    assert asked(api) == [first] * 5
    assert first in [message.id for message in api.engine.sent if isinstance(message, UnloadAdapter)]
    behind = [message for message in api.engine.sent if not isinstance(message, Command)]
    assert isinstance(behind[-1], UnloadAdapter), "it goes when the search has ended"


def test_an_alias_of_the_model_that_hides_an_adapter_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    names = ["server.model_aliases=gpt, sql", "infer.lora_modules=chat=/adapters/chat,sql=/adapters/sql"]
    with pytest.raises(ConfigError, match=r"server.model_aliases and infer.lora_modules both have the name 'sql'"):
        main([str(tmp_path), *names])

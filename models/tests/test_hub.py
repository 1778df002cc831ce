"""Models by id, against a stand-in of the hub's HTTP: what is fetched, once, and what is said when it cannot be."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from evener.config import Config, from_overrides
from evener.config.local_model import with_local_model
from evener.errors import CheckpointError

SHA = "a" * 40
FILES = {
    "config.json": b'{"architectures": ["X"]}', "tokenizer.json": b"{}", "model.safetensors": b"s" * 3000,
    "pytorch_model.bin": b"b" * 3000, "README.md": b"read me", "onnx/config.json": b"{}",
    "additional_chat_templates/rag.jinja": b"x",
}  # fmt: skip


class Hub:
    """What the stand-in has and has been asked for."""

    def __init__(self) -> None:
        self.models: dict[str, dict[str, bytes]] = {"org/tiny": FILES}
        self.token: str | None = None
        self.fetched: list[tuple[str, str | None]] = []
        self.breaks_after: int | None = None


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(False)

        def do_GET(self) -> None:
            self.answer(True)

        def answer(self, body: bool) -> None:
            parts = urlsplit(self.path).path.strip("/").split("/")
            if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self.send(401, b"{}", body, {"X-Error-Message": "Invalid username or password."})
            if parts[:2] == ["api", "models"]:
                return self.describe("/".join(parts[2:4]), parts[4:], body)
            files, name = hub.models.get("/".join(parts[:2]), {}), "/".join(parts[4:])
            if name not in files:
                return self.send(404, b"", body, {"X-Error-Code": "EntryNotFound"})
            self.file(name, files[name], body)

        def describe(self, model: str, rest: list[str], body: bool) -> None:
            if model not in hub.models:
                return self.send(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})
            if len(rest) > 1 and rest[1] not in ("main", "v1", SHA):
                return self.send(404, b"{}", body, {"X-Error-Code": "RevisionNotFound"})
            files = hub.models[model]
            if rest and rest[0] == "tree":
                entries = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in files.items()
                ]
                return self.send(200, json.dumps(entries).encode(), body)
            info = {"id": model, "sha": SHA, "siblings": [{"rfilename": name} for name in files]}
            self.send(200, json.dumps(info).encode(), body)

        def file(self, name: str, data: bytes, body: bool) -> None:
            etag = hashlib.sha1(data).hexdigest()
            more = {"ETag": f'"{etag}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
            start = 0
            if body:
                asked = self.headers.get("Range")
                hub.fetched.append((name, asked))
                start = int(asked.removeprefix("bytes=").split("-")[0]) if asked else 0
                if start:
                    more["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            if body and hub.breaks_after is not None and name.endswith(".safetensors"):
                self.send(200, data[: hub.breaks_after], body, more, length=len(data))
                hub.breaks_after = None
                return
            self.send(206 if start else 200, data[start:], body, more)

        def send(
            self, status: int, data: bytes, body: bool, more: dict[str, str] | None = None, length: int | None = None
        ) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data) if length is None else length))
            for key, value in (more or {}).items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(data)

    return Handler


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    stand_in = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(stand_in))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield stand_in
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def ask(tmp_path: Path) -> Any:
    """``ask("org/tiny", **keys)``: the configuration with a model that lies here."""

    def run(model: str, **keys: object) -> Config:
        return with_local_model(from_overrides(model, {"hub.cache": str(tmp_path / "cache"), **keys}))

    return run


def names(config: Config) -> set[str]:
    folder = Path(config.model)
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_model_is_downloaded_once_without_unneeded_files_and_keeps_its_name(hub: Hub, ask: Any) -> None:
    config = ask("org/tiny")
    assert names(config) == {
        "config.json", "tokenizer.json", "model.safetensors", "additional_chat_templates/rag.jinja"
    }  # fmt: skip
    assert config.serve.served_model_name == "org/tiny"
    assert (Path(config.model) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    count = len(hub.fetched)
    assert ask("org/tiny").model == config.model
    assert len(hub.fetched) == count
    assert with_local_model(config) is config


def test_without_safetensors_the_bin_files_are_fetched_and_with_dummy_weights_none(hub: Hub, ask: Any) -> None:
    hub.models["org/old"] = {name: data for name, data in FILES.items() if not name.endswith(".safetensors")}
    assert "pytorch_model.bin" in names(ask("org/old"))
    assert names(ask("org/tiny", load="dummy")) & {"model.safetensors", "pytorch_model.bin"} == set()


def test_one_file_of_a_model_is_named_after_its_id(hub: Hub, ask: Any) -> None:
    hub.models["org/files"] = {"q4.gguf": b"GGUF", "q8.gguf": b"GGUF"}
    config = ask("org/files/q4.gguf")
    assert (Path(config.model).name, config.serve.served_model_name) == ("q4.gguf", "org/files/q4.gguf")
    with pytest.raises(CheckpointError, match=r"per file \(q4\.gguf, q8\.gguf\); name one, as in org/files/q4\.gguf"):
        ask("org/files")
    with pytest.raises(CheckpointError, match=r"has no file 'q9\.gguf'"):
        ask("org/files/q9.gguf")


def test_a_broken_download_continues_where_it_stopped(hub: Hub, ask: Any) -> None:
    whole = bytes(range(256)) * (50 << 10)  # more than the library takes at a time
    hub.models["org/big"] = {**FILES, "model.safetensors": whole}
    hub.breaks_after = len(whole) - 100
    assert (Path(ask("org/big").model) / "model.safetensors").read_bytes() == whole
    ranges = [asked for name, asked in hub.fetched if name == "model.safetensors"]
    assert ranges[0] is None and ranges[1] is not None and ranges[1].startswith("bytes=10485760-")


def test_offline_uses_downloaded_models_and_names_a_missing_one(hub: Hub, ask: Any) -> None:
    with pytest.raises(
        CheckpointError, match=r"has not been downloaded yet, and hub\.offline or HF_HUB_OFFLINE is set"
    ):
        ask("org/tiny", **{"hub.offline": True})
    fetched = ask("org/tiny")
    hub.models.clear()
    assert ask("org/tiny", **{"hub.offline": True}).model == fetched.model


@pytest.mark.parametrize(
    ("model", "keys", "words"),
    [
        ("org/none", {}, r"org/none is not a path on .*, where org/none does not exist or is private: check"),
        ("org/tiny", {"hub.revision": "v9"}, r"has no org/tiny at revision 'v9'; set hub\.revision"),
    ],
)
def test_a_model_that_the_hub_does_not_have_is_named(model: str, keys: Any, words: str, hub: Hub, ask: Any) -> None:
    with pytest.raises(CheckpointError, match=words):
        ask(model, **keys)


def test_a_private_model_needs_the_token(hub: Hub, ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "secret"
    with pytest.raises(CheckpointError, match="set HF_TOKEN"):
        ask("org/tiny")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert "model.safetensors" in names(ask("org/tiny"))


def test_a_hub_that_cannot_be_reached_is_an_error_that_says_so(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match="org/tiny is not a path on this machine, so it is looked for on the hub"):
        ask("org/tiny")


@pytest.mark.parametrize("model", ["./a/b", "/a/b", "a", "../a/b"])
def test_a_name_that_cannot_be_an_id_is_a_path(model: str, ask: Any) -> None:
    assert ask(model).model == model


def test_a_name_that_is_neither_a_path_nor_an_id_is_an_error(ask: Any) -> None:
    with pytest.raises(CheckpointError, match="no installed package can fetch it; check the path"):
        ask("a/b/c")

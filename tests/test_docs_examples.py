"""Every command and program that the documents mark as runnable runs, and gives the output that they show."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from docs_blocks import DOCS, Block, blocks, documents, install, named, package_files, python_path
from served import free_port
from source_tree import ROOT
from warm import CHILDREN, warm

pytestmark = pytest.mark.model
PORT = "21002"
# Chinese pages have the same blocks: test_docs_chinese.py.
ALL = [block for path in documents() if not path.name.endswith(".zh.md") for block in blocks(path)]


def flagged(flag: str) -> list[Block]:
    return [block for block in ALL if flag in block.flags]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the documents' two packages are installed."""
    folder = tmp_path_factory.mktemp("packages")
    files = {**package_files(DOCS / "backend-author.md"), **package_files(DOCS / "model-author.md")}
    install(files, folder / "source", folder / "target")
    return folder / "target"


INSTALLED = Path(sys.executable).parent


def environ(block: Block, packages: Path) -> dict[str, str]:
    """As in a shell where the distributions are installed, and for ``with=packages`` the documents' own, too."""
    found = {key: value for key, value in os.environ.items() if not key.startswith(("EVENER_", "ABACUS_"))}
    commands = warm()
    found["PATH"] = f"{commands}:{INSTALLED}:{found['PATH']}"
    found[CHILDREN] = str(commands / "python")
    if block.values.get("with") == "packages":
        found["PYTHONPATH"] = python_path(packages)
    return found


def command(block: Block, model: Path, port: str = PORT) -> list[str]:
    text = block.text.replace("MODEL_DIR", str(model)).replace(PORT, port)
    program = ["bash", "-euo", "pipefail"] if block.language == "sh" else [str(warm() / "python")]
    return [*program, "-c", text]


def test_blocks_that_are_run_are_shell_or_python() -> None:
    odd = [
        str(block)
        for flag in ("run", "serve", "client")
        for block in flagged(flag)
        if block.language not in ("sh", "python")
    ]
    assert not odd and flagged("run") and flagged("serve") and flagged("client")


#: The README's are quick; a page's are run when it, or what it uses, has changed.
RUN = [b if str(b).startswith("README") else pytest.param(b, marks=pytest.mark.slow) for b in flagged("run")]


@pytest.mark.parametrize("block", RUN, ids=str)
def test_a_runnable_block_runs(block: Block, smollm2_dir: Path, packages: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        command(block, smollm2_dir), cwd=tmp_path, env=environ(block, packages),
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() or "assert " in block.text


@pytest.fixture
def served(request: pytest.FixtureRequest, smollm2_dir: Path, packages: Path, tmp_path: Path) -> Iterator[str]:
    """A document's ``serve`` block, ready, on a free port; it must end well on SIGTERM."""
    block, port = request.param, str(free_port())
    words = command(block, smollm2_dir, port)
    words[-1] = f"exec {words[-1].strip()}"
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(words, env=environ(block, packages), stdout=log, stderr=log)
        try:
            wait_until_ready(process, f"http://127.0.0.1:{port}/ready", tmp_path / "log")
            yield port
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0, (tmp_path / "log").read_text()


def wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    limit = time.monotonic() + 120
    while time.monotonic() < limit:
        assert process.poll() is None, log.read_text()
        try:
            opener.open(url, timeout=5).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
        else:
            return
    pytest.fail(f"not ready: {log.read_text()}")


@pytest.mark.parametrize("served", flagged("serve"), ids=str, indirect=True)
def test_the_server_of_a_document_answers_every_documents_clients(
    served: str, smollm2_dir: Path, packages: Path
) -> None:
    for block in flagged("client"):
        done = subprocess.run(
            command(block, smollm2_dir, served), env={**environ(block, packages), "NO_PROXY": "127.0.0.1"},
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "Paris" in done.stdout, str(block)


WATCH = """
import json, sys
import msgspec
from evener import LLM, SamplingParams
from evener.engine.sampling.pending import PendingStep
from evener.engine.worker.worker import Worker
from evener.frontend.frontend import Frontend

seen = []
execute, wait, handle = Worker.execute, PendingStep.wait, Frontend.handle

def watch(owner, name, before, after):
    inner = getattr(owner, name)
    def outer(self, *given):
        if before: seen.extend(map(repr, given))
        found = inner(self, *given)
        if after: after(found)
        return found
    setattr(owner, name, outer)

small = {"infer.max_seq_len": 1024, "infer.max_reqs": 16, "infer.step_tokens": 512, "infer.kv_memory": "64MiB"}
with LLM(sys.argv[1], **small) as llm:
    watch(Worker, "execute", True, None)
    watch(PendingStep, "wait", False, lambda result: seen.append(repr(result)))
    watch(Frontend, "handle", True, lambda found: seen.extend(map(repr, found[0])))
    watch(type(llm._client), "send", True, None)
    llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=3))
    manifest = msgspec.to_builtins(llm.info.manifest.ops)
with LLM(sys.argv[1], **small, **{"ops.decoder_layer": "reference"}) as llm:
    expanded = msgspec.to_builtins(llm.info.manifest.ops)
json.dump({"seen": seen, "manifest": manifest, "expanded": expanded}, sys.stdout)
"""


@pytest.fixture(scope="module")
def watched(smollm2_dir: Path) -> Any:
    """The messages of one request and the manifests of two runs."""
    done = subprocess.run([warm() / "python", "-c", WATCH, str(smollm2_dir)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def parts(line: str) -> tuple[str, set[str]]:
    """The name of a message and its outer fields, as text."""
    name, _, inside = line.strip().partition("(")
    depth, field, fields = 0, "", set()
    for sign in inside[:-1]:
        depth += (sign in "([") - (sign in ")]")
        if sign == "," and depth == 0:
            fields.add(field.strip())
            field = ""
        else:
            field += sign
    return name, {*fields, field.strip()}


def test_the_messages_of_a_request_are_those_that_the_page_shows_in_that_order(watched: Any) -> None:
    shown = [parts(line) for line in named(DOCS / "architecture.md", "name")["way"].splitlines()]
    seen = iter(
        [parts(re.sub(r"Sampling\((temperature=[\d.]+)[^)]*\)", r"Sampling(\1)", line)) for line in watched["seen"]]
    )
    for name, fields in shown:
        assert any(name == other and fields <= others for other, others in seen), (name, fields, watched["seen"])


@pytest.mark.parametrize("which", ["manifest", "expanded"])
def test_the_manifest_says_what_the_page_shows(which: str, watched: Any) -> None:
    for row in json.loads(named(DOCS / "architecture.md", "name")[which]):
        assert any(row.items() <= found.items() for found in watched[which]), (row, watched[which])


def test_nothing_committed_in_the_documents_names_this_machine() -> None:
    for path in documents():
        assert not re.search(r"/(root|home/\w+|work)/", path.read_text("utf-8")), path.relative_to(ROOT)

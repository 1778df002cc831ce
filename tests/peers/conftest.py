"""Tests with programs of others. They need what ``make test-peers`` installs, and run only where ``-m`` names them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from marked_apart import add_mark, leave_out
from peer_sources import NODE, Places
from served import Served

_MARK = "peers"


def pytest_configure(config: pytest.Config) -> None:
    """The mark is theirs alone."""
    add_mark(config, _MARK, "drives the server with a program of others (make test-peers)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """None of them runs without being asked for."""
    leave_out(config, items, _MARK)


@pytest.fixture(scope="session")
def places() -> Places:
    """Where the programs are. A missing one fails: a skipped test would look as if it had passed."""
    found = Places.default()
    packages = (found.node / "node_modules" / package.rsplit("@", 1)[0] for package in NODE)
    for path in (found.python, found.agents_python, *packages):
        if not path.exists():
            pytest.fail(f"{path} is not there; run 'make test-peers'", pytrace=False)
    return found


@pytest.fixture(scope="module")
def server(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A real model behind a real server, for all clients of a file. Its own template has no place for tools."""
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    source = Path(__file__).with_name("vllm_peer") / "template.jinja"
    template.write_text("{%- set reasons = false -%}\n" + source.read_text("utf-8"), "utf-8")
    settings = ("server.reasoning_parser=none", "server.tool_parser=hermes")
    with Served.model(smollm2_dir, f"server.chat_template={template}", *settings) as served:
        yield served


@pytest.fixture(scope="module")
def embedding_server(smollm2_dir: Path) -> Iterator[Served]:
    """The same model as one that embeds texts."""
    with Served.model(smollm2_dir, "infer.task=embed") as served:
        yield served


@pytest.fixture
def environ() -> dict[str, str]:
    """For clients: no path of our packages, no hub, no reports to anybody."""
    ours = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OPENAI_API_KEY")}
    quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "DO_NOT_TRACK": "1", "NO_PROXY": "127.0.0.1"}
    return ours | quiet | {"OPENAI_API_KEY": "none"}

"""A run that will start begins to read its weights before it imports an engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from evener.config import Config, from_overrides
from evener_formats import read_ahead
from evener_server import command, local_engine
from evener_server.early_reading import read_weights_ahead


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The models that reading began for."""
    found: list[Path] = []
    monkeypatch.setattr(read_ahead, "begin_reading", found.append)
    return found


def test_weights_are_read_ahead_where_the_checkpoint_is_read(begun: list[Path]) -> None:
    read_weights_ahead(from_overrides("/data/model", {"load": "dummy"}))
    read_weights_ahead(from_overrides("/data/model", {"model_cache": "/data/cache"}))
    assert begun == []
    read_weights_ahead(from_overrides("/data/model", {}))
    assert begun == [Path("/data/model")]


def test_serve_and_run_begin_before_the_engine_starts(begun: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(config: Config, **_: object) -> int:
        assert begun == [Path(config.model)]
        return 7

    monkeypatch.setattr(command, "serve", serve)
    monkeypatch.setattr(command, "set_up_logging", lambda *_: None)
    assert command.main(["/data/served"]) == 7
    begun.clear()
    with pytest.raises(Exception, match="/data/run"):  # there is no such model
        asyncio.run(local_engine.start(from_overrides("/data/run", {})))
    assert begun == [Path("/data/run")]

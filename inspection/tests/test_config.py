from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evener.cli.main import main
from evener.config.schema import key_specs
from evener.contracts.device import DeviceCapabilities, MemoryInfo

# Imported before anything is replaced: it and what it imports would keep the replacements.
from evener.engine.worker import assembly
from evener.plugins.catalog import LazyImport
from evener.plugins.discover import installed_catalog
from evener_inspection import descriptor
from evener_inspection.config_command import keys

CONFIG = LazyImport(
    kind="command", name="config", path=descriptor.commands["config"], package="inspection",
    distribution="evener-inspection",
)  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    table = {"model_type": "llama", "torch_dtype": "bfloat16", "max_position_embeddings": 2048}
    (tmp_path / "config.json").write_text(json.dumps(table))
    return tmp_path


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A pretend backend; gives what it was asked with."""
    asked: list[Any] = []
    device = SimpleNamespace(
        name="Test device", capabilities=DeviceCapabilities(dtypes=frozenset({"float32"})),
        memory=lambda: MemoryInfo(2**30, 2**31),
    )  # fmt: skip
    backend = SimpleNamespace(name="test")

    def record(result: Any) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            asked.append(args)
            return result

        return call

    monkeypatch.setattr("evener.plugins.choose.choose", record("selection"))
    selection = SimpleNamespace(reason="highest score 10")
    loaded = SimpleNamespace(backend=backend, selection=selection, open_device=lambda: device)
    monkeypatch.setattr("evener.plugins.load.load", record(loaded))
    family = SimpleNamespace(max_positions=777)
    monkeypatch.setattr(assembly, "find_architecture", lambda *_: family)
    lazy_imports = installed_catalog().lazy_imports
    catalog = SimpleNamespace(packages=(), commands=lambda: {"config": CONFIG}, lazy_imports=lazy_imports)
    monkeypatch.setattr("evener.plugins.discover.installed_catalog", lambda: catalog)
    return asked


def test_config_prints_every_value_with_its_reason(
    model: Path, chosen: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", str(model), "infer.depth=1"]) == 0
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in capsys.readouterr().out.splitlines()}
    assert lines["dtype"] == "float32 the checkpoint is bfloat16, which this device does not support"
    assert lines["infer.max_seq_len"] == "2048 max_position_embeddings of the checkpoint"
    assert lines["infer.depth"] == "1 as asked"
    assert lines["backend"] == "test highest score 10"


def test_the_length_that_an_architecture_knows_counts_where_the_file_has_none(
    model: Path, chosen: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert main(["config", str(model), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["infer.max_seq_len"]["value"] == 777


def test_config_speaks_json_and_hands_the_named_backend_on(
    model: Path, chosen: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", str(model), "--json", "--backend", "test"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["backend"] == {"value": "test", "reason": "as asked"}
    assert chosen[0][1] == "test" and chosen[1] == ("selection", {})


def test_a_folder_without_a_checkpoint_is_an_error_before_a_backend_is_chosen(
    tmp_path: Path, chosen: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", str(tmp_path / "no")]) == 1
    assert "give a model folder or file" in capsys.readouterr().err
    assert chosen == []


def test_config_keys_lists_every_key_with_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert key_specs().keys() <= {row["key"] for row in keys()}
    assert main(["config", "--keys", "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert all(row["help"] and row["takes"] for row in rows)
    assert main(["config", "--keys"]) == 0
    out = capsys.readouterr().out
    assert "serve.port\n    Port to listen on; 0: any free port.\n" in out
    assert "\n    It takes an integer from 0 to 65535; default 21002.\n" in out

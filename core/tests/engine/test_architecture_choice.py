"""What the engine asks an architecture before it resolves the configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evener.engine.processes.start import build_controller
from evener.errors import ArchitectureError, ConfigError
from evener_models.llama import LlamaForCausalLM


def without_length(config: Any, **changes: Any) -> Any:
    """The same configuration, whose checkpoint does not say how long a context may be."""
    path = Path(config.model) / "config.json"
    table = json.loads(path.read_text())
    del table["max_position_embeddings"]
    path.write_text(json.dumps({**table, **changes}))
    return config


def test_an_unknown_architecture_is_named_also_if_the_context_length_is_missing(make_config: Any) -> None:
    config = without_length(make_config("Llama", **{"infer.max_seq_len": "auto"}), architectures=["NobodyForCausalLM"])
    with pytest.raises(
        ArchitectureError, match="asks for architecture 'NobodyForCausalLM', which no installed package"
    ):
        build_controller(config)


def test_a_class_may_say_how_long_a_context_may_be(make_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = without_length(make_config("Llama", {"num_hidden_layers": 1}, **{"infer.max_seq_len": "auto"}))
    with pytest.raises(ConfigError, match=r"no max_position_embeddings; set infer\.max_seq_len"):
        build_controller(config)
    monkeypatch.setattr(LlamaForCausalLM, "max_positions", 96)
    _, ready = build_controller(config)
    assert ready.info.max_model_len == 96


def test_the_checkpoints_own_length_goes_before_that_of_the_class(
    make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "max_positions", 96)
    _, ready = build_controller(make_config("Llama", {"num_hidden_layers": 1}, **{"infer.max_seq_len": "auto"}))
    assert ready.info.max_model_len == 256

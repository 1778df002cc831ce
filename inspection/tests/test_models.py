from __future__ import annotations

import json
from pathlib import Path

import pytest

from evener.cli.main import main
from evener_conformance.distributions import write_distribution


def test_models_speaks_json_and_refuses_stray_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out), list)
    assert main(["models", "what"]) == 2
    assert "evener models: unexpected argument 'what'" in capsys.readouterr().err


def test_models_says_family_state_and_oracle_and_why_one_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_distribution(tmp_path, "odd", {"evener.plugins": {"odd": "odd_models:descriptor"}})
    (tmp_path / "odd_models.py").write_text(
        "from evener.contracts.descriptor import Descriptor\n"
        "descriptor = Descriptor(name='odd', summary='for tests', contracts={'descriptor': 1, 'architecture': 2},\n"
        "    architectures={'NoneForCausalLM': 'odd_gone:Gone', 'OddForCausalLM': 'odd_model:Odd'})\n"
    )
    (tmp_path / "odd_model.py").write_text(
        "from evener.layers import CausalLM\nclass Odd(CausalLM):\n    oracle = 'own'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("EVENER_PLUGINS", "odd, evener-inspection")
    assert main(["models"]) == 0
    broken, odd = capsys.readouterr().out.splitlines()
    assert "'NoneForCausalLM' of odd cannot be used: importing odd_gone failed" in broken
    assert odd.split() == ["OddForCausalLM", "-", "-", "own", "odd"]

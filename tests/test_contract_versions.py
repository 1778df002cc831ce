"""A vendor's wheel is built once, against contract version n; cores that come later speak n, n and n + 1, or n + 1."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from docs_blocks import install
from source_tree import ROOT

from evener.contracts.descriptor import CORE_CONTRACTS
from evener.errors import ContractVersionError
from evener.plugins.discover import discover

FROZEN = ROOT / "tests/packages/evener-backend-frozen"

#: Of every file of the package, as it was published. If core cannot load it any more, core is what has to change; or
#: the contract's version moves, in a release, and the package is thawed for that.
DIGEST = "abb9a198d01583934c3a3f6fb68cdff3d3d1c48463d8f14662d1a9204821be1f"

#: Runs a tiny model in a core that speaks the contract versions given as JSON.
RUN = """
import json, sys
from types import MappingProxyType
import evener.contracts.descriptor as descriptor

spoken, folder = json.loads(sys.argv[1]), sys.argv[2]
descriptor.CORE_CONTRACTS = MappingProxyType({name: tuple(span) for name, span in spoken.items()})
from evener import LLM, SamplingParams
from evener.errors import EvenerError

try:
    with LLM(folder, load="dummy", dtype="float32", backend="frozen", **{"infer.kv_memory": "4MiB"}) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
        tokens = llm.generate([5, 7, 5], greedy)[0].outputs[0].token_ids
        used = [row["buckets"] for row in llm.info["manifest"]["ops"] if row["provider"] == "frozen/ice_norm"]
        print(json.dumps({"tokens": tokens, "used": bool(used)}))
except EvenerError as error:
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
"""

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 99, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("frozen")
    files = {f"evener-backend-frozen/{path.relative_to(FROZEN)}": path.read_text() for path in _files()}
    install(files, folder / "source", folder / "target")
    return folder / "target"


@pytest.fixture
def start(installed: Path, tmp_path: Path) -> Any:
    """``start(device=(1, 2))``: what a run says in a core that speaks these versions of these contracts."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))

    def run(**spoken: tuple[int, int]) -> dict[str, Any]:
        words = [sys.executable, "-c", RUN, json.dumps({**CORE_CONTRACTS, **spoken}), str(tmp_path)]
        done = subprocess.run(words, capture_output=True, text=True, env=_environ(installed, tmp_path))
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    return run


def test_the_package_is_what_was_published() -> None:
    digest = hashlib.sha256()
    for path in _files():
        digest.update(path.relative_to(FROZEN).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    assert digest.hexdigest() == DIGEST


def test_it_serves_a_model_in_the_core_of_its_time_and_in_one_that_speaks_the_next_version_too(start: Any) -> None:
    today, tomorrow = start(), start(device=(1, 2), ops=(1, 2), probe=(1, 2), descriptor=(1, 2))
    assert len(today["tokens"]) == 4 and today["used"]
    assert tomorrow == today


@pytest.mark.parametrize("contract", ["device", "ops", "probe"])
def test_a_core_that_speaks_only_later_versions_refuses_it_with_both_numbers(
    contract: str, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(installed))
    found = discover(path=[str(installed)], environ={}, core_contracts={**CORE_CONTRACTS, contract: (2, 3)})
    [problem] = found.problems
    assert isinstance(problem.error, ContractVersionError) and not found.backends
    assert f"core speaks {contract} 2..3, this backend speaks 1" in str(problem.error)
    assert "pip install -U evener-backend-frozen" in str(problem.error)


def _files() -> list[Path]:
    return sorted(p for p in FROZEN.rglob("*") if p.suffix in (".py", ".toml"))


def _environ(installed: Path, home: Path) -> Mapping[str, str]:
    mine = {key: value for key, value in os.environ.items() if not key.startswith("EVENER_")}
    return {**mine, "PYTHONPATH": str(installed), "XDG_CACHE_HOME": str(home)}

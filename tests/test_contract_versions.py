"""A vendor's wheel is built once, against contract version n. Later cores speak n, or n and n + 1, or only n + 1."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from docs_blocks import install
from source_tree import ROOT
from warm import warm

from evener.contracts.descriptor import CORE_CONTRACTS
from evener.errors import ContractVersionError
from evener.plugins.discover import discover

FROZEN = ROOT / "tests/packages/evener-backend-frozen"

#: The packages of docs/examples as they were when core spoke version 1 of every contract. They import modules and names
#: that core no longer has (`evener.layers.settings`), so they must be refused before anything of theirs is imported.
OLD = ROOT / "tests/packages/wheels-of-contracts-1"

#: The packages of docs/examples as they were when the first vendors' backends were written (commit 994cb73): a device
#: with kernels, packing, state and graphs; a model; a quantization scheme; a kind of state.
NEWER = ROOT / "tests/packages/wheels-of-contracts-2"

#: Digest of all files of the frozen package. If core cannot load the package any more, change core; or, if the change
#: is meant to break a contract, raise the contract's version and update the package with it.
DIGEST = "3c601908ff73bd8dbd310955d76a216c3963716893e2d86e2468c162cddd5d19"

#: Runs a tiny model in a core that speaks the contract versions given as JSON.
RUN = """
import json, sys
from types import MappingProxyType
for name in [name for name in sys.modules if name.startswith("evener")]:
    del sys.modules[name]  # of a warm process: all of core is imported with these versions
import evener.contracts.descriptor as descriptor

spoken, folder = json.loads(sys.argv[1]), sys.argv[2]
descriptor.CORE_CONTRACTS = MappingProxyType({name: tuple(span) for name, span in spoken.items()})
from evener import LLM, SamplingParams
from evener.errors import EvenerError

try:
    with LLM(folder, load="dummy", dtype="float32", backend="frozen", **{"infer.kv_memory": "4MiB"}) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
        tokens = llm.generate([5, 7, 5], greedy)[0].outputs[0].token_ids
        used = [row.buckets for row in llm.info.manifest.ops if row.provider == "frozen/ice_norm"]
        print(json.dumps({"tokens": tokens, "used": bool(used)}))
except EvenerError as error:
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
"""

#: Starts the example backend and the example model of the wheels in a folder; prints what each run and each wheel says.
RUN_OLD = """
import json, sys
from evener import LLM
from evener.errors import EvenerError
from evener.plugins.discover import discover

wheels, model = sys.argv[1:]
said = {p.distribution: f"{type(p.error).__name__}: {p.error}" for p in discover(path=[wheels], environ={}).problems}
for run, options in (("backend", {"backend": "worked"}), ("model", {"backend": "cpu"})):
    try:
        LLM(model, load="dummy", dtype="float32", **options).close()
    except EvenerError as error:
        said[run] = f"{type(error).__name__}: {error}"
said["imported"] = sorted(name for name in sys.modules if name.startswith(("evener_backend_w", "evener_model_")))
print(json.dumps(said))
"""

#: Runs the example model of the wheels in a folder on their backend and on the CPU's; prints what each run and each
#: wheel says, and the contract versions that each wheel implements.
RUN_NEWER = """
import json, sys
from importlib.metadata import distributions
from evener import LLM, SamplingParams
from evener.errors import EvenerError
from evener.plugins.discover import discover

wheels, model = sys.argv[1:]
said = {p.distribution: f"{type(p.error).__name__}: {p.error}" for p in discover(path=[wheels], environ={}).problems}
runs = {}
for backend in ("worked", "cpu"):
    try:
        with LLM(model, load="dummy", dtype="float32", backend=backend, **{"infer.kv_memory": "4MiB"}) as llm:
            greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
            runs[backend] = llm.generate([5, 7, 5], greedy)[0].outputs[0].token_ids
    except EvenerError as error:
        runs[backend] = f"{type(error).__name__}: {error}"
points = {d.name: p for d in distributions(path=[wheels]) for p in d.entry_points if p.group.startswith("evener.")}
contracts = {name: dict(point.load().contracts) for name, point in points.items()}
print(json.dumps({"said": said, "runs": runs, "contracts": contracts}))
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


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("newer")
    files = {path.relative_to(NEWER).as_posix(): path.read_text() for path in _files(NEWER)}
    install(files, folder / "source", folder / "target")
    return folder / "target"


@pytest.fixture
def start(installed: Path, tmp_path: Path) -> Any:
    """``start(device=(2, 3))``: what a run says in a core that speaks these versions of these contracts."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))

    def run(**spoken: tuple[int, int]) -> dict[str, Any]:
        words = [warm() / "python", "-c", RUN, json.dumps({**CORE_CONTRACTS, **spoken}), str(tmp_path)]
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
    today, tomorrow = start(), start(device=(2, 3), ops=(2, 3), probe=(2, 3), descriptor=(1, 2))
    assert len(today["tokens"]) == 4 and today["used"]
    assert tomorrow == today


@pytest.mark.parametrize("contract", ["device", "ops", "probe"])
def test_a_core_that_speaks_only_later_versions_refuses_it_with_both_numbers(
    contract: str, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(installed))
    found = discover(path=[str(installed)], environ={}, core_contracts={**CORE_CONTRACTS, contract: (3, 4)})
    [problem] = found.problems
    assert isinstance(problem.error, ContractVersionError) and not found.backends
    assert f"core speaks {contract} 3..4, this backend speaks 2" in str(problem.error)
    assert "pip install -U evener-backend-frozen" in str(problem.error)


@pytest.mark.slow
def test_wheels_of_the_examples_built_for_version_1_are_refused_with_both_numbers(tmp_path: Path) -> None:
    installed, model = tmp_path / "installed", tmp_path / "model"
    install({p.relative_to(OLD).as_posix(): p.read_text() for p in _files(OLD)}, tmp_path / "source", installed)
    model.mkdir()
    (model / "config.json").write_text(json.dumps({**TINY, "architectures": ["ExampleForCausalLM"]}))
    words = [warm() / "python", "-c", RUN_OLD, str(installed), str(model)]
    done = subprocess.run(words, capture_output=True, text=True, env=_environ(installed, tmp_path))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said.pop("imported") == ["evener_backend_worked", "evener_model_example"]
    for name, numbers in (
        ("evener-backend-example", "core speaks probe 2, this backend speaks 1"),
        ("evener-backend-worked", "core speaks probe 2, this backend speaks 1"),
        ("evener-model-example", "core speaks architecture 2, this plugin speaks 1"),
    ):
        assert said[name].startswith("ContractVersionError: ")
        assert numbers in said[name] and f"pip install -U {name}" in said[name]
    assert "core speaks probe 2, this backend speaks 1" in said["backend"]
    assert "'ExampleForCausalLM'" in said["model"]
    assert "core speaks architecture 2, this plugin speaks 1" in said["model"]


def test_wheels_of_the_examples_built_for_version_2_run_or_are_refused_with_both_numbers(
    newer: Path, tmp_path: Path
) -> None:
    """Which of the two follows from the numbers alone: an ImportError or another surprise is neither."""
    model = tmp_path / "model"
    model.mkdir()
    own = {"architectures": ["ExampleForCausalLM"], "head_dim": 8, "rope_theta": 10000.0}
    (model / "config.json").write_text(json.dumps({**TINY, **own}))
    words = [warm() / "python", "-c", RUN_NEWER, str(newer), str(model)]
    environ = {**_environ(newer, tmp_path), "WORKED_PRETEND": "1"}
    del environ["XDG_CACHE_HOME"]  # the CPU's kernels take a minute to compile, and are there
    done = subprocess.run(words, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["contracts"]) == len(list(NEWER.iterdir())) == 4
    refused = {
        package: [contract for contract, version in versions.items() if not _spoken(contract, version)]
        for package, versions in found["contracts"].items()
    }
    for package, wrong in refused.items():
        assert (package in found["said"]) == bool(wrong)
        for contract in wrong:
            assert found["said"][package].startswith("ContractVersionError: core speaks ")
            assert f"speaks {found['contracts'][package][contract]}" in found["said"][package]
    if not any(refused.values()):
        assert found["runs"]["worked"] == found["runs"]["cpu"] and len(found["runs"]["cpu"]) == 4


@pytest.mark.parametrize("package", sorted(path.name for path in NEWER.iterdir()))
def test_a_later_core_refuses_each_of_these_wheels_with_both_numbers(
    package: str, newer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(newer))
    later = {contract: (newest + 1, newest + 1) for contract, (_, newest) in CORE_CONTRACTS.items()}
    found = discover(path=[str(newer)], environ={}, core_contracts={**later, "descriptor": (1, 1)})
    [problem] = [each for each in found.problems if each.distribution == package]
    assert isinstance(problem.error, ContractVersionError)
    assert f"pip install -U {package}" in str(problem.error)


def _spoken(contract: str, version: int) -> bool:
    oldest, newest = CORE_CONTRACTS[contract]
    return oldest <= version <= newest


def test_every_package_of_this_repository_implements_the_versions_that_core_speaks() -> None:
    assert [str(problem.error) for problem in discover(environ={}).problems] == []


def _files(folder: Path = FROZEN) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".toml"))


def _environ(installed: Path, home: Path) -> Mapping[str, str]:
    mine = {key: value for key, value in os.environ.items() if not key.startswith("EVENER_")}
    path = os.pathsep.join(filter(None, (str(installed), os.environ.get("PYTHONPATH"))))
    return {**mine, "PYTHONPATH": path, "XDG_CACHE_HOME": str(home)}

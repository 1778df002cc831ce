"""One of our families a second time, as a package of somebody else's: installed by pip, it passes the runner of the
table of families under its own name, without ``evener_models`` and with no line of ours that knows it."""

from __future__ import annotations

import ast
import os
import subprocess
from pathlib import Path

import pytest
from docs_blocks import install, python_path
from warm import warm

TESTS = Path(__file__).parent
PACKAGE = TESTS / "packages/evener-model-again"
CHECK = """
import sys
for name in [name for name in sys.modules if name.startswith("evener")]:
    del sys.modules[name]  # of a warm process: what is imported from here on counts
from pathlib import Path
import torch
from family_oracles import Transformers
from family_runner import check
from family_table import Row
from evener_conformance.naive.model import find_architecture
from evener_models import descriptor

torch.set_num_threads(1)
found = find_architecture("AgainForCausalLM")
result = check(Row("AgainForCausalLM", oracle=Transformers("qwen3_next"), tolerance=5e-4), Path(sys.argv[1]))
families = {path.partition(":")[0] for path in descriptor.architectures.values()}
ours = families & set(sys.modules)
print(Path(sys.modules[found.__module__].__file__).parent, result.tokens, ours)
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip has put the package."""
    folder = tmp_path_factory.mktemp("external")
    files = {f"{PACKAGE.name}/{p.relative_to(PACKAGE)}": p.read_text() for p in PACKAGE.rglob("*") if p.suffix in
             (".py", ".toml")}  # fmt: skip
    install(files, folder / "source", folder / "target")
    return folder / "target"


def run(target: Path, scratch: Path, *words: str) -> list[str]:
    paths = {"PYTHONPATH": python_path(target, TESTS), "EVENER_DISABLE_PLUGINS": "evener-models"}
    done = subprocess.run(
        [warm() / "python", *words], env={**os.environ, **paths}, cwd=scratch, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_family_from_outside_passes_the_runner_under_its_own_name_without_our_models(
    target: Path, tmp_path: Path
) -> None:
    said = run(target, tmp_path, "-c", CHECK, str(tmp_path / "model"))[-1]
    assert said == f"{target / 'evener_model_again'} 80 set()"


def test_its_state_and_oracle_stand_in_the_list_of_models(target: Path, tmp_path: Path) -> None:
    command = "from evener.cli.main import main; main(['models'])"
    listed = run(target, tmp_path, "-c", command)
    (line,) = [line for line in listed if "ForCausalLM" in line]
    assert line.split("  ") == ["AgainForCausalLM", "again", "full, recurrent", "transformers", "evener-model-again"]


def test_it_knows_contracts_and_layers_only_and_has_under_100_lines() -> None:
    texts = [path.read_text() for path in PACKAGE.rglob("*.py")]
    assert sum(bool(line.strip()) for text in texts for line in text.splitlines()) < 100
    nodes = [node for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    imported = {node.module for node in nodes if node.module and node.module.startswith("evener")}
    assert imported and all(name.startswith(("evener.contracts", "evener.layers")) for name in imported)

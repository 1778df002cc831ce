"""The example of a state provider: installed from its wheel, it serves the recurrent layers of a hybrid family, gives
the oracle's numbers, eagerly and in captured steps, and passes the conformance kit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from docs_blocks import DOCS, evener, python, wheel_site

EXAMPLE = DOCS / "examples/evener-state-example"
TESTS = Path(__file__).parent
CHECK = """
import sys
from pathlib import Path
import torch
from evener_state_example.rows import Rows
from family_oracles import Transformers
from family_runner import check
from family_table import Row

torch.set_num_threads(1)
kinds, advance = set(), Rows.advance

def watched(self, views, meta, *inputs):
    kinds.add("in turn" if meta.source is None else "at once")
    return advance(self, views, meta, *inputs)

Rows.advance = watched
result = check(Row("Qwen3NextForCausalLM", oracle=Transformers("qwen3_next"), tolerance=5e-4), Path(sys.argv[1]))
print(result.tokens, sorted(kinds))
"""
CAPTURED = """
import json, sys
import msgspec
from pathlib import Path
from evener import LLM, SamplingParams
from evener_conformance.graph.backend import install_graph_backend
from evener_models.qwen3_next import Qwen3NextForCausalLM

Path("model").mkdir()
config = Qwen3NextForCausalLM.tiny_config() | {"num_experts": 0}  # the reference of experts cannot be captured
Path("model/config.json").write_text(json.dumps(config))
install_graph_backend(Path("path"))
sys.path.insert(0, "path")
small = {"infer.kv_memory": "16MiB", "infer.step_tokens": 64, "infer.max_reqs": 4, "infer.max_seq_len": 128}
found = []
for captured in (True, False):
    keys = {**small, "infer.use_cuda_graph": captured}
    with LLM("model", load="dummy", dtype="float32", backend="graphs", **keys) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
        tokens = [o.outputs[0].token_ids for o in llm.generate([[5, 7, 5], list(range(7, 67))], greedy)]
        found.append([tokens, msgspec.to_builtins(llm.info.manifest)])
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its wheel, built and unpacked into a folder for PYTHONPATH."""
    return wheel_site(EXAMPLE, tmp_path_factory.mktemp("state"))


@pytest.mark.slow
def test_a_hybrid_family_gives_its_oracle_s_numbers_on_this_provider(site: Path, tmp_path: Path) -> None:
    done = python((site, TESTS), tmp_path, "-c", CHECK, str(tmp_path / "model"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "80 ['at once', 'in turn']"


def test_captured_steps_give_the_tokens_of_eager_ones(site: Path, tmp_path: Path) -> None:
    done = python(site, tmp_path, "-c", CAPTURED)
    assert done.returncode == 0, done.stderr
    (captured, manifest), (eager, _) = json.loads(done.stdout.splitlines()[-1])
    assert captured == eager and {len(tokens) for tokens in captured} == {24}
    assert any("are captured by graphs" in note for note in manifest["notes"]), manifest["notes"]
    assert "recurrent-rows/example.rows" in {row["provider"] for row in manifest["ops"]}


def test_the_provider_passes_the_conformance_kit(site: Path, tmp_path: Path) -> None:
    words = ("--backend", "cpu", "--op", "example.rows", "--seed", "1", "cpu.native=off")
    done = evener(site, tmp_path, "conformance", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout, done.stdout

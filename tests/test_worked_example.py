"""The example that shows each part of a backend: its wheel is found, serves a model, and passes the conformance kit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from docs_blocks import DOCS, evener, python, wheel_site

from evener_conformance.distributions import write_distribution

EXAMPLE = DOCS / "examples/evener-backend-worked"
RUN = """
import json, sys
import msgspec
from pathlib import Path
from evener import LLM, SamplingParams
from evener_models.llama import LlamaForCausalLM

Path("config.json").write_text(json.dumps(LlamaForCausalLM.tiny_config()))
small = {"infer.kv_memory": "4MiB", "infer.step_tokens": 64, "infer.max_reqs": 4, "infer.max_seq_len": 256}
greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
found = []
for backend in ("worked", "cpu"):
    small |= {"cpu.native": "off"} if backend == "cpu" else {}
    with LLM(".", load="dummy", dtype="float32", backend=backend, **small) as llm:
        tokens = [o.outputs[0].token_ids for o in llm.generate([[5, 7, 5], list(range(7, 97))], greedy)]
        found.append([tokens, msgspec.to_builtins(llm.info.manifest)])
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its wheel, built and unpacked into a folder for PYTHONPATH."""
    return wheel_site(EXAMPLE, tmp_path_factory.mktemp("worked"))


def test_every_file_is_short_and_stands_in_the_page_or_in_the_first_example() -> None:
    page = (DOCS / "backend-author-advanced.md").read_text("utf-8")
    for path in (EXAMPLE / "evener_backend_worked").glob("*.py"):
        assert len(path.read_text("utf-8").splitlines()) <= 110, path.name
        known = (DOCS / "examples/evener-backend-example/evener_backend_example" / path.name).is_file()
        assert known or f"(examples/evener-backend-worked/evener_backend_worked/{path.name})" in page


def test_a_model_runs_on_its_parts_in_captured_steps_and_gives_the_cpu_s_tokens(tmp_path: Path) -> None:
    entry = {"evener.backends": {"worked": "evener_backend_worked:descriptor"}}
    write_distribution(tmp_path, EXAMPLE.name, entry)
    done = python((tmp_path, EXAMPLE), tmp_path, "-c", RUN, WORKED_PRETEND="1")
    assert done.returncode == 0, done.stderr
    (ours, manifest), (cpu, _) = json.loads(done.stdout)
    assert ours == cpu and {len(tokens) for tokens in ours} == {16}
    providers = {row["provider"] for row in manifest["ops"]}
    assert providers >= {"worked/worked_linear", "worked/worked_mlp", "worked/worked.paged"}
    assert set(manifest["packings"]) == {"worked.transposed"}
    assert any("are captured by worked" in note for note in manifest["notes"]), manifest["notes"]


@pytest.mark.slow
def test_passes_the_conformance_kit(site: Path, tmp_path: Path) -> None:
    words = ("conformance", "--backend", "worked", "--seed", "1", "--json", "result")
    done = evener(site, tmp_path, *words, WORKED_PRETEND="1")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result").read_text())
    assert result["level"] == "L3"
    assert {case["outcome"] for case in result["cases"]} <= {"passed", "not applicable", "unknown"}

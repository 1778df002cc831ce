"""The example that shows each part of a backend: its wheel is found, serves a model, and passes the conformance kit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from docs_blocks import DOCS

from evener.testing.installed import write_distribution

EXAMPLE = DOCS / "examples/evener-backend-worked"
EVENER = "import sys; from evener.cli.main import main; sys.exit(main())"
RUN = """
import json, sys
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
        found.append([tokens, llm.info["manifest"]])
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its wheel, built and unpacked into a folder for PYTHONPATH."""
    folder = tmp_path_factory.mktemp("worked")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps",
         "--no-build-isolation", "--wheel-dir", str(folder), str(EXAMPLE)],
        check=True,
    )  # fmt: skip
    zipfile.ZipFile(next(folder.glob("*.whl"))).extractall(folder / "site")
    return folder / "site"


def python(path: str, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    mine = {key: value for key, value in os.environ.items() if not key.startswith("EVENER_")}
    mine |= {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": str(home), "WORKED_PRETEND": "1"}
    return subprocess.run([sys.executable, *words], cwd=home, env=mine, capture_output=True, text=True)


def test_every_file_is_short_and_stands_in_the_page_or_in_the_first_example() -> None:
    page = (DOCS / "backend-author.md").read_text("utf-8")
    for path in (EXAMPLE / "evener_backend_worked").glob("*.py"):
        assert len(path.read_text("utf-8").splitlines()) <= 110, path.name
        known = (DOCS / "examples/evener-backend-example/evener_backend_example" / path.name).is_file()
        assert known or f"(examples/evener-backend-worked/evener_backend_worked/{path.name})" in page


def test_a_model_runs_on_its_parts_in_captured_steps_and_gives_the_cpu_s_tokens(tmp_path: Path) -> None:
    entry = {"evener.backends": {"worked": "evener_backend_worked:descriptor"}}
    write_distribution(tmp_path, EXAMPLE.name, entry)
    done = python(f"{tmp_path}:{EXAMPLE}", tmp_path, "-c", RUN)
    assert done.returncode == 0, done.stderr
    (ours, manifest), (cpu, _) = json.loads(done.stdout)
    assert ours == cpu and {len(tokens) for tokens in ours} == {16}
    providers = {row["provider"] for row in manifest["ops"]}
    assert providers >= {"worked/worked_linear", "worked/worked_mlp", "worked/worked.paged"}
    assert set(manifest["packings"]) == {"worked.turned"}
    assert any("are captured by worked" in note for note in manifest["notes"]), manifest["notes"]


@pytest.mark.slow
def test_it_passes_the_kit(site: Path, tmp_path: Path) -> None:
    words = ("conformance", "--backend", "worked", "--seed", "1", "--json", "result")
    done = python(str(site), tmp_path, "-c", EVENER, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result").read_text())
    assert result["level"] == "L3"
    assert {case["outcome"] for case in result["cases"]} <= {"passed", "not applicable", "unknown"}

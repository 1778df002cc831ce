"""``evener new``: its packages work as they are. Those in docs/examples are the ones it writes for ``example``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from docs_blocks import DOCS
from warm import EVENER, warm

from evener.cli.main import main
from evener_conformance.new import KINDS, render, template_variables

EXAMPLES = DOCS / "examples"
RUN = """
import json, sys
from evener import LLM, SamplingParams

folder, *backends = sys.argv[1:]
found = []
for backend in backends:
    small = {"infer.kv_memory": "4MiB", "infer.step_tokens": 256, "infer.max_reqs": 8}
    small |= {"cpu.native": "off"} if backend == "cpu" else {}
    with LLM(folder, load="dummy", dtype="float32", backend=backend, **small) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
        tokens = [o.outputs[0].token_ids for o in llm.generate([[5, 7, 5], list(range(7, 97))], greedy)]
        found.append([tokens, sorted({row.provider for row in llm.info.manifest.ops})])
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels of both examples, built and unpacked into a folder for PYTHONPATH."""
    folder = tmp_path_factory.mktemp("examples")
    for kind in KINDS:
        subprocess.run(
            [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps",
             "--no-build-isolation", "--wheel-dir", str(folder / "dist"), str(EXAMPLES / f"evener-{kind}-example")],
            check=True,
        )  # fmt: skip
    for wheel in sorted((folder / "dist").glob("*.whl")):
        zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def python(site: Path, home: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    mine = {key: value for key, value in os.environ.items() if not key.startswith("EVENER_")}
    mine |= {"PYTHONPATH": str(site), "XDG_CACHE_HOME": str(home), "COLUMNS": "400", **environ}
    return subprocess.run([warm() / "python", *words], cwd=home, env=mine, capture_output=True, text=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_example_is_what_evener_new_writes(kind: str) -> None:
    folder = EXAMPLES / f"evener-{kind}-example"
    paths = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    found = {str(path.relative_to(folder)): path.read_text() for path in paths}
    assert found == dict(render(kind, "example")), f"evener new {kind} example --into docs/examples"


@pytest.mark.parametrize("kind", KINDS)
def test_the_package_has_under_150_lines(kind: str) -> None:
    assert sum(bool(line.strip()) for _, text in render(kind, "my-own") for line in text.splitlines()) < 150


def test_the_backend_is_refused_without_its_hardware_and_chosen_with_it(site: Path, tmp_path: Path) -> None:
    without = python(site, tmp_path, "-c", EVENER, "doctor")
    assert without.returncode == 0 and "/dev/example0 is not there" in without.stdout
    assert "verified to L0" in without.stdout
    with_it = python(site, tmp_path, "-c", EVENER, "doctor", EXAMPLE_PRETEND="1")
    assert "backend: example (highest score 100 over cpu 10" in with_it.stdout


def test_the_new_model_runs_on_the_new_backend_and_gives_the_cpu_s_tokens(site: Path, tmp_path: Path) -> None:
    code = "from evener_model_example import model; print(json.dumps(model.ExampleForCausalLM.tiny_config()))"
    (tmp_path / "config.json").write_text(python(site, tmp_path, "-c", f"import json; {code}").stdout)
    done = python(site, tmp_path, "-c", RUN, str(tmp_path), "example", "cpu", EXAMPLE_PRETEND="1")
    assert done.returncode == 0, done.stderr
    (ours, providers), (cpu, _) = json.loads(done.stdout)
    assert ours == cpu and {len(tokens) for tokens in ours} == {16}
    assert "example/example_norm" in providers


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_package_passes_the_tests_that_come_with_it(kind: str, site: Path, tmp_path: Path) -> None:
    folder = tmp_path / "package"
    shutil.copytree(EXAMPLES / f"evener-{kind}-example", folder)
    # The backend's test is the kit; only the checks of the package's own kernel and device run here.
    part = ["-k", "rms_norm or device"] if kind == "backend" else []
    done = python(site, folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio", *part,
                  EXAMPLE_PRETEND="1")  # fmt: skip
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout + done.stderr


def test_a_new_package_says_what_to_type_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "backend", "my-chip", "--into", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"cd {tmp_path}/evener-backend-my-chip" in said and "MY_CHIP_PRETEND=1 evener doctor" in said
    assert "MY_CHIP_PRETEND=1 evener explain MODEL --backend my-chip" in said
    assert (tmp_path / "evener-backend-my-chip/evener_backend_my_chip/device.py").is_file()
    assert main(["new", "model", "verse", "--into", str(tmp_path)]) == 0
    assert "evener explain MODEL   # a folder whose config.json names VerseForCausalLM" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["backend"], "evener new backend NAME, or evener new model NAME"),
        (["backnd", "x"], "did you mean 'backend'?"),
        (["backend", "My Chip"], "use lower case letters, digits, - and _"),
        (["backend", "7up"], "a letter first"),
        (["backend", "cpu"], "evener-backend-cpu is installed and has the name 'cpu'; choose another"),
        (["model", "there"], "is there already; name another with --into FOLDER"),
    ],
)
def test_a_wrong_request_says_what_to_type_and_writes_nothing(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evener-model-there").mkdir()
    assert main(["new", *words]) == 2
    assert said in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["evener-model-there"] and not any(tmp_path.glob("*/*"))


def test_a_name_is_spelt_as_each_place_wants_it() -> None:
    assert template_variables("my-chip_2") == {
        "name": "my-chip_2", "module": "my_chip_2", "NAME": "MY_CHIP_2", "Class": "MyChip2", "Name": "My-chip_2",
    }  # fmt: skip

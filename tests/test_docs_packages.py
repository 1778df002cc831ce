"""The two packages whose every line stands in the documents: installed by pip, found, chosen, run, removed; broken."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docs_blocks import DOCS, install, named, package_files, python_path, write
from importlib_metadata import distributions
from warm import EVENER, warm

BACKEND, MODEL = DOCS / "backend-author.md", DOCS / "model-author.md"
ADVANCED = DOCS / "backend-author-advanced.md"


@dataclass(frozen=True)
class Place:
    """A folder that packages were installed into, and a folder for what running them leaves. ``new``: Python starts
    anew, for what asks whether torch is imported."""

    target: Path
    scratch: Path
    new: bool = False

    @property
    def environ(self) -> dict[str, str]:
        mine = {key: value for key, value in os.environ.items() if not key.startswith(("EVENER_", "ABACUS_"))}
        return {**mine, "PYTHONPATH": python_path(self.target), "XDG_CACHE_HOME": str(self.scratch), "COLUMNS": "400"}

    def python(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        program = sys.executable if self.new else warm() / "python"
        return subprocess.run(
            [program, *words], cwd=self.scratch, env={**self.environ, **environ}, capture_output=True, text=True
        )

    def evener(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return self.python("-c", EVENER, *words, **environ)

    def json(self, *words: str, **environ: str) -> Any:
        return json.loads(self.evener(*words, "--json", **environ).stdout)

    def candidate(self, name: str, *words: str, **environ: str) -> dict[str, Any]:
        return next(each for each in self.json(*words, **environ)["candidates"] if each["name"] == name)

    @property
    def chip(self) -> dict[str, str]:
        """The pretend device's node."""
        node = self.scratch / "abacus0"
        node.write_text("1073741824\n")
        return {"ABACUS_NODE": str(node)}

    @property
    def haiku(self) -> str:
        """A folder with the tiny haiku's ``config.json``."""
        folder = self.scratch / "haiku"
        if not folder.is_dir():
            folder.mkdir()
            done = self.python("-c", "import json; from evener_model_haiku.haiku import HaikuForCausalLM as H; "
                               "print(json.dumps(H.tiny_config()))")  # fmt: skip
            assert done.returncode == 0, done.stderr
            (folder / "config.json").write_text(done.stdout)
        return str(folder)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both packages, as pip leaves them."""
    folder = tmp_path_factory.mktemp("packages")
    install({**package_files(BACKEND), **package_files(MODEL)}, folder / "source", folder / "target")
    return folder / "target"


@pytest.fixture
def place(installed: Path, tmp_path: Path) -> Place:
    """Both packages and an empty scratch folder."""
    return Place(installed, tmp_path)


@pytest.fixture
def spoilt(installed: Path, tmp_path: Path) -> Callable[..., Place]:
    """``spoilt(file, old, new, …)``: a copy of both packages in which that text was replaced."""

    def make(*edits: str) -> Place:
        target, scratch = tmp_path / "target", tmp_path / "scratch"
        shutil.copytree(installed, target, ignore=shutil.ignore_patterns("__pycache__"))
        scratch.mkdir()
        for pattern, old, new in zip(edits[::3], edits[1::3], edits[2::3], strict=True):
            path = next(target.glob(pattern))
            assert old in path.read_text(), f"{pattern} has no {old!r}"
            path.write_text(path.read_text().replace(old, new))
        return Place(target, scratch)

    return make


def plain(text: str) -> str:
    """Without the differences that line breaks, columns, times and folders make."""
    text = re.sub(r"\(at \S*/(\S+:\d+)\)", r"(at …/\1)", text)
    return re.sub(r" \((?:\d+\.\d s|cached answer)\)", "", re.sub(r"\s+", " ", text)).strip()


def says(done: subprocess.CompletedProcess[str], error: str, document: Path = ADVANCED) -> bool:
    """Whether the output holds the message that the document shows for ``error``."""
    return plain(named(document, "error")[error]) in plain(done.stdout + done.stderr)


def lines(files: Mapping[str, str]) -> int:
    return sum(bool(line.strip()) for text in files.values() for line in text.splitlines())


def test_the_packages_are_as_short_as_the_documents_say() -> None:
    assert lines(package_files(BACKEND, smallest=True)) < 60
    assert lines(package_files(BACKEND)) < 110
    assert lines(package_files(MODEL)) < 100


def test_a_package_of_kernels_alone_is_described_as_the_page_shows() -> None:
    from evener.contracts.descriptor import CORE_CONTRACTS, Descriptor
    from evener.plugins.catalog import Origin
    from evener.plugins.discover import check_contracts, check_descriptor

    shown = eval(named(ADVANCED, "name")["kernels-only"], {"Descriptor": Descriptor})
    origin = Origin(group="evener.kernels", name="swift-beads", distribution="swift-beads", version="0.1.0")
    check_contracts(origin, check_descriptor(origin, shown), CORE_CONTRACTS)
    full = package_files(BACKEND)["evener-backend-abacus/evener_backend_abacus/__init__.py"]
    assert all(tag in full for tag in shown.needs), "the page's backend serves what they need"


def test_each_group_s_lengths_are_those_of_the_step_that_is_replayed() -> None:
    from evener.contracts.graph import GraphCapture, Replay

    names: dict[str, Any] = {"GraphCapture": GraphCapture, "Replay": Replay}
    exec(named(ADVANCED, "name")["graph-update"], names)
    ran: list[Any] = []
    made: list[Any] = []
    step = SimpleNamespace(host_query_lens=[1, 1], host_kv_lens=[1, 1])

    def record(segment: Callable[[], None]) -> Callable[[], None]:
        segment()
        return lambda: ran.append([(each.query_lens, each.kv_lens) for each in made])

    chip = names["Chip"](record)
    groups = 2
    replay = chip.capture(lambda: made.extend(names["prepare"](chip, step) for _ in range(groups)))
    replay.update([1, 1], [7, 9])
    replay()
    assert ran == [[([1, 1], [7, 9])] * groups]
    names["prepare"](chip, step)  # of a step that runs eagerly
    assert len(replay.registered) == groups


def test_both_are_found_with_their_distributions_and_versions(place: Place) -> None:
    backend, model = (place.candidate(name, "plugins") for name in ("abacus", "haiku"))
    assert (backend["group"], backend["distribution"]) == ("evener.backends", "evener-backend-abacus")
    assert (model["group"], model["distribution"]) == ("evener.plugins", "evener-model-haiku")
    assert [each["verdict"] for each in (backend, model)] == ["installed", "installed"]
    assert {each["version"] for each in (backend, model)} == {"0.1.0"}
    assert "HaikuForCausalLM" in place.evener("models").stdout


def test_the_backend_is_refused_with_its_reason_where_its_hardware_is_not(place: Place) -> None:
    done = place.evener("doctor")
    assert done.returncode == 0
    for line in named(BACKEND, "name")["refused"].splitlines():
        assert plain(line) in plain(done.stdout)
    assert place.json("doctor")["backend"] == "cpu"
    asked = place.evener("doctor", "--backend", "abacus")
    assert asked.returncode == 1 and says(asked, "absent")


def test_the_backend_is_chosen_where_its_hardware_is(place: Place) -> None:
    done = place.evener("doctor", **place.chip)
    assert done.returncode == 0
    for line in named(BACKEND, "name")["chosen"].splitlines():
        assert plain(line) in plain(done.stdout).replace(f"{place.scratch}/", "")
    verdicts = {each["name"]: each["verdict"] for each in place.json("doctor", **place.chip)["candidates"]}
    assert (verdicts["abacus"], verdicts["cpu"], verdicts["haiku"]) == ("chosen", "refused", "chosen")
    assert place.json("doctor", EVENER_BACKEND="cpu", **place.chip)["backend"] == "cpu"


RUN = """
import json, sys
import msgspec
from evener import LLM, SamplingParams

folder, *backends = sys.argv[1:]
calls, found = [], {}
for backend in backends:
    small = {"infer.kv_memory": "4MiB", "infer.step_tokens": 256, "infer.max_reqs": 8}
    small |= {"cpu.native": "off"} if backend == "cpu" else {}
    if backend == "abacus":
        try:
            from evener_backend_abacus import kernels
        except ImportError:  # the smallest version
            pass
        else:
            count_beads = kernels.count_beads
            kernels.count_beads = lambda x, *rest: (calls.append(x.shape[0]), count_beads(x, *rest))[1]
    with LLM(folder, load="dummy", dtype="float32", backend=backend, **small) as llm:
        prompts = [[5, 7, 5], [i % 97 for i in range(7, 100)]]
        greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
        found[backend] = {
            "tokens": [o.outputs[0].token_ids for o in llm.generate(prompts, greedy)],
            "info": {"device": llm.info.device, "manifest": msgspec.to_builtins(llm.info.manifest)},
        }
json.dump({"runs": found, "rows": calls}, sys.stdout)
"""


def run(place: Place, *backends: str) -> Any:
    done = place.python("-c", RUN, place.haiku, *backends, **place.chip)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_model_gives_equal_tokens_on_the_backend_which_uses_its_kernel(place: Place) -> None:
    said = run(place, "abacus", "cpu")
    abacus, cpu = (said["runs"][name] for name in ("abacus", "cpu"))
    assert abacus["tokens"] == cpu["tokens"]
    assert {len(tokens) for tokens in abacus["tokens"]} == {16}
    assert abacus["info"]["device"] == "Abacus 0"
    assert said["rows"] and max(said["rows"]) <= 64, "the kernel ran, and never on more tokens than it serves"
    rows = abacus["info"]["manifest"]["ops"]
    for shown in json.loads(named(BACKEND, "name")["manifest"]):
        assert any(shown.items() <= row.items() for row in rows), shown


def test_the_smallest_version_runs_the_model_on_the_reference(tmp_path: Path) -> None:
    source, target, scratch = (tmp_path / name for name in ("source", "target", "scratch"))
    scratch.mkdir()
    install({**package_files(BACKEND, smallest=True), **package_files(MODEL)}, source, target)
    said = run(Place(target, scratch), "abacus", "cpu")
    assert said["runs"]["abacus"]["tokens"] == said["runs"]["cpu"]["tokens"]
    assert "rms_norm" in said["runs"]["abacus"]["info"]["manifest"]["fallbacks"]
    assert said["rows"] == []


def test_an_option_of_the_backend_is_checked_before_it_is_imported_and_reaches_its_hooks(place: Place) -> None:
    wrong = place.evener("config", place.haiku, "abacus.rod=8", **place.chip)
    assert wrong.returncode == 2 and says(wrong, "option")
    code = """
from evener import LLM
keys = {"abacus.rods": "8", "infer.kv_memory": "4MiB"}
with LLM("haiku", load="dummy", backend="abacus", **keys) as llm:
    print(*[row.buckets for row in llm.info.manifest.ops if row.provider == "abacus/bead_norm"])
"""
    done = place.python("-c", code, **place.chip)
    assert done.stdout.strip() == "['1', '2', '3..4', '5..8']", done.stderr


@pytest.mark.slow
def test_the_model_passes_the_test_that_its_page_shows(place: Place) -> None:
    write({name: text for name, text in package_files(MODEL).items() if "/tests/" in name}, place.scratch)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "-p", "no:schemathesis", "-p", "no:hypothesispytest"]
    # Without a compiler on its path the CPU backend starts at once, on plain torch.
    done = place.python("-m", "pytest", *options, "evener-model-haiku/tests", PATH="/nowhere")
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def test_an_uninstalled_package_is_gone_without_trace(spoilt: Callable[..., Place]) -> None:
    place = spoilt()
    folder = place.haiku
    for found in distributions(path=[str(place.target)]):
        for file in found.files or ():  # what `pip uninstall` removes, which spares folders outside of its environment
            Path(str(found.locate_file(file))).unlink(missing_ok=True)
    assert not {"abacus", "haiku"} & {each["name"] for each in place.json("plugins")["candidates"]}
    assert place.json("doctor", **place.chip)["backend"] == "cpu"
    done = place.evener("run", folder, "load=dummy", "request.prompt_tokens_len=3")
    assert done.returncode == 1 and says(done, "architecture", MODEL)
    asked = plain(place.evener("doctor", "--backend", "abacus").stdout)
    assert "no backend 'abacus' is installed" in asked and "pip install evener-backend-abacus" in asked


INIT, PROBE, DEVICE, HOOKS, KERNELS = (
    f"evener_backend_abacus/{name}.py" for name in ("__init__", "probe", "device", "hooks", "kernels")
)


@pytest.mark.parametrize(
    ("error", "edits"),
    [
        ("import", (INIT, "from evener", "raise RuntimeError('no beads')\nfrom evener")),
        pytest.param("torch", (INIT, "from evener", "import torch\nfrom evener"), marks=pytest.mark.slow),
        pytest.param("contract", (INIT, '"device": 2', '"device": 3'), marks=pytest.mark.slow),
    ],
)
def test_a_backend_whose_descriptor_is_of_no_use_is_left_out_with_a_warning(
    error: str, edits: tuple[str, ...], spoilt: Callable[..., Place]
) -> None:
    place = replace(spoilt(*edits), new=error == "torch")
    assert place.candidate("abacus", "plugins")["verdict"] == "broken"
    done = place.evener("doctor", **place.chip)
    assert done.returncode == 0 and says(done, error)
    assert "warning" in done.stdout and "backend: cpu" in done.stdout
    asked = place.evener("doctor", "--backend", "abacus", **place.chip)
    assert asked.returncode == 1 and says(asked, error)


@pytest.mark.parametrize("error", ["probe", "hang"])
def test_a_failing_or_hanging_probe_stops_start_up_unless_another_backend_is_named(
    error: str, spoilt: Callable[..., Place]
) -> None:
    hang = (PROBE, "    beads = ", "    import threading\n    threading.Event().wait()\n    beads = ")
    place = spoilt(*(hang if error == "hang" else ()))
    environ = {**place.chip, "EVENER_PROBE_TIMEOUT": "0.5" if error == "hang" else "20"}
    if error == "probe":
        Path(environ["ABACUS_NODE"]).write_text("many\n")
    done = place.evener("doctor", **environ)
    assert done.returncode == 1 and says(done, error)
    started = place.evener("run", place.haiku, "load=dummy", "request.prompt_tokens_len=3", **environ)
    assert started.returncode == 1 and says(started, error)
    assert "Traceback" not in started.stderr
    assert place.evener("doctor", "--backend", "cpu", **environ).returncode == 0


@pytest.mark.parametrize(
    ("error", "edits"),
    [
        ("hook", (KERNELS, "def evener_kernels", "def evener_kernals", HOOKS, "evener_kernels", "evener_kernals")),
        ("module", (DEVICE, "import torch", "raise RuntimeError('driver too old')")),
        ("announce", (INIT, '"rms_norm",', '"rms_norm", "rotary",')),
    ],
)
def test_a_backend_whose_module_is_faulty_does_not_start(
    error: str, edits: tuple[str, ...], spoilt: Callable[..., Place]
) -> None:
    place = spoilt(*edits)
    done = place.evener("run", place.haiku, "load=dummy", "request.prompt_tokens_len=3", **place.chip)
    assert done.returncode == 1 and says(done, error)
    assert "Traceback" not in done.stderr


def test_a_name_that_exists_is_an_error_that_names_both_packages(spoilt: Callable[..., Place]) -> None:
    entry = "evener_backend_abacus-*.dist-info/entry_points.txt"
    place = spoilt(INIT, 'name="abacus"', 'name="cpu"', entry, "abacus =", "cpu =")
    done = place.evener("doctor")
    assert done.returncode == 1 and says(done, "name")
    spared = place.evener("doctor", EVENER_DISABLE_PLUGINS="evener-backend-abacus")
    assert spared.returncode == 0 and "backend: cpu" in spared.stdout

"""Each command of the documents that no other test runs: it runs here, on a small model, or what can be checked is.

``test_docs_examples.py`` runs blocks that are marked, ``test_docs_commands.py`` the tables of from-other-engines.md.
The rest are commands with placeholders. This test fills them in. A command that needs hardware, a network or a
service of the system is listed with the test that shows it, or its keys are read by the same
reader.
Chinese pages have the same blocks: ``test_docs_chinese.py``.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import serving_options
from docs_blocks import Block, blocks, documents
from lora_files import write_adapter, write_model
from model_sources import SOURCES, models_root
from served import Served, free_port
from source_tree import ROOT
from warm import warm

from evener.config import from_overrides
from evener_conformance.tiny_tokenizer import VOCAB_SIZE, write_tiny_tokenizer

#: Commands that cannot run here, by how they begin: the test that runs them, or what they stand for.
ELSEWHERE = {
    ".ci/run": ".ci/run",  # it runs this test
    "curl -s http://127.0.0.1:21002/v1/rerank": "server/tests/test_scores.py",  # a model that scores
    "evener bench-engine": "inspection/tests/test_bench_engine.py",  # a model with so many layers
    "evener chat --url": "server/tests/test_terminal_chat.py",
    "evener conformance --backend cpu --op example.rows": "tests/test_state_example.py",
    "evener conformance --backend cpu --op int8": "tests/test_quant_example.py",
    "evener convert MODEL MODEL-q4.gguf": "tests/test_convert_gguf.py",  # a tokenizer that such a file can hold
    "evener convert MODEL-awq MODEL-enflame quant=halves": "tests/test_layouts.py",  # an AWQ model
    "evener convert MODEL-enflame MODEL-gptq quant=gptq": "tests/test_layouts.py",
    "evener deploy": "tests/peers/test_deploy.py",
    "evener evidence": "conformance/tests/first_contact/test_evidence.py",
    "evener explain MODEL_INT8": "tests/test_quant_example.py",
    "evener first-contact": "conformance/tests/first_contact/test_first_contact.py",
    "evener run MODEL_INT8": "tests/test_quant_example.py",
    "evener tune MODEL_DIR infer.max_reqs": "tests/test_tune.py",
    "journalctl": "tests/test_systemd_unit.py",  # systemd does not run where tests do
    "openssl": "offload/tests/test_moved_prompts.py",
    "python -m dynamo.frontend": "tests/peers/test_deploy.py",
    "python -m evener_deploy.dynamo_engine": "tests/peers/test_deploy.py",
    "python -m evener_quant_example": "tests/test_quant_example.py",
    "python -m sglang_router": "tests/peers/test_deploy.py",
    "python -m vllm_router": "tests/peers/test_deploy.py",
    "python scripts/planted_defects.py": "tests/test_planted_defects.py",
    "srun": "tests/test_many_processes.py",
    "sudo": "tests/test_systemd_unit.py",
    "torchrun": "tests/test_many_processes.py",
}
#: Packages of others that the documents install.
OTHERS = {"torch", "torch-npu", "pyyaml", "triton-ascend", "sglang-router", "vllm-router", "ai-dynamo"}
#: What a command needs that is not here: hardware, several machines, or a network. Its keys are read.
_NOT_HERE = re.compile(
    r"serve (Qwen/|BAAI/|/data/(DeepSeek|Llama))|stages=|[tp]p_size=|infer\.(cpu_layer_num|resident_experts)="
)
_HARDWARE = ("install-ascend", "install-gcu", "install-hygon", "install-muxi")
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 64, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 2048}  # fmt: skip
SMALL = "serve.port=0 infer.max_seq_len=512 infer.kv_memory=32MiB infer.max_reqs=4"


@dataclass(frozen=True)
class Line:
    """One command of a block, without its comment's meaning: bash reads that, too."""

    block: Block
    text: str

    @property
    def words(self) -> list[str]:
        """Without the variables before it."""
        words = shlex.split(self.text, comments=True)
        return words[next((at for at, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)), 0) :]

    @property
    def elsewhere(self) -> str | None:
        """The test that shows it."""
        typed = " ".join(self.words)
        return next((test for begin, test in ELSEWHERE.items() if typed.startswith(begin)), None)

    @property
    def how(self) -> str:
        """What is done with it."""
        words = self.words
        if self.elsewhere:
            return "elsewhere"
        if words[0] in ("make", "pip", "export", "curl"):
            return words[0]
        if words[0] == "python" and words[1].startswith("benchmarks/"):
            return "benchmark"
        if words[0] == "evener":
            here = not _NOT_HERE.search(self.text) and Path(self.block.document).stem not in _HARDWARE
            return "runs" if here else "keys"
        return "unknown"

    def __str__(self) -> str:
        return f"{self.block}: {self.text[:70]}"


def lines() -> Iterator[Line]:
    for path in documents():
        if path.name.endswith(".zh.md"):
            continue
        for block in blocks(path):
            marked = bool(block.flags & {"run", "serve", "client"}) or bool(block.values)
            text = block.text.replace("\\\n", " ")
            if marked or block.language not in ("", "sh", "bash") or not (block.language or _COMMAND.match(text)):
                continue
            yield from (Line(block, line) for line in text.splitlines() if line.strip() and line[0] != "#")


_COMMAND = re.compile(r"(make|pip|evener|python|\.ci/run)\b")
LINES = list(lines())
BLOCKS = list(dict.fromkeys(str(line.block) for line in LINES if line.how == "runs"))


def those(how: str) -> list[Line]:
    return [line for line in LINES if line.how == how]


def test_each_command_of_the_documents_is_run_or_checked_somewhere() -> None:
    assert len(LINES) > 90
    assert [str(line) for line in LINES if line.how == "unknown"] == []
    gone = [begin for begin in ELSEWHERE if not any(" ".join(line.words).startswith(begin) for line in LINES)]
    assert not gone, "take these out of ELSEWHERE: no document has them any more"


@pytest.mark.parametrize("line", those("elsewhere"), ids=str)
def test_a_command_that_cannot_run_here_has_a_test_that_knows_its_options(line: Line) -> None:
    assert line.elsewhere is not None
    text = (ROOT / line.elsewhere).read_text("utf-8")
    if line.words[0] in ("python", "evener") and "scripts/" not in line.text:
        for word in line.words[1:]:
            if re.match(r"--[a-z]", word):
                assert word in text, f"{line}: {line.elsewhere} does not use {word}"


@pytest.mark.parametrize("line", those("make"), ids=str)
def test_make_has_the_target(line: Line) -> None:
    done = subprocess.run(["make", "-n", *line.words[1:], "PYTHON=true"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def distributions() -> dict[str, set[str]]:
    """Names and extras of this repository's distributions."""
    tomllib = pytest.importorskip("tomllib", reason="part of Python 3.11 and later")
    found = {}
    for path in [*ROOT.glob("*/pyproject.toml"), *ROOT.glob("backends/*/pyproject.toml")]:
        project = tomllib.loads(path.read_text("utf-8"))["project"]
        found[project["name"]] = set(project.get("optional-dependencies", {}))
    return found


@pytest.mark.parametrize("line", those("pip"), ids=str)
def test_the_packages_of_pip_commands_exist(line: Line) -> None:
    known, values = distributions(), {"--find-links", "--extra-index-url"}
    words = line.words[2:]
    wanted = [w for at, w in enumerate(words) if w[0] != "-" and (at == 0 or words[at - 1] not in values)]
    assert wanted
    for each in wanted:
        name, extra = re.match(r"([\w./-]+)(?:\[([\w,]+)\])?", each).groups()  # type: ignore[union-attr]
        if name.startswith("."):
            assert (ROOT / name / "pyproject.toml").is_file(), each
        elif not name.endswith("-NAME"):
            assert name in known or name in OTHERS, f"{each}: no distribution of ours, and not in OTHERS"
            assert set(filter(None, (extra or "").split(","))) <= known.get(name, set()), each


@pytest.mark.parametrize("line", those("benchmark"), ids=str)
def test_a_benchmark_takes_its_options(line: Line) -> None:
    name, *options = line.words[1:]
    if name.endswith("serving.py"):
        assert serving_options.parse(options)
    else:  # by its place: one of them has the name of a module of Python's
        assert runpy.run_path(str(ROOT / name))["parser"]().parse_args(options)


@pytest.mark.parametrize("line", [*those("keys"), *those("runs")], ids=str)
def test_the_keys_of_a_command_are_taken(line: Line, tmp_path: Path) -> None:
    from evener.cli.main import find_command

    assert callable(find_command(line.words[1]))
    keys = [word for word in line.words[2:] if "=" in word and not word.startswith("--")]
    assert from_overrides(str(tmp_path), dict(key.split("=", 1) for key in keys))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with weights, whose matrices fit every format."""
    folder = write_model(tmp_path_factory.mktemp("docs") / "model", changes=SIZES)
    write_tiny_tokenizer(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Path:
    """Where commands run: what they read is there."""
    (tmp_path / "sample.txt").write_text("Some text to measure scales with. " * 200)
    (tmp_path / "key").write_text("0123456789abcdef" * 4)
    (tmp_path / "srv").mkdir(mode=0o700)
    (tmp_path / "model.gguf").symlink_to(models_root() / "gguf" / SOURCES["smollm2"].gguf)
    for number, name in enumerate(("sql-lora", "chat-lora"), 1):
        write_adapter(tmp_path / name, model, 4, seed=number)
    return tmp_path


def here(text: str, model: Path, folder: Path) -> str:
    """A command with its placeholders filled in."""
    places = [
        (r"~/models/SmolLM2\S*\.gguf|\bmodel\.gguf", str(folder / "model.gguf")),
        (r"~/models/SmolLM2-135M-Instruct|/data/Qwen3-\S+B|\bMODEL_DIR\b|\bMODEL\b(?![-_.=])", str(model)),
        (r"/(data|srv)/(weights|kv)\b", str(folder / "srv")), (r"/data/(sql|chat)-lora", str(folder / r"\1-lora")),
        (r"10\.0\.0\.\d", "127.0.0.1"), (r":(21100|5557|5558)\b", f":{free_port()}"), (r" serve\.port=\d+", ""),
        (r"=64GiB", "=64MiB"), (r"=500000000000", "=100000000"), (r"--tokens 131072", "--tokens 512"),
    ]  # fmt: skip
    for pattern, place in places:
        text = re.sub(pattern, place, text)
    return text


def environment(folder: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("EVENER_", "CONFIG_NAME"))}
    path = f"{warm()}:{Path(sys.executable).parent}:{kept['PATH']}"
    # A cache of its own, for tuning files; compiled kernels are those of all tests.
    compiled = Path(kept.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "evener/cpu-kernels"
    (folder / "cache/evener").mkdir(parents=True)
    (folder / "cache/evener/cpu-kernels").symlink_to(compiled)
    return {**kept, "PATH": path, "XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("place", BLOCKS)
def test_the_commands_of_a_block_run_one_after_the_other(
    place: str, model: Path, folder: Path, smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for key, value in environment(folder).items():
        monkeypatch.setenv(key, value)
    for line in LINES:
        if str(line.block) != place or line.how != "runs":
            continue
        text = here(line.text, model, folder)
        if line.words[1] == "serve":
            command, _, _ = re.sub(r"\s+#.*", "", text).partition("\n")
            with Served("bash", "-c", f"{command} {SMALL}") as served:
                assert served.get("/ready").status_code == 200
                assert served.stop() == 0
        else:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", text], stdin=subprocess.DEVNULL, capture_output=True, text=True
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("settings", ["infer.task=embed", "server.weights_folder={0} server.lora_folder={0}"])
def test_servers_answer_the_documents_curl(settings: str, model: Path, folder: Path) -> None:
    shutil.copytree(model, folder / "step-100")
    embeds, answered = "embed" in settings, 0
    with Served.warm(model, *settings.format(folder).split(), *SMALL.split()[1:], "infer.max_loras=2") as served:
        for line in those("curl"):
            if ("/v1/embeddings" in line.text) != embeds:
                continue
            text = line.text.replace("http://127.0.0.1:21002", served.url).replace("curl ", "curl -f --noproxy '*' ", 1)
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", text], capture_output=True, text=True)
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}{served.log[-1500:]}"
            answered += 1
    assert answered == (1 if embeds else 7)

"""Ranks as real processes: a real model in stages, under torchrun, and with one of them killed, stopped or cut off."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from served import EVENER, PATIENCE, Served, free_port, tiny_model

from evener import LLM, SamplingParams
from evener_conformance.naive.model import find_architecture

ROOT = Path(__file__).parent.parent
SMALL = ["load=dummy", "backend=cpu", "dtype=float32", "infer.threads=1", "infer.max_seq_len=128", "infer.max_reqs=8"]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(find_architecture("LlamaForCausalLM").tiny_config()))
    return folder


def answer(*command: str) -> dict[str, Any]:
    """What ``evener run --json`` says, however it was started."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = re.search(r"^\{.*^\}", done.stdout, re.S | re.M)
    assert found, done.stdout
    return dict(json.loads(found.group()))


def real_tokens(model: Path, **sizes: int) -> list[list[int]]:
    prompts = ["def fibonacci(n):", "The capital of France is", "import os\n\n\ndef main() -> None:\n    "]
    keys: dict[str, object] = {"dtype": "float32", "infer.max_seq_len": 256, "infer.step_tokens": 8}
    with LLM(model, **keys, **{f"infer.{key}": size for key, size in sizes.items()}) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def tokens_of_one_rank(qwen_dir: Path) -> list[list[int]]:
    return real_tokens(qwen_dir)


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1), (2, 2)])
def test_a_real_model_gives_the_tokens_of_one_rank(
    qwen_dir: Path, tokens_of_one_rank: list[list[int]], tp: int, pp: int
) -> None:
    assert real_tokens(qwen_dir, tp_size=tp, pp_size=pp) == tokens_of_one_rank


@pytest.mark.slow
def test_torchrun_starts_ranks_of_which_the_first_answers(smollm2_dir: Path) -> None:
    asked = [
        "run",
        str(smollm2_dir),
        "--prompt",
        "The capital of France is",
        "--raw",
        "--max-tokens",
        "8",
        "--json",
        "--temperature",
        "0",
        "backend=cpu",
        "dtype=float32",
        "infer.threads=1",
        "infer.max_seq_len=64",
    ]
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2", f"--master_port={free_port()}"]
    several = answer(sys.executable, *torchrun, "-m", "evener", *asked, "infer.pp_size=2")
    assert several["text"] == answer(sys.executable, "-m", "evener", *asked)["text"] != ""


SCRIPT = """
import sys
from evener import LLM, SamplingParams
print("a rank begins")
keys = dict(key.split("=") for key in sys.argv[2:])
llm = LLM(sys.argv[1], **keys)
(output,) = llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=4, detokenize=False, ignore_eos=True))
print("ids", output.outputs[0].token_ids)
if "one more" in sys.argv[0]:
    llm.close()
    LLM(sys.argv[1], **keys)
"""


@pytest.mark.slow
def test_a_script_under_torchrun_goes_on_in_one_rank_which_has_the_answers_and_one_engine(
    tiny: Path, tmp_path: Path
) -> None:
    def play(name: str, *torchrun: str, more: str = "") -> subprocess.CompletedProcess[str]:
        script = tmp_path / name
        script.write_text(SCRIPT)
        command = [sys.executable, *torchrun, str(script), str(tiny), *SMALL, *more.split()]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    alone, ranks = play("script.py"), play("script.py", *torchrun, more="infer.tp_size=2")
    assert ranks.returncode == 0, ranks.stderr
    assert ranks.stdout.count("a rank begins") == 2
    assert re.findall("ids.*", ranks.stdout) == re.findall("ids.*", alone.stdout) != []
    again = play("one more.py", *torchrun, more="infer.tp_size=2")
    assert again.returncode == 1 and "this process has already started an engine" in again.stderr


@pytest.mark.slow
def test_servers_that_were_started_once_on_each_machine_answer_together(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "tiny")
    variables = ["WORLD_SIZE=2", "MASTER_HOST=127.0.0.1", f"MASTER_PORT={free_port()}"]
    serve = [EVENER, "serve", folder, "serve.port=0", *SMALL, "infer.pp_size=2"]
    with subprocess.Popen(["env", *variables, "NODE_RANK=1", *serve], stderr=subprocess.DEVNULL) as second:
        with Served("env", *variables, "NODE_RANK=0", *serve) as first:
            assert "starting torchrun here: --nnodes=2 --node_rank=0" in first.log
            asked = {"model": first.name, "prompt": "Hello", "max_tokens": 8, "ignore_eos": True}
            answer = first.http.post("/v1/completions", json=asked)
            assert answer.json()["usage"]["completion_tokens"] == 8, answer.text
            first.stop()
        second.wait(PATIENCE)


# Of these seeds on, three and two draws come during the start; the stopped front end goes on, and is killed.
@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "seed"), [("infer.tp_size=2", 200), ("infer.pp_size=2", 100)])
def test_each_fault_of_each_process_ends_every_request_once_and_leaks_nothing(
    tiny: Path, sizes: str, seed: int
) -> None:
    script = [sys.executable, str(ROOT / "scripts/kill_ranks.py"), str(tiny), *SMALL, sizes]
    done = subprocess.run([*script, "--each", "--seed", str(seed)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    kinds = json.loads(done.stdout.splitlines()[-1])["kinds"]
    assert len(kinds) == 9 and set(kinds.values()) == {1}, kinds

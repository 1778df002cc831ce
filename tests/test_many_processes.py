"""Ranks as real processes: a real model in stages, under torchrun, and with one of them killed, stopped or cut off."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evener import LLM, SamplingParams
from evener.testing.naive import find_architecture

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


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1), (2, 2)])
def test_a_real_model_gives_the_tokens_of_one_rank(qwen_dir: Path, tp: int, pp: int) -> None:
    prompts = ["def fibonacci(n):", "The capital of France is", "import os\n\n\ndef main() -> None:\n    "]
    params = SamplingParams(temperature=0, max_tokens=24)
    keys: dict[str, object] = {"dtype": "float32", "infer.max_seq_len": 256, "infer.step_tokens": 8}
    found = []
    for more in ({}, {"infer.tp_size": tp, "infer.pp_size": pp}):
        with LLM(qwen_dir, **keys, **more) as llm:
            found.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    assert found[0] == found[1]


@pytest.mark.slow
def test_torchrun_starts_ranks_of_which_the_first_answers(smollm2_dir: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    asked = ["run", str(smollm2_dir), "--prompt", "The capital of France is", "--raw", "--max-tokens", "8", "--json",
             "--temperature", "0", "backend=cpu", "dtype=float32", "infer.threads=1", "infer.max_seq_len=64"]
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2", f"--master_port={port}"]
    several = answer(sys.executable, *torchrun, "-m", "evener", *asked, "infer.pp_size=2")
    assert several["text"] == answer(sys.executable, "-m", "evener", *asked)["text"] != ""


@pytest.mark.slow
@pytest.mark.parametrize("sizes", ["infer.tp_size=2", "infer.pp_size=2"])
def test_whatever_is_done_to_a_process_every_request_ends_once_and_nothing_is_left(tiny: Path, sizes: str) -> None:
    script = [sys.executable, str(ROOT / "scripts/kill_ranks.py"), str(tiny), *SMALL, sizes, "--draws", "15"]
    seed = "0" if sizes.startswith("infer.tp") else "15"
    done = subprocess.run([*script, "--seed", seed], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

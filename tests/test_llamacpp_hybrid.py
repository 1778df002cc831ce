"""The benchmark that times llama.cpp on a model of experts: the file that it writes, and the program that it runs."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import llamacpp_hybrid
import numpy as np
import pytest
from model_configs import CONFIGS

SMALL = {**CONFIGS["qwen3-30b-a3b"], "num_hidden_layers": 2, "num_experts": 4, "vocab_size": 64}
ROW = {"n_kv_max": 512, "t_pp": 0.25, "t_tg": 0.48}


@pytest.mark.parametrize("form", ["bf16", "q4_k_m"])
def test_the_file_of_random_weights_is_whole_and_its_values_are_small(form: str, tmp_path: Path) -> None:
    llamacpp_hybrid.write(tmp_path / "model.gguf", SMALL, form)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert len(tensors) == 3 + 2 * 12
    experts = tensors["blk.1.ffn_down_exps.weight"]
    assert list(experts.shape) == [768, 2048, 4]  # fastest first
    values = gguf.dequantize(experts.data, experts.tensor_type)
    assert np.isfinite(values).all()
    assert 0.001 < np.abs(values).max() < 0.5


def bench(folder: Path, body: str) -> list[str]:
    """The arguments of a run whose program is a shell script."""
    program = folder / "bench"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    (folder / "qwen3-30b-a3b-q4_k_m.gguf").touch()
    return ["qwen3-30b-a3b", "--bench", str(program), "--host-layers", "2", "--cases", "4x16", "--steps", "24",
            "--folder", str(folder), "--out", str(folder)]  # fmt: skip


def test_the_experts_of_the_named_layers_stay_in_host_memory_and_a_row_has_milliseconds(tmp_path: Path) -> None:
    script = f"echo \"$@\" > {tmp_path}/arguments; echo '{json.dumps(ROW)}' >&2"
    assert llamacpp_hybrid.main(bench(tmp_path, script)) == 0
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[arguments.index("-ot") + 1] == r"blk\.(0|1)\.ffn_.*_exps\.=CPU"
    assert arguments[arguments.index("-npl") + 1] == "4"
    row = json.loads((tmp_path / "llamacpp_hybrid.jsonl").read_text())
    assert (row["prompt_ms"], row["step_ms"], row["host_layers"], row["bs"], row["inp"]) == (250.0, 20.0, 2, 4, 16)


@pytest.mark.parametrize(("script", "message"), [("exit 3", "ended with 3"), ("echo hello", "printed no row")])
def test_a_program_that_fails_ends_the_benchmark_with_what_it_said(script: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=message):
        llamacpp_hybrid.main(bench(tmp_path, script))

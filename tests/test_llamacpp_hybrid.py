"""The benchmark that times llama.cpp on a model of experts: the file that it writes, the program that it runs, and the
rows that compare it with ours."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import hybrid_peer
import llamacpp_hybrid
import numpy as np
import pytest
from model_configs import CONFIGS

SMALL = {**CONFIGS["qwen3-30b-a3b"], "num_hidden_layers": 2, "num_experts": 4, "vocab_size": 64}
ROW = {"n_kv_max": 512, "pp": 16, "t_pp": 0.25, "t_tg": 0.48}


@pytest.mark.parametrize("form", [pytest.param("bf16", marks=pytest.mark.slow), "q4_k_m"])
def test_the_file_of_random_weights_is_whole_and_its_values_are_small(form: str, tmp_path: Path) -> None:
    llamacpp_hybrid.write(tmp_path / "model.gguf", SMALL, form)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert len(tensors) == 3 + 2 * 12
    experts = tensors["blk.1.ffn_down_exps.weight"]
    assert list(experts.shape) == [768, 2048, 4]  # fastest first
    values = gguf.dequantize(experts.data, experts.tensor_type)
    assert np.isfinite(values).all()
    assert abs(values.mean()) < 0.001 and 0.018 < values.std() < 0.022
    table = tensors["token_embd.weight"]
    assert 0.9 < gguf.dequantize(table.data, table.tensor_type).std() < 1.1, "tokens stay unlike each other"
    other = tensors["blk.0.ffn_down_exps.weight"]
    assert other.tensor_type != experts.tensor_type or not np.array_equal(other.data, experts.data)


def bench(folder: Path, body: str, *more: str) -> list[str]:
    """The arguments of a run whose program is a shell script."""
    program = folder / "bench"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    (folder / "qwen3-30b-a3b-q4_k_m.gguf").touch()
    return ["qwen3-30b-a3b", "--bench", str(program), "--layers", "4", "--host-layers", "2", "--cases", "4x16",
            "--steps", "24", "--repeats", "2", "--folder", str(folder), "--out", str(folder), *more]  # fmt: skip


def test_the_experts_of_the_last_layers_stay_in_host_memory_and_the_fastest_of_several_runs_is_reported(
    tmp_path: Path,
) -> None:
    faster = {**ROW, "t_pp": 0.125}
    script = f"echo \"$@\" > {tmp_path}/arguments; echo '{json.dumps(ROW)}' >&2; echo '{json.dumps(faster)}'"
    assert llamacpp_hybrid.main(bench(tmp_path, script)) == 0
    arguments = (tmp_path / "arguments").read_text().split()
    assert arguments[arguments.index("-ot") + 1] == r"blk\.(2|3)\.ffn_.*_exps\.=CPU"
    assert arguments[arguments.index("-npl") + 1] == "4" and arguments[arguments.index("-npp") + 1] == "16,16"
    row = json.loads((tmp_path / "llamacpp_hybrid.jsonl").read_text())
    assert (row["prompt_ms"], row["step_ms"], row["host_layers"], row["bs"], row["inp"]) == (125.0, 20.0, 2, 4, 16)


@pytest.mark.parametrize(("script", "message"), [("exit 3", "ended with 3"), ("echo hello", "printed 0 rows")])
def test_a_setting_with_which_the_program_fails_is_said_and_the_next_one_runs(
    script: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = json.dumps(ROW)
    body = f"case \"$*\" in *-bad*) {script};; *) echo '{line}'; echo '{line}';; esac"
    assert llamacpp_hybrid.main(bench(tmp_path, body, "--try", "-ub 512 -bad", "--try", "-ub 512")) == 1
    (row,) = map(json.loads, (tmp_path / "llamacpp_hybrid.jsonl").read_text().splitlines())
    assert row["options"] == "-ub 512"
    assert message in capsys.readouterr().err


def test_rows_compare_each_case_with_the_fastest_setting_of_the_peer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = {"model": "qwen3-30b-a3b", "form": "bf16", "host_layers": 10, "bs": 16, "inp": 128}
    kept = dict.fromkeys(hybrid_peer.KEPT, 1.5)
    ours = {**same, **kept, "way": "host", "prompt_ms": 100.0, "step_ms": 20.0,
            "counted_a_prompt": {"a": 1}, "counted_a_step": {"a": 2}, "step_host_share": 0.8}  # fmt: skip
    theirs = {**same, "layers": 12, "options": "-ub 512", "prompt_ms": 300.0, "step_ms": 25.0, "device_mib": 9000}
    others = {**theirs, "options": "-ub 2048", "prompt_ms": 200.0, "step_ms": 26.0}
    lonely = {**theirs, "inp": 512}
    (tmp_path / "hybrid.jsonl").write_text(json.dumps(ours) + "\n")
    (tmp_path / "llamacpp_hybrid.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (theirs, others, lonely)))
    words = ["--device", "a card", "--version", "v1", "--software", "torch", "--date", "2026-11-27"]
    assert hybrid_peer.main([str(tmp_path), *words, "--out", str(tmp_path / "rows.jsonl")]) == 0
    prompt, step = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert (prompt["metric"], prompt["ours"], prompt["theirs"], prompt["theirs_options"]) == (
        "prompt", 100.0, 200.0, "-ub 2048")  # fmt: skip
    assert (step["metric"], step["ours"], step["theirs"], step["theirs_options"]) == (
        "decode step", 20.0, 25.0, "-ub 512")  # fmt: skip
    assert prompt["model"] == "Qwen3-30B-A3B, bfloat16, 12 of 48 layers" and step["counted"] == {"a": 2}
    assert step["step_host_share"] == 0.8 and "step_host_share" not in prompt
    assert prompt["case"] == "16 × 128: experts of 10 layers on the host"
    assert "512): only one of both ran it" in capsys.readouterr().err

"""Models in GGUF's IQ types, from the file to tokens."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from evener_convert.command import convert
from gguf_files import unpacked_file
from llamacpp_answers import ROOT, llamacpp
from model_sources import SOURCES, models_root

from evener import LLM, SamplingParams
from evener.config import from_overrides
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.engine import play

KEEP = {"dtype": "float32", "infer.max_reqs": 2, "infer.max_seq_len": 48}


def tokens(model: Path, **keys: object) -> list[list[int]]:
    with LLM(model, **{**KEEP, **keys}) as llm:
        outputs = llm.generate(["at t", "tea"], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
        return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("storage", ["iq4_xs", "iq2_xxs"])
def test_a_file_gives_the_tokens_of_a_folder_of_its_numbers(storage: str, tmp_path: Path, one_thread: None) -> None:
    path, _ = unpacked_file(tmp_path / "m.gguf", storage)
    convert(from_overrides(path, {"quant": "auto"}), tmp_path / "folder")
    found = tokens(path)
    assert found == tokens(tmp_path / "folder") and len({*found[0], *found[1]}) > 4


def test_the_plan_counts_numbers_and_not_blocks(tmp_path: Path, one_thread: None) -> None:
    path, blocks = unpacked_file(tmp_path / "m.gguf", "iq3_s")
    keys = {**KEEP, "infer.kv_memory": 2**22, "infer.threads": 1}
    controller, ready = build_controller(from_overrides(str(path), keys))
    controller.close()
    matrices = sum(len(each) for each in blocks.values()) * 256 * 4
    assert matrices < ready.info.memory.measured_weights == ready.info.memory.weights


def test_two_ranks_give_the_tokens_of_one(tmp_path: Path, one_thread: None) -> None:
    path, _ = unpacked_file(tmp_path / "m.gguf", "iq4_nl")
    asked = [NewRequest(id="a", prompt=[5, 9, 77], max_tokens=20, sampling=Sampling(temperature=0.0))]
    keys, found = {**KEEP, "backend": "cpu", "infer.kv_memory": 2**22, "infer.threads": 1}, []
    for ranks in (1, 2):
        with rank_threads(from_overrides(str(path), {**keys, "infer.tp_size": ranks})) as (controller, _):
            found.append(play(controller, asked).tokens)
    assert found[0] == found[1] and len(set(found[0]["a"])) > 5


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("model", "kind"), [("smollm2", "IQ4_NL"), ("qwen2.5", "IQ4_XS")])
def test_perplexity_is_that_of_llama_cpp(model: str, kind: str, tmp_path: Path) -> None:
    """llama.cpp makes the file. Where a row has no whole blocks of 256 it takes another format, such as IQ4_NL. It
    rounds activations to int8: with IQ3_S, whose numbers are the same in both, Qwen's perplexity differs by 2%."""
    from test_gguf_models import TEXT, tokenizer_of, workers

    from evener_conformance.oracle import teacher_forced

    source, made = models_root() / "gguf" / SOURCES[model].gguf, tmp_path / "made.gguf"
    built = Path.home() / ".cache/evener/llamacpp/bin/python"
    python = os.environ.get("EVENER_BENCH_PYTHON_LLAMACPP", str(built))
    done = subprocess.run(
        [python, ROOT / "benchmarks/requantize.py", source, made, kind], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ids = tokenizer_of(made).encode(TEXT)[:512]
    theirs = -torch.tensor(llamacpp({"model": str(made), "ids": ids, "threads": torch.get_num_threads()})).mean()
    for _, worker in workers(made):
        chosen = teacher_forced(worker, ids[:-1]).log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])
    ours = -chosen.mean()
    drift = float((ours - theirs).exp()) - 1
    print(f"\n{made.name}: perplexity {float(ours.exp()):.4f}, llama.cpp {float(theirs.exp()):.4f} ({drift:+.3%})")
    assert abs(drift) < 0.01

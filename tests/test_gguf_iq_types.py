"""Models in GGUF's IQ types, from the file to tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from evener_convert.command import convert
from gguf_files import unpacked_file
from llamacpp_answers import requantized
from model_sources import SOURCES, models_root
from test_gguf_models import perplexity_drift

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
    made = tmp_path / "made.gguf"
    requantized(models_root() / "gguf" / SOURCES[model].gguf, made, kind)
    assert abs(perplexity_drift(made, 512)) < 0.01

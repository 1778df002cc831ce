"""A GGUF file through what takes a model: the same tokens as its folder, on the command line, with dummies."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from gguf_files import dequantized, tokenizer_keys, write_gguf
from safetensors.torch import save_file
from warm import warm

from evener import LLM, SamplingParams
from evener.config import from_overrides
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener.errors import CheckpointError, ConfigError
from evener.loading.checkpoint import open_checkpoint
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.engine import play
from evener_inspection.explanation import explain
from evener_inspection.layer_facts import model_facts

WIDTH, INNER, VOCAB, LAYERS = 64, 96, 259, 2
KEYS = {
    "context_length": 64, "embedding_length": WIDTH, "block_count": LAYERS, "feed_forward_length": INNER,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
SHAPES = {
    "attn_norm": (WIDTH,), "attn_q": (64, WIDTH), "attn_k": (32, WIDTH), "attn_v": (32, WIDTH),
    "attn_output": (WIDTH, 64), "ffn_norm": (WIDTH,), "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH),
    "ffn_down": (WIDTH, INNER),
}  # fmt: skip
KEEP = {"dtype": "float32", "infer.max_reqs": 2}


@pytest.fixture
def pair(tmp_path: Path, one_thread: None) -> Sequence[Path]:
    """A Llama in Q8_0, and the folder of its dequantized weights."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"token_embd": (VOCAB, WIDTH), "output_norm": (WIDTH,)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in SHAPES.items()}
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    path = write_gguf(tmp_path / "tiny.gguf", "llama", KEYS, tensors, "Q8_0")
    folder = tmp_path / "folder"
    folder.mkdir()
    checkpoint = open_checkpoint(path)
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text(checkpoint.text(name) or "")
    plain = {}
    for name, (_, shape) in checkpoint.headers.items():
        stored = next(n for n in tensors if checkpoint.family.name(n) == name)  # type: ignore[attr-defined]
        tensor = dequantized(tensors[stored], "Q8_0") if len(shape) == 2 else tensors[stored]
        if heads := checkpoint.family.permuted_heads(stored):  # type: ignore[attr-defined]
            tensor = tensor.view(heads, -1, 2, WIDTH).transpose(1, 2).reshape(shape)
        plain[name] = tensor.contiguous()
    save_file(plain, folder / "model.safetensors")
    return path, folder


def test_a_file_gives_the_tokens_of_its_folder_and_says_what_was_dequantized(pair: Sequence[Path]) -> None:
    texts, notes = [], []
    for model in pair:
        with LLM(model, **{**KEEP, "ops.linear": "reference"}) as llm:
            outputs = llm.generate(["at t", "tea"], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
            texts.append([output.outputs[0].token_ids for output in outputs])
            notes.append(llm.info.manifest.dequantized)  # type: ignore[index]
    assert texts[0] == texts[1]
    assert "dequantized from q8_0 to float32" in notes[0][0] and notes[1] == []


def test_explain_compares_the_header_of_a_file_with_what_the_model_declares(pair: Sequence[Path]) -> None:
    path, _ = pair
    keys = {"backend": "cpu", "infer.max_seq_len": 48, "infer.kv_memory": 2**22, **KEEP}
    assert explain(from_overrides(path, keys))["model"]["problem"] is None
    data = path.read_bytes()
    assert data.count(b"blk.1.ffn_up") == 1
    path.write_bytes(data.replace(b"blk.1.ffn_up", b"blk.7.ffn_up"))
    problem = explain(from_overrides(path, keys))["model"]["problem"]
    assert "1 tensor is missing: model.layers.1.mlp.up_proj.weight; 1 tensor is not part of the model: " in problem


def test_ranks_cut_blocks_without_dequantizing_them_and_give_the_tokens_of_one(pair: Sequence[Path]) -> None:
    keys = {"backend": "cpu", "infer.max_seq_len": 48, "infer.kv_memory": 2**22, "infer.threads": 1, **KEEP}
    asked = [NewRequest(id="a", prompt=[5, 9, 77], max_tokens=30, sampling=Sampling(temperature=0.0))]
    found = []
    for ranks in (1, 2):
        with rank_threads(from_overrides(str(pair[0]), {**keys, "infer.tp_size": ranks})) as (controller, executor):
            found.append(play(controller, asked).tokens)
        for worker in executor.workers:
            assert worker.facts.info.manifest.packings["cpu.blocks"] == 4 * LAYERS + 1
            down = [w for w in worker.assembly.build.weights if getattr(w, "name", "").endswith("down_proj")]
            assert {w.parts[0].format.storage for w in down} == {"q8_0"}
    assert found[0] == found[1] and len(set(found[0]["a"])) > 5
    four = rank_threads(from_overrides(str(pair[0]), {**keys, "infer.tp_size": 4}))
    with pytest.raises(ConfigError, match=r"o_proj.weight is stored in units of 32 and cannot be cut; .* fit: 1, 2$"):
        four.__enter__()


@pytest.mark.parametrize("kept", [True, False])
def test_a_table_and_its_head_are_planned_and_counted_once_if_both_stay_quantized(
    pair: Sequence[Path], kept: bool
) -> None:
    more = {} if kept else {"ops.embedding": "reference"}
    keys = {"infer.max_seq_len": 48, "infer.kv_memory": 2**22, "infer.threads": 1, **KEEP, **more}
    controller, ready = build_controller(from_overrides(str(pair[0]), keys))
    controller.close()
    memory = ready.info.memory
    assert memory.measured_weights == memory.weights and memory.measured_mapped == memory.mapped
    assert (memory.copies == 0) == kept


def test_of_a_table_in_blocks_a_step_reads_what_its_head_does(pair: Sequence[Path]) -> None:
    assert model_facts(from_overrides(str(pair[0]), KEEP)).head == -(-VOCAB // 16) * 16 * WIDTH * 34 // 32


def test_a_file_with_dummy_weights_runs(pair: Sequence[Path]) -> None:
    with LLM(pair[0], load="dummy", **KEEP) as llm:
        [output] = llm.generate("tea", SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 3


def test_dummy_weights_in_a_format_that_nobody_reads_are_refused(pair: Sequence[Path]) -> None:
    path = pair[1] / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "other"}}))
    with pytest.raises(CheckpointError, match="quantized with 'other', which no installed package reads"):
        LLM(pair[1], load="dummy", **KEEP)


def test_the_command_line_takes_a_file(pair: Sequence[Path]) -> None:
    command = [warm() / "evener", "run", str(pair[0]), "--prompt", "tea", "--max-tokens", "3", "--json"]
    done = subprocess.run([*command, "outputs=none", "--raw"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prompt_tokens"] == 4
    assert tokenizer_keys()["tokenizer.ggml.add_bos_token"]


#: What no answer to a plain prompt needs; each would take a tenth of a second of the start, or more.
LEFT_OUT = (
    "fastapi", "huggingface_hub", "hydra", "jinja2", "pydantic", "torch._dynamo", "torch._inductor",
    "transformers", "triton",
)  # fmt: skip
RUN = """
import sys
from evener.cli.main import main
code = main(["run", *sys.argv[2:]])
print(code, [name for name in sys.argv[1].split(",") if name in sys.modules])
"""


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["file", "folder"])
def test_a_start_imports_nothing_that_its_answer_does_not_need(number: int, pair: Sequence[Path]) -> None:
    command = [sys.executable, "-c", RUN, ",".join(LEFT_OUT), str(pair[number]), "--prompt", "tea", "--raw"]
    words = ["--max-tokens", "1", "outputs=none", "infer.threads=1"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


def test_an_open_file_is_freed_without_the_garbage_collector(pair: Sequence[Path]) -> None:
    opened = open_checkpoint(pair[0])
    assert opened.config and opened.json("tokenizer.json") and opened.names("*.json") and opened.headers
    freed = weakref.ref(opened)
    gc.disable()
    try:
        del opened
        assert freed() is None
    finally:
        gc.enable()

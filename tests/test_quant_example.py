"""The example of a quantization scheme: installed from its wheel, it reads a checkpoint that its converter made, keeps
the codes as they are stored, gives the tokens of the dequantized model, and passes the conformance kit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from docs_blocks import DOCS, evener, python, wheel_site
from lora_files import write_model

from evener_conformance.tiny_tokenizer import VOCAB_SIZE, write_tiny_tokenizer

EXAMPLE = DOCS / "examples/evener-quant-example"
RUN = """
import json, sys
import msgspec
import torch
from evener import LLM, SamplingParams
from evener_conformance.oracle import Comparison, compare_greedy
from evener_models.llama import LlamaForCausalLM
from evener_quant_example.convert import convert, quantize
from transformers import LlamaConfig
from transformers import LlamaForCausalLM as Oracle

config = LlamaForCausalLM.tiny_config() | {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16
}
torch.manual_seed(0)
torch.set_num_threads(1)
oracle = Oracle(LlamaConfig(**config)).eval()
for parameter in oracle.parameters():  # transformers' own start is too flat to show a difference
    torch.nn.init.normal_(parameter, std=0.2)
oracle.save_pretrained("plain")
convert("plain", "int8", 32)
with torch.inference_mode():
    for name, parameter in oracle.named_parameters():
        if name.endswith("_proj.weight"):
            codes, scales = quantize(parameter, 32)
            parameter.copy_((codes.unflatten(1, (-1, 32)) * scales[..., None]).flatten(1))

@torch.inference_mode()
def logits(ids):
    return oracle(torch.tensor([ids])).logits[0]

small = {"cpu.native": "off", "infer.kv_memory": "4MiB", "infer.step_tokens": 64, "infer.max_reqs": 4}
result, found = Comparison(), {}
for which, keys in {"kernel": {}, "reference": {"ops.linear": "reference"}}.items():
    with LLM("int8", dtype="float32", backend="cpu", **small, **keys) as llm:
        def answer(prompt, count):
            greedy = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            return llm.generate(list(prompt), greedy)[0].outputs[0].token_ids
        prompt = list(range(7, 57))
        compare_greedy(logits, [prompt], [answer(prompt, 24)], resume=answer, result=result)
        found[which] = msgspec.to_builtins(llm.info.manifest)
result.check()
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its wheel, built and unpacked into a folder for PYTHONPATH."""
    return wheel_site(EXAMPLE, tmp_path_factory.mktemp("quant"))


def test_a_converted_model_keeps_its_codes_and_gives_the_tokens_of_the_dequantized_one(
    site: Path, tmp_path: Path
) -> None:
    done = python(site, tmp_path, "-c", RUN)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    with_kernel, without = found["kernel"], found["reference"]
    assert with_kernel["packings"]["int8-groups.codes"] and not with_kernel["dequantized"]
    assert "int8-groups/int8_groups_linear" in {row["provider"] for row in with_kernel["ops"]}
    assert set(without["packings"]) == {"plain"} and without["dequantized"]


@pytest.mark.parametrize("part", ["int8-groups", "int8_groups_linear"])
def test_the_scheme_and_the_kernel_pass_the_conformance_kit(part: str, site: Path, tmp_path: Path) -> None:
    done = evener(site, tmp_path, "conformance", "--backend", "cpu", "--op", part, "--seed", "1", "cpu.native=off")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout, done.stdout


def test_the_page_s_commands_convert_explain_and_run_a_model(site: Path, tmp_path: Path) -> None:
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    write_tiny_tokenizer(write_model(tmp_path / "model", changes={**sizes, "num_key_value_heads": 2, "head_dim": 16}))
    small = ("infer.kv_memory=4MiB", "infer.max_seq_len=128", "cpu.native=off")
    for run, words in (
        (python, ("-m", "evener_quant_example.convert", "model", "MODEL_INT8")),
        (evener, ("explain", "MODEL_INT8", *small)),
        (evener, ("run", "MODEL_INT8", "--prompt", "Count to three.", "--max-tokens", "4", *small)),
    ):
        done = run(site, tmp_path, *words)
        assert done.returncode == 0, done.stderr
        assert words[0] != "explain" or "packings:" in done.stdout, done.stdout


def test_a_checkpoint_whose_scales_do_not_fit_is_refused_with_both_shapes(site: Path, tmp_path: Path) -> None:
    code = """
from evener_quant_example.scheme import Int8Groups
Int8Groups().part("w", {"w": ("int8", (6, 96)), "w_scale": ("float32", (6, 5))})
"""
    done = python(site, tmp_path, "-c", code)
    assert done.returncode == 1 and "int8 [6, 96] with scales as float32 [6, 5]" in done.stderr

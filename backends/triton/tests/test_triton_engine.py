"""The whole engine over these kernels, interpreted, gives the tokens of the references."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import interpreted  # noqa: F401  (repairs the interpreter)
import pytest

from evener import LLM, SamplingParams
from evener.engine.facts.manifest_report import ManifestReport
from evener_conformance.naive.model import find_architecture


def answers(folder: Path, **overrides: Any) -> tuple[list[list[int]], ManifestReport]:
    """Tokens of greedy and random requests, and the manifest."""
    common = {
        "load": "dummy", "dtype": "float32", "infer.max_seq_len": 64, "infer.max_reqs": 2, "infer.step_tokens": 16,
        "infer.kv_memory": 1 << 20,
    }  # fmt: skip
    params = [
        SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False),
        SamplingParams(temperature=1.0, seed=5, max_tokens=3, ignore_eos=True, detokenize=False),
    ]
    with LLM(folder, **{**common, **overrides}) as llm:
        outputs = llm.generate([list(range(3, 21)), [7, 8]], params)
        return [list(o.outputs[0].token_ids) for o in outputs], llm.info.manifest


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Qwen3", "Gemma3", "Qwen3Moe", "DeepseekV2"])
def test_tokens_are_those_of_the_references(family: str, tmp_path: Path, interpreted_backend: None) -> None:
    config = find_architecture(f"{family}ForCausalLM").tiny_config()
    (tmp_path / "config.json").write_text(json.dumps(config))
    got, manifest = answers(tmp_path, backend="interpreted")
    want, _ = answers(tmp_path, backend="interpreted", **{"infer.op_impl": "ref", "infer.attn_type": "ref"})
    assert got == want
    second = "moe_block" if family in ("Qwen3Moe", "DeepseekV2") else "mlp_block"
    first = ("latent", "latent_attention_block") if family == "DeepseekV2" else ("paged", "attention_block")
    for name in (*first, second, "head", "greedy"):
        assert f"triton.{name}" in str(manifest)
    whole = "triton/triton.decoder_layer" in {row.provider for row in manifest.ops}
    assert whole == (family == "Gemma3"), "there are norms on both sides of attention"


@pytest.mark.slow
def test_biased_and_penalized_requests_with_logprobs_are_answered_as_by_the_references(
    tmp_path: Path, interpreted_backend: None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(find_architecture("Qwen3ForCausalLM").tiny_config()))
    common: Any = {"max_tokens": 2, "ignore_eos": True, "detokenize": False}
    params = [
        SamplingParams(temperature=0.0, logit_bias={5: 4.0, 6: -3.0}, logprobs=4, **common),
        SamplingParams(temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.25, **common),
    ]
    found = []
    for impl in ("auto", "ref"):
        keys: Any = {"load": "dummy", "dtype": "float32", "infer.max_seq_len": 64, "infer.max_reqs": 2,
                "infer.op_impl": impl, "infer.kv_memory": 1 << 20, "backend": "interpreted"}  # fmt: skip
        with LLM(tmp_path, **keys) as llm:
            outputs = [o.outputs[0] for o in llm.generate([[3, 4, 5], [7, 8, 7]], params)]
            chosen = {row.op: row.provider for row in llm.info.manifest.ops}
        for op in ("add_bias", "penalize", "logprobs"):
            assert chosen[op] == (f"triton/triton.{op}" if impl == "auto" else "reference")
        found.append(([list(o.token_ids) for o in outputs], outputs[0].logprobs or ()))
    (got, told), (want, true) = found
    assert got == want
    assert len(told) == len(true) == 2
    assert all(a == pytest.approx(b, abs=1e-4) for a, b in zip(told, true, strict=True))

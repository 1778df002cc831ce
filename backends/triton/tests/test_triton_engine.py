"""The whole engine over these kernels, interpreted, gives the tokens of the references."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import interpreted  # noqa: F401  (repairs the interpreter)
import pytest

from evener import LLM, SamplingParams
from evener.testing.installed import write_distribution
from evener.testing.naive import find_architecture


def answers(folder: Path, **overrides: Any) -> tuple[list[list[int]], dict[str, Any]]:
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
        return [list(o.outputs[0].token_ids) for o in outputs], llm.info["manifest"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Qwen3", "Gemma3", "Qwen3Moe", "DeepseekV2"])
def test_tokens_are_those_of_the_references(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    write_distribution(
        tmp_path, "evener-backend-interpreted", {"evener.backends": {"interpreted": "triton_host:descriptor"}}
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = find_architecture(f"{family}ForCausalLM").tiny_config()
    (tmp_path / "config.json").write_text(json.dumps(config))
    got, manifest = answers(tmp_path, backend="interpreted")
    want, _ = answers(
        tmp_path, backend="interpreted", **{"infer.op_impl": "ref", "infer.attn_type": "ref"}
    )
    assert got == want
    second = "moe_block" if family in ("Qwen3Moe", "DeepseekV2") else "mlp_block"
    first = ("latent", "latent_attention_block") if family == "DeepseekV2" else ("paged", "attention_block")
    for name in (*first, second, "head", "greedy"):
        assert f"triton.{name}" in json.dumps(manifest)

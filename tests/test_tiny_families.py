"""Tiny random models of families with experts and odd state on the CPU backend: 64 greedy tokens of transformers, in
company and after a prefix hit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evener.config import from_overrides
from evener.engine.messages import NewRequest, Sampling
from evener.engine.start import build_controller
from evener.testing.naive import find_architecture
from evener.testing.reference_engine import play

GREEDY = Sampling(temperature=0.0)
SMALL = {"backend": "cpu", "dtype": "float32", "infer.max_seq_len": 128, "infer.max_reqs": 4, "infer.threads": 1,
         "infer.kv_memory": 2**24, "infer.snapshot_every": 32}  # fmt: skip


@pytest.mark.parametrize("family", ["DeepseekV2", "DeepseekV3", "DeepseekV32", "Qwen3Next"])
def test_sixty_four_greedy_tokens_are_those_of_transformers(family: str, tmp_path: Path, one_thread: None) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**find_architecture(f"{family}ForCausalLM").tiny_config())
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    noise = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "rotary" not in name:
                middle = 1.0 if name.endswith("norm.weight") else 0.0
                scale = 0.25 if tensor.dim() > 1 else 0.1
                tensor.copy_(middle + scale * torch.randn(tensor.shape, generator=noise))
    model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path)
    ids = torch.randint(3, config.vocab_size, (41,), generator=noise).tolist()
    wanted = model.generate(torch.tensor([ids]), max_new_tokens=64, do_sample=False)[0, len(ids) :].tolist()
    controller, _ = build_controller(from_overrides(str(tmp_path), SMALL))
    prompts = {"first": (ids, 64), "beside it": (ids[:20], 9), "later": (ids, 64)}
    messages = [NewRequest(id=k, prompt=p, max_tokens=n, sampling=GREEDY) for k, (p, n) in prompts.items()]
    played = play(controller, messages, arrivals={"later": 90})
    assert played.tokens["first"] == played.tokens["later"] == wanted
    assert played.cached["later"] == 32 and len(set(wanted)) > 20

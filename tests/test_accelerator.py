"""What an accelerator computes, on the accelerator: kernels against references, captured steps against eager ones, and
whole models against transformers. Marked ``gpu``; skipped with the reason where there is none."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from evener.config import from_overrides
from evener.contracts.device import Device
from evener.contracts.ops import Kernel, OpSchema
from evener.contracts.state import StateProvider
from evener.engine.clients import InlineClient
from evener.engine.messages import Abort, Finished, NewRequest, Ready, Sampling, Tokens
from evener.engine.search import Search
from evener.engine.start import start_engine
from evener.errors import EvenerError
from evener.testing.composite_check import check_composite
from evener.testing.op_check import CheckResult, check_kernel
from evener.testing.oracle import Comparison, compare_greedy, generate
from evener.testing.state_check import check_provider

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
DTYPES = ("float32", "float16", "bfloat16")


class Registered:
    """What the machine's accelerator delivers."""

    def __init__(self) -> None:
        loaded = Search(None).load({})
        self.backend = loaded.backend.name
        self.device: Device = loaded.open_device()
        self.device.select()
        self.kernels: list[Kernel] = [p.value for p in loaded.kernels(self.device)]
        self.states: list[StateProvider] = [p.value for p in loaded.state_providers(self.device)]
        self.schemas: dict[str, OpSchema] = {p.value.name: p.value for p in loaded.op_schemas()}


@cache
def found() -> Registered | str:
    """The accelerator, or why there is none."""
    try:
        registered = Registered()
    except EvenerError as error:
        return str(error)
    return "only a host backend was chosen" if registered.device.capabilities.host_memory else registered


@pytest.fixture
def accelerator() -> Registered:
    registered = found()
    if isinstance(registered, str):
        pytest.skip(f"no accelerator: {registered}")
    return registered


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kernel_agrees_with_its_reference(accelerator: Registered, dtype: str) -> None:
    if dtype not in accelerator.device.capabilities.dtypes:
        pytest.skip(f"{accelerator.device.name} does not compute in {dtype}")
    linears = [k for k in accelerator.kernels if k.op == "linear"]
    every = list(accelerator.schemas.values())
    results: list[CheckResult] = []
    for kernel in accelerator.kernels:
        schema = accelerator.schemas[kernel.op]
        if schema.composite:
            these = check_composite(kernel, every, accelerator.device, accelerator.states, linears, (dtype,))
        else:
            these = check_kernel(kernel, schema, accelerator.device, (dtype,))
        results += these
        print(f"{kernel.name}: {Counter(r.status for r in these)}", flush=True)
    assert not [str(r)[:400] for r in results if r.status == "failed"]
    passed = Counter(r.kernel for r in results if r.status == "passed")
    assert set(passed) == {k.name for k in accelerator.kernels}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_state_providers_keep_the_contract(accelerator: Registered, dtype: str) -> None:
    for provider in accelerator.states:
        report = check_provider(provider, accelerator.device, dtype)
        assert report.problems == []
        assert report.checked


@contextmanager
def engine(folder: Path, **overrides: object) -> Iterator[InlineClient]:
    client = start_engine(from_overrides(folder, overrides), "inline")
    assert isinstance(client, InlineClient)
    assert isinstance(client.receive(1)[0], Ready)
    try:
        yield client
    finally:
        client.close()


COMMON: dict[str, Any] = {
    "vocab_size": 1009, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048,
}  # fmt: skip
LATENT: dict[str, Any] = {
    **{k: v for k, v in COMMON.items() if k != "head_dim"}, "num_key_value_heads": 8, "kv_lora_rank": 64,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": COMMON,
    "llama": {**COMMON, "hidden_size": 288, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 32},
    "mistral": {**COMMON, "sliding_window": 48},
    "gemma3_text": {**COMMON, "sliding_window": 32, "num_key_value_heads": 1, "head_dim": 128,
                    "query_pre_attn_scalar": 128},
    "qwen3_moe": {**COMMON, "num_experts": 24, "num_experts_per_tok": 4, "moe_intermediate_size": 96,
                  "norm_topk_prob": True, "decoder_sparse_step": 1},
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "first_k_dense_replace": 4},
    "deepseek_v3": {**LATENT, "q_lora_rank": 96, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
                    "topk_group": 1, "moe_intermediate_size": 64, "first_k_dense_replace": 2},
}  # fmt: skip


def seeded(family: str, folder: Path) -> Any:
    """transformers' model with random weights, and the folder that it was saved in."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    config = AutoConfig.for_model(family, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if not name.endswith("norm.weight"):
                value.copy_(torch.randn(value.shape) * (0.1 if value.dim() == 1 else 2.0 * value.shape[-1] ** -0.5))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_greedy_tokens_equal_transformers(
    accelerator: Registered, family: str, captured: bool, tmp_path: Path
) -> None:
    where = accelerator.device.torch_device
    model = seeded(family, tmp_path).to(where)

    def oracle(ids: Any) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([list(ids)], device=where)).logits[0].float().cpu()

    rng, result = random.Random(3), Comparison()
    prompts = [[rng.randrange(1009) for _ in range(n)] for n in (1, 5, 16, 31, 70, 130, 200, 333)]
    with engine(
        tmp_path, **{"dtype": "float32", "infer.max_seq_len": 512, "infer.max_reqs": 16, "infer.step_tokens": 256,
                     "infer.use_cuda_graph": captured, "infer.kv_memory": 1 << 30}
    ) as client:  # fmt: skip
        answers = generate(client, prompts, 48, every=20)
        compare_greedy(oracle, prompts, answers, partial(resumed, client), result)
    result.check()


def resumed(client: InlineClient, prompt: Any, count: int) -> list[int]:
    return generate(client, [list(prompt)], count, tag=f"again{len(prompt)}-{hash(tuple(prompt))}-")[0]


@pytest.mark.parametrize("random_rows", [False, True], ids=["greedy", "sampled"])
def test_captured_steps_give_the_tokens_of_eager_ones(
    accelerator: Registered, random_rows: bool, tmp_path: Path
) -> None:
    seeded("qwen3", tmp_path)
    rng = random.Random(9)
    prompts = [[rng.randrange(1009) for _ in range(rng.randrange(1, 90))] for _ in range(13)]
    said = []
    for captured in (False, True):
        with engine(tmp_path, **{"dtype": "float32", "infer.max_seq_len": 256, "infer.max_reqs": 16,
                                 "infer.use_cuda_graph": captured, "infer.kv_memory": 1 << 30}) as client:  # fmt: skip
            for i, prompt in enumerate(prompts):
                sampling = Sampling(temperature=0.8 if random_rows and i % 2 else 0.0, seed=i)
                client.send(NewRequest(id=str(i), prompt=prompt, max_tokens=40, sampling=sampling))
            said.append(answers_of(client, len(prompts)))
    assert said[0] == said[1]


def answers_of(client: InlineClient, requests: int) -> dict[str, list[int]]:
    """Every request's tokens, once all have ended."""
    answers: dict[str, list[int]] = {}
    ended = 0
    while ended < requests:
        for event in client.receive(None):
            if isinstance(event, Tokens):
                answers.setdefault(event.id, []).extend(event.ids)
            elif isinstance(event, Finished):
                assert event.error is None, event.error
                ended += 1
    return answers


@pytest.mark.slow
def test_two_thousand_requests_some_aborted_leave_no_memory_behind(accelerator: Registered, tmp_path: Path) -> None:
    seeded("qwen3", tmp_path)
    rng = random.Random(1)
    with engine(tmp_path, **{"dtype": "bfloat16", "infer.max_seq_len": 512, "infer.max_reqs": 64,
                             "infer.kv_memory": 1 << 30}) as client:  # fmt: skip
        free = []
        for part in range(4):
            ids = [f"{part}-{i}" for i in range(500)]
            for i in ids:
                prompt = [rng.randrange(1009) for _ in range(rng.randrange(1, 300))]
                client.send(NewRequest(id=i, prompt=prompt, max_tokens=rng.randrange(1, 60),
                                       sampling=Sampling(temperature=rng.choice((0.0, 1.0)), seed=7)))  # fmt: skip
            for i in ids[::17]:
                client.send(Abort(i))
            answers_of(client, len(ids))
            accelerator.device.synchronize()
            free.append(accelerator.device.memory().free)
    assert free[-1] >= free[1] - (64 << 20), free

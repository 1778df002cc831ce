"""Engines under one interface: ``run(job)`` gives seconds to the last first token and seconds in all."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from workload import Job

Run = Callable[[Job], tuple[float, float]]


def evener(model: str, dtype: str, threads: int, overrides: dict[str, Any]) -> tuple[Run, str]:
    """This project, engine only: tokens in, tokens out, in this process."""
    from importlib_metadata import version

    from evener import LLM, SamplingParams

    llm = LLM(model, **{"dtype": dtype, "infer.threads": threads, "infer.prefix_cache": False, **overrides})

    def params(count: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)

    def generate(prompts: list[list[int]], counts: list[int]) -> float:
        began = time.perf_counter()
        outputs = llm.generate(prompts, [params(c) for c in counts])
        seconds = time.perf_counter() - began
        got = [len(o.outputs[0].token_ids) for o in outputs]
        assert got == counts, f"asked for {counts} tokens, got {got}"
        return seconds

    def run(job: Job) -> tuple[float, float]:
        first = generate(job.prompts, [1] * len(job.prompts))
        return first, generate(job.prompts, job.counts) if max(job.counts) > 1 else first

    return run, f"evener {version('evener')} on {llm.info['backend']} {llm.info['backend_version']}"


def transformers_generate(model: str, dtype: str, threads: int, overrides: dict[str, Any]) -> tuple[Run, str]:
    """``generate`` over a left-padded batch: everybody waits for the longest."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(threads)
    net = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype), attn_implementation="sdpa").eval()

    def generate(prompts: list[list[int]], count: int) -> float:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        config = GenerationConfig(
            do_sample=False, max_new_tokens=count, min_new_tokens=count, eos_token_id=None, pad_token_id=0
        )
        began = time.perf_counter()
        with torch.inference_mode():
            out = net.generate(ids, attention_mask=mask, generation_config=config)
        seconds = time.perf_counter() - began
        assert out.shape[1] == longest + count
        return seconds

    def run(job: Job) -> tuple[float, float]:
        first = generate(job.prompts, 1)
        return first, generate(job.prompts, max(job.counts)) if max(job.counts) > 1 else first

    return run, f"transformers {transformers.__version__} generate"


def transformers_batch(model: str, dtype: str, threads: int, overrides: dict[str, Any]) -> tuple[Run, str]:
    """Transformers' own continuous batching: the manager behind ``generate_batch``, each request with its own limit."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(threads)
    net = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype), attn_implementation="sdpa").eval()

    def generate(prompts: list[list[int]], counts: list[int]) -> float:
        config = GenerationConfig(do_sample=False, max_new_tokens=max(counts), eos_token_id=-1, pad_token_id=0)
        pool = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=2048, max_requests_per_batch=16)
        with (
            torch.no_grad(),
            net.continuous_batching_context_manager(
                generation_config=config, continuous_batching_config=pool, timeout=5, persistent_manager=True
            ) as manager,
        ):
            began = time.perf_counter()
            for prompt, count in zip(prompts, counts, strict=True):
                manager.add_request(prompt, max_new_tokens=count)
            done: dict[str, int] = {}
            while len(done) < len(prompts):
                result = manager.get_result(timeout=60)
                assert result is not None, "the manager's thread has stopped"
                if result.is_finished():
                    done[result.request_id] = len(result.generated_tokens)
            seconds = time.perf_counter() - began
        assert sorted(done.values()) == sorted(counts), f"asked for {counts} tokens, got {list(done.values())}"
        return seconds

    def run(job: Job) -> tuple[float, float]:
        first = generate(job.prompts, [1] * len(job.prompts))
        return first, generate(job.prompts, job.counts) if max(job.counts) > 1 else first

    return run, f"transformers {transformers.__version__} continuous batching"


ENGINES = {"evener": evener, "transformers": transformers_generate, "transformers-batch": transformers_batch}

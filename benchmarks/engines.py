"""Engines with one interface: ``run(job)`` returns the seconds until every request has its first token, and in total.

As a program, ``engines.py NAME SETTINGS``, it runs one engine in its own process: one job per input line, one answer
per output line. It does not import the other engines, so any interpreter that has the engine can run it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import after_stdlib  # noqa: F401
from workload import Job, fixed

Run = Callable[[Job], tuple[float, float]]
#: Callbacks of C code, which Python must not collect.
_KEPT: list[Any] = []
#: Processor time of this process for the parts of the last job.
_SPENT: list[float] = []


def _timed(generate: Callable[[list[list[int]], list[int]], float]) -> Run:
    """Run a job twice: with one new token for each request, for the time of the prompts, then in full."""

    def part(job: Job, counts: list[int]) -> float:
        began = time.process_time()
        seconds = generate(job.prompts, counts)
        _SPENT.append(time.process_time() - began)
        return seconds

    def run(job: Job) -> tuple[float, float]:
        _SPENT.clear()
        first = part(job, [1] * len(job.prompts))
        return first, part(job, job.counts) if max(job.counts) > 1 else first

    return run


def _check(asked: list[int], got: list[int]) -> None:
    if asked != got:
        raise RuntimeError(f"asked for {asked} new tokens, got {got}")


def evener(model: str, dtype: str, threads: int, settings: list[str]) -> tuple[Run, str]:
    """This project, engine only: tokens in, tokens out, in this process."""
    from importlib_metadata import version

    from evener import LLM, SamplingParams

    given = {"dtype": dtype, "infer.threads": threads, "infer.prefix_cache": False}
    llm = LLM(model, **{**given, **dict(pair.split("=", 1) for pair in settings)})

    def generate(prompts: list[list[int]], counts: list[int]) -> float:
        params = [SamplingParams(temperature=0.0, max_tokens=c, ignore_eos=True, detokenize=False) for c in counts]
        began = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - began
        _check(counts, [len(o.outputs[0].token_ids) for o in outputs])
        return seconds

    return _timed(generate), f"evener {version('evener')} on {llm.info.backend} {llm.info.backend_version}"


def _transformers(model: str, dtype: str, threads: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    load: Any = AutoModelForCausalLM.from_pretrained
    return load(model, dtype=getattr(torch, dtype), attn_implementation="sdpa").eval()


def transformers_generate(model: str, dtype: str, threads: int, settings: list[str]) -> tuple[Run, str]:
    """``generate`` over a left-padded batch: all requests wait for the longest."""
    import torch
    import transformers

    net, config_of = _transformers(model, dtype, threads), cast(Any, transformers.GenerationConfig)

    def generate(prompts: list[list[int]], counts: list[int]) -> float:
        longest, count = max(map(len, prompts)), max(counts)
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        config = config_of(
            do_sample=False, max_new_tokens=count, min_new_tokens=count, eos_token_id=None, pad_token_id=0
        )
        began = time.perf_counter()
        with torch.inference_mode():
            out = net.generate(ids, attention_mask=mask, generation_config=config)
        seconds = time.perf_counter() - began
        _check([longest + count], [out.shape[1]])
        return seconds

    return _timed(generate), f"transformers {transformers.__version__} generate"


def transformers_batch(model: str, dtype: str, threads: int, settings: list[str]) -> tuple[Run, str]:
    """Transformers' own continuous batching: the manager behind ``generate_batch``, each request with its own limit."""
    import torch
    import transformers

    net, config_of = _transformers(model, dtype, threads), cast(Any, transformers.GenerationConfig)

    def generate(prompts: list[list[int]], counts: list[int]) -> float:
        config = config_of(do_sample=False, max_new_tokens=max(counts), eos_token_id=-1, pad_token_id=0)
        pool = transformers.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=2048, max_requests_per_batch=16)
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
                if result is None:
                    raise RuntimeError("the manager's thread has stopped")
                if result.is_finished():
                    done[result.request_id] = len(result.generated_tokens)
            seconds = time.perf_counter() - began
        _check(sorted(counts), sorted(done.values()))
        return seconds

    return _timed(generate), f"transformers {transformers.__version__} continuous batching"


def llamacpp(model: str, dtype: str, threads: int, settings: list[str]) -> tuple[Run, str]:
    """llama.cpp through llama-cpp-python's low-level calls: one ``llama_decode`` for each step over all sequences,
    argmax.

    The GGUF file is ``model``, or the setting ``gguf=FILE``. ``dtype`` is that of the file.
    """
    import llama_cpp as lib
    import numpy as np

    given = dict(pair.split("=", 1) for pair in settings)
    path = given.get("gguf", model)
    lib.llama_backend_init()
    silent = lib.llama_log_callback(lambda *_: None)
    lib.llama_log_set(silent, None)
    _KEPT.append(silent)
    net = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    if not net:
        raise RuntimeError(f"llama.cpp cannot load {path}; give a GGUF file with --set gguf=FILE")
    vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(net))
    limit = 2048
    batch = lib.llama_batch_init(limit, 0, 1)

    def context(sequences: int, tokens: int) -> Any:
        params = lib.llama_context_default_params()
        # One state stream for each sequence: with a unified one each sequence attends, masked, to all of them.
        params.n_ctx, params.kv_unified = sequences * (-(-tokens // 256) * 256), False
        params.n_batch, params.n_ubatch, params.n_seq_max = limit, 512, sequences
        params.n_threads = params.n_threads_batch = threads
        return lib.llama_init_from_model(net, params)

    def feed(made: Any, items: list[tuple[int, int, int, bool]]) -> list[int]:
        """Decode (token, position, sequence, wants logits) entries; returns the most likely next tokens where logits
        are wanted."""
        found: list[int] = []
        for begin in range(0, len(items), limit):
            part = items[begin : begin + limit]
            for i, (token, position, sequence, wants) in enumerate(part):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, wants
                batch.seq_id[i][0], batch.n_seq_id[i] = sequence, 1
            batch.n_tokens = len(part)
            if lib.llama_decode(made, batch) != 0:
                raise RuntimeError("llama_decode failed")
            wanted = sum(item[3] for item in part)
            if wanted:
                logits = np.ctypeslib.as_array(lib.llama_get_logits(made), (wanted, vocab))
                found += logits.argmax(1).tolist()
        return found

    def generate(prompts: list[list[int]], counts: list[int]) -> float:
        made = context(len(prompts), max(len(p) + c for p, c in zip(prompts, counts, strict=True)))
        try:
            began = time.perf_counter()
            items = [(x, i, s, i == len(p) - 1) for s, p in enumerate(prompts) for i, x in enumerate(p)]
            tokens = dict(enumerate(feed(made, items)))
            for step in range(1, max(counts)):
                alive = [s for s, count in enumerate(counts) if count > step]
                rows = [(tokens[s], len(prompts[s]) + step - 1, s, True) for s in alive]
                tokens = dict(zip(alive, feed(made, rows), strict=True))
            return time.perf_counter() - began
        finally:
            lib.llama_free(made)

    return _timed(generate), f"llama.cpp (llama-cpp-python {lib.__version__}) {os.path.basename(path)}"


def openai_url(model: str, dtype: str, threads: int, settings: list[str]) -> tuple[Run, str]:
    """Any server with the OpenAI completions API that takes token ids; its address is the setting ``url=URL``."""
    import asyncio

    from stream_client import Sample, post

    given = dict(pair.split("=", 1) for pair in settings)
    if "url" not in given:
        raise RuntimeError("openai-url needs --set url=http://HOST:PORT/v1")
    url, name = given["url"].rstrip("/"), given.get("name", os.path.basename(model.rstrip("/")))

    async def ask(prompts: list[list[int]], counts: list[int]) -> list[Sample]:
        bodies = [
            {"model": name, "prompt": p, "max_tokens": c, "temperature": 0, "ignore_eos": True, "stream": True,
             "stream_options": {"include_usage": True}}
            for p, c in zip(prompts, counts, strict=True)
        ]  # fmt: skip
        return await asyncio.gather(*(post(f"{url}/completions", body) for body in bodies))

    def run(job: Job) -> tuple[float, float]:
        began = time.perf_counter()
        samples = asyncio.run(ask(job.prompts, job.counts))
        failed = [sample.error for sample in samples if sample.error]
        if failed:
            raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
        _check(job.counts, [sample.output_tokens for sample in samples])
        return max(s.times[0] for s in samples) - began, max(s.times[-1] for s in samples) - began

    return run, f"{name} at {url}"


ENGINES = {
    "evener": evener,
    "transformers": transformers_generate,
    "transformers-batch": transformers_batch,
    "llamacpp": llamacpp,
    "openai-url": openai_url,
}


def main(argv: list[str]) -> int:
    """Load one engine, report that it is ready, then run the jobs of standard input."""
    name, given = argv[0], json.loads(argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with the answers
    run, label = ENGINES[name](given["model"], given["dtype"], given["threads"], given["settings"])
    run(fixed(1, 16, 2, 128, 10**6))
    print(json.dumps({"label": label}), file=answers, flush=True)
    for line in sys.stdin:
        first, total = run(Job(**json.loads(line)))
        answer = {"first_s": first, "total_s": total, "processor_s": [_SPENT[0], _SPENT[-1]] if _SPENT else None}
        print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

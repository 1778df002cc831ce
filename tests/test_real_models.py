"""The engine on real models, against transformers: greedy tokens, alone and batched, and bf16 within its rounding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from evener.config import from_overrides
from evener.engine.processes.local_clients import InlineClient
from evener.engine.processes.start import start_engine
from evener.engine.wire.messages import Finished, NewRequest, Ready, Sampling, Tokens
from evener.engine.worker.inline_executor import InlineExecutor
from evener_conformance.oracle import Comparison, compare_greedy, generate, teacher_forced

#: Whole models in float32 on two cores: minutes, not seconds; on old ones with other work half an hour.
pytestmark = pytest.mark.timeout(2400)

TEXT = Path(__file__).parent.parent / "LICENSE"


@dataclass(frozen=True)
class Work:
    """Prompts of so many tokens, and answers; of those that are ``alone``, too, ``alone_answer`` tokens.

    Attributes:
        pool: tokens of state: too few for the whole batch, so that requests are preempted.
        longest, step, every: most tokens of a request and of a step, and events until the next prompt comes.
    """

    lengths: tuple[int, ...]
    answer: int
    alone: tuple[int, ...]
    alone_answer: int
    pool: int
    longest: int
    step: int
    every: int


#: Around ends of blocks, one beyond gemma's window of 512, several beyond a step.
SOME = Work((8, 100, 16, 129, 17, 560, 63, 80, 31, 160, 257, 90), 24, (0, 2, 4, 6), 8, 640, 608, 128, 4)
#: The same events in a tenth of the time.
FEW = Work((15, 70, 16, 66, 31, 66, 30, 66, 15, 66), 8, (0,), 6, 128, 80, 48, 2)
LENGTHS = (8, 9, 15, 16, 17, 31, 40, 48, 63, 80, 100, 129, 160, 200, 257, 300, 380, 450, 520, 600)
WHOLE = Work(LENGTHS, 64, tuple(range(20)), 64, 1200, 768, 256, 12)
#: The same ends and events for models that take most of their time for one token after another.
LARGER = replace(SOME, answer=32, pool=1000, longest=608)


@pytest.fixture(scope="module", params=["smollm2_dir", pytest.param("qwen_dir", marks=pytest.mark.slow),
                                        pytest.param("gemma_dir", marks=pytest.mark.slow)])  # fmt: skip
def model_dir(request: pytest.FixtureRequest) -> Path:
    return Path(request.getfixturevalue(request.param))


def text_ids(folder: Path) -> list[int]:
    from tokenizers import Tokenizer

    return list(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT.read_text()).ids)


def prompts_of(folder: Path, lengths: Sequence[int]) -> list[list[int]]:
    """Every second one begins with the same 64 tokens, as chats with one system prompt do."""
    ids = text_ids(folder)
    prompts = []
    for number, length in enumerate(lengths):
        start = 37 * number
        shared = ids[:64] if number % 2 and length > 64 else []
        prompts.append(shared + ids[start : start + length - len(shared)])
    return prompts


class Oracle:
    """transformers' model in float32; only the last rows of its logits, which are most of a small model's work."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def __call__(self, tokens: Sequence[int], rows: int) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([list(tokens)]), logits_to_keep=rows).logits[0]
        return logits.float()


@pytest.fixture(scope="module")
def oracle(model_dir: Path) -> Oracle:
    """Read once for all tests of a model."""
    return Oracle(model_dir)


def engine(folder: Path, **overrides: object) -> Iterator[InlineClient]:
    client = start_engine(from_overrides(folder, overrides), "inline")
    assert isinstance(client, InlineClient)
    assert isinstance(client.receive(1)[0], Ready)
    yield client
    client.close()


@pytest.mark.parametrize("model_dir", ["smollm2_dir"], indirect=True)
def test_greedy_tokens_of_some_prompts_equal_transformers_alone_and_in_a_mixed_batch(
    model_dir: Path, oracle: Oracle
) -> None:
    equal_transformers(model_dir, oracle, FEW)


@pytest.mark.slow
def test_greedy_tokens_equal_transformers_alone_and_in_a_mixed_batch_that_arrives_over_time(
    model_dir: Path, oracle: Oracle
) -> None:
    equal_transformers(model_dir, oracle, WHOLE if model_dir.name.startswith("SmolLM2") else LARGER)


def equal_transformers(model_dir: Path, model: Oracle, work: Work) -> None:
    prompts, result = prompts_of(model_dir, work.lengths), Comparison()
    oracle = partial(model, rows=work.answer)
    pool = small_pool(model_dir, work.pool)

    def compare_alone(client: InlineClient) -> None:
        for i in work.alone:
            alone = generate(client, [prompts[i]], work.alone_answer, tag=f"a{i}-")[0]
            # What equals an answer that was compared needs no second pass of the oracle.
            if alone != mixed[i][: work.alone_answer]:
                compare_greedy(oracle, [prompts[i]], [alone], partial(resumed, client), result)

    for client in engine(
        model_dir, **{"dtype": "float32", "infer.max_seq_len": work.longest, "infer.max_reqs": 16,
                      "infer.kv_memory": pool, "infer.step_tokens": work.step, "infer.block_size": 16}
    ):  # fmt: skip
        mixed = generate(client, prompts, work.answer, every=work.every)
        stats = client.controller.scheduler.stats
        assert stats.preemptions >= 3, stats
        assert stats.prefix_hits >= 5, stats
        assert stats.mixed_steps >= 5, stats
        assert client.controller.scheduler.state.pool.used == 0
        compare_greedy(oracle, prompts, mixed, partial(resumed, client), result)
        if work is FEW:  # no prefix of a prompt that is shorter than a block is cached
            compare_alone(client)
    if work is not FEW:
        for client in engine(model_dir, **{"dtype": "float32", "infer.max_seq_len": 1024, "infer.prefix_cache": False}):
            compare_alone(client)
    print(f"\n{model_dir.name}: {result.tokens} tokens, ties: {result.ties}")
    result.check()


def resumed(client: InlineClient, tokens: Sequence[int], count: int) -> list[int]:
    return generate(client, [tokens], count, tag=f"r{len(tokens)}-{hash(tuple(tokens))}-")[0]


def small_pool(folder: Path, tokens: int) -> int:
    """Bytes for about so many tokens of state."""
    import json

    config = json.loads((folder / "config.json").read_text())
    heads = config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    layers = config["num_hidden_layers"]
    if "sliding_window" in str(config.get("layer_types", "")) or config["model_type"].startswith("gemma3"):
        layers = layers * 2 // 3  # windowed layers hold less
    return int(tokens * layers * heads * dim * 2 * 4)


@pytest.mark.parametrize("count", [256, pytest.param(512, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_bf16_log_probabilities_and_perplexity_stay_close_to_float32(
    model_dir: Path, oracle: Oracle, count: int
) -> None:
    ids = text_ids(model_dir)[: count + 1]

    def chosen(logits: torch.Tensor) -> torch.Tensor:
        return logits.cpu().log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]

    exact = chosen(oracle(ids[:-1], rows=len(ids) - 1))
    for client in engine(model_dir, **{"dtype": "bfloat16", "infer.max_seq_len": 1024, "infer.max_reqs": 2}):
        executor = client.controller.executor
        assert isinstance(executor, InlineExecutor)
        got = chosen(teacher_forced(executor.worker, ids[:-1]))
    away = float((got - exact).abs().mean())
    drift = abs(float((exact.mean() - got.mean()).exp()) - 1)
    print(f"\n{model_dir.name}: log-probabilities {away:.4f}, perplexity {drift:.2%} from transformers' float32")
    # Not against its bf16, which is 0.03 to 0.04 away from its own float32.
    assert away < 0.02
    assert drift < 0.005


def test_a_search_of_the_largest_logit_gives_the_tokens_of_all_logits(model_dir: Path) -> None:
    """Its bounds hold for real weights, and it is what one request's steps use."""
    prompt, answers = text_ids(model_dir)[:30], []
    for searched in (True, False):
        settings = {"dtype": "bfloat16", "infer.max_seq_len": 128, "infer.max_reqs": 1, "cpu.screened_head": searched}
        for client in engine(model_dir, **settings):
            executor = client.controller.executor
            assert isinstance(executor, InlineExecutor)
            rows = [row for row in executor.worker.facts.info.manifest.ops if row.op == "vocab_greedy"]
            assert any("screened_greedy" in row.provider for row in rows) == searched
            answers += generate(client, [prompt], 48)
    assert answers[0] == answers[1] and len(answers[0]) > 8


@pytest.mark.slow
def test_gemma_with_a_long_context_holds_only_its_windows_blocks_and_still_gets_prefix_hits(gemma_dir: Path) -> None:
    ids = text_ids(gemma_dir)
    prompt = (ids * 3)[:4000]
    for client in engine(gemma_dir, **{"dtype": "bfloat16", "infer.max_seq_len": 4200, "infer.max_reqs": 2}):
        first = generate_and_count(client, prompt, "first")
        state = client.controller.scheduler.state
        for spec, held in zip(state.specs, first, strict=True):
            if spec.kind == "window":
                assert spec.window is not None
                assert held <= -(-spec.window // state.block_size) + 2, f"{held} blocks for a window of {spec.window}"
            else:
                assert held >= 4000 // state.block_size
        assert {spec.kind for spec in state.specs} == {"window", "full"}
        hits = client.controller.scheduler.stats.cached_tokens
        generate_and_count(client, prompt, "second")
        assert client.controller.scheduler.stats.cached_tokens - hits >= 3900


def generate_and_count(client: InlineClient, prompt: Sequence[int], tag: str) -> list[int]:
    """The blocks of each group that a request holds when it has eight tokens. It is finished afterwards."""
    client.send(NewRequest(id=tag, prompt=list(prompt), max_tokens=16, sampling=Sampling(temperature=0.0)))
    seen = 0
    while seen < 8:
        seen += sum(isinstance(event, Tokens) for event in client.receive(None))
    table = client.controller.scheduler.running[0].table
    assert table is not None
    held = [sum(block != 0 for block in blocks) for blocks in table.blocks]
    while not any(isinstance(event, Finished) for event in client.receive(None)):
        pass
    return held

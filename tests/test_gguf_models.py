"""The three real GGUF files, and one that we write: tokens, logits and perplexity against readers that are not ours.
Minutes, not seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from evener_convert.command import convert
from llamacpp_answers import llamacpp
from model_sources import SOURCES, models_root

from evener.config import from_overrides
from evener.engine.processes.local_clients import InlineClient
from evener.engine.processes.start import start_engine
from evener.engine.wire.messages import Ready
from evener.engine.worker.inline_executor import InlineExecutor
from evener.engine.worker.worker import Worker
from evener.frontend.tokenizer import Tokenizer
from evener.loading.checkpoint import open_checkpoint
from evener_conformance.oracle import Comparison, compare_greedy, generate, teacher_forced

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(1500)]

TEXT = (Path(__file__).parent.parent / "LICENSE").read_text()
CONVERTED = {"smollm2": "smollm2_dir", "qwen2.5": "qwen_dir", "gemma3": "gemma_dir"}


@pytest.fixture(params=CONVERTED)
def model(request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """A GGUF file, and the folder that was converted from it by transformers."""
    folder = Path(request.getfixturevalue(CONVERTED[request.param]))
    return models_root() / "gguf" / SOURCES[request.param].gguf, folder


def tokenizer_of(path: Path) -> Tokenizer:
    found = Tokenizer.of(open_checkpoint(path))
    assert found is not None
    return found


def workers(path: Path, **overrides: object) -> Iterator[tuple[InlineClient, Worker]]:
    client = start_engine(from_overrides(path, {"infer.max_seq_len": 1024, "infer.max_reqs": 2, **overrides}), "inline")
    assert isinstance(client, InlineClient) and isinstance(client.receive(1)[0], Ready)
    executor = client.controller.executor
    assert isinstance(executor, InlineExecutor)
    yield client, executor.worker
    client.close()


def resumed(client: InlineClient, tokens: Sequence[int], count: int) -> list[int]:
    return generate(client, [tokens], count, tag=f"r{len(tokens)}-")[0]


def test_the_tokenizer_in_the_file_is_llama_cpps_and_the_models_own(model: tuple[Path, Path]) -> None:
    path, folder = model
    ours, theirs = tokenizer_of(path), tokenizer_of(folder)
    assert ours.encode(TEXT) == llamacpp({"model": str(path), "text": TEXT})
    strange = "naïve  façade\t１２３ 4567 <|im_end|>\n\n  x = {'a': [1,2]}  # 你好 🙂 don't I'LL"
    # Not of long runs of spaces: transformers' conversion of the file cuts them otherwise than llama.cpp does.
    for text in (strange, *strange.split(), " leading", "trailing ", "\n", "a\u0301 e\u0301"):
        assert ours.encode(text) == theirs.encode(text), text
        ids = ours.encode(text, add_special_tokens=False)
        assert ours.decode(ids, False) == theirs.decode(ids, False)
    assert ours.eos_id == theirs.eos_id


def test_logits_are_those_of_the_dequantized_model_in_transformers(model: tuple[Path, Path]) -> None:
    from transformers import AutoModelForCausalLM

    path, _ = model
    ids = tokenizer_of(path).encode(TEXT)[:128]
    oracle = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()

    def logits(tokens: object) -> torch.Tensor:
        with torch.inference_mode():
            return oracle(torch.tensor([list(tokens)])).logits[0].float()  # type: ignore[call-overload, no-any-return]

    expected = logits(ids)
    prompts, result = [ids[:40], ids[60:120]], Comparison()
    # Kernels that quantize activations compute another function; the plain reference computes this one, and
    # dequantizes every weight in every step.
    for client, worker in workers(path, dtype="float32", **{"ops.linear": "reference"}):
        away = float((teacher_forced(worker, ids) - expected).abs().max())
        compare_greedy(logits, prompts, generate(client, prompts, 4), partial(resumed, client), result)
    print(f"\n{path.name}: logits within {away:.2g} of transformers; {result.tokens} tokens, ties: {result.ties}")
    assert away < 5e-3
    result.check()


def perplexity_drift(path: Path, count: int) -> float:
    """How much larger than llama.cpp's our perplexity of the text's first ``count`` tokens is, as a share."""
    ids = tokenizer_of(path).encode(TEXT)[:count]
    asked = {"model": str(path), "ids": ids, "threads": torch.get_num_threads()}
    theirs = -torch.tensor(llamacpp(asked)).mean()
    for _, worker in workers(path):
        chosen = teacher_forced(worker, ids[:-1]).log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])
    ours = -chosen.mean()
    drift = float((ours - theirs).exp()) - 1
    print(f"\n{path.name}: perplexity {float(ours.exp()):.4f}, llama.cpp {float(theirs.exp()):.4f} ({drift:+.3%})")
    return drift


def test_perplexity_is_that_of_llama_cpp(model: tuple[Path, Path]) -> None:
    assert abs(perplexity_drift(model[0], 768)) < 0.01


@pytest.mark.parametrize("quant", ["auto", "q8_0"])
def test_llama_cpp_gives_the_tokens_of_the_model_from_a_file_that_we_wrote(
    quant: str, smollm2_dir: Path, tmp_path: Path
) -> None:
    made = tmp_path / "made.gguf"
    convert(from_overrides(smollm2_dir, {"quant": quant}), made)
    own = tokenizer_of(smollm2_dir)
    asked = "<|im_start|>user\nHow many 12s are in 3,456?<|im_end|>\n<|im_start|>assistant\n"
    texts = ("The capital of France is", asked)
    prompts = [own.encode(text) for text in texts]
    for text, ids in zip(texts, prompts, strict=True):
        assert llamacpp({"model": str(made), "text": text}) == ids == tokenizer_of(made).encode(text)
    for client, _ in workers(smollm2_dir, quant=quant):
        ours = [resumed(client, ids, 12) for ids in prompts]
    assert [llamacpp({"model": str(made), "ids": ids, "count": 12}) for ids in prompts] == ours

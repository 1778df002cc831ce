"""KsanaLLM's API and ``evener client`` on a served model: the numbers are those of transformers."""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from docs_blocks import DOCS, named
from family_oracles import make_transformers
from safetensors.torch import load_file
from served import Served

from evener import LLM, SamplingParams
from evener.contracts.outputs import PromptOutputs
from evener.errors import ConfigError, EngineError, RequestError
from evener_conformance.naive.model import find_architecture
from evener_conformance.tiny_tokenizer import VOCAB_SIZE, write_tiny_tokenizer
from evener_server.client_command import main, windows
from evener_server.key_file import read_key_file

TEXT = "The bar that lets horses of different strength pull one load is called an evener. " * 2
KEYS = ("dtype=float32", "infer.max_reqs=4", "infer.max_seq_len=128", "infer.step_tokens=24", "infer.threads=1",
        "infer.kv_memory=4194304")  # fmt: skip


class Oracle:
    """What transformers computes for ids: hidden states before and after the last norm, and logits, each [n, width]."""

    def __init__(self, folder: Path) -> None:
        write_tiny_tokenizer(folder)
        shape = {**find_architecture("LlamaForCausalLM").tiny_config(), "vocab_size": VOCAB_SIZE}
        self._model = make_transformers({**shape, "max_position_embeddings": 256}, folder)

    def __call__(self, ids: Sequence[int]) -> dict[str, torch.Tensor]:
        before: list[torch.Tensor] = []
        hook = self._model.model.norm.register_forward_pre_hook(lambda _, given: before.append(given[0][0]))
        with torch.inference_mode():
            out = self._model(torch.tensor([list(ids)]), output_hidden_states=True)
        hook.remove()
        return {"transformer": before[0], "layernorm": out.hidden_states[-1][0], "logits": out.logits[0]}

    def perplexity(self, ids: Sequence[int]) -> float:
        """Of all ids but the first."""
        rows = self(ids)["logits"][:-1].log_softmax(-1)
        return math.exp(-float(rows.gather(1, torch.tensor(ids[1:])[:, None]).mean()))

    def greedy(self, ids: Sequence[int], count: int, **fields: Any) -> list[int]:
        """The ids of an answer of ``count`` tokens."""
        given = torch.tensor([list(ids)])
        self._model.generation_config.eos_token_id = None
        found = self._model.generate(given, do_sample=False, max_new_tokens=count, **fields)
        return [int(each) for each in found[0, len(ids) :]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model") / "llama"
    found.mkdir()
    return found


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.fixture(scope="module")
def served(folder: Path, oracle: Oracle) -> Iterator[Served]:
    del oracle  # it writes the folder
    with Served.warm(folder, *KEYS) as found:
        yield found


def client(served: Served, capsys: Any, *words: str) -> str:
    assert main([*words, "--url", served.url]) == 0
    return str(capsys.readouterr().out)


def numbers(target: Any) -> torch.Tensor:
    found = target["tensor"]
    array = np.frombuffer(base64.b64decode(found["data"]), dtype=found["dtype"]).reshape(found["shape"])
    return torch.from_numpy(array.copy())


def test_targets_are_what_transformers_computes(served: Served, oracle: Oracle) -> None:
    prompts = [[7 * i % 190 + 1 for i in range(70)], [3, 1, 4, 1, 5]]
    targets = [
        {"target_name": "transformer"}, {"target_name": "layernorm", "slice_pos": [[1, 2], [-2, -1]]},
        {"target_name": "logits", "token_reduce_mode": "GATHER_ALL"}, {"target_name": "layernorm", "token_id": [1]},
        {"target_name": "logits", "slice_pos": [[0, -2]], "token_reduce_mode": "GATHER_TOKEN_ID"},
    ]  # fmt: skip
    body = {"requests": [{"input_tokens": ids, "request_target": targets} for ids in prompts]}
    answer = served.http.post("/forward", json=body).json()
    for ids, found in zip(prompts, answer["responses"], strict=True):
        assert found["input_token_ids"] == ids
        wanted, count = oracle(ids), len(ids)
        ones = [at for at, token in enumerate(ids) if token == 1]
        following = wanted["logits"].softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        expected = [
            wanted["transformer"], wanted["layernorm"][[1, 2, count - 2, count - 1]], wanted["logits"],
            wanted["layernorm"][ones], following,
        ]  # fmt: skip
        for target, rows in zip(found["response"], expected, strict=True):
            torch.testing.assert_close(numbers(target), rows, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sizes", [{"no_repeat_ngram_size": 2}, {"encoder_no_repeat_ngram_size": 1},
                                   {"no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 1}])  # fmt: skip
def test_texts_without_repeated_sequences_are_those_of_transformers(
    served: Served, oracle: Oracle, sizes: dict[str, int]
) -> None:
    ids = [7, 9, 7, 11, 7, 9, 12, 13]
    plain = oracle.greedy(ids, 40)
    wanted = oracle.greedy(ids, 40, **sizes)
    config = {"max_new_tokens": 40, "ignore_eos": True, **sizes}
    body = {"input_tokens": ids, "stream": False, "sampling_config": config}
    assert served.http.post("/generate", json=body).json()["output_token_ids"] == [wanted] and wanted != plain


def test_generate_gives_the_tokens_of_the_completions_endpoint(served: Served, capsys: Any) -> None:
    body = {"prompt": TEXT[:40], "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    (choice,) = served.http.post("/v1/completions", json=body).json()["choices"]
    words = ("generate", "--text", TEXT[:40], "--max-tokens", "12")
    answer = json.loads(client(served, capsys, *words, "--json"))
    assert answer["output_token_ids"] == [choice["token_ids"]] and answer["texts"] == [choice["text"]]
    assert client(served, capsys, *words) == choice["text"] + "\n"
    assert client(served, capsys, *words, "--msgpack") == choice["text"] + "\n"


def test_beam_search_gives_as_many_texts_as_asked(served: Served) -> None:
    config = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5, "max_new_tokens": 6, "ignore_eos": True}
    body = {"prompt": "one load", "sampling_config": config, "stream": False}
    texts = served.http.post("/generate", json=body).json()["output_token_ids"]
    beams = {"use_beam_search": True, "num_beams": 3, "n": 2, "length_penalty": 0.5, "ignore_eos": True}
    same = {"prompt": "one load", "max_tokens": 6, "return_token_ids": True, **beams}
    choices = served.http.post("/v1/completions", json=same).json()["choices"]
    assert texts == [choice["token_ids"] for choice in choices] and len(texts) == 2


def test_the_forward_command_shows_numbers(served: Served, oracle: Oracle, capsys: Any) -> None:
    words = ("forward", "--tokens", "3,1,4,1,5", "--target", "layernorm", "--slices", "0:1,-1")
    for packed in ((), ("--msgpack",)):
        (found,) = json.loads(client(served, capsys, *words, *packed, "--json"))["responses"]
        rows = oracle([3, 1, 4, 1, 5])["layernorm"][[0, 1, 4]]
        torch.testing.assert_close(numbers(found["response"][0]), rows, rtol=1e-4, atol=1e-4)
    assert "layernorm [3, " in client(served, capsys, *words)
    words = ("forward", "--tokens", "3,1,4,1,5", "--target")
    assert "logits [4]" in client(served, capsys, *words, "logits", "--next-token")
    assert "transformer [2, " in client(served, capsys, *words, "transformer", "--token-id", "1,9")


def test_the_perplexity_of_a_file_is_the_offline_one(
    served: Served, oracle: Oracle, folder: Path, capsys: Any, tmp_path: Path
) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT[:90])
    found = json.loads(client(served, capsys, "perplexity", "--file", str(file), "--json"))
    with LLM(str(folder), **dict(key.split("=") for key in KEYS)) as llm:
        (output,) = llm.generate([TEXT[:90]], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    entries = [entry for entry in output.prompt_logprobs or [] if entry is not None]
    offline = math.exp(-sum(next(iter(entry.values())) for entry in entries) / len(entries))
    assert found["tokens"] == len(output.prompt_token_ids) == found["scored_tokens"] + 1
    assert found["perplexity"] == pytest.approx(offline, rel=1e-5)
    assert found["perplexity"] == pytest.approx(oracle.perplexity(output.prompt_token_ids), rel=1e-3)
    assert client(served, capsys, "perplexity", "--file", str(file)).startswith(f"perplexity {offline:.1f}")


def test_a_text_longer_than_the_context_is_scored_in_windows(served: Served, oracle: Oracle, capsys: Any) -> None:
    assert len(TEXT) > 127
    words = ("perplexity", "--text", TEXT, "--length", "64", "--stride", "16", "--json")
    found = json.loads(client(served, capsys, *words))
    ids = served.http.post("/tokenize", json={"prompt": TEXT}).json()["tokens"]
    total, scored = 0.0, 0
    for first, stop, known in windows(len(ids), 64, 16):
        window = ids[first:stop]
        rows = oracle(window)["logits"][:-1].log_softmax(-1).gather(1, torch.tensor(window[1:])[:, None])[known:]
        total, scored = total + float(rows.sum()), scored + len(rows)
    assert scored == found["scored_tokens"] == len(ids) - 1
    assert found["perplexity"] == pytest.approx(math.exp(-total / scored), rel=1e-3)


@pytest.mark.parametrize(("count", "length", "stride"), [(2, 2, 1), (10, 4, 2), (11, 4, 3), (50, 64, 16), (65, 64, 63)])
def test_windows_score_each_token_but_the_first_once(count: int, length: int, stride: int) -> None:
    scored = [at for first, stop, known in windows(count, length, stride) for at in range(first + 1 + known, stop)]
    assert scored == list(range(1, count))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "needs one of generate, forward, perplexity"),
        (("forwards", "--text", "a"), "did you mean 'forward'?"),
        (("generate",), "--text TEXT, --tokens IDS or --file FILE"),
        (("generate", "--text", "a", "--tokens", "1"), "needs one prompt"),
        (("generate", "--tokens", "a"), "separated by commas, as in 5,6,7"),
        (("generate", "--file", "/nowhere/a.txt"), "give a text file in UTF-8"),
        (("forward", "--tokens", "1", "--slices", "a"), "give FIRST:LAST"),
    ],
)
def test_a_wrong_command_line_says_what_to_type(words: Sequence[str], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        main([*words, "--url", "http://127.0.0.1:9"])
    assert says in str(raised.value)


def test_the_command_tells_what_the_server_refuses_and_that_none_answers(served: Served, capsys: Any) -> None:
    with pytest.raises(RequestError, match=r"answers 400: .*send \[first, last\] within it"):
        client(served, capsys, "forward", "--tokens", "3,1", "--slices", "0:7")
    with pytest.raises(RequestError, match="does not exist here"):
        client(served, capsys, "generate", "--text", "a", "--model", "other", "--msgpack")
    with pytest.raises(ConfigError, match="give a length of 2 to 127"):
        client(served, capsys, "perplexity", "--text", TEXT, "--length", "500")
    with pytest.raises(EngineError, match="check that the server runs and --url is right"):
        main(["generate", "--text", "a", "--url", "http://127.0.0.1:9"])


def example(name: str, folder: Path, tmp_path: Path) -> Path:
    """A copy of the model with the plug-in file that serving.md shows."""
    found = Path(shutil.copytree(folder, tmp_path / name))
    (found / "ksana_plugin.py").write_text(named(DOCS / "serving.md", "name")[name])
    return found


PLUGIN = {"request.plugins": ["ksana_plugin"], "server.trust_plugin_file": True}


def test_the_documents_perplexity_plugin_gives_the_offline_perplexity(
    oracle: Oracle, folder: Path, tmp_path: Path
) -> None:
    keys = dict(key.split("=") for key in KEYS)
    with LLM(str(example("ksana-perplexity", folder, tmp_path)), **keys, **PLUGIN) as llm:
        (output,) = llm.generate([TEXT[:60]])
    found = re.fullmatch(r".* perplexity ([0-9.]+)", output.outputs[0].text, re.DOTALL)
    assert found is not None and float(found[1]) == pytest.approx(oracle.perplexity(output.prompt_token_ids), rel=1e-3)


def test_the_documents_embeddings_plugin_puts_an_image_into_the_prompt(
    oracle: Oracle, folder: Path, tmp_path: Path
) -> None:
    model, image = example("ksana-embeddings", folder, tmp_path), [40, 41, 42, 43]
    rows = load_file(folder / "model.safetensors")["model.embed_tokens.weight"][image]
    np.save(model / "image.npy", rows.float().numpy())
    wanted = SamplingParams(max_tokens=1, temperature=0, prompt_outputs=PromptOutputs("hidden", [(0, 8)]))
    keys = dict(key.split("=") for key in KEYS)
    with LLM(str(model), **keys, **PLUGIN) as llm:
        (output,) = llm.generate([[7, 8, 0, 0, 0, 0, 9, 10]], wanted)
    found = torch.from_numpy(np.frombuffer(output.outputs[0].pooled, dtype=np.float32).copy()).view(8, -1)
    # The image's rows are those of these tokens.
    torch.testing.assert_close(found, oracle([7, 8, *image, 9, 10])["transformer"], rtol=1e-4, atol=1e-4)


def test_the_documents_key_file_can_be_used(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(named(DOCS / "api.md", "name")["keys"])
    chat, operator, batch = read_key_file(str(file))
    assert (operator.admin, chat.admin, batch.admin) == (True, False, False)
    assert (chat.name, chat.priority, batch.name, batch.tokens_per_minute) == ("chat", 10, "batch", 100_000)

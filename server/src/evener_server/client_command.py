"""``evener client generate|forward|perplexity``: asks a running server."""

from __future__ import annotations

import argparse
import base64
import binascii
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evener.cli.command import Command
from evener.errors import ConfigError, EngineError, did_you_mean
from evener_server.client_http import Server

#: Where ``evener serve`` listens by default.
DEFAULT_URL = "http://127.0.0.1:21002"
#: Of a text that is read: far more than any context has.
_MAX_FILE_BYTES = 64 << 20


def main(argv: list[str]) -> int:
    """Ask once, and print the answer. Returns the exit code.

    Raises:
        ConfigError: a wrong option, or a file that cannot be read.
        EngineError: the server does not answer. RequestError: it refuses.
    """
    command = _command()
    arguments, words = command.parse(argv)
    if len(words) != 1 or words[0] not in _ACTIONS:
        given = words[0] if words else ""
        raise ConfigError(f"evener client needs one of {', '.join(_ACTIONS)}, not {given!r}"
                          f"{did_you_mean(given, _ACTIONS)} Type `evener client --help`")  # fmt: skip
    with Server(arguments.url, arguments.api_key or os.environ.get("OPENAI_API_KEY")) as server:
        _ACTIONS[words[0]](server, arguments)
    return 0


def _command() -> Command:
    command = Command(
        "client", "Ask a running server for a text, for numbers of a prompt's tokens, or for a perplexity.",
        False, "generate|forward|perplexity",
    )  # fmt: skip
    command.option("--url", default=DEFAULT_URL, metavar="URL", help=f"of the server; default: {DEFAULT_URL}")
    command.option("--api-key", metavar="KEY", help="API key for that server; default: $OPENAI_API_KEY")
    command.option("--model", metavar="NAME", help="the model's name, or an adapter's")
    command.option("--text", metavar="TEXT", help="the prompt")
    command.option("--tokens", metavar="IDS", help="the prompt as token ids, separated by commas")
    command.option("--file", metavar="FILE", help="file with the prompt's text; - reads standard input")
    command.option("--json", action="store_true", help="print the server's answer as JSON")
    command.option("--msgpack", action="store_true", help="generate, forward: ask in msgpack")
    command.option("--max-tokens", type=int, metavar="N", help="generate: maximum number of new tokens")
    command.option("--temperature", type=float, metavar="X", help="generate: sampling temperature; 0 is greedy")
    command.option("--top-k", type=int, metavar="N", help="generate: sample from the N likeliest tokens; default: 1")
    command.option("--top-p", type=float, metavar="X", help="generate: sample from the likeliest that add up to X")
    command.option("--seed", type=int, metavar="N", help="generate: seed of the samples")
    command.option("--target", choices=("transformer", "layernorm", "logits"), default="layernorm",
                   help="forward: hidden states before the last norm, after it (the default), or logits")  # fmt: skip
    command.option("--slices", metavar="RANGES", help="forward: positions FIRST:LAST, separated by commas, both "
                   "included; negative ones count from the end; default: all")  # fmt: skip
    command.option("--token-id", metavar="IDS", help="forward: every token with one of these ids instead")
    command.option("--next-token", action="store_true",
                   help="forward: probabilities of the following tokens (GATHER_TOKEN_ID)")  # fmt: skip
    command.option("--length", type=int, metavar="N", help="perplexity: tokens of a window; default: the context")
    command.option("--stride", type=int, metavar="N",
                   help="perplexity: tokens from one window to the next; default: half a window")  # fmt: skip
    return command


def _generate(server: Server, arguments: argparse.Namespace) -> None:
    config = {
        "temperature": arguments.temperature, "topk": arguments.top_k, "topp": arguments.top_p,
        "max_new_tokens": arguments.max_tokens, "seed": arguments.seed,
    }  # fmt: skip
    body = {
        **_prompt(arguments), **_model(arguments), "stream": not (arguments.json or arguments.msgpack),
        "sampling_config": {name: value for name, value in config.items() if value is not None},
    }  # fmt: skip
    if not body["stream"]:
        answer = server.post("/generate", body, arguments.msgpack)
        print(json.dumps(answer, indent=2) if arguments.json else answer["texts"][0])
        return
    shown = 0
    for answer in _answers(server.stream("/generate", body)):
        if "texts" not in answer:
            raise EngineError(f"the server ended the answer: {answer.get('message', answer)}")
        print(answer["texts"][0][shown:], end="", flush=True)
        shown = len(answer["texts"][0])
    print()


def _answers(pieces: Iterable[bytes]) -> Iterator[Mapping[str, Any]]:
    """The objects of a stream, each of which a zero byte ends."""
    left = b""
    for piece in pieces:
        *whole, left = (left + piece).split(b"\0")
        yield from map(json.loads, whole)


def _forward(server: Server, arguments: argparse.Namespace) -> None:
    target: dict[str, Any] = {"target_name": arguments.target}
    target["token_reduce_mode"] = "GATHER_TOKEN_ID" if arguments.next_token else "GATHER_ALL"
    if arguments.slices:
        target["slice_pos"] = [_range(part) for part in arguments.slices.split(",")]
    if arguments.token_id:
        target["token_id"] = _ids(arguments.token_id, "--token-id")
    body = {"requests": [{**_prompt(arguments), "request_target": [target]}], **_model(arguments)}
    answer = server.post("/forward", body, arguments.msgpack)
    if arguments.json:
        print(json.dumps(answer, indent=2, default=lambda data: data.decode("ascii")))
        return
    (response,) = answer["responses"]
    numbers = read_tensor(response["response"][0]["tensor"])
    print(f"tokens {response['input_token_ids']}\n{arguments.target} {list(numbers.shape)}\n{numbers}")


def read_tensor(tensor: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """The numbers of a tensor of /forward.

    Raises:
        EngineError: it is none.
    """
    try:
        data = np.frombuffer(base64.b64decode(tensor["data"], validate=True), dtype=tensor["dtype"])
        return data.reshape(tensor["shape"])
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise EngineError(f"the server sent a tensor that cannot be read: {error}") from error


def _perplexity(server: Server, arguments: argparse.Namespace) -> None:
    given = _prompt(arguments)
    ids = given.get("input_tokens")
    if ids is None:
        ids = server.post("/tokenize", {"prompt": given["prompt"], **_model(arguments)})["tokens"]
    context = int(server.get("/v1/models")["data"][0]["max_model_len"]) - 1
    length = arguments.length or context
    stride = arguments.stride or max(length // 2, 1)
    if not 2 <= length <= context or not 1 <= stride < length:
        raise ConfigError(f"--length is {length} and --stride {stride}: give a length of 2 to {context}, the context "
                          "without one new token, and a smaller stride")  # fmt: skip
    if len(ids) < 2:
        raise ConfigError("the text has one token; a perplexity needs two")

    def score(window: Sequence[int]) -> list[float]:
        body = {"prompt": window, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0, **_model(arguments)}
        (choice,) = server.post("/v1/completions", body)["choices"]
        entries = zip(window[1:], choice["prompt_logprobs"][1:], strict=True)
        return [entry[str(token)]["logprob"] for token, entry in entries]

    found: list[float] = []
    for first, stop, known in windows(len(ids), length, stride):
        found += score(ids[first:stop])[known:]
    value = math.exp(-sum(found) / len(found))
    result = {"perplexity": value, "scored_tokens": len(found), "tokens": len(ids)}
    print(json.dumps(result, indent=2) if arguments.json else f"perplexity {value:.4f} over {len(found)} tokens")


def windows(count: int, length: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Windows of ``length`` tokens over ``count`` tokens, from which each token but the first is scored once, with the
    tokens before it in the first window that has it.

    Gives the first position, the one after the last, and how many of its scores earlier windows gave.
    """
    first, scored = 0, 1
    while scored < count:
        stop = min(first + length, count)
        yield first, stop, scored - first - 1
        scored, first = stop, first + stride


def _prompt(arguments: argparse.Namespace) -> dict[str, Any]:
    """The one prompt that was given, by the name of its field."""
    given = [name for name in ("text", "tokens", "file") if getattr(arguments, name) is not None]
    if len(given) != 1:
        raise ConfigError("evener client needs one prompt: --text TEXT, --tokens IDS or --file FILE")
    if given[0] == "tokens":
        return {"input_tokens": _ids(arguments.tokens, "--tokens")}
    return {"prompt": arguments.text if given[0] == "text" else _read(arguments.file)}


def _read(file: str) -> str:
    try:
        if file == "-":
            data = sys.stdin.buffer.read(_MAX_FILE_BYTES + 1)
        else:
            with Path(file).expanduser().open("rb") as opened:
                data = opened.read(_MAX_FILE_BYTES + 1)
        if len(data) > _MAX_FILE_BYTES:
            raise ValueError(f"it has more than {_MAX_FILE_BYTES} bytes")
        return data.decode("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--file {file} cannot be read: {error}; give a text file in UTF-8") from error


def _ids(text: str, option: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} is {text!r}: give token ids, separated by commas, as in 5,6,7") from error


def _range(text: str) -> list[int]:
    first, colon, last = text.partition(":")
    try:
        return [int(first), int(last if colon else first)]
    except ValueError as error:
        raise ConfigError(f"--slices has {text!r}: give FIRST:LAST, as in 0:4 or -2:-1") from error


def _model(arguments: argparse.Namespace) -> dict[str, str]:
    return {} if arguments.model is None else {"model": arguments.model}


_ACTIONS: Mapping[str, Callable[[Server, argparse.Namespace], None]] = {
    "generate": _generate, "forward": _forward, "perplexity": _perplexity,
}  # fmt: skip

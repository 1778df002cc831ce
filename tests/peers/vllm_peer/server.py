"""``evener serve`` behind the interface of the class that starts ``vllm serve`` in vLLM's tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai

from .adapters import named_adapter, write_adapter
from .flags import settings

#: Seconds: the first start compiles kernels.
_START = 300.0
_STOP = 30.0
#: Models of tests that were not trained for chats: they do not end a turn, as the small model would.
_WITHOUT_TURNS = frozenset({"facebook/opt-125m"})
_PARSERS = ("server.reasoning_parser", "server.tool_parser")
#: Parsers of what the template's examples show.
_FORMATS = ("think", "llama3")
#: Names of models whose tests look at what they say, or at their calls and reasoning.
_HARMONY = "gpt-oss"
_LARGER = ("qwen", _HARMONY, "zephyr")
#: Qwen 3 has the temperature 0.6; at a lower one, a small model keeps to the examples of the template.
_SAMPLING = {"temperature": 0.3, "top_k": 20, "top_p": 0.95}
_TEMPLATE, _HARMONY_TEMPLATE = map(Path(__file__).with_name, ("template.jinja", "harmony.jinja"))
#: Special tokens of the larger model, and which marks of harmony they are where it has that format. The other marks are
#: plain text.
_MARKS = {"<|im_start|>": "<|start|>", "<|im_end|>": "<|return|>"}
#: Where the model does not end its reasoning by itself.
_BUDGET = {"server.thinking_budget": "16"}
#: Marks that are plain text have many tokens.
_LONGER = {"request.max_new_tokens": "400"}


@dataclass
class Launcher:
    """How servers are started, and which of them run.

    Attributes:
        evener: the command.
        model: folder of the model that is served under the names of tests.
        larger: folder of the one that is served under names with a part of ``_LARGER``.
        running: process ids of the servers that run.
        started: how many were started.
    """

    evener: Path
    model: Path
    larger: Path
    running: set[int] = field(default_factory=set)
    started: int = 0

    def folder(self, name: str) -> Path:
        """What is served under this name."""
        return self.larger if any(each in name.lower() for each in _LARGER) else self.model

    def served(self, name: str) -> tuple[str, Path]:
        """How a server gets it: what to type, and where. The larger model has the test's name there, as with vLLM, and
        ``_SAMPLING`` in place of its own defaults."""
        if (folder := self.folder(name)) != self.larger:
            return str(folder), Path.cwd()
        where = Path(tempfile.mkdtemp())
        (there := where / name).mkdir(parents=True)
        for file in folder.iterdir():
            (there / file.name).symlink_to(file)
        changed = {"generation_config.json": lambda text: json.dumps(json.loads(text) | _SAMPLING)}
        if _HARMONY in name:
            changed |= dict.fromkeys(("tokenizer.json", "tokenizer_config.json"), _with_marks)
        for file, change in changed.items():
            text = change((there / file).read_text("utf-8"))
            (there / file).unlink()
            (there / file).write_text(text, "utf-8")
        return name, where

    def config(self, name: str) -> dict[str, Any]:
        """Its config."""
        found: dict[str, Any] = json.loads((self.folder(name) / "config.json").read_text("utf-8"))
        return found

    def server_class(self) -> type[RemoteOpenAIServer]:
        """The class that vLLM's tests import."""
        return type("RemoteOpenAIServer", (RemoteOpenAIServer,), {"launcher": self})


class RemoteOpenAIServer:
    """A server until its ``with`` block ends. Arguments and methods are those of vLLM's class.

    Raises:
        MissingFeature: its flags ask for what evener does not have.
        RuntimeError: it did not start; the message has its log.
    """

    launcher: Launcher
    show_hidden_metrics = False
    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self,
        model: str,
        vllm_serve_args: Sequence[str],
        *,
        env_dict: dict[str, str] | None = None,
        seed: int | None = 0,
        auto_port: bool = True,
        max_wait_seconds: float | None = None,
        override_hf_configs: dict[str, Any] | None = None,
    ) -> None:
        flags = [*vllm_serve_args, *([] if seed is None else ["--seed", str(seed)])]
        if override_hf_configs:
            flags += ["--hf-overrides", str(override_hf_configs)]
        # An answer that nobody limits ends before it fills the context, which takes minutes on a CPU.
        keys = {"serve.port": str(_free_port()), "request.max_new_tokens": "160"}
        keys |= {"infer.stop_with_eos": "false"} if model in _WITHOUT_TURNS else {}
        keys |= settings(model, flags)
        if length := keys.get("infer.max_seq_len"):
            # Tests may ask for more, of their models.
            keys["infer.max_seq_len"] = str(min(int(length), self.launcher.config(model)["max_position_embeddings"]))
        if key := (env_dict or {}).get("VLLM_API_KEY"):
            keys["serve.api_keys"] = f"[{key}]"
        if "{" in (template := keys.get("server.chat_template", "")):  # the template itself, not its file
            keys["server.chat_template"] = self._in_file(template)
        if "server.watermark_key_file" in keys:  # vLLM has the key itself, and its algorithm
            keys["server.watermark_key_file"] = self._in_file(keys["server.watermark_key_file"])
        if "infer.lora_modules" in keys:  # adapters of other models: one of this model has the name and the folder
            name, place = named_adapter(keys["infer.lora_modules"])
            write_adapter(Path(place), self.launcher.config(model))
            keys["infer.lora_modules"] = f"{name}={place}"
        if _HARMONY in model:  # vLLM has this model's parsers without a flag
            keys = dict.fromkeys(_PARSERS, "harmony") | keys | _LONGER
            keys |= {"server.chat_template": str(_HARMONY_TEMPLATE), **_BUDGET}
        elif keys.keys() & _PARSERS:
            keys |= self._parsed(keys)
        self.host, self.port = "127.0.0.1", int(keys["serve.port"])
        folder, where = self.launcher.served(model)
        command = [str(self.launcher.evener), "serve", folder]
        command += [f"{name}={value}" for name, value in keys.items()]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by _stop)
        self.proc = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True,
            cwd=where, env=os.environ | (env_dict or {}),
        )  # fmt: skip
        self.launcher.running.add(self.proc.pid)
        self.launcher.started += 1
        try:
            self._wait(max(max_wait_seconds or 0, _START))
        except BaseException:
            self._stop()
            raise

    @staticmethod
    def _parsed(keys: Mapping[str, str]) -> dict[str, str]:
        """For a server with parsers: a template with examples of calls and reasoning, for a model that was not trained
        for either, and the parsers of the form that it writes. The API does not depend on the form."""
        if "server.chat_template" in keys:
            return {} if _PARSERS[0] in keys else {_PARSERS[0]: "none"}
        reasons = _PARSERS[0] in keys
        parsers = {name: kind if name in keys else "none" for name, kind in zip(_PARSERS, _FORMATS, strict=True)}
        template = f"{{%- set reasons = {str(reasons).lower()} -%}}\n{_TEMPLATE.read_text('utf-8')}"
        return {
            **parsers,
            **(_BUDGET if reasons else {}),
            "server.chat_template": RemoteOpenAIServer._in_file(template),
        }

    @staticmethod
    def _in_file(text: str) -> str:
        """The name of a file with this text."""
        file = tempfile.NamedTemporaryFile("w", delete=False, encoding="utf-8")  # noqa: SIM115
        with file:
            file.write(text)
        return file.name

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @property
    def url_root(self) -> str:
        """The server's address."""
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        """The address of a path."""
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        """OpenAI's client."""
        return openai.OpenAI(base_url=self.url_for("v1"), **self._options(options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """OpenAI's asynchronous client."""
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), **self._options(options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        """Anthropic's client."""
        return anthropic.Anthropic(base_url=self.url_for(), **self._options(options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        """Anthropic's asynchronous client."""
        return anthropic.AsyncAnthropic(base_url=self.url_for(), **self._options(options))

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 600} | options

    def _wait(self, limit: float) -> None:
        end = time.monotonic() + limit
        with httpx.Client(base_url=self.url_root, trust_env=False) as client:
            while time.monotonic() < end:
                if self.proc.poll() is not None:
                    raise RuntimeError(f"evener serve ended with exit status {self.proc.returncode}: {self._tail()}")
                with contextlib.suppress(httpx.TransportError):  # it does not listen yet
                    if client.get("/ready").status_code == 200:
                        return
                time.sleep(0.1)
        raise RuntimeError(f"evener serve is not ready after {limit:.0f} s: {self._tail()}")

    def _stop(self) -> None:
        try:
            self.proc.terminate()
            self.proc.wait(_STOP)
        except subprocess.TimeoutExpired:
            os.killpg(self.proc.pid, signal.SIGKILL)
            self.proc.wait()
        finally:
            self.launcher.running.discard(self.proc.pid)
            self._log.close()

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-2000:].decode("utf-8", "replace").strip()


def _with_marks(text: str) -> str:
    """A file of a tokenizer with the names of ``_MARKS``."""
    for theirs, mark in _MARKS.items():
        text = text.replace(theirs, mark)
    return text


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""The server's own options: keys ``server.<name>``."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evener.config.schema import Config
from evener.errors import ConfigError
from evener.sampling_params import MAX_LOGPROBS
from evener_server import descriptor

#: Values of the options that name a parser: by the model's chat template, or none.
AUTO, NONE = "auto", "none"
#: Of a chat template: the largest known have a few ten thousand.
MAX_TEMPLATE_BYTES = 1 << 20
_ORIGIN = re.compile(r"https?://[A-Za-z0-9.-]+(:[0-9]+)?|https?://\[[0-9a-fA-F:.]+\](:[0-9]+)?")


@dataclass(frozen=True)
class ServerOptions:
    """The options; ``descriptor.options`` has their help texts.

    Attributes:
        vllm_metrics: serve metrics under vLLM's names too.
        tool_parser, reasoning_parser: names of parsers.
        api_key_file: a file with API keys; api_key_strict: requests without one are refused.
        cors_origins: web sites whose pages may ask, separated by commas; "*": any.
        trust_plugin_file: run the plug-in file of the model's folder.
        tls_cert, tls_key: files of the certificate and its key.
        tls_client_ca: file with certificates that sign those which clients must have; None: they need none.
        chat_template: a file with a chat template, instead of the model's.
        exclude_tools_when_tool_choice_none: the chat template gets no tools if none may be called.
        forward_bytes: bytes of the numbers in one answer of /forward.
        force_include_usage: every stream ends with the usage.
        model_aliases: other names of the model, separated by commas.
        max_logprobs: log-probabilities that a request may have of a position; -1: those of all tokens.
        otlp_endpoint: where spans of requests are sent; None: what the environment says.
        page: serve the chat page at /.
        request_metrics: answers have the times of their request.
        root_path: a path before every route.
        sampling_defaults: values of sampling parameters that requests do not name.
        show_cached_tokens: the usage says how many tokens of the prompt were in the prefix cache.
        thinking_budget: tokens that reasoning may have by default.
        tokenizer_info: show the tokenizer's settings.
        trust_request_chat_template: requests may bring their chat template.
        token_ids: log-probabilities name tokens by their ids by default.
        watermark_key_file: a file with the key of the watermark.
        kv_events, kv_events_replay: ZMQ addresses on which events of the prefix cache are published, and sent again.
        kv_events_topic: the first part of each of these messages.
        lora_folder: a folder below which clients may load adapters; None: they may not.
        weights_folder: a folder below which clients may replace the weights; None: they may not.
    """

    vllm_metrics: bool = True
    tool_parser: str = AUTO
    reasoning_parser: str = AUTO
    api_key_file: str | None = None
    api_key_strict: bool = True
    cors_origins: str = ""
    trust_plugin_file: bool = False
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    chat_template: str | None = None
    exclude_tools_when_tool_choice_none: bool = True
    forward_bytes: int = 64 << 20
    force_include_usage: bool = False
    model_aliases: str = ""
    max_logprobs: int = MAX_LOGPROBS
    otlp_endpoint: str | None = None
    page: bool = True
    request_metrics: bool = False
    root_path: str = ""
    sampling_defaults: str = ""
    show_cached_tokens: bool = True
    thinking_budget: int | None = None
    tokenizer_info: bool = False
    trust_request_chat_template: bool = False
    token_ids: bool = False
    watermark_key_file: str | None = None
    lora_folder: str | None = None
    kv_events: str | None = None
    kv_events_replay: str | None = None
    kv_events_topic: str = ""
    weights_folder: str | None = None

    def read_chat_template(self) -> str | None:
        """The text of ``chat_template``.

        Raises:
            ConfigError: the file cannot be read, or is too large.
        """
        if self.chat_template is None:
            return None
        path = Path(self.chat_template).expanduser()
        try:
            with path.open("rb") as file:
                content = file.read(MAX_TEMPLATE_BYTES + 1)
            if len(content) > MAX_TEMPLATE_BYTES:
                raise ValueError(f"it has more than {MAX_TEMPLATE_BYTES:,} bytes")
            return content.decode("utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"server.chat_template={path} cannot be used: {error}; give a text file") from error

    @functools.cached_property
    def origins(self) -> tuple[str, ...]:
        """Web sites whose pages may ask this server.

        Raises:
            ConfigError: one is no origin.
        """
        found = tuple(dict.fromkeys(name for part in self.cors_origins.split(",") if (name := part.strip())))
        for name in found:
            if name != "*" and not _ORIGIN.fullmatch(name):
                raise ConfigError(f"server.cors_origins has {name!r}, which is no origin; give SCHEME://HOST[:PORT] "
                                  "without a path, as in https://app.example, or *")  # fmt: skip
        return found

    @functools.cached_property
    def aliases(self) -> tuple[str, ...]:
        """Other names under which requests find the model."""
        return tuple(dict.fromkeys(name for part in self.model_aliases.split(",") if (name := part.strip())))

    def check_names(self, config: Config) -> None:
        """Raises:
        ConfigError: an alias of the model is the name of an adapter, which no request could name.
        """
        adapters = [entry.partition("=")[0] for entry in config.infer.lora_modules]
        if hidden := [name for name in self.aliases if name in adapters]:
            raise ConfigError(f"server.model_aliases and infer.lora_modules both have the name {hidden[0]!r}; requests "
                              "with it would get the model alone: give one of them another name")  # fmt: skip

    def check_numbers(self) -> None:
        """Raises:
        ConfigError: a limit has a value without a meaning.
        """
        if self.max_logprobs < -1:
            raise ConfigError(f"server.max_logprobs is {self.max_logprobs}; give 0 or more, or -1 for no limit")

    @classmethod
    def of(cls, options: Mapping[str, Mapping[str, Any]]) -> ServerOptions:
        """From ``Config.options``, in which only options that were set are."""
        return cls(**options.get(descriptor.name, {}))

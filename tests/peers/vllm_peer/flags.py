"""vLLM's command-line flags as keys of ``evener serve``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


class MissingFeature(Exception):
    """A test's server needs what evener does not have. The message is the feature's name."""


@dataclass(frozen=True)
class Key:
    """The flag's value is the value of this key; ``value`` if the flag has none of its own. ``names``: what values of
    the flag are called here."""

    name: str
    value: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Unneeded:
    """The server starts without it: its requests show what comes of that. ``words`` values follow the flag."""

    why: str
    words: int = 0


@dataclass(frozen=True)
class Missing:
    """The tests of such a server are about this feature, unless the flag's value is ``harmless``."""

    feature: str
    harmless: str | None = None


Meaning = Key | Unneeded | Missing

#: Tests ask for it because it is fast, which this is on a CPU.
_HALF = {"half": "bfloat16", "float16": "bfloat16"}
#: Parsers of the same formats.
_TOOLS = {"llama3_json": "llama3", "openai": "harmony", "glm45": "glm4", "qwen3_xml": "qwen3_coder"}
_REASONING = {"qwen3": "think", "deepseek_r1": "think", "openai_gptoss": "harmony", "mistral": "bracket_think"}

FLAGS: Mapping[str, Meaning] = {
    "--dtype": Key("dtype", names=_HALF),
    "--enable-prefix-caching": Key("infer.prefix_cache", "true"),
    "--attention-backend": Unneeded("the CPU has one", words=1),
    "--exclude-tools-when-tool-choice-none": Key("server.exclude_tools_when_tool_choice_none", "true"),
    "--enforce-eager": Key("infer.use_cuda_graph", "false"),
    "--max-model-len": Key("infer.max_seq_len"),
    "--max-num-batched-tokens": Key("infer.step_tokens"),
    "--max-num-seqs": Key("infer.max_reqs"),
    "--no-enable-prefix-caching": Key("infer.prefix_cache", "false"),
    "--override-generation-config": Key("server.sampling_defaults"),
    "--port": Key("serve.port"),
    "--seed": Key("seed"),
    "--served-model-name": Key("serve.served_model_name"),
    "--enable-chunked-prefill": Unneeded("prompts are always computed in chunks"),
    "--enable-lora": Unneeded("a server with adapters needs no switch for them"),
    "--enable-per-request-metrics": Key("server.request_metrics", "true"),
    "--enable-prompt-tokens-details": Key("server.show_cached_tokens", "true"),
    "--gpu-memory-utilization": Unneeded("the device is the CPU", words=1),
    "--lora-module": Key("infer.lora_modules"),
    "--limit-mm-per-prompt": Unneeded("the limit is fixed", words=1),
    "--lora-modules": Key("infer.lora_modules"),
    "--max-cpu-loras": Key("infer.max_cpu_loras"),
    "--max-lora-rank": Key("infer.max_lora_rank"),
    "--max-logprobs": Key("server.max_logprobs"),
    "--show-hidden-metrics-for-version": Unneeded("no metric is hidden", words=1),
    "--trust-remote-code": Unneeded("the model needs no code of its own"),
    "--chat-template": Key("server.chat_template"),
    "--chat-template-content-format": Unneeded("templates get one text a message", words=1),
    "--enable-auto-tool-choice": Unneeded("tools are always read if the server has a parser"),
    "--enable-force-include-usage": Key("server.force_include_usage", "true"),
    "--enable-prompt-embeds": Unneeded("prompts may always be embeddings"),
    "--enable-server-load-tracking": Unneeded("the load is always counted"),
    "--enable-tokenizer-info-endpoint": Key("server.tokenizer_info", "true"),
    "--no-async-scheduling": Unneeded("answers do not depend on it"),
    "--reasoning-config": Unneeded("the parser knows its marks", words=1),
    "--reasoning-parser": Key("server.reasoning_parser", names=_REASONING),
    "--return-tokens-as-token-ids": Key("server.token_ids", "true"),
    "--root-path": Key("server.root_path"),
    "--runner": Key("infer.task", names={"pooling": "embed"}),
    "--skip-tokenizer-init": Missing("a server without a tokenizer"),
    "--speculative-config": Missing("speculative decoding"),
    "--structured-outputs-config.backend": Unneeded("the installed library is used", words=1),
    "--trust-request-chat-template": Key("server.trust_request_chat_template", "true"),
    "--tool-call-parser": Key("server.tool_parser", names=_TOOLS),
    "--tool-server": Unneeded("clients run tools; tests of those that the server runs are left out by name", words=1),
    "--watermark-config": Key("server.watermark_key_file"),
}


def settings(model: str, flags: Sequence[str]) -> dict[str, str]:
    """The keys of ``evener serve`` for vLLM's ``flags``; the model keeps the name that the test gives it.

    Raises:
        MissingFeature: a flag asks for a feature that evener does not have, or is unknown here.
    """
    # vLLM shows the prompt's cached tokens only where a flag says so.
    keys = {"serve.served_model_name": model, "server.show_cached_tokens": "false"}
    words = [word for flag in flags for word in _split(flag)]
    while words:
        flag = words.pop(0)
        meaning = FLAGS.get(flag.replace("_", "-"))
        if isinstance(meaning, Key):
            value = words.pop(0) if meaning.value is None else meaning.value
            keys[meaning.name] = meaning.names.get(value, value)
        elif isinstance(meaning, Unneeded):
            del words[: meaning.words]
        elif isinstance(meaning, Missing) and words and words[0] == meaning.harmless:
            del words[0]
        elif isinstance(meaning, Missing):
            raise MissingFeature(meaning.feature)
        else:
            raise MissingFeature(f"the server's option {flag}")
    return keys


def _split(word: str) -> list[str]:
    """``--flag=value`` as two words."""
    return word.split("=", 1) if word.startswith("--") else [word]

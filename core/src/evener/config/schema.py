"""The configuration as the user asked for it: frozen dataclasses, one field per key.

A key is a field's dotted name: ``dtype``, ``infer.max_reqs``, ``serve.port``. ``auto`` stays ``"auto"`` here;
``resolve`` returns a new object. The metadata of each field has its allowed values and its help text; the command line,
``LLM``, Hydra, ``evener config`` and the documents all read them there. A value that this version does not support is
an error when the object is built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from evener.key_spec import KeySpec, Kind, check

Auto = Literal["auto"]

#: Short names of compute dtypes.
DTYPE_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
}


def option(default: Any, kind: Kind, help: str, **limits: Any) -> Any:
    """A dataclass field that is a key; ``limits`` are further fields of ``KeySpec``."""
    spec = KeySpec(help=help, kind=kind, default=default, **limits)
    return field(default=default, metadata={"spec": spec}, repr=not spec.secret)


class Section:
    """Checks every field when the object is built."""

    prefix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, spec in specs(type(self)).items():
            check(self.prefix + name, spec, getattr(self, name))


def specs(section: type[Section]) -> dict[str, KeySpec]:
    """The keys of one section by field name; sections and open mappings are left out."""
    fields = dataclasses.fields(section)  # type: ignore[arg-type]  # every Section is a dataclass
    return {f.name: f.metadata["spec"] for f in fields if "spec" in f.metadata}


@dataclass(frozen=True, kw_only=True)
class InferConfig(Section):
    """How the model is run."""

    prefix: ClassVar[str] = "infer."

    tp_size: int = option(1, "int", "Tensor-parallel ranks.", minimum=1)
    pp_size: int = option(1, "int", "Pipeline stages.", minimum=1)
    pp_layer_partition: tuple[str, ...] = option(
        (), "names", "Number of layers of each pipeline stage, as in 15,16, or equal; none: equal numbers, or what "
        "takes equal time if infer.stages has several backends."
    )  # fmt: skip
    layers: tuple[str, ...] = option((), "names", "Numbers of the layers that run, as in 0-3,60, to measure a model "
        "that does not fit; none: all. The text is not the model's, so a server refuses the key.")  # fmt: skip
    stages: tuple[str, ...] = option(
        (), "names", "Backend of each pipeline stage, with the index of its device if wanted, as in cpu:0,cpu:1; auto: "
        "all accelerators here, and the host if it must; none: all on one backend. Needs evener-offload."
    )  # fmt: skip
    pp_prefill_reqs: int | Auto = option(
        "auto", "int", "With pipeline stages: maximum number of prefill requests in one plan; auto: their share.",
        auto=True, minimum=1
    )  # fmt: skip
    pp_decode_reqs: int | Auto = option(
        "auto", "int", "With pipeline stages: maximum number of decode requests in one plan; auto: their share.",
        auto=True, minimum=1
    )  # fmt: skip
    dp_size: int = option(
        1, "int", "Data-parallel ranks of attention.", minimum=1, supported=(1,), missing="data parallelism is"
    )
    ep_size: int = option(1, "int", "Groups of tensor-parallel ranks that divide a layer's experts among them; 1: "
                          "all ranks share each expert; infer.tp_size: each has whole ones.", minimum=1)  # fmt: skip
    task: str = option("auto", "str", "What the model is for; auto: what its folder says.",
                       choices=("auto", "generate", "embed", "score"))  # fmt: skip
    pooling: str = option("auto", "str", "Of which tokens the vector of a text is made; auto: what the folder says, or "
                          "the last.", choices=("auto", "last", "mean", "cls"))  # fmt: skip
    max_reqs: int | Auto = option("auto", "int", "Maximum number of running requests.", auto=True, minimum=1)
    max_seq_len: int | Auto = option("auto", "int", "Maximum tokens of one request, prompt and answer together.",
                                     auto=True, minimum=2)  # fmt: skip
    attn_type: str = option(
        "auto", "str", "Kernel for attention: auto: the fastest that fits; ref: the plain reference.",
        choices=("auto", "ref"), claimable=True
    )  # fmt: skip
    op_impl: str = option(
        "auto", "str", "Kernels for all other ops: auto: the fastest that fit; ref: the plain reference.",
        choices=("auto", "ref"), claimable=True
    )  # fmt: skip
    use_cuda_graph: bool | Auto = option(
        "auto", "bool", "Capture decode steps and short prompts as graphs and replay them; auto: if the device can.",
        auto=True
    )  # fmt: skip
    tuning: str = option(
        "auto", "path",
        "File of `evener tune` with the choice of kernels; auto: the files for this device in the user's cache folder "
        "and in packages; off: none.", auto=True
    )  # fmt: skip
    cache_type: str = option("auto", "str", "Layout of the KV cache; always paged.", choices=("auto", "paged"))
    mla_absorb: str = option(
        "auto", "str",
        "How latent attention (MLA) decodes: none: latents are expanded to keys and values; absorb-without-precomp: "
        "queries are projected into latent space; absorb: the same with matrices multiplied once at start.",
        choices=("auto", "none", "absorb-without-precomp", "absorb")
    )  # fmt: skip
    index_topk: int | Auto = option(
        "auto", "int", "Number of earlier tokens that sparse attention reads; 0: all.", auto=True, minimum=0
    )
    kv_dtype: str = option(
        "auto", "str", "Dtype of stored keys, values and latents; auto: as the checkpoint says, or the compute dtype.",
        choices=("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8"), words={"fp8": "fp8_e4m3"}
    )  # fmt: skip
    kv_scales: str | None = option(None, "path", "File with scales of keys and values, by `evener calibrate`; none: "
                                   "those of the model's folder or checkpoint.", none=True)  # fmt: skip
    quant_activations: str = option(
        "as_checkpoint", "str", "Activations before products with quantized weights: as_checkpoint: rounded to 8 bits "
        "where the checkpoint says so and a kernel does it; keep: never.", choices=("as_checkpoint", "keep")
    )  # fmt: skip
    snapshot_every: int = option(
        512, "int", "Tokens between snapshots of recurrent state in the prefix cache.", minimum=1
    )
    block_size: int | Auto = option("auto", "int", "Tokens in one block of the KV cache.", auto=True, minimum=1)
    kv_memory: int | float | Auto = option(
        "auto", "size", "Memory for KV cache and other state: bytes, or a fraction of what is free at start.", auto=True
    )
    step_tokens: int | Auto = option("auto", "int", "Token budget of one step, over all requests.",
                                     auto=True, minimum=1)  # fmt: skip
    step_target: float = option(0.25, "float", "Seconds that a server's step should take at most, if infer.step_tokens "
                                "is auto, see generation.step_limit; 0: no limit.", minimum=0)  # fmt: skip
    depth: int | Auto = option(
        "auto", "int", "Plans in flight; auto: pipeline stages + 1. 1 is for debugging; the tokens are the same.",
        auto=True, minimum=1, maximum=16
    )  # fmt: skip
    drafter: str = option("none", "str", "Speculative decoding: what proposes tokens, of which a step checks several; "
                          "none (or infer.draft_model), or an installed one: ngram, grammar or other.")  # fmt: skip
    draft_model: str | None = option(None, "path", "Speculative decoding: the folder of a smaller model with the same "
                                     "tokenizer, or of an EAGLE-3 head, which proposes tokens.", none=True)  # fmt: skip
    draft_tokens: int = option(4, "int", "The most tokens that a drafter proposes for a request in a step.",
                               minimum=1, maximum=16)  # fmt: skip
    lora_modules: tuple[str, ...] = option(
        (), "names", "Adapters (LoRA) to load at start, as in sql=/data/sql-lora,chat=/data/chat-lora."
    )
    max_loras: int = option(0, "int", "Adapters on the device at a time; 0: as many as infer.lora_modules has.",
                            minimum=0, maximum=256)  # fmt: skip
    max_lora_rank: int = option(16, "int", "The largest rank of an adapter.", minimum=1, maximum=512)
    max_cpu_loras: int = option(32, "int", "Adapters that may be in host memory: those that are loaded, and those that "
                                "requests still use.", minimum=1)  # fmt: skip
    cpu_layer_num: int | Auto = option(0, "int", "Layers whose experts the host computes: the last ones that have "
        "experts; auto: as few as the device's memory allows. Needs evener-offload.", auto=True, minimum=0)  # fmt: skip
    host_experts: tuple[str, ...] = option((), "names", "Numbers of the layers whose experts the host computes, as in "
        "3-20,40; none: infer.cpu_layer_num of them.")  # fmt: skip
    resident_experts: int | Auto = option(0, "int", "Experts of a layer that are on the device, which computes all; "
        "the others wait in host memory. Of all layers, or of those that the two keys above say. auto: as many as "
        "fit; 0: the host computes.", auto=True, minimum=0)  # fmt: skip
    kv_host_memory: int | float | None = option(None, "size", "Host memory of each rank for KV cache blocks that leave "
        "the device, and come back when they are needed: bytes, or a fraction of what the host has free. Needs "
        "evener-offload.", none=True)  # fmt: skip
    prefix_cache: bool = option(True, "bool", "Reuse the KV cache of prompts with a common prefix.")
    heartbeat_timeout: float = option(
        20.0, "float", "Seconds without a heartbeat after which a process counts as dead; 0: no limit.", minimum=0
    )
    step_timeout: float = option(
        300.0, "float", "Seconds that one step may take in worker processes, before the engine stops; 0: no limit.",
        minimum=0
    )  # fmt: skip
    threads: int | Auto = option("auto", "int", "Host threads for computation.", auto=True, minimum=1)
    stop_with_eos: bool = option(True, "bool", "Stop at the model's end-of-sequence token, unless a request says.")

    @property
    def proposes(self) -> str:
        """The name of the drafter: ``drafter``, and "model" if only ``draft_model`` is set."""
        return "model" if self.draft_model is not None and self.drafter == "none" else self.drafter

    @property
    def adapter_slots(self) -> int:
        """Adapters on the device at a time; 0: requests have none."""
        return self.max_loras or len(self.lora_modules)


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Section):
    """The HTTP server."""

    prefix: ClassVar[str] = "serve."

    host: str = option("127.0.0.1", "str", "Address to listen on; 0.0.0.0: all interfaces.")
    port: int = option(21002, "int", "Port to listen on; 0: any free port.", minimum=0, maximum=65535)
    api_keys: tuple[str, ...] = option((), "names", "API keys, one of which a request must have.", secret=True)
    served_model_name: str | None = option(
        None, "str", "The model's name in the API; none: the folder's name.", none=True
    )
    allowed_hosts: tuple[str, ...] = option((), "names", "Names that a Host header may have; *: any. By default "
                                            "localhost and its addresses if serve.host is one, else any.")  # fmt: skip
    max_connections: int = option(4096, "int", "Maximum number of open connections.", minimum=1)
    max_queue: int = option(1024, "int", "Maximum number of waiting samples; more get status 429.", minimum=0)


_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class LogConfig(Section):
    """The log."""

    prefix: ClassVar[str] = "log."

    level: str = option(
        "auto", "str", "Minimum log level; auto: info for a server and in a file, warning otherwise.",
        choices=("auto", *_LEVELS), words=dict(zip(_LEVELS, _LEVELS, strict=True))
    )  # fmt: skip
    file: str | None = option(None, "path", "Log file, in addition to standard error; none: no file.", none=True)
    format: str = option("text", "str", "Format of a log line: text, or a JSON object.", choices=("text", "json"))
    interval: float = option(10.0, "float", "Seconds between a server's lines of statistics; 0: none.", minimum=0)


@dataclass(frozen=True, kw_only=True)
class RequestConfig(Section):
    """Defaults for requests."""

    prefix: ClassVar[str] = "request."

    prompt_tokens_len: int | None = option(
        None, "int",
        "`evener run` uses a prompt of this many tokens; with request.max_new_tokens the answer's length is exact too.",
        none=True, minimum=1
    )  # fmt: skip
    max_new_tokens: int | None = option(
        None, "int",
        "Default maximum of new tokens; none: the rest of the context for chat, 16 for completions.",
        none=True, minimum=1
    )  # fmt: skip
    plugins: tuple[str, ...] = option((), "names", "Request plugins that process every request, in this order.")


@dataclass(frozen=True, kw_only=True)
class Config(Section):
    """Everything that can be set.

    Attributes:
        ops: the package that computes an op, ``{"attention": "name of a package"}``; written ``ops.<op>=<package>``.
        options: options of packages that were set, ``{package: {option: value}}``; written
            ``<package>.<option>=<value>``.
    """

    model: str = option(
        dataclasses.MISSING, "path", "The model: a folder, a file such as model.gguf, or its id on a hub (org/name)."
    )
    dtype: str = option(
        "auto", "str", "Compute dtype; auto: the checkpoint's own.",
        choices=("auto", "bfloat16", "float16", "float32"), words=DTYPE_ALIASES
    )  # fmt: skip
    load: str = option(
        "auto", "str", "Source of the weights: auto: the checkpoint; dummy: random numbers.", choices=("auto", "dummy")
    )
    quant: str = option(
        "auto", "str", "Quantization scheme; auto: that of the checkpoint; none: unquantized; or an installed one."
    )
    backend: str | None = option(
        None, "str", "The backend to run on; none: the best one that is installed and fits this machine.", none=True
    )
    max_fallback: str = option(
        "any",
        "str",
        "Ops that may run on the slow reference: any; listed: any, with a warning for each at start; none.",
        choices=("any", "listed", "none"),
    )
    seed: int = option(
        0, "int", "Seed of random weights, and of requests without a seed.", minimum=0, maximum=2**31 - 1
    )
    trust_model_code: bool = option(
        False, "bool", "Run Python code from the model's folder.", supported=(False,),
        missing="code from a model's folder is"
    )  # fmt: skip
    tokenizer: str | None = option(None, "path", "Folder or file with the tokenizer; none: the model's.", none=True)
    weight_map: str | None = option(
        None, "path", "JSON file of regular expressions that rename a checkpoint's tensors.", none=True
    )
    model_cache: str | None = option(
        None, "path", "Folder in which the first start leaves each rank's weights, ready for the device, for the next; "
        "auto: in the user's cache folder; none: no cache.", auto=True, none=True
    )  # fmt: skip
    executor: str = option(
        "auto", "str", "Where workers run: inline: in this process (several as threads); process: each in its own.",
        choices=("auto", "inline", "process")
    )  # fmt: skip
    outputs: str | None = option(
        "auto", "path",
        "Folder in which `evener run` creates a folder with keys, log and result; auto: outputs if request.* sets a "
        "length, otherwise none.",
        auto=True, none=True
    )  # fmt: skip
    infer: InferConfig = field(default_factory=InferConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    request: RequestConfig = field(default_factory=RequestConfig)
    log: LogConfig = field(default_factory=LogConfig)
    ops: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


#: The sections of ``Config`` by their prefixes in keys.
SECTIONS: Mapping[str, type[Section]] = {
    "infer": InferConfig,
    "serve": ServeConfig,
    "request": RequestConfig,
    "log": LogConfig,
}


def key_specs() -> dict[str, KeySpec]:
    """Every fixed key, in the order of the documents; ``ops.<op>`` and ``<package>.<option>`` come from installed
    packages."""
    keys = specs(Config)
    for name, section in SECTIONS.items():
        keys.update({f"{name}.{key}": spec for key, spec in specs(section).items()})
    return keys


def to_flat(config: Config) -> dict[str, Any]:
    """All of ``config`` as dotted keys; ``from_overrides`` turns them back into an equal ``Config``."""
    flat: dict[str, Any] = {}
    for key in key_specs():
        section, _, name = key.rpartition(".")
        flat[key] = getattr(getattr(config, section) if section else config, name)
    flat.update({f"ops.{op}": provider for op, provider in config.ops.items()})
    for package, options in config.options.items():
        flat.update({f"{package}.{key}": value for key, value in options.items()})
    return flat

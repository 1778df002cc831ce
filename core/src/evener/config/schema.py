"""The configuration as it was asked for: frozen dataclasses, one field a key.

A key is a field's dotted name: ``dtype``, ``infer.max_reqs``, ``serve.port``. ``auto`` stays ``"auto"`` here;
``resolve`` gives a new object. Every field says in its metadata what it takes and what it is for; the command line,
``LLM``, Hydra, ``evener config`` and the documents read that and nothing else. A value that this version cannot
honour is an error when the object is built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from evener.key_spec import KeySpec, Kind, check

Auto = Literal["auto"]

#: Short spellings of compute types.
DTYPE_WORDS = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
}


def option(default: Any, kind: Kind, help: str, **limits: Any) -> Any:
    """A field that is a key; ``limits`` are fields of ``KeySpec``."""
    return field(default=default, metadata={"spec": KeySpec(help=help, kind=kind, **limits)})


class Section:
    """Checks every field when the object is built."""

    prefix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, spec in specs(type(self)).items():
            check(self.prefix + name, spec, getattr(self, name))


def specs(section: type[Section]) -> dict[str, KeySpec]:
    """The keys of one section by field name; sections and open mappings are left out."""
    fields = dataclasses.fields(section)  # type: ignore[arg-type]  # every Section is a dataclass
    return {f.name: dataclasses.replace(f.metadata["spec"], default=f.default) for f in fields if "spec" in f.metadata}


@dataclass(frozen=True, kw_only=True)
class InferConfig(Section):
    """How the model is computed."""

    prefix: ClassVar[str] = "infer."

    tp_size: int = option(1, "int", "Tensor-parallel ranks.", minimum=1)
    pp_size: int = option(1, "int", "Pipeline stages.", minimum=1)
    pp_layer_partition: tuple[str, ...] = option(
        (), "names", "Layers of each pipeline stage, as in 15,16; none: equally many."
    )  # fmt: skip
    pp_prefill_reqs: int | Auto = option(
        "auto", "int", "With stages, requests of one plan that read their prompts; auto: their share of a stage.",
        auto=True, minimum=1
    )  # fmt: skip
    pp_decode_reqs: int | Auto = option(
        "auto", "int", "With stages, requests of one plan that add a token; auto: their share of a stage.",
        auto=True, minimum=1
    )  # fmt: skip
    dp_size: int = option(
        1, "int", "Data-parallel copies of attention.", minimum=1, supported=(1,), missing="data parallelism is"
    )  # fmt: skip
    ep_size: int = option(
        1, "int", "Ranks that share a model's experts.", minimum=1, supported=(1,), missing="expert parallelism is"
    )  # fmt: skip
    max_reqs: int | Auto = option("auto", "int", "Requests that run at the same time.", auto=True, minimum=1)
    max_seq_len: int | Auto = option(
        "auto", "int", "Tokens of one request, prompt and answer together.", auto=True, minimum=2
    )  # fmt: skip
    attn_type: str = option(
        "auto", "str", "Who computes attention: the best that fits, or the plain reference.",
        choices=("auto", "ref"), claimable=True
    )  # fmt: skip
    op_impl: str = option(
        "auto", "str", "Who computes the other ops: the best that fits, or the plain reference.",
        choices=("auto", "ref"), claimable=True
    )  # fmt: skip
    use_cuda_graph: bool | Auto = option(
        "auto", "bool", "Capture steps and replay them, where the device can.", auto=True
    )  # fmt: skip
    tuning: str = option(
        "auto", "path",
        "Measured choices of kernels: a file of `evener tune`; auto: what the user's cache folder and packages hold "
            "for such a device; off: none.",
        auto=True
    )  # fmt: skip
    cache_type: str = option("auto", "str", "How state is kept: in pages.", choices=("auto", "paged"))
    mla_absorb: str = option(
        "auto", "str",
        "How latent attention reads its state for one new token: expanded to keys and values, with queries brought "
        "into latent space, or so with matrix products made once at start.",
        choices=("auto", "none", "absorb-without-precomp", "absorb")
    )  # fmt: skip
    index_topk: int | Auto = option(
        "auto", "int", "Earlier tokens that sparse attention reads; 0 reads all of them.", auto=True, minimum=0
    )  # fmt: skip
    latent_dtype: str = option(
        "auto", "str", "Type of latent state; auto: the compute type.", choices=("auto", "bfloat16", "float8_e4m3fn")
    )  # fmt: skip
    snapshot_every: int = option(
        512, "int", "Tokens between the snapshots of recurrent state that a prefix can go on from.", minimum=1
    )  # fmt: skip
    block_size: int | Auto = option("auto", "int", "Tokens in one block of state.", auto=True, minimum=1)
    kv_memory: int | float | Auto = option(
        "auto", "size", "Memory for state: bytes, or a fraction of what is free at start.", auto=True
    )  # fmt: skip
    step_tokens: int | Auto = option(
        "auto", "int", "Tokens computed in one step, over all requests.", auto=True, minimum=1
    )  # fmt: skip
    depth: int | Auto = option(
        "auto", "int", "Plans in flight: 1 for debugging; auto: one more than pipeline stages. Tokens are the same.",
        auto=True, minimum=1, maximum=16
    )  # fmt: skip
    prefix_cache: bool = option(True, "bool", "Reuse the state of prompts that begin alike.")
    silence_limit: float = option(
        20.0, "float", "Seconds without a sign of life after which a process of the run is taken for dead; 0: never.",
        minimum=0
    )  # fmt: skip
    step_limit: float = option(
        300.0, "float", "Seconds that a step in worker processes may take before the engine gives up; 0: any number.",
        minimum=0
    )  # fmt: skip
    threads: int | Auto = option("auto", "int", "Host threads that compute.", auto=True, minimum=1)
    stop_with_eos: bool = option(True, "bool", "End an answer at the model's end token, for requests that do not say.")


@dataclass(frozen=True, kw_only=True)
class ServeConfig(Section):
    """The HTTP server."""

    prefix: ClassVar[str] = "serve."

    host: str = option("127.0.0.1", "str", "Address to listen on; 0.0.0.0 for every interface.")
    port: int = option(21002, "int", "Port to listen on; 0 takes a free one.", minimum=0, maximum=65535)
    api_keys: tuple[str, ...] = option(
        (), "names", "Keys that requests must carry.", supported=((),), missing="API keys are"
    )  # fmt: skip
    served_model_name: str | None = option(
        None, "str", "The model's name in the API; none: the folder's name.", none=True
    )  # fmt: skip
    max_queue: int = option(1024, "int", "Requests that may wait; more are refused with 429.", minimum=0)


_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class LogConfig(Section):
    """The log."""

    prefix: ClassVar[str] = "log."

    level: str = option(
        "auto", "str", "The least of what is said; auto: info of a server and in a file, warnings elsewhere.",
        choices=("auto", *_LEVELS), words=dict(zip(_LEVELS, _LEVELS, strict=True))
    )  # fmt: skip
    file: str | None = option(None, "path", "A file that lines are added to as well; none: no file.", none=True)
    format: str = option("text", "str", "Lines for people, or an object a line.", choices=("text", "json"))
    interval: float = option(10.0, "float", "Seconds between a busy server's lines on itself; 0: none.", minimum=0)


@dataclass(frozen=True, kw_only=True)
class RequestConfig(Section):
    """What a request asks for when it does not say."""

    prefix: ClassVar[str] = "request."

    prompt_tokens_len: int | None = option(
        None, "int",
        "`evener run` makes a prompt of so many tokens; with request.max_new_tokens the answer's number is exact, too.",
        none=True, minimum=1
    )  # fmt: skip
    max_new_tokens: int | None = option(
        None, "int",
        "New tokens of requests that do not say; none: chat takes the rest of the context, completions 16.",
        none=True, minimum=1
    )  # fmt: skip
    plugins: tuple[str, ...] = option((), "names", "Request plugins that see every request, in this order.")


@dataclass(frozen=True, kw_only=True)
class Config(Section):
    """Everything a person may set.

    Attributes:
        ops: who computes an op, ``{"attention": "name of a package"}``; typed as ``ops.<op>=<package>``.
        options: options of packages, ``{package: {option: value}}``; typed as ``<package>.<option>=<value>``. Only
            those that were set.
    """

    model: str = option(
        dataclasses.MISSING, "path", "The model: a folder, a file such as model.gguf, or its id on a hub (org/name)."
    )  # fmt: skip
    dtype: str = option(
        "auto", "str", "Type that is computed in; auto: the checkpoint's own.",
        choices=("auto", "bfloat16", "float16", "float32"), words=DTYPE_WORDS
    )  # fmt: skip
    load: str = option(
        "auto", "str", "Where weights come from: the checkpoint, or random numbers (dummy).",
        choices=("auto", "dummy")
    )  # fmt: skip
    quant: str = option(
        "auto", "str", "Quantization; auto: as the checkpoint says.", supported=("auto", "none"),
        missing="quantization is"
    )  # fmt: skip
    backend: str | None = option(
        None, "str", "The backend to run on; none: the best that is installed and fits.", none=True
    )  # fmt: skip
    max_fallback: str = option(
        "any", "str",
        "What may run on the plain reference: anything, anything with a line for each at start, or nothing.",
        choices=("any", "listed", "none")
    )  # fmt: skip
    seed: int = option(
        0, "int", "Seed of random weights and of requests that bring none.", minimum=0, maximum=2**31 - 1
    )  # fmt: skip
    trust_model_code: bool = option(
        False, "bool", "Run Python code from the model's folder.", supported=(False,),
        missing="code from a model's folder is"
    )  # fmt: skip
    tokenizer: str | None = option(None, "path", "Folder or file with the tokenizer; none: the model's.", none=True)
    weight_map: str | None = option(
        None, "path", "JSON file of regular expressions that rename a checkpoint's tensors.", none=True
    )  # fmt: skip
    executor: str = option(
        "auto", "str", "Where workers run: in this process (several: as its threads), or each in one of its own.",
        choices=("auto", "inline", "process")
    )  # fmt: skip
    outputs: str | None = option(
        "auto", "path",
        "Folder in which `evener run` leaves a folder with its keys, log and result; auto: outputs where request.* "
            "fixes a length, otherwise none.",
        auto=True, none=True
    )  # fmt: skip
    infer: InferConfig = field(default_factory=InferConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    request: RequestConfig = field(default_factory=RequestConfig)
    log: LogConfig = field(default_factory=LogConfig)
    ops: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


#: The sections of ``Config`` by their names in keys.
SECTIONS: Mapping[str, type[Section]] = {
    "infer": InferConfig,
    "serve": ServeConfig,
    "request": RequestConfig,
    "log": LogConfig,
}


def key_specs() -> dict[str, KeySpec]:
    """Every fixed key, in the order of the documents; ``ops.<op>`` and ``<package>.<option>`` come from what is
    installed."""
    keys = specs(Config)
    for name, section in SECTIONS.items():
        keys.update({f"{name}.{key}": spec for key, spec in specs(section).items()})
    return keys


def to_flat(config: Config) -> dict[str, Any]:
    """``config`` as dotted keys, all of them; ``from_overrides`` of it gives an equal ``Config``."""
    flat: dict[str, Any] = {}
    for key in key_specs():
        section, _, name = key.rpartition(".")
        flat[key] = getattr(getattr(config, section) if section else config, name)
    flat.update({f"ops.{op}": provider for op, provider in config.ops.items()})
    for package, options in config.options.items():
        flat.update({f"{package}.{key}": value for key, value in options.items()})
    return flat

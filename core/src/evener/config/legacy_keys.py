"""Legacy keys: those of the projects that this one grew from, and our own that were renamed.

A legacy key that has an equivalent is rewritten, with a warning that names the new key. One that has none is an error
that says why. ``models=NAME`` used to name a file with a model's shape; shapes are now read from the checkpoint, so
NAME becomes the served name and must match the checkpoint's family (``check_model_family``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from evener.config.keys import Override
from evener.errors import ConfigError
from evener.key_spec import format_value


@dataclass(frozen=True)
class RenamedKey:
    """A legacy key with an equivalent. ``value`` turns the old value into the new one; None: there is no new value for
    it, which is an error."""

    key: str
    value: Callable[[str], str | None] = lambda value: value


@dataclass(frozen=True)
class RemovedKey:
    """A legacy key without an equivalent, and why. ``ignored_values`` ask for what happens anyway: only a warning."""

    reason: str
    ignored_values: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Rewritten:
    """The result of ``rewrite``: overrides with current keys, one warning for each legacy key, and names given with
    ``models=``."""

    overrides: tuple[Override, ...]
    notes: tuple[str, ...]
    claimed: tuple[str, ...]


def _bool_to(on: str, off: str) -> Callable[[str], str | None]:
    def convert(value: str) -> str | None:
        return {"true": on, "1": on, "false": off, "0": off}.get(value.lower(), value)

    return convert


def _only(word: str, instead: str) -> Callable[[str], str | None]:
    def convert(value: str) -> str | None:
        if value.lower() != word:
            raise ConfigError(f"the value {value!r} has no equivalent: {instead}")
        return "auto"

    return convert


_OFF = frozenset({"false", "0", "none", "null", ""})
_ON = frozenset({"true", "1"})
_NO_PHASES = "there is no prefill phase; a step computes up to infer.step_tokens tokens of any requests"
_FORMATS = "the device decides in which dtype a stored format is computed; dtype sets the dtype of everything else"
_SHAPES = "a model's shape is read from its config.json and cannot be set"
_LAUNCH = "processes on other nodes are started by torchrun, Slurm or SSH"
_CONVERT = "checkpoints are read as published; nothing is converted beforehand"

#: Legacy switches that are on by default, and the numbers that apply only if they are off.
_PIPELINE = {
    "scheduler.pp_config.prefill_num_tasks_divided_by_pp": "scheduler.pp_config.prefill_num_tasks",
    "scheduler.pp_config.enforce_decode_num_tasks_max": "scheduler.pp_config.decode_num_tasks",
}

#: Legacy keys of the command line and of config files.
LEGACY_KEYS: Mapping[str, RenamedKey | RemovedKey] = {
    "models.ckpt_dir": RenamedKey("model"),
    "models.tokenizer_path": RenamedKey("tokenizer"),
    "infer.do_load": RenamedKey("load", _bool_to("auto", "dummy")),
    "infer.seed": RenamedKey("seed"),
    "infer.max_batch_size": RenamedKey("infer.max_reqs"),
    "infer.prefill_chunk_size": RenamedKey("infer.step_tokens"),
    # Our own names until 0.1; these two rows go after one release.
    "infer.silence_limit": RenamedKey("infer.heartbeat_timeout"),
    "infer.step_limit": RenamedKey("infer.step_timeout"),
    "infer.schedule_overlap": RenamedKey(
        "infer.depth", lambda value: {"true": "2", "auto": "2", "false": "1"}.get(value.lower())
    ),
    "keep_dtype_in_checkpoint": RenamedKey("dtype", _only("true", "set the dtype, as in dtype=bfloat16")),
    "float_16bit_dtype": RenamedKey("dtype"),
    "infer.soft_fp8": RemovedKey(_FORMATS, _OFF),
    "infer.raise_lower_bit_float_to": RemovedKey(_FORMATS),
    "infer.memory_utilization": RemovedKey(
        "it included the weights; infer.kv_memory sets the memory for state only, in bytes or as a fraction"
    ),
    "infer.num_blocks": RemovedKey("infer.kv_memory sets the memory for state in bytes"),
    "infer.max_concurrent_requests": RemovedKey("infer.max_reqs limits running requests, serve.max_queue waiting ones"),
    "scheduler.prefill_first.num_tasks": RemovedKey(_NO_PHASES),
    "scheduler.pp_config.prefill_num_tasks": RenamedKey("infer.pp_prefill_reqs"),
    "scheduler.pp_config.decode_num_tasks": RenamedKey("infer.pp_decode_reqs"),
    **dict.fromkeys(_PIPELINE, RemovedKey("without it, set the number: prefill_num_tasks or decode_num_tasks", _ON)),
    "scheduler.*": RemovedKey(_NO_PHASES),
    "quant_on_load": RemovedKey(_CONVERT, _OFF),
    "quant_ckpt_dir": RemovedKey("give the folder of the quantized checkpoint as the model"),
    "skip_preprocess": RemovedKey(_CONVERT, _OFF),
    "cpu_layer_num": RemovedKey("this version has no experts on the host"),
    "request.frequency_penalty": RemovedKey("this version has no default penalties; requests may set their own"),
    "serve.validate_api_key": RemovedKey("list the keys in serve.api_keys", _OFF),
    "models.*": RemovedKey(_SHAPES),
    "boot.*": RemovedKey(_LAUNCH),
    "hydra.*": RemovedKey("Hydra only reads options here; it starts no jobs and creates no folders"),
    "model_spec.base_model.model_dir": RenamedKey("model"),
    "setting.global.tensor_para_size": RenamedKey("infer.tp_size"),
    "setting.global.pipeline_para_size": RenamedKey("infer.pp_size"),
    "setting.batch_scheduler.max_step_tokens": RenamedKey("infer.step_tokens"),
    "setting.batch_scheduler.max_batch_size": RenamedKey("infer.max_reqs"),
    "setting.batch_scheduler.max_token_len": RenamedKey("infer.max_seq_len"),
    "setting.batch_scheduler.max_waiting_queue_len": RenamedKey("serve.max_queue"),
    "setting.block_manager.block_token_num": RenamedKey("infer.block_size"),
    "setting.*": RemovedKey("it has no equivalent here"),
    "weight_path": RenamedKey("model"),
    "kvcache_mem_gpu": RenamedKey("infer.kv_memory", lambda value: f"{value}MiB"),
    "device_ids": RemovedKey("the platform's own environment variable sets which devices are visible"),
    "multi_process": RemovedKey(
        "executor=process gives each rank its own process, executor=inline runs all in one process"
    ),
    "host": RenamedKey("serve.host"),
    "serve.log_level": RenamedKey("log.level"),
    "port": RenamedKey("serve.port"),
}

#: Legacy values of keys that still exist, ``{key: {old value: new value}}``.
LEGACY_VALUES: Mapping[str, Mapping[str, str]] = {"infer.op_impl": {"torch": "auto"}}

_UNUSED_LEGACY_ENV = re.compile(r"(CINFER|CHITU)_\w+")


def rewrite(overrides: Iterable[Override]) -> Rewritten:
    """Replace legacy keys and values by current ones.

    Raises:
        ConfigError: a legacy key has no equivalent; the message says why.
    """
    given = list(overrides)
    explicit = {override.key for override in given}
    done: list[Override] = []
    notes: list[str] = []
    claimed: list[str] = []
    numbers = {number: switch for switch, number in _PIPELINE.items()}
    off = {o.key for o in given if o.key in _PIPELINE and format_value(o.value).lower() in _OFF}
    for override in given:
        if override.key in off and _PIPELINE[override.key] in explicit:
            continue  # the number replaces the switch
        if override.key in numbers and numbers[override.key] not in off:
            notes.append(f"{override.original} has no effect while {numbers[override.key]} is on; leave it out")
            continue
        if override.key == "models":
            claimed.append(str(override.value))
            if "serve.served_model_name" not in explicit:
                done.append(override.to("serve.served_model_name", str(override.value)))
            notes.append(f"{override.original}: models= is a legacy key; the model's folder alone defines the model; "
                         "write serve.served_model_name= to set its name in the API")  # fmt: skip
            continue
        new = _rewrite_key(override, notes)
        if new is not None:
            done.append(_rewrite_value(new, notes))
    return Rewritten(tuple(done), tuple(notes), tuple(claimed))


def _rule(key: str) -> RenamedKey | RemovedKey | None:
    if key in LEGACY_KEYS:
        return LEGACY_KEYS[key]
    parts = key.split(".")
    stems = (".".join(parts[:end]) + ".*" for end in range(len(parts) - 1, 0, -1))
    return next((LEGACY_KEYS[stem] for stem in stems if stem in LEGACY_KEYS), None)


def _rewrite_key(override: Override, notes: list[str]) -> Override | None:
    rule = _rule(override.key)
    if rule is None:
        return override
    text, legacy = format_value(override.value), f"{override.original}: {override.key} is"
    if isinstance(rule, RemovedKey) and text.lower() not in rule.ignored_values:
        raise ConfigError(f"{legacy} a legacy key without an equivalent: {rule.reason}; leave it out")
    if isinstance(rule, RemovedKey):
        notes.append(f"{legacy} a legacy key; leave it out, it asks for what happens anyway")
        return None
    try:
        value = rule.value(text)
    except ConfigError as error:
        raise ConfigError(f"{legacy} the legacy name of {rule.key}, and {error}") from error
    if value is None:
        raise ConfigError(f"{legacy} the legacy name of {rule.key}, which has no value for {text!r}")
    notes.append(f"{legacy} a legacy key; write {rule.key}={value}")
    return override.to(rule.key, value)


def _rewrite_value(override: Override, notes: list[str]) -> Override:
    new = LEGACY_VALUES.get(override.key, {}).get(str(override.value))
    if new is None:
        return override
    notes.append(f"{override.original}: {override.value!r} is a legacy value; write {override.key}={new}")
    return override.to(override.key, new)


def check_model_family(name: str, model: str, model_type: str) -> None:
    """Check that ``models=NAME`` matches the checkpoint: the name of its folder, or its family.

    The family is the leading word and number of ``model_type`` (``name2``). NAME may have any separator between them
    (``Name-2-7B``).

    Raises:
        ConfigError: NAME is of another family.
    """
    if _alphanumeric(name) == _alphanumeric(model.rstrip("/").rpartition("/")[2]):
        return
    match = re.match(r"([a-z]+)[-_]?(\d*)", model_type.lower())
    word, number = (match[1], match[2]) if match else (model_type.lower(), "")
    found = re.search(re.escape(word) + r"[-_ ]?(\d*)", name.lower())
    if found and (not number or found[1] in ("", number)):
        return
    raise ConfigError(
        f"models={name} was asked for, but {model} holds a {model_type!r} checkpoint (its config.json says so); "
        "leave models= out, or give the folder of that model"
    )


def _alphanumeric(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


#: Legacy environment variables that set a key, and the key.
LEGACY_ENV_VARS: Mapping[str, str] = {"KLLM_LOG_LEVEL": "log.level", "KLLM_LOG_FILE": "log.file"}


def legacy_env_overrides(environ: Mapping[str, str]) -> tuple[tuple[Override, ...], tuple[str, ...]]:
    """Keys that legacy environment variables set, and a warning for each."""
    found = {name: key for name, key in LEGACY_ENV_VARS.items() if environ.get(name)}
    overrides = tuple(Override(key, environ[name], f"{name}={environ[name]}") for name, key in found.items())
    notes = tuple(f"{name} is a legacy variable; write {key}={environ[name]}" for name, key in found.items())
    return overrides, notes


def unused_legacy_env_notes(environ: Mapping[str, str]) -> tuple[str, ...]:
    """One warning for each legacy build variable that is set; nothing here reads them."""
    names = sorted(name for name in environ if _UNUSED_LEGACY_ENV.fullmatch(name))
    return tuple(f"{name} is set, but nothing reads it: evener has no such build options; unset it" for name in names)

"""Old spellings: the keys of the projects that this one grew from.

Each old key either has an equivalent, and is rewritten with a note that names the new key, or has none, and is an
error that says why. ``models=NAME`` named a file with a model's shape; shapes are now read from the checkpoint, so
NAME becomes the served name and must fit the checkpoint (``family``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from evener.config.keys import Override
from evener.errors import ConfigError
from evener.key_spec import shown


@dataclass(frozen=True)
class Renamed:
    """An old key with an equivalent. ``value`` turns the old value into the new one; None means "nothing to set"."""

    key: str
    value: Callable[[str], str | None] = lambda value: value


@dataclass(frozen=True)
class Gone:
    """An old key without an equivalent, and why; ``harmless`` values of it asked for what happens anyway."""

    reason: str
    harmless: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Rewritten:
    """What ``rewrite`` made: overrides in today's spelling, one note for each old spelling, and names given with
    ``models=``."""

    overrides: tuple[Override, ...]
    notes: tuple[str, ...]
    claimed: tuple[str, ...]


def _switch(on: str, off: str) -> Callable[[str], str | None]:
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
_NO_PHASES = "there is no prefill phase to size; a step computes up to infer.step_tokens tokens of any request"
_FORMATS = (
    "the compute type of a stored format follows from what the device can do; dtype sets the type of everything else"
)
_SHAPES = "a model's shape is read from its own config.json and never typed"
_LAUNCH = "processes on other nodes are started by torchrun, Slurm or SSH"
_CONVERT = "checkpoints are read as they were published; nothing is converted beforehand"

#: Switches that are on by default, and the numbers that count only where they are off.
_PIPELINE = {
    "scheduler.pp_config.prefill_num_tasks_divided_by_pp": "scheduler.pp_config.prefill_num_tasks",
    "scheduler.pp_config.enforce_decode_num_tasks_max": "scheduler.pp_config.decode_num_tasks",
}

#: Old keys of the command line and of whole files.
OLD_KEYS: Mapping[str, Renamed | Gone] = {
    "models.ckpt_dir": Renamed("model"),
    "models.tokenizer_path": Renamed("tokenizer"),
    "infer.do_load": Renamed("load", _switch("auto", "dummy")),
    "infer.seed": Renamed("seed"),
    "infer.max_batch_size": Renamed("infer.max_reqs"),
    "infer.prefill_chunk_size": Renamed("infer.step_tokens"),
    "infer.schedule_overlap": Renamed(
        "infer.depth", lambda value: {"true": "2", "auto": "2", "false": "1"}.get(value.lower())
    ),
    "keep_dtype_in_checkpoint": Renamed("dtype", _only("true", "name the type, as in dtype=bfloat16")),
    "float_16bit_dtype": Renamed("dtype"),
    "infer.soft_fp8": Gone(_FORMATS, _OFF),
    "infer.raise_lower_bit_float_to": Gone(_FORMATS),
    "infer.memory_utilization": Gone(
        "it counted weights too; infer.kv_memory is the state's own memory, in bytes or as a fraction"
    ),
    "infer.num_blocks": Gone("infer.kv_memory is the state's memory in bytes"),
    "infer.max_concurrent_requests": Gone("infer.max_reqs limits those that run, serve.max_queue those that wait"),
    "scheduler.prefill_first.num_tasks": Gone(_NO_PHASES),
    "scheduler.pp_config.prefill_num_tasks": Renamed("infer.pp_prefill_reqs"),
    "scheduler.pp_config.decode_num_tasks": Renamed("infer.pp_decode_reqs"),
    **dict.fromkeys(_PIPELINE, Gone("without it, set the number: prefill_num_tasks or decode_num_tasks", _ON)),
    "scheduler.*": Gone(_NO_PHASES),
    "quant_on_load": Gone(_CONVERT, _OFF),
    "quant_ckpt_dir": Gone("give the folder of the quantized checkpoint as the model"),
    "skip_preprocess": Gone(_CONVERT, _OFF),
    "cpu_layer_num": Gone("experts on the host are not in this version"),
    "request.frequency_penalty": Gone("penalties are not in this version"),
    "serve.validate_api_key": Gone("API keys are not in this version", _OFF),
    "models.*": Gone(_SHAPES),
    "boot.*": Gone(_LAUNCH),
    "hydra.*": Gone("Hydra only reads options here; it runs nothing and writes no folder"),
    "model_spec.base_model.model_dir": Renamed("model"),
    "setting.global.tensor_para_size": Renamed("infer.tp_size"),
    "setting.global.pipeline_para_size": Renamed("infer.pp_size"),
    "setting.batch_scheduler.max_step_tokens": Renamed("infer.step_tokens"),
    "setting.batch_scheduler.max_batch_size": Renamed("infer.max_reqs"),
    "setting.batch_scheduler.max_token_len": Renamed("infer.max_seq_len"),
    "setting.batch_scheduler.max_waiting_queue_len": Renamed("serve.max_queue"),
    "setting.block_manager.block_token_num": Renamed("infer.block_size"),
    "setting.*": Gone("it has no equivalent here"),
    "weight_path": Renamed("model"),
    "kvcache_mem_gpu": Renamed("infer.kv_memory", lambda value: f"{value}MiB"),
    "device_ids": Gone("which devices are visible is set by the platform's own environment variable"),
    "multi_process": Gone("executor=process gives each rank a process of its own, executor=inline has all in one"),
    "host": Renamed("serve.host"),
    "serve.log_level": Renamed("log.level"),
    "port": Renamed("serve.port"),
}

#: Old values of keys that still exist, ``{key: {old value: new value}}``.
OLD_VALUES: Mapping[str, Mapping[str, str]] = {"infer.op_impl": {"torch": "auto"}}

_OLD_VARIABLES = re.compile(r"(CINFER|CHITU)_\w+")


def rewrite(overrides: Iterable[Override]) -> Rewritten:
    """Turn old spellings into today's.

    Raises:
        ConfigError: an old key without an equivalent; says why.
    """
    given = list(overrides)
    explicit = {override.key for override in given}
    done: list[Override] = []
    notes: list[str] = []
    claimed: list[str] = []
    numbers = {number: switch for switch, number in _PIPELINE.items()}
    off = {o.key for o in given if o.key in _PIPELINE and shown(o.value).lower() in _OFF}
    for override in given:
        if override.key in off and _PIPELINE[override.key] in explicit:
            continue  # the number says it
        if override.key in numbers and numbers[override.key] not in off:
            notes.append(f"{override.shown}: nothing reads it while {numbers[override.key]} is on; leave it out")
            continue
        if override.key == "models":
            claimed.append(str(override.value))
            if "serve.served_model_name" not in explicit:
                done.append(override.to("serve.served_model_name", str(override.value)))
            notes.append(f"{override.shown}: models= is an old spelling; the folder alone says what it holds, and "
                         "serve.served_model_name= sets the name")  # fmt: skip
            continue
        new = _rewrite_key(override, notes)
        if new is not None:
            done.append(_rewrite_value(new, notes))
    return Rewritten(tuple(done), tuple(notes), tuple(claimed))


def _rule(key: str) -> Renamed | Gone | None:
    if key in OLD_KEYS:
        return OLD_KEYS[key]
    parts = key.split(".")
    stems = (".".join(parts[:end]) + ".*" for end in range(len(parts) - 1, 0, -1))
    return next((OLD_KEYS[stem] for stem in stems if stem in OLD_KEYS), None)


def _rewrite_key(override: Override, notes: list[str]) -> Override | None:
    rule = _rule(override.key)
    if rule is None:
        return override
    text = shown(override.value)
    if isinstance(rule, Gone) and text.lower() not in rule.harmless:
        raise ConfigError(
            f"{override.shown}: {override.key} is an old spelling without an equivalent: {rule.reason}; leave it out"
        )
    if isinstance(rule, Gone):
        notes.append(
            f"{override.shown}: {override.key} is an old spelling; leave it out, it asks for what happens anyway"
        )
        return None
    try:
        value = rule.value(text)
    except ConfigError as error:
        raise ConfigError(f"{override.shown}: {override.key} is an old spelling of {rule.key}, and {error}") from error
    if value is None:
        raise ConfigError(
            f"{override.shown}: {override.key} is an old spelling of {rule.key}, which has nothing for {text!r}"
        )
    notes.append(f"{override.shown}: {override.key} is an old spelling; write {rule.key}={value}")
    return override.to(rule.key, value)


def _rewrite_value(override: Override, notes: list[str]) -> Override:
    new = OLD_VALUES.get(override.key, {}).get(str(override.value))
    if new is None:
        return override
    notes.append(f"{override.shown}: {override.value!r} is an old value; write {override.key}={new}")
    return override.to(override.key, new)


def check_family(name: str, model: str, model_type: str) -> None:
    """Say whether ``models=NAME`` fits the checkpoint: its folder's name, or its family.

    A family is the leading word and number of ``model_type`` (``name2``), found in NAME with any separator
    (``Name-2-7B``).

    Raises:
        ConfigError: NAME is of another family.
    """
    if _plain(name) == _plain(model.rstrip("/").rpartition("/")[2]):
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


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


#: Environment variables of the seeds that set a key, and the key.
OLD_VARIABLES: Mapping[str, str] = {"KLLM_LOG_LEVEL": "log.level", "KLLM_LOG_FILE": "log.file"}


def environment_overrides(environ: Mapping[str, str]) -> tuple[tuple[Override, ...], tuple[str, ...]]:
    """Keys that variables of the seeds set, and a note for each."""
    found = {name: key for name, key in OLD_VARIABLES.items() if environ.get(name)}
    overrides = tuple(Override(key, environ[name], f"{name}={environ[name]}") for name, key in found.items())
    notes = tuple(f"{name} is an old spelling; write {key}={environ[name]}" for name, key in found.items())
    return overrides, notes


def environment_notes(environ: Mapping[str, str]) -> tuple[str, ...]:
    """One note for each variable of the seeds' build that is set and that nothing here reads."""
    names = sorted(name for name in environ if _OLD_VARIABLES.fullmatch(name))
    return tuple(f"{name} is set, but nothing reads it: evener has nothing to compile; unset it" for name in names)

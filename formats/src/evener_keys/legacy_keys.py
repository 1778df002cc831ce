"""Legacy keys: those of the projects that this one grew from, and our own that were renamed.

A legacy key that has an equivalent is rewritten, with a warning that names the new key. One that has none is an error
that says why. The tables are in ``legacy_keys.json``; its rows "renamed in 0.1" go after one release. ``models=NAME``
used to name a file with a model's shape; shapes are now read from the checkpoint, so NAME becomes the served name and
must match the checkpoint's family (``check_model_family``).
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evener.config.keys import Override
from evener.config.old_spellings import OldSpellings, Rewritten
from evener.errors import ConfigError
from evener.key_spec import format_value


@dataclass(frozen=True)
class RenamedKey:
    """A legacy key with an equivalent, ``key``.

    Attributes:
        values: the new values of old ones, which are compared in lower case. Another value stays as it is.
        otherwise: what to type instead of a value that is not in ``values``, which then is an error.
        unit: what is written after the value.
    """

    key: str
    values: Mapping[str, str] = field(default_factory=dict)
    otherwise: str = ""
    unit: str = ""

    def value(self, old: str) -> str:
        """The new value.

        Raises:
            ConfigError: ``old`` has no equivalent.
        """
        if self.otherwise and old.lower() not in self.values:
            raise ConfigError(f"the value {old!r} has no equivalent: {self.otherwise}")
        return self.values.get(old.lower(), old) + self.unit


@dataclass(frozen=True)
class RemovedKey:
    """A legacy key without an equivalent, and why. ``ignored_values`` ask for what happens anyway: only a warning."""

    reason: str
    ignored_values: Sequence[str] = ()


_OFF = frozenset({"false", "0", "none", "null", ""})

#: Legacy switches that are on by default, and the numbers that apply only if they are off.
_PIPELINE = {
    "scheduler.pp_config.prefill_num_tasks_divided_by_pp": "scheduler.pp_config.prefill_num_tasks",
    "scheduler.pp_config.enforce_decode_num_tasks_max": "scheduler.pp_config.decode_num_tasks",
}

_TABLES: Mapping[str, Any] = json.loads(Path(__file__).with_name("legacy_keys.json").read_text("utf-8"))
#: Legacy keys of the command line and of config files; ``name.*`` stands for every key below ``name``.
LEGACY_KEYS: Mapping[str, RenamedKey | RemovedKey] = {
    **{key: RenamedKey(**row) for key, row in {**_TABLES["renamed"], **_TABLES["renamed in 0.1"]}.items()},
    **{key: RemovedKey(**row) for key, row in _TABLES["removed"].items()},
}
#: Legacy values of keys that still exist, ``{key: {old value: new value}}``.
LEGACY_VALUES: Mapping[str, Mapping[str, str]] = _TABLES["values"]
#: Legacy environment variables that set a key, and the key.
LEGACY_ENV_VARS: Mapping[str, str] = _TABLES["environment"]
#: Those that count only if another one is on.
LEGACY_ENV_SWITCHES: Mapping[str, str] = _TABLES["environment switches"]
_UNUSED_LEGACY_ENV = re.compile(r"(CINFER|CHITU)_\w+")


class LegacyKeys(OldSpellings):
    """What the tables say."""

    def rewrite(self, overrides: Iterable[Override]) -> Rewritten:
        return rewrite(overrides)

    def check_claim(self, name: str, model: str, model_type: str) -> None:
        check_model_family(name, model, model_type)

    def from_environ(self, environ: Mapping[str, str]) -> Rewritten:
        return legacy_env_overrides(environ)

    def arguments(self, argv: list[str]) -> list[str]:
        return legacy_arguments(argv, os.environ)


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


def legacy_env_overrides(environ: Mapping[str, str]) -> Rewritten:
    """Keys that legacy environment variables set, and a warning for each."""
    found = {name: key for name, key in LEGACY_ENV_VARS.items() if environ.get(name) and _is_on(name, environ)}
    overrides = tuple(Override(key, environ[name], f"{name}={environ[name]}") for name, key in found.items())
    notes = tuple(f"{name} is a legacy variable; write {key}={environ[name]}" for name, key in found.items())
    return Rewritten(overrides, notes)


def _is_on(name: str, environ: Mapping[str, str]) -> bool:
    switch = LEGACY_ENV_SWITCHES.get(name)
    return switch is None or environ.get(switch, "").lower() not in _OFF


def legacy_arguments(argv: list[str], environ: Mapping[str, str]) -> list[str]:
    """Without a command, keys are for ``serve``: ``python -m evener models=… serve.port=…``. Warns about variables that
    nothing reads."""
    first = argv[0] if argv else ""
    keys = "=" in first or (first.startswith("--") and first not in ("--help", "--version"))
    if not keys and (argv or not environ.get("CONFIG_NAME")):
        return argv
    for note in unused_legacy_env_notes(environ):
        print(f"warning: {note}", file=sys.stderr)
    return ["serve", *argv]


def unused_legacy_env_notes(environ: Mapping[str, str]) -> tuple[str, ...]:
    """One warning for each legacy build variable that is set; nothing here reads them."""
    names = sorted(name for name in environ if _UNUSED_LEGACY_ENV.fullmatch(name))
    return tuple(f"{name} is set, but nothing reads it: evener has no such build options; unset it" for name in names)

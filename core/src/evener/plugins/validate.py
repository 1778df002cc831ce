"""Judging one descriptor: is it well-formed, and does core speak the contract versions that it names?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Any

from evener.contracts.descriptor import Descriptor, Option
from evener.errors import ContractVersionError, DescriptorError, did_you_mean
from evener.plugins.catalog import LAZY, Origin

NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_EVIDENCE = re.compile(r"L[0-5]: .+")
_TUPLES = ("ops", "op_schemas", "states", "state_kinds", "formats")

#: The contract that each announcement, or membership of a group, implements.
_IMPLIED: Mapping[str, str] = {
    "ops": "ops",
    "op_schemas": "ops",
    "states": "state",
    "state_kinds": "state",
    "formats": "quant",
    "architectures": "architecture",
    "request_plugins": "request_plugin",
    "checkpoints": "checkpoint",
    "model_sources": "checkpoint",
}
_IMPLIED_BY_GROUP: Mapping[str, tuple[str, ...]] = {
    "evener.backends": ("probe", "device"),
    "evener.graphs": ("graph",),
    "evener.collectives": ("communicator",),
}


def check_descriptor(origin: Origin, value: object) -> Descriptor:
    """``value`` as the descriptor of ``origin``.

    Raises:
        DescriptorError: it is no ``Descriptor``, or a field of it is malformed; the message names the field.
    """
    if not isinstance(value, Descriptor):
        raise DescriptorError(
            f"{origin}: the entry point names a {type(value).__name__}, not an evener.contracts.descriptor.Descriptor"
        )
    fault = (
        _name_fault(origin, value)
        or _set_fault(value)
        or _names_fault(value)
        or _option_fault(value)
        or _module_fault(origin, value)
        or _evidence_fault(value)
    )
    if fault:
        raise DescriptorError(f"{origin}: {fault}")
    return value


def check_contracts(origin: Origin, descriptor: Descriptor, core: Mapping[str, tuple[int, int]]) -> None:
    """Check the contract versions that ``descriptor`` names against those that ``core`` speaks.

    Raises:
        ContractVersionError: core knows no such contract, or speaks other versions of it.
        DescriptorError: the descriptor does not name the version of a contract that it implements.
    """
    who = origin.noun
    for contract, version in descriptor.contracts.items():
        if contract not in core:
            raise ContractVersionError(
                f"{origin}: core speaks no contract {contract!r}{did_you_mean(contract, core)}; "
                f"upgrade core if {origin.distribution} is newer: pip install -U evener"
            )
        oldest, newest = core[contract]
        if not oldest <= version <= newest:
            spoken = str(newest) if oldest == newest else f"{oldest}..{newest}"
            older = "evener" if version > newest else origin.distribution
            raise ContractVersionError(
                f"{origin}: core speaks {contract} {spoken}, this {who} speaks {version}; "
                f"upgrade the older one: pip install -U {older}"
                + ("" if version <= newest else f", or, if it is yours, implement {contract} {newest}")
            )
    implied = set(_IMPLIED_BY_GROUP.get(origin.group, ()))
    implied |= {contract for field, contract in _IMPLIED.items() if getattr(descriptor, field)}
    missing = sorted(implied - set(descriptor.contracts))
    if missing:
        wanted = ", ".join(f'"{contract}": {core[contract][1]}' for contract in missing if contract in core)
        raise DescriptorError(
            f"{origin}: it implements {', '.join(missing)} without saying which version; "
            f"add {wanted} to the descriptor's contracts"
        )


def _name_fault(origin: Origin, descriptor: Descriptor) -> str | None:
    name: Any = descriptor.name
    if not isinstance(name, str) or not NAME.fullmatch(name):
        return f"name {name!r} is malformed; use lower case letters, digits, '-' and '_', a letter or digit first"
    if name != origin.name:
        return f"the descriptor is named {name!r} but its entry point {origin.name!r}; they must be equal"
    summary: Any = descriptor.summary
    if not isinstance(summary, str) or not summary:
        return f"summary must be one sentence, not {summary!r}"
    contracts: Any = descriptor.contracts
    if not isinstance(contracts, Mapping) or not all(
        isinstance(key, str) and type(version) is int for key, version in contracts.items()
    ):
        return f"contracts must map contract names to integers, not {contracts!r}"
    return None


def _set_fault(descriptor: Descriptor) -> str | None:
    for field in ("serves", "needs"):
        tags: Any = getattr(descriptor, field)
        if not isinstance(tags, Set) or not all(isinstance(tag, str) and tag for tag in tags):
            return f"{field} must be a frozenset of tags, not {tags!r}"
    return None


def _names_fault(descriptor: Descriptor) -> str | None:
    for field in _TUPLES:
        names: Any = getattr(descriptor, field)
        if not isinstance(names, tuple) or not all(isinstance(name, str) and name for name in names):
            return f"{field} must be a tuple of names, not {names!r}"
        if len(set(names)) < len(names):
            return f"{field} names something twice: {names!r}"
    for field in (*LAZY, "aliases"):
        table: Any = getattr(descriptor, field)
        if not isinstance(table, Mapping):
            return f"{field} must be a mapping, not {table!r}"
        for name, value in table.items():
            if not (isinstance(name, str) and name and isinstance(value, str)):
                return f"{field} must map names to text, not {name!r} to {value!r}"
            if field == "aliases":
                if "=" not in name or "=" not in value:
                    return f"aliases must map 'key=value' to 'key=value', not {name!r} to {value!r}"
            elif not _TARGET.fullmatch(value):
                return f"{field}[{name!r}] must read 'module:attribute', not {value!r}"
    return None


def _option_fault(descriptor: Descriptor) -> str | None:
    options: Any = descriptor.options
    if not isinstance(options, Mapping):
        return f"options must be a mapping, not {options!r}"
    for key, option in options.items():
        if not isinstance(option, Option) or option.type not in (int, float, str, bool):
            return f"options[{key!r}] must be an Option of type int, float, str or bool"
        values = (*option.choices, *(() if option.default is None else (option.default,)))
        wrong = [value for value in values if type(value) is not option.type]
        if wrong:
            return f"options[{key!r}]: {wrong[0]!r} is not {option.type.__name__}"
        if option.choices and option.default is not None and option.default not in option.choices:
            return f"options[{key!r}]: the default {option.default!r} is not among its choices {option.choices!r}"
    return None


def _module_fault(origin: Origin, descriptor: Descriptor) -> str | None:
    backend = origin.group == "evener.backends"
    for field in ("module", "probe", "tuning"):
        path: Any = getattr(descriptor, field)
        if path is not None and not (isinstance(path, str) and _DOTTED.fullmatch(path)):
            return f"{field} must be a dotted module path, not {path!r}"
    timeout: Any = descriptor.probe_timeout
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        return f"probe_timeout must be a number of seconds above 0, not {timeout!r}"
    if backend and descriptor.probe is None:
        return "a backend must name its probe module"
    if backend and descriptor.needs:
        return "a backend serves tags; it cannot need any"
    if not backend and (descriptor.probe is not None or descriptor.serves):
        return "only a backend has a probe and serves tags"
    delivers = [field for field in _TUPLES if getattr(descriptor, field)]
    if descriptor.module is None and (delivers or origin.group != "evener.plugins"):
        return f"it must name the module that delivers its {' and '.join(delivers) or 'hooks'}"
    return None


def _evidence_fault(value: Descriptor) -> str:
    if not value.evidence or (isinstance(value.evidence, str) and _EVIDENCE.fullmatch(value.evidence)):
        return ""
    return f"its evidence is {value.evidence!r}; write the level first, L0 to L5, then what ran where: 'L3: …'"

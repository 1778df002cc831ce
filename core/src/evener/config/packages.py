"""Keys of installed packages: their options, their ops and the option values that they claim.

Descriptors are read only for a key or value that the core does not know, so ``LLM`` with plain keys reads none here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from evener.errors import ConfigError
from evener.key_spec import KeySpec

if TYPE_CHECKING:
    from evener.contracts.descriptor import Descriptor

#: Ops that are chosen like the others, but computed by state providers.
STATE_OPS = ("attention",)


def installed_descriptors() -> Iterable[Descriptor]:
    """The descriptors of all installed packages, read now."""
    from evener.plugins.discover import installed_catalog

    return [package.descriptor for package in installed_catalog().packages]


class Packages:
    """Keys of installed packages. ``read`` returns their descriptors; it is called once, at the first use."""

    def __init__(self, read: Callable[[], Iterable[Descriptor]] = installed_descriptors) -> None:
        self._read = read

    @cached_property
    def descriptors(self) -> tuple[Descriptor, ...]:
        """The installed packages."""
        return tuple(self._read())

    @cached_property
    def options(self) -> dict[str, KeySpec]:
        """``{"<package>.<option>": spec}``."""
        return {
            f"{descriptor.name}.{name}": KeySpec.of_option(option)
            for descriptor in self.descriptors
            for name, option in descriptor.options.items()
        }

    @cached_property
    def ops(self) -> frozenset[str]:
        """Names that may follow ``ops.``: the core's ops, those of packages, and ``attention``."""
        from evener.ops.schemas import BUILTIN

        core = {schema.name for schema in BUILTIN}
        return frozenset(
            core | set(STATE_OPS) | {op for descriptor in self.descriptors for op in descriptor.op_schemas}
        )

    def alias(self, key: str, value: str) -> tuple[str, str, str] | None:
        """The package that claims ``key=value``: (key to set, value to set, package), or None.

        Raises:
            ConfigError: two packages claim it, or the claim is not of the form ``key=value``.
        """
        text = f"{key}={value}"
        claims = {d.aliases[text]: d.name for d in self.descriptors if text in d.aliases}
        if not claims:
            return None
        if len(claims) > 1:
            raise ConfigError(f"{text} has different meanings in {' and '.join(sorted(claims.values()))}; "
                              f"type one of: {', '.join(sorted(claims))}")  # fmt: skip
        ((target, package),) = claims.items()
        new_key, equals, new_value = target.partition("=")
        if not equals:
            raise ConfigError(
                f"package {package!r} maps {text} to {target!r}, which is not key=value; report it to its author"
            )
        return new_key, new_value, package

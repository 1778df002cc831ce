"""Old spellings of keys, which an installed package knows. Without one there are none, and an old key is unknown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from evener.config.keys import Override


@dataclass(frozen=True)
class Rewritten:
    """The result of ``OldSpellings.rewrite``: overrides with current keys, one warning for each old key, and names
    that the user gave the model, which must be of its family."""

    overrides: tuple[Override, ...]
    notes: tuple[str, ...] = ()
    claimed: tuple[str, ...] = ()


class OldSpellings:
    """There are none. A package announces another class in ``Descriptor.old_spellings``."""

    def rewrite(self, overrides: Iterable[Override]) -> Rewritten:
        """Replace old keys and values by current ones.

        Raises:
            ConfigError: an old key has no equivalent; the message says why.
        """
        return Rewritten(tuple(overrides))

    def check_claim(self, name: str, model: str, model_type: str) -> None:
        """Check that a name of ``Rewritten.claimed`` fits the model.

        Raises:
            ConfigError: it is of another family.
        """

    def from_environ(self, environ: Mapping[str, str]) -> Rewritten:
        """Keys that old environment variables set."""
        return Rewritten(())

    def arguments(self, argv: list[str]) -> list[str]:
        """The arguments of ``evener`` that mean those of ``python -m evener``. May print warnings."""
        return argv


def installed_spellings() -> OldSpellings:
    """The old spellings of the first installed package that has any."""
    from evener.plugins.discover import installed_catalog

    found = installed_catalog().lazy_imports("old spellings")
    return found[min(found)].load()() if found else OldSpellings()

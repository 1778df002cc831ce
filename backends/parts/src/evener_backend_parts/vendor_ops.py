"""Custom ops of a vendor's package, called only if they are what the vendor published.

A backend ships a JSON file with the schemas that it was written against, each with the repository, commit, file and
line where the vendor defines it. Before an op is used, the schema that the installed package registered is compared
with it: a package of another version is refused with both texts, instead of being called with wrong arguments.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from evener.errors import BackendError
from evener_backend_parts.library import Library


@dataclass(frozen=True)
class PublishedOps:
    """Schemas from one file of a vendor's public repository.

    Attributes:
        repository, commit, file: where they are defined.
        schemas: "namespace::op" → the schema's text, as ``torch.library.Library.define`` takes it.
        lines: "namespace::op" → its line in ``file``.
    """

    repository: str
    commit: str
    file: str
    schemas: Mapping[str, str]
    lines: Mapping[str, int]

    @staticmethod
    def read(path: Path) -> PublishedOps:
        """From a JSON file with these names, where ``ops`` maps an op to its ``schema`` and ``line``."""
        data = json.loads(path.read_text("utf-8"))
        schemas = {name: op["schema"] for name, op in data["ops"].items()}
        lines = {name: op["line"] for name, op in data["ops"].items()}
        return PublishedOps(data["repository"], data["commit"], data["file"], schemas, lines)

    def source(self, name: str) -> str:
        """Where an op is defined, for messages."""
        return f"{self.repository}@{self.commit[:12]} {self.file}:{self.lines[name]}"


@dataclass(frozen=True)
class VendorOps:
    """The ops of one package.

    Attributes:
        published: the schemas that our calls were written against.
        library: the package that registers the ops when it is imported.
    """

    published: PublishedOps
    library: Library

    def refusal(self, name: str, variant: str) -> str | None:
        """Why op ``name`` cannot be called on a device of this variant; None if it can. Imports the package.

        Raises:
            BackendError: no schema of that name is written down.
        """
        if name not in self.published.schemas:
            raise BackendError(f"op {name} was asked for, but the published schemas have only: "
                               f"{', '.join(self.published.schemas)}")  # fmt: skip
        lacking = self.library.refusal(variant)
        if lacking:
            return lacking
        found = registered(name)
        package = f"{self.library.distributions[0]} {self.library.installed()}"
        if found is None:
            return f"{package} does not register {name}, which {self.published.source(name)} defines"
        if _arguments(found) != _arguments(self._parsed[name]):
            return (
                f"{package} registers {found}, but this backend was written for {self.published.schemas[name]} "
                f"({self.published.source(name)})"
            )
        return None

    def function(self, name: str) -> Callable[..., Any]:
        """The registered op; call it after ``refusal`` returned None, with the schema's names as keywords."""
        namespace, _, op = name.partition("::")
        found: Callable[..., Any] = getattr(getattr(torch.ops, namespace), op)
        return found

    @cached_property
    def _parsed(self) -> Mapping[str, Any]:
        return {
            name: torch._C.parse_schema(f"{name.partition('::')[0]}::{text}")
            for name, text in self.published.schemas.items()
        }


def registered(name: str) -> Any | None:
    """The schema that this process has for "namespace::op"; None if there is no such op."""
    namespace, _, op = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), op, None)
    return None if packet is None else packet.default._schema


def _arguments(schema: Any) -> tuple[tuple[str, str, bool], ...]:
    """Name, type, and whether it is written to, of each argument; then the types of results."""
    taken = [
        (argument.name, str(argument.type), argument.alias_info is not None and argument.alias_info.is_write)
        for argument in schema.arguments
    ]
    return (*taken, *(("", str(result.type), False) for result in schema.returns))

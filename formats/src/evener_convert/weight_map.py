"""Weight maps: rules that rename the tensors of a checkpoint. Torch-free.

A JSON object of ``"regular expression": "name"``, in RE2's syntax, whose time is linear: a model's folder may be
hostile, and its file is applied without being asked for. The first expression, in the file's order, that matches a
whole name renames it; ``$1`` and ``\\1`` stand for its groups, and ``null`` drops the tensor. ``weight_map=FILE``
names it; without the key ``<model_type>_weight_map.json`` of the model is used, if there is one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import re2

from evener.contracts.checkpoint import Checkpoint, Extent, Headers
from evener.contracts.conversion.views import CheckpointView, ViewRequest
from evener.errors import CheckpointError
from evener.loading.checkpoint import FolderFiles

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)


class RenamedCheckpoint(CheckpointView):
    """A checkpoint with renamed tensors.

    Args:
        inner: the checkpoint below.
        rules: compiled expressions, and the name that each gives; None drops the tensor.

    Raises:
        CheckpointError: two tensors get the same name.
    """

    changes, keys = "names", frozenset({"weight_map"})

    def __init__(self, inner: Checkpoint, rules: Sequence[tuple[Any, str | None]]) -> None:
        super().__init__(inner)
        self._names: dict[str, str] = {}
        used, untouched = [0] * len(rules), []
        for stored in inner.headers:
            number, match = next(((i, m) for i, (p, _) in enumerate(rules) if (m := p.fullmatch(stored))), (-1, None))
            name: str | None = stored
            if match is None:
                untouched.append(stored)
            else:
                used[number] += 1
                name = rules[number][1] and match.expand(rules[number][1])
            if name is not None and self._names.setdefault(name, stored) != stored:
                raise CheckpointError(
                    f"the weight map of {inner.path} gives {self._names[name]!r} and {stored!r} one name, {name!r}; "
                    "change one of the two rules"
                )
        self.copied = frozenset(name for name, stored in self._names.items() if stored in inner.copied)
        unused = [pattern.pattern for (pattern, _), count in zip(rules, used, strict=True) if not count]
        if unused:
            log.warning("weight map: no tensor matches %s", ", ".join(map(repr, unused)))
        if untouched:
            shown = ", ".join(untouched[:10]) + (", …" if len(untouched) > 10 else "")
            log.info("weight map: %d tensors keep their names: %s", len(untouched), shown)

    @classmethod
    def of(cls, request: ViewRequest) -> RenamedCheckpoint | None:
        """The renamed checkpoint, if there are rules.

        Raises:
            CheckpointError: the rules are not a JSON object of expressions and names, or two tensors get the same name.
        """
        checkpoint, file = request.checkpoint, request.weight_map
        options = re2.Options()
        options.log_errors = False
        named = None if file is None else Path(file).expanduser()
        files = checkpoint if named is None else FolderFiles(named.parent)
        name = f"{checkpoint.config.get('model_type')}_weight_map.json" if named is None else named.name
        if (text := files.text(name)) is None and named is None:
            return None
        try:
            rules = [(re2.compile(key, options), value and re2.sub(r"\$(\d+)", r"\\g<\1>", value))
                     for key, value in json.loads(text or "").items()]  # fmt: skip
            return cls(checkpoint, rules)
        except (ValueError, AttributeError, TypeError, IndexError, re2.error) as error:
            where, why = file or checkpoint.where(name), "there is no such file" if text is None else error
            must = "it must be a JSON object of regular expressions and names"
            raise CheckpointError(f"the weight map {where} cannot be used: {why}; {must}") from error

    @cached_property
    def headers(self) -> Headers:
        return {name: self.inner.headers[stored] for name, stored in self._names.items()}

    def tensor(self, name: str) -> torch.Tensor:
        return self.inner.tensor(self._names.get(name, name))

    def extent(self, name: str) -> Extent | None:
        return self.inner.extent(self._names.get(name, name))

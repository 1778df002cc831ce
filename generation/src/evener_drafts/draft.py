"""What drafts beside the model, declared: a draft model or a head."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from evener.contracts.architecture import Architecture
from evener.engine.sampling.sampler import Sampler
from evener.engine.worker.assembly import Assembly, StoredModel
from evener.layers.builder import Builder


class DeclaredDraft(NamedTuple):
    """Its layers are declared to ``build``, and ``stored`` is how its checkpoint is read."""

    stored: StoredModel
    build: Builder
    model: Architecture
    sampler: Sampler

    def beside(self, a: Assembly) -> Assembly:
        """The assembly with it in place of the model that it drafts for."""
        stored = self.stored
        return replace(
            a, checkpoint=stored.checkpoint, headers=stored.headers, scheme=stored.scheme, build=self.build,
            model=self.model, sampler=self.sampler, other_stages=(), placement=None,
        )  # fmt: skip

"""Speculative decoding in the controller: the configured drafter, and which requests get drafts. Torch-free."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from evener.config.schema import InferConfig
from evener.contracts.generation.drafter import Drafter
from evener.engine.facts.worker_facts import WorkerFacts
from evener.errors import ConfigError, DescriptorError
from evener.plugins.discover import installed_catalog
from evener_generation.drafting.speculation import Speculation, measured


@runtime_checkable
class ForcingGrammars(Protocol):
    """Grammars of an engine that know which tokens a request has no choice about."""

    def forced(self, request: Any) -> list[int] | None:
        """Tokens that its grammar leaves a request no choice about, if all its tokens were read; None: it has none."""


class MeasuredDrafts:
    """The drafts of an engine: tokens of the drafter that ``infer`` names, and of grammars, while they make more tokens
    a second.

    Raises:
        ConfigError: there is no drafter of that name, or the engine cannot have drafts.
        DescriptorError: it cannot be imported, or is no drafter.
    """

    def __init__(self, infer: InferConfig) -> None:
        self._infer, self._drafter = infer, _find_drafter(infer)

    def controller(self, facts: WorkerFacts, grammars: object) -> Speculation:
        """What the scheduler asks. ``grammars``: of the engine.

        Raises:
            ConfigError: the model cannot have drafts.
        """
        if facts.info.pooling:
            raise ConfigError(f"{_key(self._infer)} is for models that generate; leave it out")
        length = self._infer.draft_tokens
        drafts = measured(self._drafter, length, facts.max_reqs + length, facts.info.vocab_size)
        if isinstance(grammars, ForcingGrammars):
            drafts.forced = grammars.forced
        return drafts


def _key(infer: InferConfig) -> str:
    """The key that asks for drafts, with its value."""
    return f"infer.draft_model={infer.draft_model}" if infer.drafter == "none" else f"infer.drafter={infer.drafter}"


def _find_drafter(infer: InferConfig) -> type[Drafter]:
    found, name = installed_catalog().lazy_imports("drafter"), infer.proposes
    if name not in found:
        raise ConfigError(f"infer.drafter is {name!r}; installed drafters: {', '.join(sorted(found))}")
    if infer.pp_size > 1:
        raise ConfigError(f"{_key(infer)} does not work with pipeline stages; set infer.pp_size=1")
    loaded = found[name].load()
    if not (isinstance(loaded, type) and issubclass(loaded, Drafter)):
        package = found[name]
        raise DescriptorError(f"drafter {package.name!r} of {package.distribution}: {package.path} is no Drafter")
    if infer.draft_model is not None and not loaded.by_worker:
        raise ConfigError(f"{_key(infer)} proposes tokens without infer.draft_model; leave one of the two out")
    return loaded

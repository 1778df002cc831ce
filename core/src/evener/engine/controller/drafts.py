"""Speculative decoding: the drafter that the configuration names, and the policy of an installed package for it."""

from __future__ import annotations

from collections.abc import Callable

from evener.config.schema import InferConfig
from evener.contracts.generation.drafter import Drafter
from evener.contracts.generation.drafts import DraftPolicy, Drafts
from evener.engine.wire.worker_facts import WorkerFacts
from evener.errors import ConfigError, DescriptorError
from evener.plugins.discover import installed_catalog


def open_drafts(infer: InferConfig, facts: WorkerFacts) -> Drafts:
    """What the configuration asks for.

    Raises:
        ConfigError: the model or its layout cannot have drafts.
    """
    if infer.proposes == "none":
        return Drafts()
    drafter, policy = find_drafter(infer)
    if facts.info.pooling:
        raise ConfigError(f"{_key(infer)} is for models that generate; leave it out")
    return policy(drafter, infer.draft_tokens, facts.max_reqs + infer.draft_tokens, facts.info.vocab_size)


def _key(infer: InferConfig) -> str:
    """The key that asks for drafts, with its value."""
    return f"infer.draft_model={infer.draft_model}" if infer.drafter == "none" else f"infer.drafter={infer.drafter}"


def find_drafter(infer: InferConfig) -> tuple[Callable[[], Drafter], DraftPolicy]:
    """The installed drafter that the configuration names, and the policy that says when requests get drafts.

    Raises:
        ConfigError: there is none of that name, no policy, or the engine cannot have drafts.
        DescriptorError: it cannot be imported, or is no drafter.
    """
    found, policies = (installed_catalog().lazy_imports(kind) for kind in ("drafter", "draft policy"))
    name = infer.proposes
    if name not in found or not policies:
        known = ", ".join(sorted(found)) if found and policies else "none; type: pip install evener-generation"
        raise ConfigError(f"infer.drafter is {name!r}; installed drafters: {known}")
    if infer.pp_size > 1:
        raise ConfigError(f"{_key(infer)} does not work with pipeline stages; set infer.pp_size=1")
    loaded = found[name].load()
    if not (isinstance(loaded, type) and issubclass(loaded, Drafter)):
        package = found[name]
        raise DescriptorError(f"drafter {package.name!r} of {package.distribution}: {package.path} is no Drafter")
    if infer.draft_model is not None and not loaded.by_worker:
        raise ConfigError(f"{_key(infer)} proposes tokens without infer.draft_model; leave one of the two out")
    return loaded, policies[min(policies)].load()

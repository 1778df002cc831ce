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
    if infer.drafter == "none":
        return Drafts()
    drafter, policy = find_drafter(infer)
    if any(spec.per == "request" for spec in facts.specs):
        raise ConfigError(
            f"infer.drafter={infer.drafter} needs state that can go back a few tokens, and the recurrent layers of "
            "this model keep none; leave infer.drafter out"
        )
    if facts.info.pooling:
        raise ConfigError(f"infer.drafter={infer.drafter} is for models that generate; leave it out")
    return policy(drafter, infer.draft_tokens, facts.max_reqs + infer.draft_tokens, facts.info.vocab_size)


def find_drafter(infer: InferConfig) -> tuple[Callable[[], Drafter], DraftPolicy]:
    """The installed drafter that ``infer.drafter`` names, and the policy that says when requests get drafts.

    Raises:
        ConfigError: there is none of that name, no policy, or the engine cannot have drafts.
        DescriptorError: it cannot be imported, or is no drafter.
    """
    found, policies = (installed_catalog().lazy_imports(kind) for kind in ("drafter", "draft policy"))
    if infer.drafter not in found or not policies:
        known = ", ".join(sorted(found)) if found and policies else "none; type: pip install evener-generation"
        raise ConfigError(f"infer.drafter is {infer.drafter!r}; installed drafters: {known}")
    if infer.pp_size > 1:
        raise ConfigError(f"infer.drafter={infer.drafter} does not work with pipeline stages; set infer.pp_size=1")
    loaded = found[infer.drafter].load()
    if not (isinstance(loaded, type) and issubclass(loaded, Drafter)):
        package = found[infer.drafter]
        raise DescriptorError(f"drafter {package.name!r} of {package.distribution}: {package.path} is no Drafter")
    return loaded, policies[min(policies)].load()

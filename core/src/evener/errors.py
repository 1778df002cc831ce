"""Every exception that evener raises on purpose.

::

    EvenerError
    ├── ConfigError                 an option, key or value that cannot be used
    │   └── UnknownNameError        a name nobody registered (carries a did-you-mean)
    ├── PluginError                 something about an installed package
    │   ├── DescriptorError         its descriptor is malformed or promises what it does not deliver
    │   ├── ContractVersionError    it speaks a contract version that this core does not
    │   ├── HookError               a misspelt, unmarked or failing hook
    │   ├── DuplicateNameError      two packages registered the same name
    │   └── BackendError            finding or choosing the device
    │       ├── ProbeError          its marks fit but the probe failed or hung
    │       └── NoBackendError      nothing can run here, or what was asked for is not installed
    ├── ResolveError                no provider may serve a call site (fallback budget)
    ├── CheckpointError             a model folder or weight file that cannot be used
    ├── ArchitectureError           the checkpoint asks for an architecture nobody registered
    ├── MemoryPlanError             the model and its state do not fit
    ├── RequestError                one request is invalid (HTTP 400)
    │   ├── ContextLengthError      the prompt, or prompt + max_tokens, is too long
    │   ├── TemplateError           the chat template refused the messages
    │   └── RequestPluginError      a request plugin failed on it (HTTP 500)
    ├── OverloadedError             too many requests are waiting (HTTP 429)
    └── EngineError                 the engine cannot go on
        └── EngineDeadError         a worker or the controller is gone (HTTP 503)

A message says what was asked, what is wrong, and what to type next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EvenerError(Exception):
    """Base of every error that evener raises on purpose."""


class ConfigError(EvenerError):
    """An option, key or value that cannot be used."""


class UnknownNameError(ConfigError):
    """A name nobody registered.

    Args:
        what: the kind of thing, as a noun phrase ("option", "architecture").
        name: what was asked for.
        known: the names that exist.
        hint: what to type next, when a did-you-mean is not enough.
    """

    def __init__(self, what: str, name: str, known: Iterable[str], hint: str = "") -> None:
        self.what, self.name, self.known = what, name, sorted(known)
        super().__init__(f"unknown {what} {name!r}" + _sentence(did_you_mean(name, self.known), hint))


class PluginError(EvenerError):
    """Something about an installed package."""


class DescriptorError(PluginError):
    """A descriptor is malformed, or the module does not deliver what it promises."""


class ContractVersionError(PluginError):
    """A package speaks a contract version that this core does not."""


class HookError(PluginError):
    """A misspelt, unmarked or failing hook implementation."""


class DuplicateNameError(PluginError):
    """Two packages registered the same name."""

    def __init__(self, what: str, name: str, first: str, second: str) -> None:
        super().__init__(
            f"{what} {name!r} is registered by both {first!r} and {second!r}; uninstall one of them, "
            f"or disable one with EVENER_DISABLE_PLUGINS={second}"
        )


class BackendError(PluginError):
    """Finding or choosing the device failed."""


class ProbeError(BackendError):
    """A backend's marks fit this machine but its probe failed or hung."""


class NoBackendError(BackendError):
    """No installed backend can run here, or the one asked for is not installed."""


class ResolveError(EvenerError):
    """No provider may serve a call site."""


class CheckpointError(EvenerError):
    """A model folder or weight file that cannot be used."""


class ArchitectureError(EvenerError):
    """The checkpoint asks for an architecture nobody registered, or for a variant it does not implement."""


class MemoryPlanError(EvenerError):
    """The model and its state do not fit into memory."""


class RequestError(EvenerError):
    """One request is invalid. ``param`` names the field, ``code`` is OpenAI's error code where it has one."""

    status = 400

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


class ContextLengthError(RequestError):
    """The prompt, or prompt plus max_tokens, does not fit the context."""

    def __init__(self, message: str, param: str | None = "messages") -> None:
        super().__init__(message, param, "context_length_exceeded")


class TemplateError(RequestError):
    """The chat template refused the messages, or took too long."""


class RequestPluginError(RequestError):
    """A request plugin failed; the message names it."""

    status = 500


class OverloadedError(EvenerError):
    """Too many requests are waiting; try again after ``retry_after`` seconds."""

    status = 429
    retry_after = 1


class EngineError(EvenerError):
    """The engine cannot go on."""


class EngineDeadError(EngineError):
    """A worker or the controller is gone."""

    status = 503


def _sentence(text: str, hint: str) -> str:
    """``text`` and then ``hint`` as a sentence of its own."""
    if not hint:
        return text
    return f"{text} {hint}" if text.endswith("?") else f"{text}. {hint}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?``, else what exists, or that nothing does."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    if not known:
        return "; none is installed"
    shown = ", ".join(known[:20]) + (", …" if len(known) > 20 else "")
    return f"; known: {shown}"

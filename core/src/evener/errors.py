"""All exceptions that evener raises on purpose.

::

    EvenerError
    ├── ConfigError                 an option, key or value that cannot be used
    │   └── UnknownNameError        a name that is not registered (suggests a similar one)
    ├── PluginError                 a problem with an installed package
    │   ├── DescriptorError         its descriptor is malformed or declares something that it does not have
    │   ├── ContractVersionError    it needs a contract version that this core does not have
    │   ├── HookError               a misspelt, unmarked or failing hook
    │   ├── DuplicateNameError      two packages registered the same name
    │   └── BackendError            finding or choosing the device failed
    │       ├── ProbeError          its platform marks match but the probe failed or hung
    │       └── NoBackendError      no backend can run here, or the requested one is not installed
    ├── ResolveError                no provider may run an op (see max_fallback)
    ├── CheckpointError             a model folder or weight file that cannot be used
    ├── ArchitectureError           the checkpoint has an architecture that no package registered
    ├── MemoryPlanError             the model and its state do not fit
    ├── RequestError                one request is invalid (HTTP 400)
    │   ├── ContextLengthError      the prompt, or prompt + max_tokens, is too long
    │   ├── TemplateError           the chat template refused the messages
    │   │   └── RenderTimeoutError  they were not rendered in time (HTTP 504)
    │   └── RequestPluginError      a request plugin failed on it (HTTP 500)
    ├── OverloadedError             too many requests are waiting (HTTP 429)
    └── EngineError                 the engine cannot continue
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
    """A name that is not registered.

    Args:
        what: the kind of thing, as a noun phrase ("option", "architecture").
        name: the unknown name.
        known: the names that exist.
        hint: what to type next, if the suggestion of a similar name is not enough.
    """

    def __init__(self, what: str, name: str, known: Iterable[str], hint: str = "") -> None:
        self.what, self.name, self.known = what, name, sorted(known)
        super().__init__(f"unknown {what} {name!r}" + _sentence(did_you_mean(name, self.known), hint))


class PluginError(EvenerError):
    """A problem with an installed package."""


class DescriptorError(PluginError):
    """A descriptor is malformed, or declares something that its module does not have."""


class ContractVersionError(PluginError):
    """A package needs a contract version that this core does not have."""


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
    """A backend's platform marks match this machine but its probe failed or hung."""


class NoBackendError(BackendError):
    """No installed backend can run here, or the requested one is not installed."""


class ResolveError(EvenerError):
    """No provider may run an op at a call site."""


class CheckpointError(EvenerError):
    """A model folder or weight file that cannot be used."""


class ArchitectureError(EvenerError):
    """The checkpoint has an architecture that no package registered, or a variant that it does not implement."""


class MemoryPlanError(EvenerError):
    """The model and its state do not fit into memory."""


class RequestError(EvenerError):
    """One request is invalid. ``param`` names the field; ``code`` is OpenAI's error code, if it has one."""

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


class RenderTimeoutError(TemplateError):
    """A conversation was not rendered in time, and not because of its template."""

    status = 504


class RequestPluginError(RequestError):
    """A request plugin failed; the message names it."""

    status = 500


class OverloadedError(EvenerError):
    """Too many requests are waiting; try again after ``retry_after`` seconds."""

    status = 429
    retry_after = 1


class EngineError(EvenerError):
    """The engine cannot continue."""


class EngineDeadError(EngineError):
    """A worker or the controller is gone."""

    status = 503


def _sentence(text: str, hint: str) -> str:
    """``text``, followed by ``hint`` as its own sentence."""
    if not hint:
        return text
    return f"{text} {hint}" if text.endswith("?") else f"{text}. {hint}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for a similar name, else the known names, or that there are none."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    if not known:
        return "; none is installed"
    shown = ", ".join(known[:20]) + (", …" if len(known) > 20 else "")
    return f"; known: {shown}"

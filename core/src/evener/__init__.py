"""evener: an engine for large language models with a small core; each kind of hardware is a package of its own.

::

    from evener import LLM, SamplingParams

    with LLM("/data/SmolLM2-135M-Instruct") as llm:
        print(llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text)

Importing this package imports neither torch nor transformers; building an engine does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evener.async_llm import AsyncLLM
    from evener.contracts.outputs import CompletionOutput, RequestOutput
    from evener.llm import LLM
    from evener.sampling_params import SamplingParams

    __version__: str

_LAZY_EXPORTS = {
    "AsyncLLM": "evener.async_llm",
    "CompletionOutput": "evener.contracts.outputs",
    "LLM": "evener.llm",
    "RequestOutput": "evener.contracts.outputs",
    "SamplingParams": "evener.sampling_params",
}

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib_metadata import version

        return version("evener")
    if name in _LAZY_EXPORTS:
        return getattr(import_module(_LAZY_EXPORTS[name]), name)
    raise AttributeError(f"module 'evener' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

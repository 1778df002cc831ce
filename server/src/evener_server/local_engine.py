"""The engine of a command that asks it itself, in this process: started quickly, and with little memory."""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from evener_server.collector import collector_paused
from evener_server.torch_libraries import load_ahead

if TYPE_CHECKING:
    from evener.async_llm import AsyncLLM
    from evener.config.schema import Config


def prepare() -> None:
    """Call this as soon as it is sure that an engine will be started, before numpy and torch are imported."""
    # Threads of numpy's library wait for work in a loop, from its import on: a twentieth of a second of the start.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    load_ahead()


async def start(config: Config) -> AsyncLLM:
    """Start the engine.

    Raises:
        EvenerError: the engine or the front end could not start.
    """
    with collector_paused():
        from evener.async_llm import AsyncLLM
        from evener.frontend.settings import FrontendSettings
        from evener.frontend.tokenizer import Tokenizer
        from evener.loading.checkpoint import open_files

        # Kept until the engine has started: it reads the same header of a single file.
        files = open_files(config.tokenizer or config.model)
        # Before the weights: a large vocabulary takes twice its memory for a moment, which is free for them then.
        # Other files than this one may need the model's class, which is not known yet.
        tokenizer = Tokenizer.of(files) if files.names("tokenizer.json") else None
        _give_back_free_memory()
        settings = replace(FrontendSettings.from_config(config), tokenizer=tokenizer)
        return await AsyncLLM.start(config, "thread", settings)


def _give_back_free_memory() -> None:
    """Give memory back that the C library keeps: a vocabulary leaves 15 to 20 MiB between the parts that stay."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)

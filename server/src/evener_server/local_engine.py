"""The engine of a command that asks it itself, in this process: started quickly, and with little memory."""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from evener_server.collector import collector_paused
from evener_server.early_reading import read_weights_ahead
from evener_server.torch_libraries import load_ahead

if TYPE_CHECKING:
    from evener.async_llm import AsyncLLM
    from evener.config.schema import Config

#: Parameters of glibc's ``mallopt``: free memory at the end of the heap that it keeps, and the size from which an
#: allocation is mapped alone, in bytes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


def prepare() -> None:
    """Call this as soon as it is sure that an engine will be started, before numpy and torch are imported."""
    # Threads of numpy's library wait for work in a loop, from its import on: a twentieth of a second of the start.
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    # A vocabulary, a header and a packed weight leave much free memory.
    _keep_free_memory(64 << 10, 128 << 10)


async def start(config: Config) -> AsyncLLM:
    """Start the engine.

    Raises:
        EvenerError: the engine or the front end could not start.
    """
    read_weights_ahead(config)
    with collector_paused():
        from evener.async_llm import AsyncLLM
        from evener.frontend.settings import FrontendSettings
        from evener.frontend.tokenizer import Tokenizer
        from evener.loading.checkpoint import open_files
        from evener_formats.tokenizers.vocabulary import use_library

        # Kept until the engine has started: it reads the same header of a single file.
        files = open_files(config.tokenizer or config.model)
        # Torch's libraries are loaded while the tokenizer is made.
        use_library()
        load_ahead()
        # Before the weights: a large vocabulary takes twice its memory for a moment, which is free for them then.
        # Other files than this one may need the model's class, which is not known yet.
        tokenizer = Tokenizer.of(files) if files.names("tokenizer.json") else None
        _give_back_free_memory()
        settings = replace(FrontendSettings.from_config(config), tokenizer=tokenizer)
        engine = await AsyncLLM.start(config, "thread", settings)
    # The most that glibc keeps by itself: steps allocate again what they free, and to get it anew takes time.
    _keep_free_memory(64 << 20, 32 << 20)
    return engine


def _keep_free_memory(at_the_end: int, mapped_from: int) -> None:
    """How much freed memory glibc keeps, in bytes: at the end of the heap, and of allocations that it does not map."""
    set_parameter = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_parameter is not None:
        set_parameter(_TRIM_THRESHOLD, at_the_end)
        set_parameter(_MMAP_THRESHOLD, mapped_from)


def _give_back_free_memory() -> None:
    """Give memory back that glibc keeps between the parts that stay: a vocabulary leaves 15 to 20 MiB."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

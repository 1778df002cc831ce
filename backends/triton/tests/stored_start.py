"""Starts a worker on a card that is not here, with Triton's own launch, and prints what Triton compiled.

    python stored_start.py

As on a first start: the kernels come from installed packages or are compiled, and are loaded; only the driver does
nothing. Prints one JSON object: ``compiled`` and ``found``, the names of kernels; ``loaded``, how many binaries the
driver was given; ``launched``, how many launches reached a launcher.
"""

from __future__ import annotations

import json
from typing import Any

from triton import knobs
from triton.runtime import driver
from triton_launches import CARDS, AbsentDriver, work

from evener_conformance.naive.model import find_architecture

SEEN: dict[str, Any] = {"compiled": [], "found": [], "loaded": 0, "launched": 0}


class Launcher:
    """Counts."""

    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *args: Any) -> None:
        SEEN["launched"] += 1


class CountingDriver(AbsentDriver):
    """Takes every binary."""

    launcher_cls = Launcher

    @property
    def utils(self) -> CountingDriver:
        return self

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        assert kernel[:4] == b"\x7fELF"
        SEEN["loaded"] += 1
        return object(), name, 10, 0, 1024

    def unload_module(self, module: object) -> None:
        pass

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}


def listen(*, src: Any, cache_hit: bool, **more: Any) -> None:
    """Of a compilation, or of what was found in its place."""
    SEEN["found" if cache_hit else "compiled"].append(src.name)


def tiny() -> dict[str, Any]:
    """A small model with shapes that the kernels take."""
    config = {**find_architecture("LlamaForCausalLM").tiny_config(), "num_hidden_layers": 1}
    return {**config, "hidden_size": 256, "head_dim": 64, "intermediate_size": 512}


KEYS = {"dtype": "bfloat16", "infer.max_reqs": 2, "infer.max_seq_len": 64, "infer.step_tokens": 32,
        "infer.kv_memory": 1 << 20}  # fmt: skip

if __name__ == "__main__":
    knobs.compilation.listener = listen
    driver.set_active(CountingDriver(CARDS["h200"].compiled_for))
    work(CARDS["h200"], tiny(), KEYS, all_steps=False)
    print(json.dumps(SEEN))

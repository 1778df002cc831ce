"""Constructs the three parts of the adapters. Each process imports only its own, so a front end needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from evener.contracts.adapters import AdapterLimits, Adapters, AdapterSlots, AdapterStacks

if TYPE_CHECKING:
    from evener.config.schema import InferConfig
    from evener.engine.wire.messages import ToController
    from evener.layers.builder import Builder


class LoraAdapters:
    """See ``evener.contracts.adapters``."""

    @staticmethod
    def front_end(
        limits: AdapterLimits | None, reserved: Sequence[str], send: Callable[[ToController], None],
        modules: Sequence[str],
    ) -> Adapters:  # fmt: skip
        """The front end's part, with the adapters of ``modules`` loaded."""
        from evener_adapters.loaded import LoadedAdapters, load_modules

        adapters = Adapters() if limits is None else LoadedAdapters(limits, reserved, send)
        load_modules(adapters, modules)
        return adapters

    @staticmethod
    def controller(infer: InferConfig) -> AdapterSlots:
        """The controller's part."""
        from evener_adapters.slots import LoraSlots

        return LoraSlots(infer.adapter_slots)

    @staticmethod
    def worker(build: Builder, infer: InferConfig, stages: Sequence[Builder]) -> AdapterStacks:
        """A rank's part."""
        from evener_adapters.stacks import LoraStacks

        return LoraStacks(build, infer, stages)

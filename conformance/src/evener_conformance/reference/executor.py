"""The strict executor: an inline worker whose steps must not read values on the host, with a log of its plans."""

from __future__ import annotations

from evener.config.schema import Config
from evener.engine.controller.controller import Controller
from evener.engine.processes.start import build_controller
from evener.engine.wire.plan import Order, Plan, StepResult
from evener.engine.worker.inline_executor import InlineExecutor
from evener.engine.worker.worker import Worker
from evener.errors import ConfigError
from evener_conformance.reference.device import DelayedDevice


class StrictExecutor(InlineExecutor):
    """Submits each step under ``DelayedDevice.step``.

    Attributes:
        log: ("submit" or "read", plan id) in order.
    """

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        device = worker.assembly.device
        if not isinstance(device, DelayedDevice):
            raise ConfigError(
                f"{device.name} does not delay its results; set backend=reference and reference.delay=true"
            )
        self._device = device
        self.log: list[tuple[str, int]] = []

    def submit(self, order: Order) -> None:
        if isinstance(order, Plan):
            self.log.append(("submit", order.id))
        with self._device.step():
            super().submit(order)

    def read(self) -> StepResult:
        result = super().read()
        self.log.append(("read", result.plan))
        return result


def strict_controller(config: Config) -> tuple[Controller, StrictExecutor]:
    """A controller in this process over a delayed device, and its executor.

    Raises:
        EvenerError: as ``build_controller``.
        ConfigError: the configuration's device does not delay its results.
    """
    controller, _ = build_controller(config)
    assert isinstance(controller.executor, InlineExecutor), "a strict executor is inline"
    strict = StrictExecutor(controller.executor.worker)
    controller.executor = strict
    return controller, strict

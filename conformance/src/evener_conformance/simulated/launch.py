"""Launching the chip's own kernels: a broken constraint is an error before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from evener_conformance.graph.nested import mapped, tensors
from evener_conformance.graph.record import Recorder
from evener_conformance.simulated.constraints import ConstraintError, Constraints
from evener_conformance.simulated.namespace import Namespace


class Launcher:
    """Runs functions of CPU tensors as kernels of one device.

    Attributes:
        launches: how often each kernel ran.
    """

    def __init__(self, constraints: Constraints, namespace: Namespace, where: torch.device) -> None:
        self.constraints, self._namespace, self._where = constraints, namespace, where
        self.launches: dict[str, int] = {}

    def __call__(self, kernel: str, function: Callable[..., Any], *args: Any) -> Any:
        """Run ``function`` with CPU aliases of the tensors in ``args``; returns its results on the device. During a
        capture the call is recorded as one call.

        Raises:
            ConstraintError: the chip's kernels cannot take one of the tensors.
        """

        def run(*now: Any) -> Any:
            self.launches[kernel] = self.launches.get(kernel, 0) + 1
            self._check(kernel, now)
            return mapped(self._on_device, function(*mapped(self._on_host, now)))

        recorder = active_recorder()
        with _disable_current_modes():
            return run(*args) if recorder is None else recorder.record(run, args, {})

    def _on_host(self, value: Any) -> Any:
        return self._namespace.host(value) if isinstance(value, torch.Tensor) else value

    def _on_device(self, value: Any) -> Any:
        return value.to(self._where) if isinstance(value, torch.Tensor) else value

    def _check(self, kernel: str, args: Any) -> None:
        for number, tensor in enumerate(tensors(args)):
            if (why := self._fault(tensor)) is not None:
                switch, what = why
                raise ConstraintError(f"{switch}: kernel {kernel} was given tensor {number}, {_short(tensor)}{what}")

    def _fault(self, tensor: torch.Tensor) -> tuple[str, str] | None:
        """The switch whose constraint a tensor breaks, and what is wrong with it; None: the chip takes it."""
        can = self.constraints
        if tensor.device != self._where:
            return "simulated", f", which is on {tensor.device}, not on {self._where}"
        if tensor.dtype is torch.int64 and not can.int64:
            return "simulated.int64=false", "; this chip's kernels take int32"
        if tensor.is_floating_point() and (name := _name(tensor.dtype)) not in can.chip.dtypes:
            return f"simulated.chip={can.chip.name}", f"; this chip has no {name}"
        if not tensor.is_contiguous():
            return "simulated", f" with strides {tensor.stride()}; its kernels ignore strides"
        if tensor.numel() and (off := tensor.data_ptr() % can.alignment):
            return f"simulated.alignment={can.alignment}", f", which begins {off} bytes off"
        return None


def active_recorder() -> Recorder | None:
    """The recorder of the capture in progress, or None."""
    modes = _get_current_dispatch_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, Recorder)), None)


def _short(tensor: torch.Tensor) -> str:
    return f"{_name(tensor.dtype)} {list(tensor.shape)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

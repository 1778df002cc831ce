"""Launching the chip's own kernels: a broken constraint is an error before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_map_only

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
            result = function(*tree_map_only(torch.Tensor, self._namespace.host, now))
            return tree_map_only(torch.Tensor, lambda tensor: tensor.to(self._where), result)

        recorder = active_recorder()
        with _disable_current_modes():
            return run(*args) if recorder is None else recorder.record(run, args, {})

    def _check(self, kernel: str, args: Any) -> None:
        can = self.constraints
        for number, tensor in enumerate(a for a in tree_flatten(args)[0] if isinstance(a, torch.Tensor)):
            what = f"kernel {kernel} was given tensor {number}, {_short(tensor)}"
            if tensor.device != self._where:
                raise ConstraintError(f"simulated: {what}, which is on {tensor.device}, not on {self._where}")
            if tensor.dtype is torch.int64 and not can.int64:
                raise ConstraintError(f"simulated.int64=false: {what}; this chip's kernels take int32")
            name = str(tensor.dtype).removeprefix("torch.")
            if tensor.is_floating_point() and name not in can.chip.dtypes:
                raise ConstraintError(f"simulated.chip={can.chip.name}: {what}; this chip has no {name}")
            if not tensor.is_contiguous():
                raise ConstraintError(f"simulated: {what} with strides {tensor.stride()}; its kernels ignore strides")
            if tensor.numel() and tensor.data_ptr() % can.alignment:
                off = tensor.data_ptr() % can.alignment
                raise ConstraintError(f"simulated.alignment={can.alignment}: {what}, which begins {off} bytes off")


def active_recorder() -> Recorder | None:
    """The recorder of the capture in progress, or None."""
    modes = _get_current_dispatch_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, Recorder)), None)


def _short(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"

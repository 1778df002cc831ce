"""Missing experts that the host computes, if that is faster than copying them (``offload.host_when_sooner``).

If the host's kernels read the device's layout, they read the memory from which experts are copied. Otherwise host
memory holds the experts a second time, in the host's layout. In small steps, a layer's rows are copied to the host too.
The device computes the experts in slots and those that are copied. Meanwhile the host computes its experts' part of
each token's sum, in a thread of its own, because the thread that submits work to the device is busy. The device adds
the sums.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from evener.config.resolve import ResolvedConfig
from evener.contracts.declared import CallSite
from evener.contracts.device import Device
from evener.contracts.ops import Bucket, OpFunction, Static
from evener.contracts.placement import Placement
from evener.contracts.weights import MoEWeights
from evener.layers.builder import Builder
from evener.ops.composites import linear_static
from evener.resolution.resolver import Resolver
from evener_offload.captured_experts import SPARING
from evener_offload.expert_costs import ExpertCosts, host_share
from evener_offload.host_backend import auto_or_number, open_host, upload
from evener_offload.resident_layer import ResidentLayer
from evener_offload.second_layout import Stacks, expert_bytes, keep, second_bytes, second_layout
from evener_offload.slot_products import MOST_TOKENS

log = logging.getLogger("evener.worker")
#: The host is timed with 1 row and with so many rows, so many times each.
_TIMED_ROWS, _TIMES = 4, 3
#: Computes the host's part. Takes rows [T, hidden], ids [T, k] with -1 for experts that are not the host's, weights of
#: the ids [T, k], and the layer's weights. Returns sums [T, hidden].
OnHost = Callable[[torch.Tensor, "np.ndarray[Any, Any]", torch.Tensor, MoEWeights], torch.Tensor]


class HostShare:
    """Chooses the host's experts, and computes them.

    Args:
        most_rows: the host computes missing experts that have at most so many rows; None: measured costs decide.

    Attributes:
        computed: how many experts the host has computed.
        host: the host's device.
        packings: the host's, by layout.

    Raises:
        ConfigError: the host does not compute in the run's dtype.
    """

    def __init__(self, config: ResolvedConfig, device: Device, resolver: Resolver, most_rows: int | None) -> None:
        self._device, self._most_rows, self.computed = device, most_rows, 0
        self.host, self._resolver = open_host(config, resolver)
        # If the host computed on all cores, the thread that shares its core with the submitting thread would be late,
        # and all others would wait for it in every product.
        self.host.limit_threads(config.threads - (config.threads >= SPARING))
        self._thread = ThreadPoolExecutor(1, "evener-host-share", initializer=self.host.select)
        self._device_resolver, self.packings = resolver, self._resolver.packings_by_layout
        #: By path: the stacks that the host reads.
        self._stacks: dict[str, Stacks] = {}
        #: By bytes of an expert: layers with experts of equal size share measured costs.
        self._costs: dict[int, ExpertCosts] = {}
        self._learned: Any = None
        self._biases: dict[str, list[torch.Tensor | None]] = {}
        how = "measured costs decide" if most_rows is None else f"those with at most {most_rows} rows"
        resolver.manifest.notes.append(f"the host computes missing experts of small steps: {how}")

    @staticmethod
    def parse_threshold(value: str) -> int | None:
        """Parse ``offload.host_when_sooner``: None: measured costs decide; a number of rows; 0: off.

        Raises:
            ConfigError: the value is something else.
        """
        return auto_or_number("host_when_sooner", value, MOST_TOKENS, f"a number from 1 to {MOST_TOKENS}")

    def keep(self, site: CallSite, own: Builder, placement: Placement) -> int:
        """Declare the experts of ``site`` for the device and for the host. Returns the bytes of host memory that the
        second layout adds; 0 if both read one layout."""
        found = self._stacks[site.path] = second_layout(site, self._device_resolver, self._resolver, "the host")
        keep(site, found, own, placement)
        return second_bytes(site, found, self.packings)

    def resolve(self, path: str, static: Static, bucket: Bucket) -> OnHost:
        """The function that computes the host's experts of one layer."""
        top, (up_stack, down_stack) = static["top"], self._stacks[path]

        def use(part: str, sizes: dict[str, int], **inner: Any) -> OpFunction:
            return self._resolve(part, f"{path} on the host", inner, bucket, sizes)

        gate_up = use("grouped_linear", {"K": top}, **linear_static(up_stack))
        act = use("act_and_mul", {"T": top}, inner=static["inner"],
                  **{k: static[k] for k in ("activation", "alpha", "limit", "dtype")})  # fmt: skip
        down = use("grouped_linear", {"T": top}, **linear_static(down_stack))
        mix = use("mix_experts", {"K": top}, hidden=static["hidden"], dtype=static["dtype"])

        def compute(x: torch.Tensor, ids: np.ndarray[Any, Any], weights: torch.Tensor, w: MoEWeights) -> torch.Tensor:
            slots, biases = torch.from_numpy(ids), self._biases[path]
            h = act(gate_up(x, up_stack.value, slots, biases[0]).flatten(0, 1))
            pairs = down(h, down_stack.value, slots.reshape(-1, 1), biases[1])
            return mix(pairs.view(*ids.shape, -1), weights)  # type: ignore[no-any-return]

        return compute

    def routed(self, path: str, static: Static, bucket: Bucket, steps: str) -> OpFunction:
        """``routed_experts`` of one layer on the host. ``steps``: which captured steps it is for, for the manifest."""
        gate_up, down = self._stacks[path]
        inner = {**static, "gate_up": gate_up, "down": down, "placement": None}
        return self._resolve("routed_experts", f"{path} on the host in {steps}", inner, bucket, {})

    def _resolve(
        self, op: str, path: str, static: Static, bucket: Bucket, sizes: Mapping[str, int]
    ) -> OpFunction:  # fmt: skip
        choices = self._resolver.manifest.choices
        known = len(choices)
        found = self._resolver.resolve(op, path, static, bucket, sizes)
        # A capture holds only a call of the host, not the host's kernels.
        choices[known:] = [replace(choice, capturable=True) for choice in choices[known:]]
        return found

    def weights(self, path: str, w: MoEWeights) -> MoEWeights:
        """The weights of a layer as the host reads them. ``w``: the device's."""
        (gate_up, down), biases = self._stacks[path], self._biases_of(path, w)
        assert gate_up.value is not None and down.value is not None, "weights are loaded"
        return w._replace(
            gate_up=gate_up.value, down=down.value, gate_up_bias=biases[0], down_bias=biases[1]
        )  # fmt: skip

    def expert_bytes(self, path: str) -> int:
        """Bytes of an expert as the host reads it."""
        return expert_bytes(self._stacks[path], self.packings)

    def _biases_of(self, path: str, w: MoEWeights) -> list[torch.Tensor | None]:
        if path not in self._biases:
            both = w.gate_up_bias, w.down_bias
            self._biases[path] = [None if b is None else self._device.readback(b).wait() for b in both]
        return self._biases[path]

    def choose(
        self, layer: ResidentLayer, path: str, numbers: np.ndarray[Any, Any], compute: OnHost, x: torch.Tensor,
        w: MoEWeights,
    ) -> list[int]:  # fmt: skip
        """The missing experts in ``numbers`` [T, k] that the host computes. ``x``: rows [T, hidden], on the host."""
        self._biases_of(path, w)
        experts, counts = np.unique(numbers, return_counts=True)
        held = layer.residents.slots
        absent = [each not in held for each in experts.tolist()]
        experts, counts = experts[absent], counts[absent]
        if self._most_rows is not None:
            return experts[counts <= self._most_rows].tolist()  # type: ignore[no-any-return]
        costs = self._costs.get(layer.nbytes)
        if costs is None:
            costs = self._costs[layer.nbytes] = self._measure(layer, numbers.shape[1], compute, x, w)
            log.info(
                "an expert of %d bytes is copied in %.0f µs, and computed by the host in %.0f µs with one row and "
                "%.1f µs with each more",
                layer.nbytes,
                1e6 * costs.copy,
                1e6 * costs.first,
                1e6 * costs.more,
            )
        return host_share(experts, counts, costs).tolist()  # type: ignore[no-any-return]

    def learn(self, layer: ResidentLayer, expert: int, needed: list[int]) -> None:
        """Start copying an expert that the host computes, if no such copy is under way. So the slots hold what was used
        last, and other copies wait for at most one such copy."""
        if self._learned is None or self._learned.query():
            self._learned = layer.learn(expert, needed)

    def start(
        self, chosen: list[int], numbers: np.ndarray[Any, Any], compute: OnHost, x: torch.Tensor,
        weights: torch.Tensor, w: MoEWeights,
    ) -> Callable[[], torch.Tensor]:  # fmt: skip
        """Start computing the chosen experts' part of each token's sum. Returns a function that waits for the sums, and
        returns them on the device: [T, hidden]."""
        self.computed += len(chosen)
        ids = np.where(np.isin(numbers, chosen), numbers, -1).astype(np.int32)
        job = self._thread.submit(_inferred, partial(compute, x, ids, weights, w))
        return lambda: upload(self._device, job.result())

    def close(self) -> None:
        """End the thread. Calling ``close`` again does nothing."""
        self._thread.shutdown()

    def _measure(self, layer: ResidentLayer, top: int, compute: OnHost, x: torch.Tensor, w: MoEWeights) -> ExpertCosts:
        """Time a copy of one expert, and the host's products with it. Called in the warm-up, when nothing else runs."""

        def host(count: int) -> float:
            """Seconds of one expert with ``count`` rows: the mean of ``top`` experts, other ones each time."""
            many, weights = x[:1].expand(count, -1).contiguous(), torch.ones(count, top)
            times = []
            for number in range(1 + _TIMES):
                ids = (np.arange(top, dtype=np.int32) + (number + count) * top) % layer.experts
                began = time.perf_counter()
                compute(many, np.tile(ids, (count, 1)), weights, w)
                times.append(time.perf_counter() - began)
            return min(times[1:]) / top

        copy = min(self._device.measure(layer.copy_again) for _ in range(1 + _TIMES))
        one, several = host(1), host(_TIMED_ROWS)
        return ExpertCosts(copy, one, max(0.0, several - one) / (_TIMED_ROWS - 1))


def _inferred(work: Callable[[], torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():  # each thread has its own mode
        return work()

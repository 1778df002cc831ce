"""Keys and values in the simulated chip's layout: blocks of 128 tokens, values transposed, lengths from the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from evener.contracts.device import DeviceCapabilities
from evener.contracts.quant import DTYPE_BYTES
from evener.contracts.quantized.state import QuantizedState
from evener.contracts.state import AttentionProvider, AttentionSpec, StateSpec, StateStep
from evener.ops.reference.state import ReferenceState
from evener.state_pages.elements import ScaledPages
from evener_conformance.simulated.constraints import ConstraintError
from evener_conformance.simulated.device import SimulatedDevice
from evener_conformance.simulated.kernels import aligned_contiguous
from evener_conformance.simulated.launch import active_recorder

_REFERENCE = ReferenceState()


@dataclass(frozen=True)
class Pages:
    """One layer's blocks. ``canonical`` are CPU views of them in the canonical layout, for the kernels."""

    canonical: tuple[torch.Tensor | ScaledPages, ...]


@dataclass
class HostLengths:
    """A step's lengths on the host, for the chip's attention. A capture keeps them as constants until ``refresh``."""

    queries: list[int]
    keys: list[int]
    baked: bool = False

    def refresh(self, query_lens: Sequence[int], kv_lens: Sequence[int]) -> None:
        """Set the lengths of the step that is replayed next."""
        self.queries, self.keys = list(query_lens), list(kv_lens)


@dataclass(frozen=True)
class PagedMeta:
    """One step of a group."""

    step: StateStep
    spec: StateSpec
    attention: AttentionSpec
    block_size: int
    lengths: HostLengths


class SimulatedPaged(AttentionProvider, QuantizedState):
    """The provider of one device. A page is the keys [128, heads, dim], then the values, each aligned."""

    name = "simulated.paged"
    layout = "simulated.paged"
    kinds = frozenset({"full", "window", "chunk"})
    batch_invariant = True
    transposes = True

    def __init__(self, device: SimulatedDevice) -> None:
        self._device, self._constraints = device, device.constraints
        floats = () if self._constraints.int8_state else ("float8_e4m3fn", "float8_e5m2")
        self.scaled = frozenset({"int8", *floats})
        self.replaced = dict.fromkeys({"float8_e4m3fn", "float8_e5m2"} - self.scaled, "int8")
        # Without updates, a replay would use the lengths of the captured step.
        self.graph = (
            "never" if self._constraints.host_lengths and not self._constraints.graph_update else "uniform_decode"
        )

    def supports(self, spec: StateSpec, attention: AttentionSpec, device: DeviceCapabilities) -> str | None:
        odd = [t.wide or t.dtype for t in spec.tensors if (t.wide or t.dtype) not in device.dtypes]
        why = f"the {device.variant} chip has no {odd[0]}" if odd else None
        return why or _REFERENCE.supports(spec, attention, device)

    def block_sizes(self, spec: StateSpec) -> Sequence[int]:
        return (128,) if self._constraints.block_128 else (16, 32, 64, 128)

    def bytes_per_block(self, spec: StateSpec, block_size: int) -> int:
        return sum(self._align_up(t.nbytes * (block_size if spec.per == "token" else 1)) for t in spec.tensors)

    def _align_up(self, nbytes: int) -> int:
        return -(-nbytes // self._constraints.alignment) * self._constraints.alignment

    def _align(self, values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(aligned_contiguous(value, self._constraints.alignment) for value in values)

    def bind(self, storage: torch.Tensor, spec: StateSpec, block_size: int) -> Pages:
        if self._constraints.block_128 and block_size != 128:
            raise ConstraintError(f"simulated.block_128=true: state was bound in blocks of {block_size} tokens")
        step = self._constraints.alignment
        if storage.data_ptr() % step or storage.stride(0) % step:
            raise ConstraintError(
                f"simulated.alignment={step}: pages begin at {storage.data_ptr()}, one every {storage.stride(0)} bytes"
            )
        pages, start, canonical = self._device.namespace.host(storage), 0, []
        for number, tensor in enumerate(spec.tensors):
            nbytes = tensor.nbytes * (block_size if spec.per == "token" else 1)
            flat = pages[:, start : start + nbytes].view(getattr(torch, tensor.dtype))
            if spec.per == "request":
                canonical.append(flat.unflatten(1, tensor.shape))
            elif number and self.transposes and self._constraints.transposed_values:
                canonical.append(flat.unflatten(1, (*tensor.shape, block_size)).permute(0, 3, 1, 2))
            else:
                canonical.append(flat.unflatten(1, (block_size, *tensor.shape)))
            start += self._align_up(nbytes)
        return Pages(tuple(canonical))

    def bind_scaled(
        self, storage: torch.Tensor, spec: StateSpec, block_size: int, scales: Sequence[torch.Tensor]
    ) -> Pages:
        parts = zip(self.bind(storage, spec, block_size).canonical, scales, spec.tensors, strict=True)
        host = self._device.namespace.host
        pages = []
        for view, scale, tensor in parts:
            assert isinstance(view, torch.Tensor), "bind makes tensors"
            pages.append(ScaledPages(view, host(scale), getattr(torch, str(tensor.wide))))
        return Pages(tuple(pages))

    def prepare(self, step: StateStep, spec: StateSpec, attention: AttentionSpec, block_size: int) -> PagedMeta:
        lengths = HostLengths(list(step.host_query_lens), list(step.host_kv_lens))
        if self._constraints.host_lengths and not all(type(n) is int for n in (*lengths.queries, *lengths.keys)):
            raise ConstraintError("simulated.host_lengths=true: a step's lengths are not host integers")
        recorder = active_recorder()
        if recorder is not None:
            lengths.baked = True
            recorder.baked.append(lengths)
        return PagedMeta(step, spec, attention, block_size, lengths)

    def write(self, views: Pages, meta: PagedMeta, *values: torch.Tensor) -> None:
        def kernel(slots: torch.Tensor, *values: torch.Tensor) -> None:
            blocks, offsets = (slots // meta.block_size).long(), (slots % meta.block_size).long()
            for view, value in zip(views.canonical, values, strict=True):
                view[blocks, offsets] = value.to(view.dtype)

        self._device.launch("simulated.write", kernel, self._slots(meta.step), *self._align(values))

    def _slots(self, step: StateStep) -> torch.Tensor:
        return step.slot_mapping

    def attend(
        self, views: Pages, meta: PagedMeta, query: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._compute("attend", views, meta, query, sinks)

    def _compute(self, method: str, views: Pages, meta: PagedMeta, *inputs: torch.Tensor | None) -> torch.Tensor:
        """A method of the reference as a kernel over the chip's own layout."""

        def kernel(
            starts: torch.Tensor, ends: torch.Tensor, table: torch.Tensor, *inputs: torch.Tensor | None
        ) -> torch.Tensor:
            step = self._on_host(meta, starts, ends, table)
            inner = _REFERENCE.prepare(step, meta.spec, meta.attention, meta.block_size)
            found: torch.Tensor = getattr(_REFERENCE, method)(views.canonical, inner, *inputs)
            return found

        fit = (t if t is None else aligned_contiguous(t, self._constraints.alignment) for t in inputs)
        found: torch.Tensor = self._device.launch(f"simulated.{method}", kernel, *self._arrays(meta.step), *fit)
        return found

    def _arrays(self, step: StateStep) -> tuple[torch.Tensor, ...]:
        """What a kernel reads of a step; core has aligned it."""
        return step.query_start, step.kv_lens, step.block_table

    def _on_host(self, meta: PagedMeta, starts: torch.Tensor, ends: torch.Tensor, table: torch.Tensor) -> StateStep:
        """The step as the kernel sees it: its lengths are those of the host, where the chip wants them there."""
        queries, keys, given = starts.diff().tolist(), ends.tolist(), meta.lengths
        if self._constraints.host_lengths and (given.queries, given.keys) != (queries, keys):
            switch = "graph_update" if given.baked else "host_lengths"
            why = "baked in at capture; Replay.update was not told this step's" if given.baked else "given by the step"
            raise ConstraintError(
                f"simulated.{switch}=true: attention has the lengths {given.keys} of queries {given.queries} ({why}), "
                f"but the device has {keys} of {queries}"
            )
        # The reference reads the table and the lists; the rest stays where it is.
        return replace(meta.step, query_start=starts, kv_lens=ends, block_table=table, slot_mapping=table.new_zeros(0),
                       host_query_lens=queries, host_kv_lens=keys)  # fmt: skip

    def copy_blocks(self, views: Pages, source: torch.Tensor, target: torch.Tensor) -> None:
        def kernel(source: torch.Tensor, target: torch.Tensor) -> None:
            _REFERENCE.copy_blocks(views.canonical, source, target)

        self._device.launch("simulated.copy_blocks", kernel, source, target)

    def export_blocks(self, views: Pages, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def kernel(blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(t.contiguous() for t in _REFERENCE.export_blocks(views.canonical, blocks))

        found: tuple[torch.Tensor, ...] = self._device.launch("simulated.export_blocks", kernel, blocks)
        return found

    def import_blocks(self, views: Pages, blocks: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        def kernel(blocks: torch.Tensor, *values: torch.Tensor) -> None:
            _REFERENCE.import_blocks(views.canonical, blocks, values)

        self._device.launch("simulated.import_blocks", kernel, blocks, *self._align(values))

    def workspace(self, spec: StateSpec, attention: AttentionSpec, max_tokens: int, max_kv: int) -> int:
        return max_tokens * max_kv * attention.heads * int(DTYPE_BYTES["float32"])

"""Checks recurrent state: rows that steps advance, and snapshots from which a cached prefix continues."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from evener.contracts.device import Device
from evener.contracts.state import AttentionSpec, RecurrentProvider, StateProvider, StateSpec, StateStep, StateTensor
from evener.plugins.hook_check import check_supports
from evener_conformance.kit.compare import describe_scale_error
from evener_conformance.kit.fallback_monitor import FallbackMonitor, HostCopyMonitor
from evener_conformance.kit.outcome import format_backend_exception
from evener_conformance.naive.state import NaiveRecurrentState

_TOLERANCE = {"float32": (1e-4, 1e-4), "bfloat16": (3e-2, 3e-2), "float16": (1e-2, 1e-2)}
#: Key heads, value heads, key dim, value dim, width of the convolution.
_SHAPES = ((1, 1, 8, 8, 4), (2, 4, 16, 8, 4))


def recurrent_problems(
    provider: StateProvider, device: Device, dtype: str, seed: int, watch: FallbackMonitor
) -> tuple[list[str], list[str], list[str]]:
    """Shapes that were computed, shapes that were refused with the reason, and problems."""
    checked, refused, problems = [], [], []
    for key_heads, heads, key_dim, value_dim, width in _SHAPES:
        channels = 2 * key_heads * key_dim + heads * value_dim
        tensors = (
            StateTensor("conv", (channels, width - 1), dtype),
            StateTensor("delta", (heads, key_dim, value_dim), "float32"),
        )
        spec = StateSpec("recurrent", tensors, per="request")
        how = AttentionSpec(heads, key_dim, 1.0, dtype=dtype, algorithm="gated_delta")
        label = f"recurrent {key_heads}/{heads} heads of {key_dim}/{value_dim}"
        reason = check_supports(provider, provider.supports(spec, how, device.capabilities))
        if reason is not None:
            refused.append(f"{label}: {reason}")
            continue
        size = min(provider.block_sizes(spec))
        if (named := provider.bytes_per_block(spec, size)) < spec.nbytes:
            problems.append(f"{label}: bytes_per_block is {named}, but a row has {spec.nbytes} bytes")
            continue
        try:
            rows = _Rows(provider, device, spec, how, size, seed, watch)
            problems += [f"{label}: {p}" for p in (*rows.problems(channels, width), *watch.memory.problems())]
        except Exception as error:  # raised by the provider: report it
            problems.append(f"{label}: {format_backend_exception(error)}")
        checked.append(label)
    return checked, refused, problems


class _Rows:
    """Two requests that grow, and a third that continues from the first one's snapshot."""

    def __init__(
        self, provider: StateProvider, device: Device, spec: StateSpec, how: AttentionSpec, size: int, seed: int,
        watch: FallbackMonitor,
    ) -> None:  # fmt: skip
        assert isinstance(provider, RecurrentProvider), "a provider of the kind is refused without its interface"
        self._provider, self._device, self._spec, self._how, self._size = provider, device, spec, how, size
        self._noise, self._watch = torch.Generator().manual_seed(seed + 5), watch
        self._type: torch.dtype = getattr(torch, how.dtype)

    def problems(self, channels: int, width: int) -> Iterator[str]:
        """Run all steps and yield all problems."""
        size = self._size
        page = -(-self._provider.bytes_per_block(self._spec, size) // 64) * 64
        storage = self._watch.memory.copy(torch.full((12, page), 0x46, dtype=torch.uint8), "the state pool")
        self._views = self._provider.bind(storage, self._spec, size)
        self._filter = torch.randn(channels, width, generator=self._noise).to(self._type)
        table = torch.tensor([[3, 1, 6, 9], [2, 5, 4, 8], [3, 7, 7, 7]], dtype=torch.int32)
        naive = [self._naive(channels, width) for _ in range(3)]
        lengths = [0, 0, 0]
        steps = [(size + 1, size - 1, 0), (1, 1, 0), (1, 1, 0), (size, 3, 0)]
        for number, counts in enumerate(steps):
            yield from (f"step {number}: {p}" for p in self._step(table, naive, lengths, counts))
            lengths = [b + n for b, n in zip(lengths, counts, strict=True)]
        if self._provider.drafts:  # these pass the end of a block, and the next step goes on before them
            drafted = self._step(table, naive, lengths, (size, 4, 0), (size - 1, 2, 0))
            yield from (f"proposed tokens: {p}" for p in drafted)
            lengths = [lengths[0] + 1, lengths[1] + 2, 0]
            yield from (f"after proposed tokens: {p}" for p in self._step(table, naive, lengths, (2, 3, 0)))
        naive[2].conv, naive[2].delta = self._snapshot
        yield from (f"from a snapshot: {p}" for p in self._step(table, naive, [0, 0, size], (0, 0, 2)))

    def _naive(self, channels: int, width: int) -> NaiveRecurrentState:
        conv, delta = (torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for t in self._spec.tensors)
        return NaiveRecurrentState(self._spec, self._how, conv, delta)

    def _step(
        self, table: torch.Tensor, naive: list[NaiveRecurrentState], before: list[int], counts: tuple[int, ...],
        drafts: tuple[int, ...] = (),
    ) -> Iterator[str]:  # fmt: skip
        """A step of ``counts`` tokens of each request behind those ``before``, the last ``drafts`` of which are
        proposed."""
        rows = [r for r, n in enumerate(counts) if n]
        total, ends = sum(counts), [before[r] + counts[r] for r in rows]
        lens = [counts[r] for r in rows]
        mixed = torch.randn(total, self._filter.shape[0], generator=self._noise).to(self._type)
        decay = -torch.rand(total, self._how.heads, generator=self._noise)
        beta = torch.rand(total, self._how.heads, generator=self._noise)

        memory = self._watch.memory

        def put(name: str, values: list[int]) -> torch.Tensor:
            return memory.copy(torch.tensor(values, dtype=torch.int32), name)

        at = [p for r in rows for p in range(before[r], before[r] + counts[r])]
        slots = [int(table[r, p // self._size]) * self._size + p % self._size
                 for r in rows for p in range(before[r], before[r] + counts[r])]  # fmt: skip
        kept = [end - drafts[r] for r, end in zip(rows, ends, strict=True)] if drafts else None
        step = StateStep(
            tokens=total, requests=len(rows), max_query=max(lens), max_kv=max(ends),
            query_start=put("query_start", [0, *torch.tensor(lens).cumsum(0).tolist()]),
            kv_lens=put("kv_lens", ends), positions=put("positions", at), slot_mapping=put("slot_mapping", slots),
            block_table=memory.copy(table[rows], "block_table"), host_query_lens=lens, host_kv_lens=ends,
            kept_lens=None if kept is None else put("kept_lens", kept), host_kept_lens=kept,
        )  # fmt: skip
        with torch.inference_mode(), HostCopyMonitor(self._device, memory):
            meta = self._provider.prepare(step, self._spec, self._how, self._size)
        inputs = [memory.copy(t, "an input of advance") for t in (mixed, self._filter, decay, beta)]
        with torch.inference_mode(), self._watch.profiled(), self._watch():
            made = self._provider.advance(self._views, meta, *inputs)
        got = self._device.readback(made).wait().float()
        relative, absolute = _TOLERANCE[self._how.dtype]
        start = 0
        for row in rows:
            pieces = []
            left = None
            for token in range(counts[row]):
                if drafts and token == counts[row] - drafts[row]:
                    left = naive[row].conv.clone(), naive[row].delta.clone()
                here = slice(start + token, start + token + 1)
                pieces.append(naive[row].advance(mixed[here], self._filter, decay[here], beta[here]))
                if row == 0 and before[row] + token + 1 == self._size:
                    self._snapshot = naive[row].conv.clone(), naive[row].delta.clone()
            if left is not None:
                naive[row].conv, naive[row].delta = left
            want = torch.cat(pieces).float()
            have = got[start : start + counts[row]]
            start += counts[row]
            if not torch.allclose(have, want, rtol=relative, atol=absolute):
                off = float((have - want).abs().nan_to_num(torch.inf).max())
                like = describe_scale_error(have, want, relative)
                yield f"request {row}, {counts[row]} tokens from {before[row]}: off by up to {off:.3g}" + like

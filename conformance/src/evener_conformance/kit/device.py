"""Checking a device: memory, uploads and read-back, streams, events, random state, and its claims."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from evener.contracts.device import Device
from evener_conformance.kit.outcome import CaseResult, Check, Outcome, format_backend_exception

Found = Iterator[tuple[Outcome, str]]


def device_results(check: Check, device: Device, pretended: bool) -> Iterator[CaseResult]:
    """One result for each promise of the device contract."""
    if pretended:
        yield check.result("all", "not applicable", "pretended: this is host memory, not the backend's device")
        return
    cases = {
        "names": _names, "memory": _memory, "zeros": _zeros, "upload": _upload, "readback": _readback,
        "readback keeps order": _order, "compute types": _types, "random state": _random, "streams and events": _events,
        "host_fallbacks": _fallbacks,
    }  # fmt: skip
    for name, run in cases.items():
        try:
            found = list(run(device))
        except Exception as error:  # the backend's exception is the failure
            found = [("failed", format_backend_exception(error))]
        wrong = [detail for outcome, detail in found if outcome == "failed"]
        if wrong:
            yield check.result(name, "failed", "; ".join(wrong))
        else:
            yield check.result(name, *(found[0] if found else ("passed", "")))


def _names(device: Device) -> Found:
    if not device.name or not isinstance(device.name, str):
        yield "failed", f"name is {device.name!r}"
    if device.index != 0:
        yield "failed", f"device 0 was opened, but its index is {device.index}"
    able = device.capabilities
    unknown = [d for d in able.dtypes | able.emulated if not isinstance(getattr(torch, d, None), torch.dtype)]
    if unknown:
        yield "failed", f"torch has no dtype {', '.join(sorted(unknown))}"
    if not able.dtypes | able.emulated:
        yield "failed", "it claims no compute dtype"
    if able.alignment < 1 or able.alignment & (able.alignment - 1):
        yield "failed", f"alignment is {able.alignment}, which is not a power of two"
    if able.graph_update and not able.graphs:
        yield "failed", "graph_update without graphs"
    if able.max_captures is not None and able.max_captures < 1:
        yield "failed", f"max_captures is {able.max_captures}"
    if able.host_memory and device.torch_device.type != "cpu":
        yield "failed", f"host_memory is set, but its tensors are on {device.torch_device}"


def _memory(device: Device) -> Found:
    before = device.memory()
    if not 0 < before.free <= before.total:
        yield "failed", f"{before.free} bytes are free of {before.total}"
        return
    if device.capabilities.host_memory:
        return
    size = min(64 << 20, before.free // 4)
    held = device.zeros(size)
    held.fill_(1)
    device.synchronize()
    after = device.memory()
    taken = before.free - after.free
    if taken < size // 2:
        yield "failed", f"{size} bytes were allocated, and {taken} fewer are free"
    if taken > 4 * size + (64 << 20):
        yield "failed", f"{size} bytes were allocated, and {taken} fewer are free"
    del held
    if after.total != before.total:
        yield "failed", f"the total changed from {before.total} to {after.total}"


def _zeros(device: Device) -> Found:
    # Twice: the second time the memory may have been written before.
    for _ in range(2):
        made = device.zeros(100_003)
        if made.dtype != torch.uint8 or made.shape != (100_003,) or made.device.type != device.torch_device.type:
            yield "failed", f"zeros gives {made.dtype} {list(made.shape)} on {made.device}"
            return
        if device.readback(made).wait().any():
            yield "failed", "zeros are not zero"
        if made.data_ptr() % device.capabilities.alignment:
            yield "failed", f"zeros start at an address that is no multiple of {device.capabilities.alignment}"
        made.fill_(0x5A)
        del made


def _upload(device: Device) -> Found:
    for dtype in (np.int32, np.float32, np.uint8):
        array = np.arange(3001).astype(dtype).reshape(-1, 1)
        right = torch.from_numpy(array.copy())
        made = device.upload(array)
        array[:] = 1
        device.synchronize()
        if made.device.type != device.torch_device.type:
            yield "failed", f"upload puts it on {made.device}, not on {device.torch_device}"
        got = device.readback(made).wait()
        if got.dtype != right.dtype or not torch.equal(got, right):
            yield "failed", f"an uploaded {np.dtype(dtype)} array has other values; is the caller's memory read later?"


def _readback(device: Device) -> Found:
    for dtype in sorted(device.capabilities.dtypes | {"int32", "uint8", "bool"}):
        right = (torch.arange(-100, 103) * 3).to(getattr(torch, dtype)).view(7, 29)
        for value in (right, right.t(), right[:, 3:5], right[0, 0], right[:0]):
            made = value.contiguous().to(device.torch_device, copy=True)
            if not value.is_contiguous() and value.dim() == 2:
                made = made.t().contiguous().t()
            back = device.readback(made)
            if made.numel():
                made.fill_(1)
            got = back.wait()
            if got.device.type != "cpu" or got.dtype != value.dtype or got.shape != value.shape:
                back_as = f"{got.dtype} {list(got.shape)} on {got.device}"
                yield "failed", f"a {dtype} {list(value.shape)} comes back as {back_as}"
            elif not torch.equal(got, value):
                yield (
                    "failed",
                    f"a {dtype} {list(value.shape)} comes back with other values, or with later ones",
                )
            elif not back.ready():
                yield "failed", "ready() is False after wait()"


def _order(device: Device) -> Found:
    """A read-back sees all work that was submitted before it, and none that came after."""
    size = 256
    x = torch.eye(size, device=device.torch_device)
    backs = []
    for step in range(8):
        x = x * 2
        y = x
        for _ in range(4):
            y = y @ torch.eye(size, device=device.torch_device)
        backs.append((device.readback(y), 2.0 ** (step + 1)))
        y.zero_()
    for back, right in backs:
        got = back.wait()
        if not torch.equal(got, torch.eye(size) * right):
            yield "failed", f"a read-back between two steps holds {float(got.max())} instead of {right}"
            return


def _types(device: Device) -> Found:
    for dtype in sorted(device.capabilities.dtypes | device.capabilities.emulated):
        kind = getattr(torch, dtype)
        a, b = (torch.randn(33, 17) for _ in range(2))
        x, y = (t.to(kind).to(device.torch_device) for t in (a, b))
        got = device.readback((x @ y.t() + x[:, :1]).float()).wait()
        want = a.to(kind).float() @ b.to(kind).float().t() + a.to(kind).float()[:, :1]
        if not torch.allclose(got, want, rtol=2e-2, atol=1e-1):
            yield "failed", f"it claims {dtype}, but a product is off by {float((got - want).abs().max()):.3g}"


def _random(device: Device) -> Found:
    drawn = []
    for seed in (7, 7, 8):
        device.seed(seed)
        drawn.append(device.readback(torch.randn(999, device=device.torch_device)).wait().clone())
    if not torch.equal(drawn[0], drawn[1]):
        yield "failed", "the same seed gave two sequences"
    if torch.equal(drawn[0], drawn[2]):
        yield "failed", "two seeds gave the same sequence"


def _events(device: Device) -> Found:
    try:
        stream, event = device.new_stream(), device.new_event()
    except NotImplementedError as error:
        yield "not applicable", str(error)
        return
    x = torch.ones(512, 512, device=device.torch_device)
    device.synchronize()
    with stream:
        for _ in range(8):
            x = x @ x / 512
        event.record()
    event.synchronize()
    if not event.query():
        yield "failed", "query() is False after synchronize()"
    device.synchronize()
    if float(device.readback(x).wait().sub(1).abs().max()) > 1e-3:
        yield "failed", "an event completed before the work on its stream"
    with stream:
        for _ in range(8):
            x = x @ x / 512
        event.record()
    event.wait()  # the stream that was current before waits, and the host does not
    if float(device.readback(x + 0).wait().sub(1).abs().max()) > 1e-3:
        yield "failed", "a stream did not wait for an event"


def _fallbacks(device: Device) -> Found:
    count = device.host_fallbacks()
    if count is None:
        yield "not applicable", "the device does not count them"
    elif type(count) is not int or count < 0:
        yield "failed", f"host_fallbacks() is {count!r}"

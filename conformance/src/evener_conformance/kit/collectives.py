"""Checking a communicator on two ranks, each in its own process: every rank knows all inputs, and so its results."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from evener.contracts.communicator import Communicator
from evener.errors import BackendError
from evener_conformance.kit.outcome import CaseResult, Check, format_backend_exception
from evener_conformance.kit.subject import Subject, open_subject

_TIMEOUT = 180
_KINDS = ("float32", "bfloat16", "float16", "int32")


def collective_results(check: Check, subject: Subject, seed: int) -> Iterator[CaseResult]:
    """The results of two ranks; every case must be right on both."""
    devices = device_count(subject)
    if devices < 2 and not (subject.device.simulated or subject.device.capabilities.host_memory):
        yield check.result("two ranks", "unknown", f"two devices are needed, and there is {devices}")
        return
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    spec = {
        "backend": subject.name, "pretend": subject.pretended, "options": subject.options, "port": port, "seed": seed,
        "devices": devices,
    }  # fmt: skip
    command = [sys.executable, "-m", "evener_conformance.kit.collectives"]
    ranks = [
        subprocess.Popen([*command, json.dumps({**spec, "rank": rank})], stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]  # fmt: skip
    for rank, process in enumerate(ranks):
        try:
            out, stderr_text = process.communicate(timeout=_TIMEOUT)
        except subprocess.TimeoutExpired:
            for each in ranks:
                each.kill()
            yield check.result(f"rank {rank}", "failed", f"it hung: no result after {_TIMEOUT} seconds")
            return
        if process.returncode:
            yield check.result(f"rank {rank}", "failed", " ".join(stderr_text.strip().splitlines()[-3:]))
            continue
        for case, problems in json.loads(out.splitlines()[-1]).items():
            yield check.result(f"{case}, rank {rank}", "failed" if problems else "passed", "; ".join(problems))


def device_count(subject: Subject) -> int:
    """How many devices two ranks can have, each its own. Nobody probed a pretended backend: its device 1 is tried."""
    if not subject.pretended or subject.device.capabilities.host_memory:
        return len(subject.loaded.selection.probe.devices)
    try:
        subject.loaded.open_device(1)
    except BackendError:
        return 1
    return 2


def rank_input(rank: int, kind: str, *shape: int, seed: int) -> torch.Tensor:
    """Small whole numbers, whose sums are exact in every dtype."""
    noise = torch.Generator().manual_seed(seed + 1000 * rank)
    return torch.randint(-20, 20, shape, generator=noise).to(getattr(torch, kind))


def check_collectives(
    communicator: Communicator, where: torch.device, read: Callable[[Any], torch.Tensor], seed: int
) -> dict[str, Any]:
    """``{case: problems}`` of this rank."""
    mine, other, found = communicator.rank, 1 - communicator.rank, dict[str, list[str]]()

    def put(rank: int, kind: str, *shape: int) -> torch.Tensor:
        return rank_input(rank, kind, *shape, seed=seed).to(where)

    def expect_equal(case: str, work: Callable[[], Any], want: torch.Tensor, kept: torch.Tensor | None = None) -> None:
        problems = found.setdefault(case, [])
        before = None if kept is None else kept.clone()
        try:
            got = read(work())
        except Exception as error:  # the backend's exception is the failure
            problems.append(format_backend_exception(error))
            return
        if got.shape != want.shape or got.dtype != want.dtype or not torch.equal(got, want):
            problems.append(_describe(got, want.to(got.device)))
        if kept is not None and before is not None and not torch.equal(read(kept), read(before)):
            problems.append("its input is not donated and was changed")

    for kind in _KINDS:
        a, b = (rank_input(r, kind, 6, 37, seed=seed) for r in (0, 1))
        floats = a.is_floating_point()
        if floats or kind in communicator.capabilities.dtypes:
            for shape in ((6, 37), (5, 37), (1,), (6, 37), (4099,)):  # odd numbers of elements leave a tail
                x, y = (rank_input(r, kind, *shape, seed=seed) for r in (0, 1))
                expect_equal(f"all_reduce {kind}",
                    lambda k=kind, s=shape: communicator.all_reduce(put(mine, k, *s)), x + y)  # type: ignore[misc]  # fmt: skip
            for dim in (0, 1):
                x, y = (rank_input(r, kind, 6, 4, seed=seed) for r in (0, 1))
                expect_equal(f"reduce_scatter {kind}, dim {dim}",
                    lambda k=kind, d=dim: communicator.reduce_scatter(put(mine, k, 6, 4), d),  # type: ignore[misc]
                    (x + y).chunk(2, dim)[mine].contiguous())  # fmt: skip
        for dim in (-1, 0):
            given = put(mine, kind, 6, 37)
            expect_equal(f"all_gather {kind}, dim {dim}",
                lambda g=given, d=dim: communicator.all_gather(g, d), torch.cat((a, b), dim), given)  # type: ignore[misc]  # fmt: skip
        for source in (0, 1):
            expect_equal(f"broadcast {kind} from {source}",
                lambda k=kind, s=source: communicator.broadcast(put(mine, k, 6, 37), s), (a, b)[source])  # type: ignore[misc]  # fmt: skip
    sends = ((1, 3), (2, 0))
    receives = [sends[r][mine] for r in (0, 1)]
    whole = [rank_input(r, "float32", sum(sends[r]), 5, seed=seed) for r in (0, 1)]
    parts = [w.split(list(s))[mine] for w, s in zip(whole, sends, strict=True)]
    given = whole[mine].to(where)
    expect_equal(
        "all_to_all of uneven parts",
        lambda: communicator.all_to_all(given, sends[mine], receives),
        torch.cat(parts),
        given,
    )
    empty = torch.zeros(3, 7, device=where)
    for sender in (0, 1):
        if mine == sender:
            communicator.send(put(mine, "float32", 3, 7), other)
        else:
            expect_equal(f"send and receive from {sender}",
                lambda e=empty, s=sender: communicator.receive(e, s),  # type: ignore[misc]
                rank_input(sender, "float32", 3, 7, seed=seed))  # fmt: skip
    communicator.barrier()
    return found


def _describe(got: torch.Tensor, want: torch.Tensor) -> str:
    """What differs: types and shapes, or the elements."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"got {got.dtype} {list(got.shape)}, expected {want.dtype} {list(want.shape)}"
    places = (got != want).nonzero()
    first = tuple(places[0].tolist())
    return (
        f"{len(places)} of {want.numel()} elements of {want.dtype} {list(want.shape)} differ; the first at "
        f"{list(first)}: got {got[first].item():g}, expected {want[first].item():g}"
    )


def main(spec: dict[str, Any]) -> None:
    """Run one rank and print its results as JSON."""
    subject = open_subject(spec["backend"], spec["pretend"], spec["options"], spec["rank"] % spec["devices"])
    assert subject.communicator is not None, "the caller checked that a communicator is registered"
    address = f"tcp://127.0.0.1:{spec['port']}"
    communicator = subject.communicator.value("tp", [0, 1], spec["rank"], 2, address)
    device = subject.device

    def read(tensor: torch.Tensor) -> torch.Tensor:
        return device.readback(tensor).wait().clone()

    found = check_collectives(communicator, device.torch_device, read, spec["seed"])
    communicator.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

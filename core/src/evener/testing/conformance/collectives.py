"""Checking a communicator on two ranks, each a process of its own: what each gets follows from what all have."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from evener.contracts.communicator import Communicator
from evener.testing.conformance.outcome import CaseResult, Check, raised
from evener.testing.conformance.subject import Subject, open_subject

_TIMEOUT = 180
_KINDS = ("float32", "bfloat16", "float16", "int32")


def collective_results(check: Check, subject: Subject, seed: int) -> Iterator[CaseResult]:
    """What two ranks found; both must have found the same right."""
    devices = len(subject.loaded.selection.probe.devices)
    if devices < 2 and subject.level == "L5" and not subject.device.capabilities.host_memory:
        yield check.result("two ranks", "unknown", f"it takes two devices, and {devices} is here")
        return
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    orders = {
        "backend": subject.name, "pretend": subject.pretended, "options": subject.options, "port": port, "seed": seed,
        "devices": devices,
    }  # fmt: skip
    command = [sys.executable, "-m", "evener.testing.conformance.collectives"]
    ranks = [
        subprocess.Popen([*command, json.dumps({**orders, "rank": rank})], stdout=subprocess.PIPE,
                         stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]  # fmt: skip
    for rank, process in enumerate(ranks):
        try:
            out, said = process.communicate(timeout=_TIMEOUT)
        except subprocess.TimeoutExpired:
            for each in ranks:
                each.kill()
            yield check.result(f"rank {rank}", "failed", f"it hung: nothing after {_TIMEOUT} seconds")
            return
        if process.returncode:
            yield check.result(f"rank {rank}", "failed", " ".join(said.strip().splitlines()[-3:]))
            continue
        for case, problems in json.loads(out.splitlines()[-1]).items():
            yield check.result(f"{case}, rank {rank}", "failed" if problems else "passed", "; ".join(problems))


def of_rank(rank: int, kind: str, *shape: int, seed: int) -> torch.Tensor:
    """Small whole numbers, whose sums every type has."""
    noise = torch.Generator().manual_seed(seed + 1000 * rank)
    return torch.randint(-20, 20, shape, generator=noise).to(getattr(torch, kind))


def findings(talk: Communicator, where: torch.device, read: Callable[[Any], torch.Tensor], seed: int) -> dict[str, Any]:
    """``{case: problems}`` of this rank."""
    mine, other, found = talk.rank, 1 - talk.rank, dict[str, list[str]]()

    def put(rank: int, kind: str, *shape: int) -> torch.Tensor:
        return of_rank(rank, kind, *shape, seed=seed).to(where)

    def judge(case: str, work: Callable[[], Any], want: torch.Tensor, kept: torch.Tensor | None = None) -> None:
        problems = found.setdefault(case, [])
        before = None if kept is None else kept.clone()
        try:
            got = read(work())
        except Exception as error:  # the backend's; it is the finding
            problems.append(raised(error))
            return
        if got.shape != want.shape or got.dtype != want.dtype or not torch.equal(got, want):
            problems.append(f"got {got.dtype} {list(got.shape)} {got.flatten()[:6].tolist()}, "
                            f"not {want.dtype} {list(want.shape)} {want.flatten()[:6].tolist()}")  # fmt: skip
        if kept is not None and before is not None and not torch.equal(read(kept), read(before)):
            problems.append("its input was changed, which is not donated")

    for kind in _KINDS:
        a, b = (of_rank(r, kind, 6, 37, seed=seed) for r in (0, 1))
        floats = a.is_floating_point()
        if floats or kind in talk.capabilities.dtypes:
            for shape in ((6, 37), (5, 37), (1,), (6, 37), (4099,)):  # odd numbers of elements have tails
                x, y = (of_rank(r, kind, *shape, seed=seed) for r in (0, 1))
                judge(f"all_reduce {kind}",
                      lambda k=kind, s=shape: talk.all_reduce(put(mine, k, *s)), x + y)  # type: ignore[misc]  # fmt: skip
            for dim in (0, 1):
                x, y = (of_rank(r, kind, 6, 4, seed=seed) for r in (0, 1))
                judge(f"reduce_scatter {kind}, dim {dim}",
                      lambda k=kind, d=dim: talk.reduce_scatter(put(mine, k, 6, 4), d),  # type: ignore[misc]
                      (x + y).chunk(2, dim)[mine].contiguous())  # fmt: skip
        for dim in (-1, 0):
            given = put(mine, kind, 6, 37)
            judge(f"all_gather {kind}, dim {dim}", lambda g=given, d=dim: talk.all_gather(g, d), torch.cat((a, b), dim),  # type: ignore[misc]
                  given)  # fmt: skip
        for source in (0, 1):
            judge(f"broadcast {kind} from {source}",
                  lambda k=kind, s=source: talk.broadcast(put(mine, k, 6, 37), s), (a, b)[source])  # type: ignore[misc]  # fmt: skip
    sends = ((1, 3), (2, 0))
    receives = [sends[r][mine] for r in (0, 1)]
    whole = [of_rank(r, "float32", sum(sends[r]), 5, seed=seed) for r in (0, 1)]
    parts = [w.split(list(s))[mine] for w, s in zip(whole, sends, strict=True)]
    given = whole[mine].to(where)
    judge("all_to_all of uneven parts", lambda: talk.all_to_all(given, sends[mine], receives), torch.cat(parts), given)
    empty = torch.zeros(3, 7, device=where)
    for sender in (0, 1):
        if mine == sender:
            talk.send(put(mine, "float32", 3, 7), other)
        else:
            judge(f"send and receive from {sender}", lambda e=empty, s=sender: talk.receive(e, s),  # type: ignore[misc]
                  of_rank(sender, "float32", 3, 7, seed=seed))  # fmt: skip
    talk.barrier()
    return found


def main(orders: dict[str, Any]) -> None:
    """One rank: prints what it found."""
    subject = open_subject(orders["backend"], orders["pretend"], orders["options"], orders["rank"] % orders["devices"])
    assert subject.communicator is not None, "a communicator is registered"
    address = f"tcp://127.0.0.1:{orders['port']}"
    talk = subject.communicator.value("tp", [0, 1], orders["rank"], 2, address)
    device = subject.device

    def read(tensor: torch.Tensor) -> torch.Tensor:
        return device.readback(tensor).wait().clone()

    found = findings(talk, device.torch_device, read, orders["seed"])
    talk.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

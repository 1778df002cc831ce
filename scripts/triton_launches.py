"""Which kernels a worker launches on a card that this machine does not have: the worker runs, on the host, without
computing.

Everything on the way to a launch is the real thing: the engine, the choice of kernels, their launch sizes, and Triton's
own look at each argument. In place of a compiled kernel nothing runs, and products of torch's library are left empty
too. Tokens and lengths come from the plans, so no choice depends on what was computed.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from evener.backend_search import BackendSearch
from evener.config import from_overrides
from evener.contracts.descriptor import Descriptor
from evener.contracts.device import Device, MemoryInfo
from evener.contracts.graph import GraphCapture, Replay
from evener.contracts.hooks import hookimpl
from evener.contracts.probe import Marks, ProbedDevice, ProbeResult
from evener.engine.wire.messages import LogitBias, Sampling
from evener.engine.wire.plan import Admission, Plan, SamplePlan, StepMasks, TableUpdate
from evener.engine.worker.worker import Worker
from evener.resolution.buckets import capture_sizes
from evener_backend_cuda.capability import capabilities
from evener_conformance.distributions import write_distribution
from evener_conformance.reference.device import HostDevice

#: A launch: the function, its signature, its constants, what is known of its arguments, and its options.
Launch = tuple[Any, Mapping[str, Any], Mapping[Any, Any], Mapping[Any, Any], Any]


@dataclass(frozen=True)
class Card:
    """What decides about launches on a card.

    Attributes:
        name: as the driver calls it; packages have measured launch sizes for some names.
        capability: of computing.
        units: multiprocessors.
        shared: bytes of shared memory that a program may have.
        memory: bytes of the card.
        features: what torch's library has there (``evener_backend_cuda.scaled``).
        conditions: of the measured launch sizes.
    """

    name: str
    capability: tuple[int, int]
    units: int
    shared: int
    memory: int
    features: frozenset[str] = frozenset()
    conditions: tuple[tuple[str, str], ...] = ()

    @property
    def target(self) -> str:
        """As in ``sm_90``."""
        return "sm_{}{}".format(*self.capability)

    @property
    def compiled_for(self) -> GPUTarget:
        """The same as Triton has it."""
        return GPUTarget("cuda", 10 * self.capability[0] + self.capability[1], 32)


#: Linux: room that may be larger than memory.
_NORESERVE = 0x4000
_SCALED = frozenset({"scaled-rows", "scaled-blocks"})
#: An H200 has measured launch sizes in the package of its backend; they count for these versions.
_MEASURED = (("torch", "2.11.0"), ("driver", "580.159"), ("cuda", "13.0"), ("triton", "3.6.0"))
CARDS = {
    "a100": Card("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163 << 10, 80 << 30),
    "h100": Card("NVIDIA H100 80GB HBM3", (9, 0), 132, 227 << 10, 80 << 30, _SCALED),
    "h200": Card("NVIDIA H200", (9, 0), 132, 227 << 10, 140 << 30, _SCALED, _MEASURED),
    "b200": Card("NVIDIA B200", (10, 0), 148, 227 << 10, 180 << 30, frozenset({"scaled-rows"})),
}


class _CardDevice(HostDevice):
    """Host memory that says of itself what a card says."""

    def __init__(self, card: Card) -> None:
        super().__init__(0)
        can = capabilities(card.capability, card.units, card.shared)
        self.capabilities = replace(can, features=can.features | card.features, host_calls=False)
        self.name, self._card = card.name, card

    def memory(self) -> MemoryInfo:
        return MemoryInfo(self._card.memory * 9 // 10, self._card.memory)

    def zeros(self, nbytes: int) -> torch.Tensor:
        # The system gives a page when something writes there, and nothing does: the card may have more memory.
        room = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        return torch.frombuffer(room, dtype=torch.uint8)

    def conditions(self) -> Mapping[str, str]:
        return dict(self._card.conditions)


class _Runs(GraphCapture):
    """Runs what is captured, once."""

    def capture(self, segment: Callable[[], None]) -> Replay:
        segment()
        return _Nothing()


class _Nothing(Replay):
    def __call__(self) -> None:
        return


_CHOSEN: list[Card] = []
descriptor = Descriptor(
    name="absent",
    summary="a card that is not here; its launches are recorded",
    contracts={"probe": 2, "device": 2, "graph": 1},
    probe="triton_launches",
    module="triton_launches",
    serves=frozenset({"triton", "namespace:cpu", "wave:32"}),
    tuning="evener_backend_cuda.measured",
)


def marks() -> Marks:
    """Every machine has a host."""
    return Marks(True, ("nothing of the card is needed",))


def result_from_marks(marks: Marks) -> ProbeResult:
    """Never chosen unless it is named."""
    return ProbeResult(1, (ProbedDevice(0, "absent"),), ("nothing of the card is needed",))


@hookimpl
def evener_device(index: int, options: Mapping[str, Any]) -> Device:
    """The card of the worker that is being made."""
    return _CardDevice(_module()._CHOSEN[-1])


@hookimpl
def evener_graph_capture(device: Device, options: Mapping[str, Any]) -> GraphCapture:
    """Steps are captured by running them."""
    return _Runs()


def _module() -> Any:
    """This module as packages import it: it may run as a script, too."""
    import triton_launches

    return triton_launches


class AbsentDriver:
    """What Triton asks before it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class _Empty(TorchDispatchMode):
    """Products of torch's library get a result that nobody computed."""

    _PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "_scaled_mm", "einsum")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ not in self._PRODUCTS:
            return func(*args, **kwargs)
        if "out" in kwargs:
            return kwargs["out"]
        meta = torch.utils._pytree.tree_map(
            lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, (args, kwargs)
        )
        return torch.empty_like(func(*meta[0], **meta[1]), device="cpu")


@contextmanager
def _recorded(card: Card) -> Iterator[dict[Any, Launch]]:
    """Launches in here are recorded by what Triton would compile them for, and not run."""
    found: dict[Any, Launch] = {}
    functions: set[Any] = set()

    def note(
        self: Any, key: Any, signature: Any, device: Any, constants: Any, options: Any, attrs: Any, *more: Any
    ) -> None:
        functions.add(self)
        found.setdefault((self.fn.__module__, self.__name__, key), (self, signature, constants, attrs, options))

    compiles, JITFunction._do_compile = JITFunction._do_compile, note
    driver.set_active(AbsentDriver(card.compiled_for))
    try:
        yield found
    finally:
        JITFunction._do_compile = compiles
        for function in functions:  # what they know is of this card
            function.device_caches.clear()


def record(
    card: Card, config: Mapping[str, Any], overrides: Mapping[str, Any] | None = None, *, all_steps: bool = True
) -> list[Launch]:
    """Every different launch of ``work`` on a ``card``.

    Raises:
        EvenerError: the model cannot be served there.
    """
    with _recorded(card) as found:
        work(card, config, overrides, all_steps=all_steps)
    return list(found.values())


def work(
    card: Card, config: Mapping[str, Any], overrides: Mapping[str, Any] | None = None, *, all_steps: bool = True
) -> None:
    """Start a worker on a ``card`` and, with ``all_steps``, run steps of many sizes. Triton needs a driver that can do
    without the card.

    Args:
        config: the model's ``config.json``; a few of its layers run, one of each kind.
        overrides: keys of evener.

    Raises:
        EvenerError: the model cannot be served there.
    """
    points = {"evener.backends": {"absent": "triton_launches:descriptor"}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        write_distribution(folder, "evener-backend-absent", points)
        sys.path.insert(0, name)
        _module()._CHOSEN.append(card)
        try:
            with _Empty():  # type: ignore[no-untyped-call]
                keys = {"load": "dummy", "backend": "absent", **_layers(config), **(overrides or {})}
                worker = Worker(from_overrides(name, keys), BackendSearch("absent"), serving=True)
                if all_steps:
                    _steps(worker)
                worker.close()
        finally:
            sys.path.remove(name)
            _module()._CHOSEN.pop()


def _layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """The first layer, and the first of another kind."""
    other = config.get("first_k_dense_replace") or (config.get("sliding_window_pattern") or 2) - 1
    return {"infer.layers": f"0,{other}"} if config["num_hidden_layers"] > 1 else {}


#: Tokens that are in the state before a step's.
_CONTEXTS = (64, 500, 2000, 6000, 30000)
_GREEDY = Sampling(temperature=0.0)


def _steps(worker: Worker) -> None:
    """Decode steps of every size that is captured and every length of state, ways to sample, prompts of every
    bucket: alone and in company, from the start and in chunks."""
    most, longest = worker.facts.max_reqs, worker.facts.max_seq_len
    contexts = [n for n in _CONTEXTS if n < longest - 1]
    for size in capture_sizes(most):
        for context in contexts:
            _run(worker, [context] * size, [1] * size)
        _run(worker, contexts[:1] * size, [1] * size, random=True)
        _run(worker, contexts[:1] * size, [1] * size, random=True, masked=True)
        _run(worker, contexts[:1] * size, [1] * size, changed=True)
    for size in (1, 3, 16):
        _run(worker, contexts[:1] * size, [1] * size, random=True, eager=True)
        _run(worker, contexts[:1] * size, [1] * size, eager=True)
    tokens = 2
    while tokens <= worker.facts.step_tokens:
        for count in {tokens, tokens - 3, tokens - 1} & set(range(2, longest)):
            for context in [0, *(n for n in contexts[1:] if n + count < longest)]:
                _run(worker, [context], [count])
            if count > 8:
                _run(worker, [0, 0, 500], [count // 2, count - count // 2 - 1, 1])
                _run(worker, [0, 0, 0, 0], [count // 4] * 4)
        tokens *= 2


def _run(
    worker: Worker, starts: Sequence[int], counts: Sequence[int], *, random: bool = False, masked: bool = False,
    changed: bool = False, eager: bool = False,
) -> None:  # fmt: skip
    """A step of ``counts`` tokens behind ``starts``; ``changed``: penalties and biases; ``eager``: one that reports
    log-probabilities, which no capture does."""
    rows, size, groups = list(range(len(starts))), worker.facts.block_size, len(worker.facts.specs)
    how = Sampling(temperature=0.8, top_p=0.9) if random and eager else Sampling() if random else _GREEDY
    if changed:
        how = Sampling(temperature=0.0, repetition_penalty=1.1, presence_penalty=0.1, bias=[LogitBias(3, 1.0)])
    updates = [TableUpdate(r, 0, [[0] * (-(-(starts[r] + counts[r]) // size))] * groups) for r in rows]
    drawn = SamplePlan(
        random=rows if random else [], filtered=random and eager, logprobs=rows if eager else [],
        top_logprobs=5 if eager else 0, penalized=rows if changed else [], biased=rows if changed else [],
    )  # fmt: skip
    plan = Plan(
        id=0, admissions=[Admission(r, [0] * (starts[r] + counts[r]), how) for r in rows], updates=updates, slots=rows,
        starts=list(starts), counts=list(counts), samples=rows, sampling=drawn,
        masked=rows if masked else [],
    )  # fmt: skip
    step = worker.execute(plan)
    if masked:
        words = -(-worker.facts.info.vocab_size // 32)
        worker.execute(StepMasks(plan=0, masks=[b"\xff" * 4 * words] * len(rows)))
    del step


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
    from model_configs import CONFIGS

    os.environ.pop("TRITON_INTERPRET", None)
    launches = record(CARDS[sys.argv[1]], CONFIGS[sys.argv[2]], all_steps="--start" not in sys.argv)
    for function, *_ in launches:
        print(function.__name__)
    print(len(launches))

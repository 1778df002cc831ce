"""The tuner: for every op that a model calls, parts before composites, each candidate is compared with the reference
and timed: on the device's clock, in turns, over inputs larger than its caches."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from evener.backend_search import BackendSearch
from evener.config.schema import Config
from evener.contracts.declared import LinearWeight, StateSlot
from evener.contracts.device import Device
from evener.contracts.graph import GraphCapture
from evener.contracts.ops import Bucket, OpFunction, Variant
from evener.engine.worker.assembly import Assembly
from evener.engine.worker.worker import Worker
from evener.errors import ConfigError, UnknownNameError
from evener.ops.parts import walk_static
from evener.resolution.candidates import reference_provider, refusal
from evener.resolution.resolver import Resolver
from evener.tuning_files import measurements
from evener.tuning_files.measurements import Entry, Measurement, TuningTable, label, signature
from evener_inspection.recorded_ops import RecordedOp, Steps

#: Least seconds of one timed run, so that its start and end do not matter; rounds of all candidates; rounds of those
#: that are at most so many times slower than the fastest, and that factor.
MIN_RUN_SECONDS, FIRST_ROUNDS, ROUNDS, MAX_SLOWDOWN = 1e-3, 3, 6, 2.0
#: The largest distance of a row from the reference in the same dtype, as a share of the row's norm. It finds wrong
#: results; the conformance kit checks rounding.
_TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}
#: Recorded calls whose results are compared.
_MAX_COMPARED_CALLS = 8
#: The candidate that is first by priority stays first unless another takes less than this share of its time: smaller
#: differences of medians are chance.
_SWITCH_RATIO = 0.98


class InputCopies:
    """Inputs of several calls; those that a kernel may overwrite are copies.

    Attributes:
        inputs: of each call.
    """

    def __init__(self, recorded: RecordedOp) -> None:
        donated = [t.donated for t in recorded.schema.inputs]
        self._kept, self.inputs = recorded.inputs, [_writable(values, donated) for values in recorded.inputs]

    def restore(self) -> None:
        """Write the recorded numbers into the copies again."""
        for kept, used in zip(self._kept, self.inputs, strict=True):
            for old, new in zip(kept, used, strict=True):
                if new is not old:
                    new.copy_(old)


def _writable(values: Sequence[Any], donated: Sequence[bool]) -> tuple[Any, ...]:
    pairs = zip(values, donated, strict=False)
    return tuple(v.clone() if on and isinstance(v, torch.Tensor) else v for v, on in pairs)


@dataclass
class DeviceTimer:
    """Times callables on a device; ``capture`` captures and replays them, so that host time does not count."""

    device: Device
    capture: GraphCapture | None

    def times(self, runs: Sequence[Callable[[], None]], copies: InputCopies) -> list[float]:
        """Seconds of one call of each of ``runs``, which ``prepared`` made: medians of rounds in which they take
        turns."""
        found = [[self._measured(run, copies, 1) for _ in range(FIRST_ROUNDS)] for run in runs]
        best = [min(seconds) for seconds in found]
        for _ in range(ROUNDS):
            for run, once, seconds in zip(runs, best, found, strict=True):
                if once <= MAX_SLOWDOWN * min(best):
                    seconds.append(self._measured(run, copies, max(1, min(50, int(MIN_RUN_SECONDS / once)))))
        if self.capture is not None:
            self.capture.release()
        return [statistics.median(seconds[FIRST_ROUNDS:] or seconds) / len(copies.inputs) for seconds in found]

    def prepared(self, function: OpFunction, copies: InputCopies) -> Callable[[], None]:
        """A callable that calls ``function`` once with each of the inputs.

        Raises:
            EngineError: it cannot be captured.
        """

        def segment() -> None:
            for inputs in copies.inputs:
                function(*inputs)

        segment()
        return segment if self.capture is None else self.capture.capture(segment)

    def _measured(self, run: Callable[[], None], copies: InputCopies, times: int) -> float:
        copies.restore()

        def work() -> None:
            for _ in range(times):
                run()

        return self.device.measure(work) / times


@dataclass(frozen=True)
class TuningOutcome:
    """The result for one call.

    Attributes:
        entry: the measurements, fastest first.
        untuned: the measurement of the candidate that runs without tuning; None if no candidate was right.
        dropped: (candidate, reason) of those that were not timed.
    """

    entry: Entry
    untuned: Measurement | None
    dropped: Sequence[tuple[str, str]]

    def lines(self) -> Iterator[str]:
        """For a person: one on the choice, and one for each candidate that was dropped."""
        best = self.entry.measured[0] if self.untuned else "no candidate is right"
        gain = "" if best == self.untuned or not self.untuned else f" instead of {self.untuned}"
        yield f"{self.entry.op} at {self.entry.tokens} tokens: {best}{gain}"
        yield from (f"  dropped: {name} {reason}" for name, reason in self.dropped)


@dataclass(frozen=True)
class _Candidate:
    provider: str
    variant: Variant
    run: OpFunction
    capturable: bool

    def __str__(self) -> str:
        return label(self.provider, self.variant)


class Tuner:
    """Tunes the recorded ops of one model.

    Args:
        a: the model, resolved without tuning files; its weights are loaded.
    """

    def __init__(self, a: Assembly) -> None:
        self._a, available = a, a.resolver.available
        self._device, self._plain = a.device, available.reference_packing.layout
        self._tuned = TuningTable()
        self._resolver = Resolver(replace(available, tuned=self._tuned, max_fallback="any"))
        self._reference = Resolver(replace(available, kernels=(), forced={}))

    def tune(self, recorded: RecordedOp) -> TuningOutcome | None:
        """Time one op; None if there is only one candidate, or if running the op twice changes its state."""
        r, dropped = recorded, list[tuple[str, str]]()
        if any(isinstance(v, StateSlot) and v.spec.per == "request" for _, v in walk_static(r.call.static)):
            return None
        candidates = list(self._candidates(r))
        capture = self._a.loaded.graph_capture(self._device) if self._device.capabilities.graphs else None
        if capture is not None:  # a candidate that cannot be captured would make every step run eagerly
            dropped = [(str(c), "cannot be captured") for c in candidates if not c.capturable]
            candidates = [c for c in candidates if c.capturable]
        if len(candidates) < 2:
            return None
        entry = Entry(r.schema.name, str(r.call.bucket), signature(r.call), [])
        copies, close = InputCopies(r), _TOLERANCE.get(r.call.static.get("dtype", "float32"), 1e-3)
        clock = DeviceTimer(self._device, None if capture is None else capture.value)
        with torch.inference_mode():
            want, right, runs = self._results(self._expected_run(r, candidates[0]), copies), [], []
            for candidate in candidates:
                try:
                    reason = _differences(want, self._results(candidate.run, copies), close, r.schema.composite)
                    runs += [] if reason else [clock.prepared(candidate.run, copies)]
                    self._device.synchronize()
                except Exception as error:  # it is reported: a variant may need more memory than the device has
                    reason = f"raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"
                right += [] if reason else [candidate]
                dropped += [(str(candidate), reason)] if reason else []
            if not right:
                return TuningOutcome(entry, None, dropped)
            seconds = clock.times(runs, copies)
        found = [
            Measurement(c.provider, round(s * 1e6, 3), dict(c.variant)) for c, s in zip(right, seconds, strict=True)
        ]
        entry.measured.extend(sorted(found, key=lambda m: m.us))
        if entry.measured[0].us > _SWITCH_RATIO * found[0].us:
            entry.measured.remove(found[0])
            entry.measured.insert(0, found[0])
        self._tuned.add("", [entry])
        return TuningOutcome(entry, found[0], dropped)

    def _candidates(self, r: RecordedOp) -> Iterator[_Candidate]:
        """Every candidate that may serve, by priority, in every variant; then the reference, whose parts were tuned
        before."""
        resolver, call = self._resolver, r.call
        for kernel in resolver.available.of_op(r.schema.name):
            if refusal(resolver.available, kernel, call) is None:
                for variant in ({}, *kernel.value.variants(call)):
                    run = resolver.build(kernel, replace(call, variant=variant))
                    yield _Candidate(kernel.label, variant, run, kernel.value.capturable)
        if r.schema.composite or self._readable(r):
            known = len(resolver.manifest.choices)
            run = resolver.reference(r.schema, r.path, call.static, call.bucket)
            fixed = r.schema.capturable and all(c.capturable for c in resolver.manifest.choices[known:])
            yield _Candidate(reference_provider(r.schema), {}, run, fixed)

    def _readable(self, r: RecordedOp) -> bool:
        """Whether the reference reads the weights as they are packed."""
        return all(w.layout == self._plain for _, w in walk_static(r.call.static) if isinstance(w, LinearWeight))

    def _expected_run(self, r: RecordedOp, untuned: _Candidate) -> OpFunction:
        """The callable that candidates are compared with: the reference without kernels; if it cannot read the packed
        weights, the candidate that runs without tuning."""
        if not self._readable(r):
            return untuned.run
        return self._reference.reference(r.schema, r.path, r.call.static, r.call.bucket)

    def _results(self, run: OpFunction, copies: InputCopies) -> list[list[torch.Tensor]]:
        copies.restore()
        made = (run(*inputs) for inputs in copies.inputs[:_MAX_COMPARED_CALLS])
        return [[t.clone() for t in (m if isinstance(m, tuple) else (m,)) if t is not None] for m in made]


def _differences(
    want: Sequence[Sequence[torch.Tensor]], got: Sequence[Sequence[torch.Tensor]], close: float, composite: bool
) -> str | None:
    """How results differ from the reference's; None if they are close enough. Integers must be equal."""
    rows, off = 0, list[float]()
    for w, g in ((w, g) for ws, gs in zip(want, got, strict=True) for w, g in zip(ws, gs, strict=True)):
        if w.shape != g.shape or w.dtype != g.dtype:
            return f"gives {g.dtype} {list(g.shape)} where the reference gives {w.dtype} {list(w.shape)}"
        if not w.is_floating_point() and not torch.equal(w, g):
            return "differs from the reference"
        far = _distances(w, g)
        rows, off = rows + len(far), off + far[~(far <= close)].tolist()
    # Rounding may change the experts of a few rows.
    allowed = min(rows // 4, max(1, rows // 16)) if composite else 0
    return f"is off by {max(off):.2g} of the reference in {len(off)} of {rows} rows" if len(off) > allowed else None


def _distances(want: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """The distance of each row from the wanted one, as a share of that row's norm."""
    rows = want.shape[0] if want.dim() else 1
    w, g = (t.double().reshape(rows, -1) for t in (want, got))
    lengths: torch.Tensor = torch.linalg.vector_norm(w, dim=1)
    far: torch.Tensor = torch.linalg.vector_norm(w - g, dim=1)
    return far / lengths.clamp(min=1e-9 + 1e-3 * float(lengths.mean()))


def tune(
    config: Config, ops: Sequence[str] = (), tokens: Sequence[int] = (), context: int = 512, out: str | None = None,
    shown: Callable[[Sequence[RecordedOp]], Iterable[RecordedOp]] = iter,
) -> tuple[Path, list[TuningOutcome]]:  # fmt: skip
    """Measure the candidates for each op of ``config``'s model, and write the times to a tuning file.

    Args:
        ops: names of the ops to time; all if empty.
        tokens: sizes of the steps, in tokens; one for each bucket if empty.
        context: earlier tokens of decoding requests.
        out: the file; None: in the user's cache folder.
        shown: yields the recorded ops one by one; may show the progress.

    Raises:
        UnknownNameError: the model calls no such op.
        ConfigError: no step has so many tokens.
        EvenerError: as starting the engine would; ``MemoryPlanError`` if the model does not fit.
    """
    untuned = replace(config, infer=replace(config.infer, tuning="off"))
    worker = Worker(untuned, BackendSearch(config.backend))
    a = worker.assembly
    recorded = Steps(worker, context).record(_chosen(a.resolver.available.buckets, tokens))
    called = {each.schema.name for each in recorded.values()}
    for op in ops:
        if op not in called:
            raise UnknownNameError("op", op, called, "The model calls these ops.")
    bench = a.resolver.available.tuned.bench
    assert bench is not None, "assembly says where it is"
    name = re.sub(r"[^a-z0-9.]+", "-", f"{a.device.name} {Path(config.model).name} {a.config.dtype}".lower())
    path = Path(out) if out else measurements.default_folder() / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    tuner, outcomes = Tuner(a), list[TuningOutcome]()
    for each in shown([r for r in recorded.values() if not ops or r.schema.name in ops]):
        outcomes += [found] if (found := tuner.tune(each)) is not None else []
        # After each op, so that an interrupted run keeps its measurements.
        path.write_bytes(_file(bench, [found.entry for found in outcomes if found.untuned]).encode())
    return path, outcomes


def _file(bench: measurements.BenchEnvironment, entries: list[Entry]) -> measurements.TuningFile:
    """Packages of which nothing was measured are left out: a later run may lack them."""
    measured = {each.provider.partition("/")[0] for entry in entries for each in entry.measured}
    packages = {name: version for name, version in bench.packages.items() if name in measured}
    return measurements.TuningFile(measurements.FORMAT, msgspec.structs.replace(bench, packages=packages), entries)


def _chosen(buckets: Sequence[Bucket], tokens: Sequence[int]) -> list[Bucket]:
    for n in tokens:
        if not 1 <= n <= buckets[-1].high:
            raise ConfigError(f"--buckets {n}: steps have 1 to {buckets[-1].high} tokens (infer.step_tokens)")
    return [b for b in buckets if not tokens or any(b.low <= n <= b.high for n in tokens)]

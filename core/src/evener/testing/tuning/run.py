"""One run of ``evener tune``: from a configuration to a file."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from evener.config.schema import Config
from evener.contracts.ops import Bucket
from evener.engine.worker import Worker
from evener.errors import ConfigError, UnknownNameError
from evener.resolution import tuning_files
from evener.resolution.tuning import FORMAT, Bench, Entry, TuningFile
from evener.search import Search
from evener.testing.tuning.record import Recorded, Steps
from evener.testing.tuning.tuner import Outcome, Tuner


def tune(
    config: Config, ops: Sequence[str] = (), tokens: Sequence[int] = (), context: int = 512, out: str | None = None,
    shown: Callable[[Sequence[Recorded]], Iterable[Recorded]] = iter,
) -> tuple[Path, list[Outcome]]:  # fmt: skip
    """Tune ``config``'s model, and write what was measured.

    Args:
        ops: names of those to time; all if empty.
        tokens: sizes of the steps; one of each bucket if empty.
        context: earlier tokens of requests that add one token.
        out: the file; None: in the user's cache folder.
        shown: gives what is to be timed one by one, and may show how far it is.

    Raises:
        UnknownNameError: the model calls no such op.
        ConfigError: no step has so many tokens.
        EvenerError: as starting the engine would; ``MemoryPlanError`` if the model does not fit.
    """
    untuned = dataclasses.replace(config, infer=dataclasses.replace(config.infer, tuning="off"))
    worker = Worker(untuned, Search(config.backend))
    a = worker.assembly
    recorded = Steps(worker, context).record(_chosen(a.resolver.market.buckets, tokens))
    called = {each.schema.name for each in recorded.values()}
    for op in ops:
        if op not in called:
            raise UnknownNameError("op", op, called, "Those are what the model calls.")
    bench = a.resolver.market.tuned.bench
    assert bench is not None, "assembly says where it is"
    name = re.sub(r"[^a-z0-9.]+", "-", f"{a.device.name} {Path(config.model).name} {a.config.dtype}".lower())
    path = Path(out) if out else tuning_files.default_folder() / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    tuner, outcomes = Tuner(a), list[Outcome]()
    for each in shown([r for r in recorded.values() if not ops or r.schema.name in ops]):
        outcomes += [found] if (found := tuner.tune(each)) is not None else []
        # Every time: who interrupts it keeps what was measured.
        path.write_bytes(_file(bench, [found.entry for found in outcomes if found.anyway]).encode())
    return path, outcomes


def _file(bench: Bench, entries: list[Entry]) -> TuningFile:
    """Without packages of which nothing was measured: they need not be there later."""
    measured = {each.provider.partition("/")[0] for entry in entries for each in entry.measured}
    packages = {name: version for name, version in bench.packages.items() if name in measured}
    return TuningFile(FORMAT, msgspec.structs.replace(bench, packages=packages), entries)


def _chosen(buckets: Sequence[Bucket], tokens: Sequence[int]) -> list[Bucket]:
    for n in tokens:
        if not 1 <= n <= buckets[-1].high:
            raise ConfigError(f"--buckets {n}: steps have 1 to {buckets[-1].high} tokens (infer.step_tokens)")
    return [b for b in buckets if not tokens or any(b.low <= n <= b.high for n in tokens)]

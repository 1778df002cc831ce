"""The process of one part: ``python -m evener_conformance.first_contact.child DESCRIPTOR``.

It reads what to do from standard input, as JSON, and writes what it finds to the file descriptor with this number, one
JSON object a line; standard output is left to what vendors' software prints. ``supervisor`` starts it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from evener.errors import EvenerError
from evener_conformance.kit.outcome import format_backend_exception

if TYPE_CHECKING:
    from evener_conformance.kit.subject import Subject


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one process does.

    Attributes:
        part: name of the part; ``area``: the kit's area, if it is one.
        pretend: as ``evener conformance --pretend``.
        options: options of packages.
        done: checks that an earlier process of this part has done, or that ended it.
        only: name of one check of the area; all if empty.
    """

    part: str
    area: str
    backend: str
    pretend: bool
    options: dict[str, dict[str, str]]
    seed: int
    done: tuple[str, ...] = ()
    only: str = ""


@dataclass(frozen=True)
class Writer:
    """Writes lines to the supervisor."""

    descriptor: int

    def __call__(self, kind: str, value: object) -> None:
        data = json.dumps([kind, value]).encode() + b"\n"
        while data:
            data = data[os.write(self.descriptor, data) :]


def main(descriptor: str) -> int:
    """Do one task."""
    number = int(descriptor)
    # Programs that the backend starts must not keep the supervisor waiting.
    os.set_inheritable(number, False)
    write = Writer(number)
    task = msgspec.json.decode(_read_line(0), type=Task)
    _end_with_parent()
    try:
        _run(task, write)
    except EvenerError as error:
        write("error", str(error))
    except Exception as error:  # the backend's: it is what first contact is for
        write("error", format_backend_exception(error))
    write("end", "")
    sys.stdout.flush()
    sys.stderr.flush()
    # Exit handlers of vendors' software may hang or crash, and all is written.
    os._exit(0)


def _read_line(descriptor: int) -> bytes:
    """A line, and nothing after it."""
    found = b""
    while not found.endswith(b"\n") and (byte := os.read(descriptor, 1)):
        found += byte
    return found


def _end_with_parent() -> None:
    """End this process group when the supervisor closes standard input; everything else reads from an empty file."""
    lifeline, empty = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)

    def watch() -> None:
        os.read(lifeline, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _run(task: Task, write: Writer) -> None:
    if task.part == "packages":
        _packages(task, write)
    elif task.area:
        _kit(task, write)
    elif task.part == "engine":
        _engine(task, write)
    else:
        _timing(task, write)


def _packages(task: Task, write: Writer) -> None:
    """The choice of the backend as a run makes it, without cached answers."""
    from evener.plugins.choose import assess
    from evener.plugins.discover import installed_catalog
    from evener.plugins.probe import ProbeRun

    catalog = installed_catalog()
    package = next((each for each in catalog.backends if each.name == task.backend), None)
    if package is not None:
        write("fact", ["distribution", package.distribution])
    if task.pretend:
        if package is None:
            names = ", ".join(each.name for each in catalog.backends) or "none"
            write("error", f"no backend {task.backend!r} is installed; installed: {names}")
        return
    assessed = assess(catalog, task.backend, probes=ProbeRun.start(catalog.backends, only=task.backend, fresh=True))
    for candidate in assessed.report.candidates:
        if candidate.name == task.backend and candidate.group == "evener.backends":
            steps = "; ".join(f"{step.name}: {step.detail}" for step in candidate.steps)
            write("fact", ["probe", f"{candidate.verdict}: {candidate.reason}; {steps}"])
    if assessed.report.error is not None:
        write("error", assessed.report.error)


def _open(task: Task) -> Subject:
    from evener_conformance.kit.subject import open_subject

    return open_subject(task.backend, task.pretend, task.options)


def _kit(task: Task, write: Writer) -> None:
    """The checks of one area, each announced before it runs, so that the supervisor knows which one ended a process."""
    from evener_conformance.kit.checklist import Checklist, CheckRequest

    subject = _open(task)
    checks = Checklist(subject, CheckRequest(task.seed)).checks
    if task.area == "device":
        _device_facts(subject, write)
        for check in checks:
            write("listed", [check.area, check.name])
    for check in checks:
        if check.area != task.area or check.name in task.done or (task.only and check.name != task.only):
            continue
        write("check", check.name)
        for case in check.run():
            write("case", asdict(case))


def _device_facts(subject: Subject, write: Writer) -> None:
    from evener_conformance.kit.result import run_facts

    facts = run_facts(subject, "test", 0)
    write("level", [facts["level"], subject.device.simulated])
    for name, value in {**facts["device"], **{f"driver {k}": v for k, v in facts["driver"].items()}}.items():
        write("device", [name, ", ".join(value) if isinstance(value, list) else str(value)])
    for name, value in asdict(subject.device.capabilities).items():
        write("device", [f"capability {name}", ", ".join(sorted(map(str, value))) if isinstance(value, frozenset)
                         else str(value)])  # fmt: skip
    versions = facts["versions"]
    for name in ("evener", "torch", "python", "system"):
        write("version", [name, versions[name]])
    for name, value in versions["packages"].items():
        write("version", [name, value])


def _engine(task: Task, write: Writer) -> None:
    """Tokens of the engine in processes of its own equal those of an engine in this process."""
    if task.pretend:
        write("not applicable", "an engine opens the device in another process, which --pretend cannot")
        return
    from evener.config import from_overrides
    from evener.engine.processes.start import start_engine
    from evener.engine.wire.messages import Ready
    from evener_conformance.kit.model import describe_divergence, prompts, write_tiny_model
    from evener_conformance.oracle import generate

    subject = _open(task)
    dtype, asked = subject.dtypes[0], prompts(task.seed)[:6]
    keys = {f"{name}.{key}": value for name, values in task.options.items() for key, value in values.items()}
    answers = {}
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(subject, Path(folder))
        for mode in ("inline", "process"):
            write("check", f"engine/{mode}")
            config = from_overrides(folder, {
                "backend": task.backend, "load": "dummy", "dtype": dtype, "infer.max_reqs": 5, "infer.max_seq_len": 384,
                "infer.kv_memory": 8 << 20, **keys,
            })  # fmt: skip
            client = start_engine(config, mode)
            try:
                while not any(isinstance(event, Ready) for event in client.receive(None)):
                    pass
                answers[mode] = generate(client, asked, 16)
            finally:
                client.close()
    wrong = describe_divergence(asked, answers)
    if wrong:
        write("error", wrong)
    else:
        write("passed", f"{sum(map(len, answers['process']))} tokens")


#: Ops whose times say most about a backend; with these numbers of rows.
_TIMED_OPS, _TIMED_ROWS = ("linear", "rms_norm", "act_and_mul", "rotary"), (1, 129)
#: Numbers in the tensor that is copied to measure how fast memory is read.
_COPIED = 32 << 20


def _timing(task: Task, write: Writer) -> None:
    from evener_conformance.kit.perf import measure

    subject = _open(task)
    dtype = "bfloat16" if "bfloat16" in subject.dtypes else subject.dtypes[0]
    write("check", "timing/copy")
    write("timing", _copy_time(subject))
    for provided in subject.kernels:
        if provided.value.op in _TIMED_OPS:
            for rows in _TIMED_ROWS:
                label = f"{provided.package}/{provided.value.name}"
                write("check", f"timing/{label}")
                found = measure(subject, provided.value, subject.schemas[provided.value.op], dtype, rows, task.seed)
                if not isinstance(found, str):
                    write("timing", [f"{provided.value.op} {label} {dtype} {rows} rows of {found.size} numbers",
                                     found.own, 0])  # fmt: skip
    for requests in (1, 16):
        write("check", f"timing/decode of {requests}")
        write("timing", _decode_time(subject, dtype, requests))
    write("passed", "")


def _copy_time(subject: Subject) -> list[Any]:
    """Seconds to copy a tensor within the device; reads and writes both count as bytes."""
    import torch

    source = torch.ones(_COPIED, dtype=torch.int16, device=subject.device.torch_device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    subject.device.measure(copy)
    seconds = median(subject.device.measure(copy) for _ in range(9))
    return ["copy within the device", seconds, 2 * source.numel() * source.element_size()]


#: A model whose step is mostly reading weights, and small enough for any device.
_TIMED_SHAPE: Mapping[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192,
}  # fmt: skip


def _decode_time(subject: Subject, dtype: str, requests: int) -> list[Any]:
    """Seconds of one decode step: the time for 40 tokens less the time for 8, over 32."""
    from evener_conformance.kit.model import engine, write_tiny_model
    from evener_conformance.oracle import generate

    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(subject, Path(folder), _TIMED_SHAPE)
        client = engine(subject, Path(folder), dtype, **{"infer.max_reqs": 16, "infer.kv_memory": 32 << 20})
        asked = [[(17 * i + j) % 211 for j in range(16)] for i in range(requests)]
        try:
            runs = iter(range(1_000))

            def seconds(count: int) -> float:
                start = time.perf_counter()
                generate(client, asked, count, tag=f"{next(runs)}-")
                return time.perf_counter() - start

            seconds(8)
            step = (median(_times(seconds, 40)) - median(_times(seconds, 8))) / 32
        finally:
            client.close()
    return [f"decode step of a model with 4 layers of 1,024, {dtype}, requests: {requests}", max(step, 0.0), 0]


def _times(seconds: Callable[[int], float], count: int) -> Iterator[float]:
    return (seconds(count) for _ in range(3))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

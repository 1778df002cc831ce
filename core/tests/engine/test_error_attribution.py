"""When a package's kernel raises in a step, the error names package, file and line, and the requests end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from evener import LLM, SamplingParams
from evener.engine.processes.child import run_role
from evener.engine.processes.child_process import ChildFailure
from evener.errors import NoBackendError, PluginError
from evener_conformance.distributions import write_distribution

MODULE = """
from evener.contracts.descriptor import Descriptor
from evener.contracts.hooks import hookimpl
from evener.contracts.ops import Kernel
from evener.contracts.probe import Marks, ProbedDevice, ProbeResult

descriptor = Descriptor(
    name="hasty", summary="Raises in prompts.", contracts={"descriptor": 1, "probe": 2, "device": 2, "ops": 2},
    probe="hasty", module="hasty", ops=("rms_norm",),
)


def marks():
    return Marks(True, ("everywhere",))


def result_from_marks(marks):
    return ProbeResult(1, (ProbedDevice(0, "host"),), ("everywhere",))


class Hasty(Kernel):
    op, name = "rms_norm", "hasty"

    def supports(self, call):
        return None

    def build(self, call):
        return norm


def norm(x, weight):
    if len(x) > 1:
        raise OSError("out of breath")
    return x * weight


@hookimpl
def evener_kernels(device, options):
    return [Hasty()]


@hookimpl
def evener_device(index, options):
    from evener_conformance.reference.device import HostDevice

    return HostDevice(index)
"""


class End:
    """One end of a channel to whoever waits."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, data: bytes) -> None:
        self.sent.append(data)

    def close(self) -> None:
        return


def test_a_worker_process_logs_the_traceback_of_a_package_s_error_and_sends_the_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def role() -> None:
        try:
            raise OSError("out of breath")
        except OSError as error:
            raise PluginError("kernel hasty/hasty raised it") from error

    end: Any = End()
    assert run_role(end, role) == 1
    assert msgspec.msgpack.decode(end.sent[0], type=ChildFailure).message == "kernel hasty/hasty raised it"
    assert "OSError: out of breath" in caplog.text


def test_a_worker_process_that_finds_no_backend_sends_the_line_and_logs_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def role() -> None:
        raise NoBackendError("backend=faun: no installed package serves it")

    end: Any = End()
    assert run_role(end, role) == 1
    failure = msgspec.msgpack.decode(end.sent[0], type=ChildFailure)
    assert failure.message == "backend=faun: no installed package serves it" and not caplog.text


def test_a_step_in_which_a_package_s_kernel_raises_names_package_kernel_op_and_line(
    make_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hasty.py").write_text(MODULE)
    line = next(n for n, text in enumerate(MODULE.splitlines(), 1) if "raise OSError" in text)
    write_distribution(tmp_path, "evener-backend-hasty", {"evener.backends": {"hasty": "hasty:descriptor"}}, "3.1")
    monkeypatch.syspath_prepend(str(tmp_path))
    small = {"infer.kv_memory": "4MiB", "infer.max_seq_len": 128, "infer.max_reqs": 4, "infer.step_tokens": 24}
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    with LLM(make_config().model, backend="hasty", load="dummy", dtype="float32", **small) as llm:
        with pytest.raises(PluginError) as error:
            llm.generate([5, 7, 5], greedy)
        assert f"kernel hasty/hasty 3.1 raised OSError: out of breath; ops.rms_norm=reference runs without it; it " \
               f"happened at {tmp_path}/hasty.py:{line}, in a step" in str(error.value)  # fmt: skip
        assert isinstance(error.value.__cause__, OSError)

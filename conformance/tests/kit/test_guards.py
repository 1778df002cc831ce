"""The kit sees what a kernel reads and writes outside of its tensors."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from warm import warm

from evener.contracts.ops import Kernel, OpCall, OpFunction
from evener.ops.parts import load_reference
from evener.ops.schemas import BUILTIN
from evener_conformance.kit.guards import GuardedMemory
from evener_conformance.kit.ops import check_kernel, forbid_nested_ops
from evener_conformance.reference.device import HostDevice

SCHEMAS = {schema.name: schema for schema in BUILTIN}


class OtherDevice(HostDevice):
    """Its memory is not the host's, as far as the kit knows: no pages are closed."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.capabilities = type(self.capabilities)(dtypes=frozenset({"float32"}), alignment=64, int64=True)


def around(value: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """``count`` elements from ``first`` on, counted from the tensor's start."""
    return torch.as_strided(value, (count,), (1,), value.storage_offset() + first)


class Softcap(Kernel):
    """The reference, with something done to its input and its result."""

    op, name = "softcap", "own_softcap"

    def __init__(self, does: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        self._does = does

    def supports(self, call: OpCall) -> str | None:
        return None

    def build(self, call: OpCall) -> OpFunction:
        run = load_reference(SCHEMAS["softcap"])(call.static, forbid_nested_ops)

        def changed(x: torch.Tensor) -> torch.Tensor:
            y = torch.empty(x.shape)
            y.copy_(run(x))
            if y.numel():
                self._does(x, y)
            return y

        return changed


WRITES = {
    "in front of input x": lambda x, y: around(x, -1, 1).zero_(),
    "behind the end of input x": lambda x, y: around(x, x.stride(0) * len(x), 1).zero_(),
    "in front of memory that it allocates": lambda x, y: around(y, -1, 1).zero_(),
    "behind the end of memory that it allocates": lambda x, y: around(y, y.numel(), 1).zero_(),
}


@pytest.mark.parametrize("where", WRITES)
def test_a_write_outside_of_a_tensor_is_found_and_named(where: str) -> None:
    device = OtherDevice(0)
    results = check_kernel(Softcap(WRITES[where]), SCHEMAS["softcap"], device, ("float32",))
    assert any(f"it writes {where}" in r.detail for r in results if r.outcome == "failed")
    right = check_kernel(Softcap(lambda x, y: None), SCHEMAS["softcap"], device, ("float32",))
    assert right and all(r.outcome == "passed" for r in right)


def test_a_value_that_is_read_behind_the_end_shows_in_the_result() -> None:
    def shifted(x: torch.Tensor, y: torch.Tensor) -> None:
        y.view(-1)[-1] += around(x, x.stride(0) * (len(x) - 1) + x.shape[1], 1)[0] * 0

    results = check_kernel(Softcap(shifted), SCHEMAS["softcap"], OtherDevice(0), ("float32",))
    assert all("got nan" in r.detail for r in results if r.outcome == "failed")
    assert sum(r.outcome == "failed" for r in results) >= len(results) - 1, "all but that of no rows"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8])
@pytest.mark.parametrize("flush", [False, True])
def test_tensors_keep_values_and_strides_and_their_guards_differ_from_them(dtype: torch.dtype, flush: bool) -> None:
    memory, value = GuardedMemory(HostDevice(0)), (torch.arange(35) % 7).to(dtype).view(5, 7)
    for given in (value, value.t(), value[:, 2:4], value[3]):
        made = memory.copy(given, "x", flush=flush)
        assert torch.equal(made, given) and made.stride() == given.stride()
        assert flush or made.data_ptr() % 64 == 0
        assert not (around(made, -8, 8) == value.flatten()[:8]).any()
    assert memory.problems() == []


def test_packed_data_is_copied_if_nothing_else_shares_its_memory() -> None:
    memory, one = GuardedMemory(HostDevice(0)), torch.ones(4, 3)
    made = memory.place({"a": one, "b": (one + 1, None)}, "w")
    assert torch.equal(made["a"], one) and made["a"].data_ptr() != one.data_ptr() and made["b"][1] is None
    for shared in ((one, one), one[1:], [one[0], one[1]]):
        assert memory.place(shared, "w") is shared, "its kernels may know what lies beside"


READER = """
import ctypes, torch
from evener_conformance.kit.guards import GuardedMemory
from evener_conformance.reference.device import HostDevice
x = GuardedMemory(HostDevice(0)).copy(torch.ones(5, 7), "x")
behind = (ctypes.c_float * {count}).from_address(x.data_ptr() + x.nbytes)
unused = torch.frombuffer(behind, dtype=torch.float32) * 0
print(x.sum().item())
"""


@pytest.mark.parametrize(("count", "code"), [(1, 0), (7000, -signal.SIGSEGV)])
def test_a_read_behind_the_end_ends_the_process_on_the_host_though_nothing_uses_it(count: int, code: int) -> None:
    """The first elements are within the alignment, where the guard is NaN."""
    command = [warm() / "python", "-c", READER.format(count=count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (code, "" if code else "35.0\n")

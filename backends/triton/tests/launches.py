"""Makes the same calls of plain and of ``FastLaunchFunction`` kernels over a driver that records its launches.

Prints one JSON object: ``wrong``, calls that differ; ``asked``, calls for which Triton is asked every time; the same of
prepared kernels; and what ``hooks``, ``nothing_is_kept`` and ``asked_elsewhere`` return. For a process of its own:
kernels are compiled for cuda:90, and the driver stays.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import aot
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from evener.contracts.device import DeviceCapabilities
from evener_conformance.reference.device import HostDevice
from evener_kernels_triton.jit.launch import FastLaunchFunction, PreparedLaunch, fast_launch
from evener_kernels_triton.linear import skinny
from evener_kernels_triton.plugin import evener_state_providers
from evener_kernels_triton.prefill import LongQueries, attend_long, pool_lines
from evener_kernels_triton.primitives import norm_rows
from evener_kernels_triton.tuning import LongTile, Tuning

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
#: (hash of the compiled kernel, what the launcher got) of each launch.
REACHED: list[tuple[str, tuple[Any, ...]]] = []


class Launcher:
    """Records."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.hash = metadata.hash

    def __call__(self, *args: Any) -> None:
        REACHED.append((self.hash, args))
        for hook in args[7:9]:
            if hook is not None:
                hook(args[6])


class Driver:
    """A device of compute capability 9.0 whose memory is the host's, and which is told which device is current."""

    launcher_cls = Launcher
    device = 0
    target = GPUTarget("cuda", 90, 32)

    @property
    def utils(self) -> Driver:
        return self

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return object(), f"{name} on {device}", 10, 0, 1024

    def unload_module(self, module: object) -> None:
        pass

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 7 + device

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def tiny(x, y, n, scale, flag, FORM: tl.constexpr, LAST: tl.constexpr = 3, more=5):  # type: ignore[no-untyped-def]
    tl.store(y, tl.load(x).to(y.dtype.element_ty))


class Own(torch.Tensor):
    """Could have an address of its own making."""


def tiny_calls() -> dict[str, Call]:
    """Calls that differ from the first in one thing each, by what that is."""
    x, y = torch.zeros(64), torch.zeros(64, dtype=torch.float16)
    base = {"x": x, "y": y, "n": 32, "scale": 2.0, "flag": False, "FORM": 8}
    changes: dict[str, list[Any]] = {
        "x": [x.half(), x.bfloat16(), x.int(), x[1:], x[4:], y, torch.nn.Parameter(x), x.to("meta"), x.as_subclass(Own),
              None],
        "y": [x, y[1:], y[8:], y.float()],
        "n": [0, 1, 16, 17, -1, -16, 2**31 - 1, 2**31, 2**40, 2**40 + 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64, -(2**31),
              -(2**31) - 1, -(2**63), -(2**63) - 1, True, False, 1.0, 32.0, None, x, "text", tl.constexpr(32)],
        "scale": [3.0, -0.0, float("inf"), 2, 1, 16, None, True],
        "flag": [True, 0, 1, None, 0.0],
        "FORM": [9, 1, True, 1.0, 0, False, 0.0, -0.0, "eight", None, tl.float32, tl.constexpr(8), (8, 1), (8, True)],
        "LAST": [3, 4, 1, True], "more": [5, 6, 1, 16, 2**40, 5.0, None],
        "num_warps": [1, 4], "num_stages": [2], "launch_pdl": [False, True, 1, 0], "debug": [True],
        "nothing": [1],
    }  # fmt: skip
    calls: dict[str, Call] = {"base": ((4,), (), base)}
    for name, values in changes.items():
        for i, value in enumerate(values):
            shown = f"{name}[{i}]" if isinstance(value, torch.Tensor) else f"{name}={value!r}"
            changed = base | {name: value}
            calls[shown] = ((4,), (), changed)
            # by position as far as the parameters without defaults go
            calls[f"{shown}, written by position"] = (
                (4,), tuple(changed[k] for k in base), {k: v for k, v in changed.items() if k not in base},
            )  # fmt: skip
    for grid in ((1,), (2, 3), (4, 5, 6), [7, 8], lambda given: (given["n"],)):
        calls[f"grid {grid if not callable(grid) else 'made'}"] = (grid, (), base)
    calls["other order"] = ((4,), (), dict(reversed(base.items())))
    calls["too few"] = ((4,), (x,), {})
    calls["twice"] = ((4,), (x,), base)
    return calls


def real_calls() -> Iterator[tuple[Any, dict[str, Call]]]:
    """Kernels as this package launches them, and the same with an integer, an address or a type changed."""
    features = frozenset({"units:132", f"shared:{227 << 10}", "overlap", "fp8"})
    device = HostDevice(0)
    device.capabilities = DeviceCapabilities(dtypes=frozenset({"float32", "bfloat16"}), features=features)
    found: dict[Any, Call] = {}
    short = FastLaunchFunction._launch
    FastLaunchFunction._launch = lambda self, grid, /, *args, **kwargs: found.update({self: (grid, args, kwargs)})
    tuning = Tuning.of(device.capabilities)
    x, w = torch.zeros(16, 1024, dtype=torch.bfloat16), torch.zeros(1024, 1024, dtype=torch.bfloat16)
    skinny(tuning, x, w, x.dtype)
    norm_rows(tuning, x, None, w[0], 1e-6, 0.0, x.dtype)
    aot.META = torch.device("cpu")
    aot._long_step(evener_state_providers(device, {})[0], device, torch.bfloat16, "bfloat16")
    step: Any = SimpleNamespace(
        block_table=torch.zeros(4, 8, dtype=torch.int32), query_start=torch.zeros(5, dtype=torch.int32),
        kv_lens=torch.zeros(4, dtype=torch.int32), requests=4,
    )  # fmt: skip
    keys, values = (pool_lines(torch.zeros(8, 8, 16, 128, dtype=torch.bfloat16), 128) for _ in range(2))
    query, out = (torch.zeros(512, 16, 128, dtype=torch.bfloat16) for _ in range(2))
    assert keys is not None and values is not None
    long = LongQueries(step, 0, LongTile(128, 128, 2, 16), 1.0, 0, 4, 132)
    attend_long(long, keys, values, 16, 8, query, out, torch.zeros(1, dtype=torch.int32))
    FastLaunchFunction._launch = short
    assert {"prefill_kernel", "skinny_kernel", "rms_norm_kernel", "decode_kernel", "write_kernel"} <= {
        k.__name__ for k in found
    }
    for kernel, (grid, args, kwargs) in found.items():
        calls: dict[str, Call] = {"as launched": (grid, args, kwargs)}
        first = next(i for i, value in enumerate(args) if type(value) is int)
        calls["an integer of 1"] = (grid, (*args[:first], 1, *args[first + 1 :]), kwargs)
        if kernel.is_gluon():
            halves = (replace(v, base=v.base.half()) for v in args[:4])
            calls["another dtype"] = (grid, (*halves, args[4].half(), *args[5:]), kwargs)
        else:
            calls["an address that is odd"] = (grid, (args[0].flatten()[1:], *args[1:]), kwargs)
        if kernel.__name__ == "decode_kernel":
            calls["nothing to merge"] = (grid, (*args[:8], *args[7:8] * 3, *args[11:]), kwargs | {"SPLITS": 1})
        yield kernel, calls


def outcome(kernel: Any, call: Call, device: int) -> tuple[Any, bool]:
    """What a call does, tensors by address, and whether Triton was asked."""
    grid, args, kwargs = call
    REACHED.clear()
    Driver.device = device
    try:
        compiled = kernel[grid](*args, **kwargs)
    except Exception as error:  # Triton's; it is the outcome
        return type(error).__name__, True
    ((found, reached),) = REACHED
    assert compiled is None or compiled.hash == found  # of ``PreparedLaunch`` it is None
    plain = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in reached[9:]]
    return (found, reached[:6], [(type(v), repr(v)) for v in plain]), reached[7] is not None


def remade(kernel: Any) -> Any:
    """The same kernel as its compiler's decorator makes it."""
    return (gluon.jit if kernel.is_gluon() else triton.jit)(kernel.fn)


def compare(
    make: Callable[[], Any], calls: dict[str, Call], rounds: int, devices: int = 1
) -> tuple[list[str], set[str]]:
    """Calls that differ, and those for which Triton was asked every time. Each round has its own kernels and order."""
    wrong, asked = [], set(calls)
    for seed in range(rounds):
        plain, quick = make(), fast_launch(make())
        assert isinstance(quick, FastLaunchFunction) and not isinstance(plain, FastLaunchFunction)
        order = [(name, device) for name in calls for device in range(devices)] * 2
        if seed:
            random.Random(seed).shuffle(order)
        for name, device in order:
            expected, _ = outcome(plain, calls[name], device)
            got, was_asked = outcome(quick, calls[name], device)
            if got != expected:
                wrong.append(f"{name}: {got}, not {expected}")
            if not was_asked:
                asked.discard(name)
    return wrong, asked


class Given:
    """A prepared kernel that is called as others are, with what it has been told or without."""

    def __init__(self, **fixed: Any) -> None:
        self.prepared, self.fixed = PreparedLaunch(fast_launch(triton.jit(tiny)), **fixed), fixed

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.prepared(
            (*grid, 1, 1)[:3],  # type: ignore[arg-type]
            *args, *(value for name, value in kwargs.items() if name not in self.fixed),
        )  # fmt: skip


def prepared() -> tuple[list[str], list[str]]:
    """Calls of prepared kernels that differ from plain ones, and those for which Triton was asked the second time: each
    call of one kernel in many orders, and a kernel of its own for each."""
    calls = {name: call for name, call in tiny_calls().items() if not call[1] and type(call[0]) is tuple}
    wrong, asked, plain = [], [], triton.jit(tiny)
    base = list(calls["base"][2])
    alike = [name for name, call in calls.items() if list(call[2]) == base and name[:4] != "FORM"]
    for seed in range(4):
        one = Given(FORM=8)
        order = [(name, device) for name in alike for device in (0, 1)] * 2
        if seed:
            random.Random(seed).shuffle(order)
        for name, device in order:
            expected, _ = outcome(plain, calls[name], device)
            if (got := outcome(one, calls[name], device)[0]) != expected:
                wrong.append(f"{name}: {got}, not {expected}")
    for name, (grid, args, kwargs) in calls.items():
        given = {k: v for k, v in kwargs.items() if k not in ("x", "y")}
        own, call = Given(**given), (grid, args, {"x": kwargs.get("x"), "y": kwargs.get("y"), **given})
        expected, _ = outcome(triton.jit(tiny), call, 0)  # one for all would take True for 1, as Triton does
        for again in (False, True):
            got, was_asked = outcome(own, call, 0)
            wrong += [f"{name}, fixed: {got}, not {expected}"] if got != expected else []
            asked += [name] if again and was_asked else []
    one = Given(FORM=8)
    ways = [outcome(one, calls["base"], 0)[1] for _ in range(2)]
    knobs.runtime.launch_enter_hook.add(hook := lambda metadata: None)
    ways.append(outcome(one, calls["base"], 0)[1])
    knobs.runtime.launch_enter_hook.remove(hook)
    ways.append(outcome(one, calls["base"], 0)[1])
    if ways != [True, False, True, False] or len(alike) < 30:
        wrong.append(f"hooks: {ways}; {len(alike)} calls")
    return wrong, asked


def hooks() -> list[Any]:
    """What is heard of calls before, while and after a profiler and other hooks listen; and which way each went."""
    kernel, call = fast_launch(triton.jit(tiny)), tiny_calls()["base"]
    heard: list[Any] = []
    ways: list[Any] = [outcome(kernel, call, 0)[1] for _ in range(2)]
    for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        hook = partial(lambda heard, metadata: heard.append(metadata.get()["name"]), heard)
        chain.add(hook)
        ways.append(outcome(kernel, call, 0)[1])
        chain.remove(hook)
        ways.append(outcome(kernel, call, 0)[1])
    kernel.add_pre_run_hook(lambda *args, **kwargs: heard.append(sorted(kwargs)))
    ways.append(outcome(kernel, call, 0)[1])
    kernel.pre_run_hooks.clear()
    knobs.runtime.debug = True
    debugged = outcome(kernel, call, 0)
    knobs.runtime.debug = False
    usual = outcome(kernel, call, 0)
    return [heard, [*ways, debugged[1], usual[1]], debugged[0][0] != usual[0][0]]


def asked_elsewhere() -> list[bool]:
    """Whether Triton is asked, the same call twice, where the backend also looks at the sizes of tensors."""
    kernel, call = fast_launch(triton.jit(tiny)), tiny_calls()["base"]
    Driver.target = GPUTarget("hip", "gfx942", 64)
    return [outcome(kernel, call, 0)[1] for _ in range(2)]


def nothing_is_kept() -> int:
    """Kernels that are memoized where ``run`` is replaced by something that compiles none, as ``aot.py`` does."""
    kernel, (grid, args, kwargs) = fast_launch(triton.jit(tiny)), tiny_calls()["base"]
    run = JITFunction.run
    JITFunction.run = lambda self, *args, **kwargs: None
    driver.set_active(None)  # nor is there a driver
    assert kernel[grid](*args, **kwargs) is kernel[grid](*args, **kwargs) is None
    JITFunction.run = run
    driver.set_active(Driver())
    return len(kernel._forms)


if __name__ == "__main__":
    driver.set_active(Driver())
    wrong, asked = compare(lambda: triton.jit(tiny), tiny_calls(), 3, 2)
    less = partial(triton.jit, tiny, do_not_specialize=["n"], do_not_specialize_on_alignment=["x"])
    wrong += compare(less, {name: call for name, call in tiny_calls().items() if name[:2] in ("ba", "n=", "x[")}, 1)[0]
    for kernel, calls in real_calls():
        found, never_short = compare(partial(remade, kernel), calls, 2)
        wrong += [f"{kernel.__name__}: {line}" for line in found]
        asked |= {f"{kernel.__name__}: {name}" for name in never_short}
    odd, asked_again = prepared()
    said = {"wrong": wrong, "asked": sorted(asked), "hooks": hooks(), "kept": nothing_is_kept()}
    said |= {"prepared": odd, "asked again": asked_again}
    print(json.dumps(said | {"elsewhere": asked_elsewhere()}))

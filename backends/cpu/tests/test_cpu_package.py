"""The package around the kernels: descriptor, probe, device, memory limits, and the compiler that may not be there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from warm import warm

from evener.backend.native_code import Unavailable
from evener.contracts.ops import Bucket, OpCall
from evener.contracts.state import AttentionSpec, StateSpec, StateTensor
from evener.errors import BackendError
from evener_backend_cpu import descriptor, isa, memory, native_library, plugin, probe
from evener_backend_cpu.device import CpuDevice
from evener_backend_cpu.native_library import load


def test_the_descriptor_and_the_probe_do_not_import_torch() -> None:
    code = (
        "import sys, evener_backend_cpu.probe as p; p.result_from_marks(p.marks()); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_cpu_is_always_there_and_scores_below_accelerators() -> None:
    result = probe.result_from_marks(probe.marks())
    assert result.score == 10 and len(result.devices) == 1 and result.devices[0].memory > 0


def test_the_hooks_deliver_what_the_descriptor_names() -> None:
    device = plugin.evener_device(0, {"native": "off"})
    kernels, states = plugin.evener_kernels(device, {}), plugin.evener_state_providers(device, {})
    assert {k.op for k in kernels} == set(descriptor.ops) and {s.name for s in states} == set(descriptor.states)


def test_ranks_share_the_cpu_under_any_index_but_a_negative_one() -> None:
    assert CpuDevice(1, {}).torch_device == CpuDevice(0, {}).torch_device
    with pytest.raises(BackendError, match="use index 0"):
        CpuDevice(-1, {})


def test_a_readback_outlives_its_tensor() -> None:
    tensor = torch.ones(3)
    back = CpuDevice(0, {}).readback(tensor)
    tensor.zero_()
    assert back.ready() and back.wait().tolist() == [1, 1, 1]


def test_threads_are_limited_for_torch_and_for_the_kernels() -> None:
    before = torch.get_num_threads()
    try:
        device = CpuDevice(0, {})
        device.limit_threads(1)
        device.select()
        assert torch.get_num_threads() == device.threads == 1
        with pytest.raises(BackendError, match="use 1 or more"):
            device.limit_threads(0)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("flags", "variant"),
    [
        ("flags : avx2 fma avx512f avx512bw avx512dq avx512vl avx512_bf16 avx512_vnni", "avx512_bf16"),
        ("flags : sse4_2 avx2 fma", "avx2"),
        ("Features : fp asimd bf16", "neon_bf16"),
        ("flags : sse2", "generic"),
    ],
)
def test_the_variant_is_the_best_instruction_set(tmp_path: Path, flags: str, variant: str) -> None:
    (tmp_path / "cpuinfo").write_text(f"model name : A chip\n{flags}\nmodel name : another\n")
    assert isa.read(tmp_path / "cpuinfo").variant == variant
    assert isa.read(tmp_path / "nothing").variant == "generic"


_BIG = isa.Processor("A chip", "avx512_bf16", frozenset(), isa.LIMITS["avx512_bf16"].needs)


def test_a_limit_leaves_the_instructions_of_its_level() -> None:
    assert isa.limited(_BIG, "auto", {}) == _BIG == isa.limited(_BIG, "auto", {"EVENER_CPU_ISA": "auto"})
    for environ, asked in (({"EVENER_CPU_ISA": "avx2"}, "auto"), ({"EVENER_CPU_ISA": "avx512"}, "avx2")):
        held = isa.limited(_BIG, asked, environ)
        assert (held.limit, held.variant, held.words) == ("avx2", "avx2", isa.LIMITS["avx2"].needs)
        assert "avx2" in held.features and "avx512f" not in held.features
    assert tuple(isa.LIMITS) == descriptor.options["isa"].choices[:0:-1]
    assert [isa.limited(_BIG, name, {}).variant for name in isa.LIMITS] == ["avx512_bf16", "avx512", "avx512", "avx2"]


def test_intels_bfloat16_products_are_left_out_where_there_are_no_tiles(tmp_path: Path) -> None:
    words = isa.LIMITS["avx512_bf16"].needs
    found = {}
    amx = " amx_tile amx_bf16 amx_int8"
    for name, more in (("AMD EPYC", ""), ("Intel(R) Xeon(R)", ""), ("Intel(R) Xeon(R) 2", amx)):
        (tmp_path / "cpuinfo").write_text(f"model name : {name}\nflags : {' '.join(words)}{more}\n")
        found[name] = isa.read(tmp_path / "cpuinfo")
    assert [found[name].variant for name in found] == ["avx512_bf16", "avx512", "amx_bf16"]
    plain, tiles = found["Intel(R) Xeon(R)"], found["Intel(R) Xeon(R) 2"]
    assert plain.words == words - {"avx512_bf16"} and plain.slower == {"avx512_bf16"}
    for processor in (plain, tiles):
        held = isa.limited(processor, "avx512_bf16", {})
        assert (held.limit, held.variant, held.words) == ("avx512_bf16", "avx512", plain.words)


@pytest.mark.parametrize(
    ("words", "asked", "environ", "error"),
    [
        ("avx512_bf16", "auto", "sse", r"EVENER_CPU_ISA=sse, but there is no such level; type EVENER_CPU_ISA=auto or "),
        ("avx512", "avx512_bf16", "", "cpu.isa=avx512_bf16, but A chip lacks it; type cpu.isa=auto or cpu.isa=avx512 "),
        ("avx2", "auto", "avx512", "EVENER_CPU_ISA=avx512, but A chip lacks it; type .*=auto or EVENER_CPU_ISA=avx2$"),
    ],
)
def test_a_limit_that_the_processor_lacks_is_refused_with_those_that_it_has(
    words: str, asked: str, environ: str, error: str
) -> None:
    processor = isa.Processor("A chip", "any", frozenset(), isa.LIMITS[words].needs)
    with pytest.raises(BackendError, match=error):
        isa.limited(processor, asked, {"EVENER_CPU_ISA": environ})


def test_kernels_of_a_limit_are_compiled_for_its_level_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(native_library, "compile_library", lambda *how: (asked.append(how), Unavailable("not now"))[1])
    for name in ("A chip", "another"):
        load(isa.limited(isa.Processor(name, "any", frozenset(), _BIG.words), "avx2", {}))
    load(_BIG)
    assert asked[0] == asked[1] and "-march=x86-64-v3" in asked[0][1] and not asked[0][4]
    assert "-march=native" in asked[2][1] or "-mcpu=native" in asked[2][1]


def test_the_device_the_probe_and_the_log_name_the_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(isa, "read", lambda: _BIG)
    device = CpuDevice(0, {"isa": "avx2"})
    assert device.name.endswith("threads, limited to avx2") and device.capabilities.variant == "avx2"
    monkeypatch.delenv("EVENER_CPU_ISA", raising=False)
    assert "limited" not in CpuDevice(0, {}).name
    monkeypatch.setenv("EVENER_CPU_ISA", "avx2")
    assert probe.marks().reasons == ("A chip: avx2",) and probe.marks().cache_key == {"variant": "avx2"}
    assert CpuDevice(0, {}).name.endswith("threads, limited to avx2")
    monkeypatch.setattr(native_library, "compile_library", lambda *how: Path("made.so"))
    monkeypatch.setattr(native_library, "Native", lambda path: SimpleNamespace(path=path, tiles_error=0))
    with caplog.at_level("INFO", "evener.native"):
        _ = device.native
    assert caplog.messages == ["kernels of the CPU backend use avx2: made.so"]


def _machine(root: Path, cgroup: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 800 kB\n")
    (root / "proc/self/cgroup").write_text(cgroup)


def test_without_a_limit_memory_is_the_machines(tmp_path: Path) -> None:
    _machine(tmp_path, "0::/\n")
    assert memory.free_and_total(tmp_path) == (800 * 1024, 1000 * 1024)


def test_a_parents_version_2_limit_counts_and_its_page_cache_is_free(tmp_path: Path) -> None:
    _machine(tmp_path, "0::/outer/inner\n")
    (tmp_path / "sys/fs/cgroup/outer/inner").mkdir(parents=True)
    for folder, limit in (("outer", "400000"), ("outer/inner", "max")):
        at = tmp_path / "sys/fs/cgroup" / folder
        (at / "memory.max").write_text(limit)
        (at / "memory.current").write_text("300000")
        (at / "memory.stat").write_text("anon 5\ninactive_file 100000\n")
    assert memory.free_and_total(tmp_path) == (200000, 400000)


def test_a_version_1_limit_counts(tmp_path: Path) -> None:
    _machine(tmp_path, "4:cpu:/\n3:memory:/box\n")
    at = tmp_path / "sys/fs/cgroup/memory/box"
    at.mkdir(parents=True)
    (at / "memory.limit_in_bytes").write_text("500000")
    (at / "memory.usage_in_bytes").write_text("600000")
    assert memory.free_and_total(tmp_path) == (0, 500000)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/evener/cpu-kernels"


def _calls(device: CpuDevice) -> list[str | None]:
    spec = StateSpec("full", tuple(StateTensor(n, (1, 16), "float32") for n in ("key", "value")))
    attention = AttentionSpec(1, 16, 1.0)
    states = plugin.evener_state_providers(device, {})
    call = OpCall("rms_norm", {"dtype": "float32"}, Bucket(1, 1), device.capabilities)
    kernels = plugin.evener_kernels(device, {})
    return [s.supports(spec, attention, device.capabilities) for s in states] + [k.supports(call) for k in kernels]


def test_without_a_compiler_everything_refuses_with_the_reason(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_library.shutil, "which", lambda name: None)
    reasons = _calls(CpuDevice(0, {"native": "auto"}))
    assert reasons and all(reason is not None and "no C++ compiler was found" in reason for reason in reasons)
    with pytest.raises(BackendError, match=r"cpu\.native=require"):
        _ = CpuDevice(0, {"native": "require"}).native


def test_native_off_is_a_reason(empty_cache: Path) -> None:
    assert set(_calls(CpuDevice(0, {"native": "off"}))) == {"cpu.native=off"}


def test_a_compiler_that_fails_is_a_reason_and_leaves_nothing_behind(empty_cache: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho 'x.h:1: error: no such header' >&2\nexit 1\n")
    broken.chmod(0o755)
    found = load(isa.read(), str(broken))
    assert isinstance(found, Unavailable) and "no such header" in found.reason
    assert list(empty_cache.iterdir()) == []
    missing = load(isa.read(), "no-such-compiler")
    assert isinstance(missing, Unavailable) and "cpu.compiler=no-such-compiler" in missing.reason


def test_another_processor_gets_kernels_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(native_library, "compile_library", lambda *how: (asked.append(how), Unavailable("not now"))[1])
    here = isa.read()
    for processor in (here, isa.Processor("another", here.variant, here.features - {"avx2"})):
        assert load(processor) == Unavailable("not now")
    assert asked[0] != asked[1]


def test_the_kernels_bring_no_second_openmp_runtime() -> None:
    # In a process of its own: other tests load libraries that bring theirs.
    code = (
        "from pathlib import Path; from evener_backend_cpu.device import CpuDevice\n"
        "print(CpuDevice(0, {}).native, Path('/proc/self/maps').read_text())"
    )
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "evener_backend_cpu" in text and "Unavailable" not in text
    assert len(set(re.findall(r"/\S*lib(?:gomp|iomp|omp)[^/\s]*\.so\S*", text))) <= 1


def test_a_forked_child_gets_threads_of_its_own() -> None:
    code = (
        "import os, sys, torch\n"
        "from evener_backend_cpu.device import CpuDevice\n"
        "native = CpuDevice(0, {}).native\n"
        "x, w, y = torch.randn(3, 64), torch.randn(900, 64), torch.empty(3, 900)\n"
        "def run():\n"
        "    linear = native.function('linear', 'float32')\n"
        "    linear(x.data_ptr(), 3, w.data_ptr(), None, None, 900, 64, y.data_ptr(), 2)\n"
        "run()\n"
        "child = os.fork()\n"
        "run()\n"
        "if child == 0: os._exit(0)\n"
        "sys.exit(os.waitpid(child, 0)[1])\n"
    )
    subprocess.run([warm() / "python", "-c", code], check=True)


def test_hooks_refuse_another_backends_device() -> None:
    with pytest.raises(BackendError, match="own device"):
        plugin.evener_kernels(SimpleNamespace(), {})  # type: ignore[arg-type]

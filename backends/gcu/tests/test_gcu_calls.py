"""Calls of Enflame's ops, against the schemas of the vendor's public source; and how its library is loaded."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gcu_stand_ins import FUNCTIONS, stand_in_ops
from stand_ins import installed, source_is_cited
from warm import warm

from evener.contracts.ops import Bucket, OpCall
from evener.contracts.state import AttentionSpec, StateSpec, StateStep, StateTensor
from evener.errors import BackendError
from evener.ops.parts import load_reference
from evener.ops.reference.state import ReferenceState
from evener.ops.schemas import PRIMITIVES
from evener_backend_gcu import plugin, probe
from evener_backend_gcu.device import capabilities
from evener_backend_gcu.kernels import GcuHostSort, GcuRotary
from evener_backend_gcu.state import BLOCK, GcuPaged
from evener_backend_gcu.vendor_library import VLLM_GCU, CompiledLibrary, vendor_ops

ROTARY = {"head_dim": 32, "rotary_dim": 32, "interleaved": False, "dtype": "float32", "heads": 4, "kv_heads": 2}
GCU300 = capabilities(13, graphs=False)


def call(op: str, **static: Any) -> OpCall:
    return OpCall(op, static, Bucket(1, 8), GCU300)


def spec(dtype: str = "float32", dim: int = 32, **changes: Any) -> StateSpec:
    tensors = tuple(StateTensor(name, (2, dim), dtype) for name in ("key", "value"))
    return StateSpec(**{"kind": "full", "tensors": tensors, **changes})


def test_every_schema_names_its_repository_commit_file_and_line_L1() -> None:
    assert source_is_cited(vendor_ops().published)
    assert vendor_ops().published.repository.endswith("EnflameTechnology/vllm-gcu")


def test_every_published_op_has_a_stand_in_with_its_schema_L1(tmp_path: Path) -> None:
    with installed(tmp_path, stand_in_ops(), functions=FUNCTIONS):
        assert [stand_in_ops().refusal(name, "gcu300") for name in FUNCTIONS] == [None] * len(FUNCTIONS)
    assert FUNCTIONS.keys() == vendor_ops().published.schemas.keys()


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_fits_the_schema_and_computes_the_op_L1(interleaved: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    asked = call("rotary", **{**ROTARY, "interleaved": interleaved})
    positions = torch.tensor([4, 0, 9], dtype=torch.int32)
    query, key, table = torch.randn(3, 4, 32), torch.randn(3, 2, 32), torch.randn(12, 32)
    schema = next(each for each in PRIMITIVES if each.name == "rotary")
    want = load_reference(schema)(asked.static, None)(positions, query.clone(), key.clone(), table)
    with installed(tmp_path, stand_in_ops(), functions=FUNCTIONS):
        kernel = GcuRotary(stand_in_ops(), "gcu", 100, ("float32",))
        assert kernel.supports(asked) is None
        got = kernel.build(asked)(positions, query, key, table)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs)


#: Of heads of keys, and of values.
SCALES = torch.tensor([0.02, 0.03]), torch.tensor([0.05, 0.01])


@pytest.mark.parametrize("scales", [(), SCALES], ids=["wide", "int8"])
@pytest.mark.parametrize("lengths", [([1, 1], [70, 3]), ([5, 1], [70, 64])], ids=["decode", "mixed"])
def test_state_in_the_vendors_layout_attends_as_the_reference_L1(
    lengths: Any, scales: tuple[torch.Tensor, ...], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    (counts, ends), attention = lengths, AttentionSpec(4, 32, 32**-0.5)
    starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
    table = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
    places = [(row, at) for row, (n, end) in enumerate(zip(counts, ends, strict=True)) for at in range(end - n, end)]
    slots = torch.tensor([int(table[r, at // BLOCK]) * BLOCK + at % BLOCK for r, at in places], dtype=torch.int32)
    step = StateStep(
        tokens=len(places), requests=2, max_query=max(counts), max_kv=max(ends), query_start=starts,
        positions=torch.tensor([at for _, at in places], dtype=torch.int32),
        kv_lens=torch.tensor(ends, dtype=torch.int32), slot_mapping=slots, block_table=table,
        host_query_lens=counts, host_kv_lens=ends,
    )  # fmt: skip
    reference, storage = ReferenceState(), torch.zeros(4, 2 * 2 * 32 * 4 * BLOCK, dtype=torch.uint8)
    stored = spec()
    if scales:
        stored = replace(stored, tensors=tuple(replace(t, dtype="int8", wide="float32") for t in stored.tensors))

    def bound(provider: Any) -> Any:
        if scales:
            return provider.bind_scaled(storage, stored, BLOCK, scales)
        return provider.bind(storage, stored, BLOCK)

    plain = bound(reference)
    filled = tuple(torch.randn(4, BLOCK, 2, 32) for _ in range(2))
    blocks = torch.arange(4, dtype=torch.int32)
    reference.import_blocks(plain, blocks, filled)
    new, query = [torch.randn(len(places), 2, 32) for _ in range(2)], torch.randn(len(places), 4, 32)
    meta = reference.prepare(step, stored, attention, BLOCK)
    reference.write(plain, meta, *new)
    with installed(tmp_path, stand_in_ops(), functions=FUNCTIONS):
        ours = GcuPaged(stand_in_ops())
        assert ours.supports(stored, attention, GCU300) is None
        views = bound(ours)
        ours.import_blocks(views, blocks, filled)
        mine = ours.prepare(step, stored, attention, BLOCK)
        assert mine.decode == (counts == [1, 1])
        ours.write(views, mine, *new)
        torch.testing.assert_close(
            ours.attend(views, mine, query), reference.attend(plain, meta, query), rtol=1e-5, atol=1e-5
        )
        kept = reference.export_blocks(plain, blocks)
        for got, want in zip(ours.export_blocks(views, blocks), kept, strict=True):
            assert torch.equal(got, want)
        ours.copy_blocks(views, blocks[3:], blocks[:1])
        assert torch.equal(ours.export_blocks(views, blocks[:1])[0], kept[0][3:])


@pytest.mark.parametrize(
    ("given", "word"),
    [
        (spec("float8_e4m3fn"), "not in float32 over float8_e4m3fn"),
        (spec(dim=48), "not 48"),
        (spec("float16"), "not in float32 over float16"),
        (spec(per="request"), "nothing else"),
    ],
)
def test_state_that_the_vendors_ops_do_not_store_is_refused_L1(given: StateSpec, word: str, tmp_path: Path) -> None:
    with installed(tmp_path, stand_in_ops(), functions=FUNCTIONS):
        refused = GcuPaged(stand_in_ops()).supports(given, AttentionSpec(4, 32, 1.0), GCU300)
    assert word in (refused or "")


@pytest.mark.parametrize(
    "planted",
    [
        {"slots": torch.zeros(1)}, {"slot_mapping": None}, {"k_scale": torch.ones(2)}, {"kv_cache_dtype": 0},
        {"k_zero": None},
    ],
    ids=["a name", "no tensor", "a tensor for a number", "no text", "no number"],
)  # fmt: skip
def test_wrong_arguments_do_not_pass_the_schema_L1(planted: dict[str, Any], tmp_path: Path) -> None:
    key = torch.zeros(1, 1, 32)
    right: dict[str, Any] = {
        "key": key, "value": key, "key_cache": torch.zeros(1, 1, 8, 64, 4), "value_cache": torch.zeros(1, 1, 32, 64),
        "slot_mapping": torch.zeros(1, dtype=torch.int32), "kv_cache_dtype": "auto", "k_scale": 1.0, "v_scale": 1.0,
        "k_zero": 0.0, "v_zero": 0.0,
    }  # fmt: skip
    with installed(tmp_path, stand_in_ops(), functions=FUNCTIONS):
        write = stand_in_ops().function("_C_cache_ops::reshape_and_cache")
        write(**right)
        with pytest.raises((RuntimeError, TypeError)):
            write(**{**right, **planted})


def test_an_installed_stack_that_registers_another_op_is_refused_L1(tmp_path: Path) -> None:
    older = dict(vendor_ops().published.schemas)
    older["_C::paged_attention_v1"] = older["_C::paged_attention_v1"].replace(", Tensor? query_scales", "")
    with installed(tmp_path, stand_in_ops(), older, FUNCTIONS):
        refused = GcuPaged(stand_in_ops()).supports(spec(), AttentionSpec(4, 32, 1.0), GCU300) or ""
    assert "vllm-gcu 1.0 registers _C::paged_attention_v1(" in refused and "Tensor? query_scales" in refused


def test_the_compiled_part_is_loaded_without_the_package_around_it_L0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm_gcu's ``__init__`` imports ``torch_gcu.transfer_to_gcu``, which rewrites ``torch.cuda``."""
    package = tmp_path / "some_vllm_gcu"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('the package was imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    library = CompiledLibrary("some_vllm_gcu", ("some-vllm-gcu",), "0.9", "", "it")
    with pytest.raises(ImportError, match=r"has no compiled part _C\*\.so in .*some_vllm_gcu"):
        library.load()
    (package / "_C.cpython-310-x86_64-linux-gnu.so").write_bytes(b"")
    loaded: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    library.load()
    assert loaded == [str(package / "_C.cpython-310-x86_64-linux-gnu.so")]
    assert VLLM_GCU.module == "vllm_gcu" and VLLM_GCU.before == "tops_extension.torch"


def test_nothing_imports_what_rewrites_another_namespace_L0() -> None:
    folder = Path(plugin.__file__).parent
    lines = [line for path in folder.glob("*.py") for line in path.read_text("utf-8").splitlines()]
    assert not [line for line in lines if "import" in line.split("#")[0].split() and "transfer_to_gcu" in line]
    script = "import sys, evener_backend_gcu.plugin; print([m for m in sys.modules if 'torch_gcu' in m])"
    done = subprocess.run([warm() / "python", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_extension_is_an_error_that_says_what_to_install_L0(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match=r"torch_gcu does not import .* of one release"):
        plugin.evener_device(index=0, options={"graphs": False})


def test_sampling_with_filters_runs_on_the_host_and_is_never_captured_L3() -> None:
    kernel = GcuHostSort()
    assert not kernel.capturable
    assert kernel.supports(call("sample", vocab=9, filters=False)) == "nothing is sorted without filters"
    assert kernel.supports(call("sample", vocab=9, filters=True)) is None


@pytest.mark.parametrize(("major", "variant"), [(13, "gcu300"), (14, "gcu400")])
def test_the_generation_follows_from_the_reported_number_L3(major: int, variant: str) -> None:
    can = capabilities(major, graphs=False)
    assert (can.variant, can.int64, can.graphs) == (variant, False, False)
    assert ("fp8" in can.features) == (variant == "gcu400")


def test_doctor_is_given_tuning_advice_L3() -> None:
    lines = " ".join(probe.advice({}))
    assert "TORCH_ECCL_AVOID_RECORD_STREAMS=1" in lines and "TORCHGCU_INDUCTOR_ENABLE=0" in lines
    assert probe.advice({"TORCH_ECCL_AVOID_RECORD_STREAMS": "1", "TORCHGCU_INDUCTOR_ENABLE": "0"}) == ()


def test_the_probe_lists_what_the_extension_registers_L3(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 2, get_device_name=lambda index: f"S60 {index}",
        get_device_properties=lambda index: SimpleNamespace(total_memory=48 << 30),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch_gcu", importlib.import_module("types"))
    monkeypatch.setattr(torch, "get_device_module", lambda name: module)
    found = probe.probe()
    assert (found.score, [d.name for d in found.devices]) == (100, ["S60 0", "S60 1"])
    module.is_available = lambda: False
    assert probe.probe().score == 0

"""``evener tune`` on the CPU, from a model's folder to a run that its file decides, with kernels planted to lose."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from evener import LLM, SamplingParams
from evener.cli import main as cli
from evener.config import from_overrides
from evener.engine.facts.manifest_report import ManifestReport, OpChoice
from evener.errors import MemoryPlanError
from evener.tuning_files.measurements import decode
from evener_conformance.distributions import write_distribution
from evener_conformance.graph.backend import install_graph_backend
from evener_conformance.naive.model import find_architecture
from evener_inspection.tuner import _differences, tune

DESCRIPTOR = """
from evener.contracts.descriptor import Descriptor

descriptor = Descriptor(
    name="planted", summary="kernels that lose", contracts={"ops": 2}, module="planted.kernels",
    needs=frozenset({"namespace:cpu"}), ops=("embedding", "rms_norm", "add_rms_norm", "act_and_mul"),
)
"""
KERNELS = """
import time

import torch

from evener.contracts.hooks import hookimpl
from evener.contracts.ops import Kernel


class Planted(Kernel):
    priority = 1000
    capturable = property(lambda kernel: kernel.name == "rows")

    def __init__(self, op, name, function, *others):
        self.op, self.name, self._function, self._others = op, name, function, others

    def supports(self, call):
        return None

    def variants(self, call):
        return self._others

    def build(self, call):
        return lambda *inputs: self._function(call, *inputs)


def slow_norm(call, x, weight):
    time.sleep(0.001)
    return torch.nn.functional.rms_norm(x.float(), weight.shape, weight.float(), call.static["eps"]).to(x.dtype)


def wrong_add(call, x, residual, weight):
    return torch.zeros_like(x), residual


def act(call, x):
    if call.variant:
        raise RuntimeError("no such instruction")
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def rows(call, ids, table):
    if pause := call.variant.get("pause_ms", 5):
        time.sleep(pause / 1000)
    return table[ids] * call.static["scale"]


@hookimpl
def evener_kernels(device, options):
    return [
        Planted("rms_norm", "slow", slow_norm), Planted("add_rms_norm", "wrong", wrong_add),
        Planted("act_and_mul", "act", act, {"broken": 1}),
        Planted("embedding", "rows", rows, {"pause_ms": 0}, {"pause_ms": 3}),
    ]
"""
KEYS: dict[str, Any] = {
    "backend": "cpu", "load": "dummy", "dtype": "float32", "infer.max_reqs": 2, "infer.max_seq_len": 64,
    "infer.step_tokens": 16, "infer.kv_memory": "4MiB", "infer.threads": 1,
}  # fmt: skip
OPS = "embedding,rms_norm,add_rms_norm,act_and_mul"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Path:
    """A tiny model whose composites are all taken apart, with the planted package installed."""
    site = tmp_path / "site"
    write_distribution(site, "evener-kernels-planted", {"evener.kernels": {"planted": "planted:descriptor"}})
    (site / "planted").mkdir()
    (site / "planted/__init__.py").write_text(DESCRIPTOR)
    (site / "planted/kernels.py").write_text(KERNELS)
    monkeypatch.syspath_prepend(str(site))
    # Not the whole cache: compiled kernels are there too.
    monkeypatch.setattr("evener.tuning_files.measurements.default_folder", lambda: tmp_path / "tuning")
    for name in ("planted", "planted.kernels"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(find_architecture("LlamaForCausalLM").tiny_config()))
    return folder


def serve(model: Path, **keys: Any) -> tuple[list[int], ManifestReport]:
    """Greedy tokens, and the manifest."""
    with LLM(model, **{**KEYS, **keys}) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
        return llm.generate([1, 2, 3], greedy)[0].outputs[0].token_ids, llm.info.manifest


def rows(manifest: ManifestReport, op: str) -> list[OpChoice]:
    return [row for row in manifest.ops if row.op == op]


def test_tunes_measurements_decide_later_runs_and_slow_wrong_and_broken_kernels_lose(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"{key}={value}" for key, value in KEYS.items()]
    file = tmp_path / "tuned.json"
    assert cli.main(["tune", str(model), *words, "--out", str(file), "--op", OPS, "--buckets", "1,3"]) == 0
    said = capsys.readouterr()
    assert f"measurements in {file}" in said.err
    assert "instead of" in next(line for line in said.out.splitlines() if line.startswith("rms_norm at 1 tokens: "))
    assert "  dropped: planted/wrong is off by " in said.out
    assert "  dropped: planted/act[broken=1] raised RuntimeError: no such instruction" in said.out
    written = decode(file.read_bytes())
    entries = written.entries
    assert written.bench.packages.keys() == {"cpu", "planted"}
    assert {e.tokens for e in entries if e.op == "embedding"} == {"1", "3..4"}
    for entry in entries:
        providers = [measured.provider for measured in entry.measured]
        assert "planted/wrong" not in providers and {"broken": 1} not in [m.variant for m in entry.measured]
        assert entry.op != "rms_norm" or (providers[-1] == "planted/slow" and len(providers) > 1)

    # A run without tuning would take the planted norm for all rows; the wrong one is kept away by hand.
    plain, before = serve(model, **{"ops.add_rms_norm": "cpu", "infer.tuning": "off"})
    assert {row.provider for row in rows(before, "rms_norm")} == {"planted/slow"}
    tokens, manifest = serve(model, **{"ops.add_rms_norm": "cpu", "infer.tuning": str(file)})
    assert tokens == plain
    for row in rows(manifest, "rms_norm"):
        if "1" in row.buckets:
            assert row.provider != "planted/slow"
            assert row.why.startswith(f"chosen by tuning file {file}: ") and "µs, beats " in row.why
    assert any("1" in row.buckets for row in rows(manifest, "rms_norm"))
    assert f"tuning file {file} is used" in manifest.notes
    # Its best variant serves where the planted kernel is forced.
    forced = {"ops.add_rms_norm": "cpu", "ops.embedding": "planted"}
    tokens, manifest = serve(model, **{**forced, "infer.tuning": str(file)})
    assert tokens == plain
    assert rows(manifest, "embedding")[0].provider == "planted/rows[pause_ms=0]"


def test_a_file_in_the_users_cache_folder_is_found_and_one_of_another_device_is_not_used(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = from_overrides(model, KEYS)
    path, outcomes = tune(config, ops=["rms_norm"], tokens=[1], context=4)
    assert path.parent.name == "tuning" and path.name.endswith("-model-float32.json")
    assert decode(path.read_bytes()).bench.conditions["threads"] == "1"
    assert {found.entry.op for found in outcomes} == {"rms_norm"} and {o.entry.tokens for o in outcomes} == {"1"}
    others = {"ops.add_rms_norm": "cpu"}
    _, manifest = serve(model, **others)
    assert f"tuning file {path.name} is used" in manifest.notes
    assert rows(manifest, "rms_norm")[0].provider != "planted/slow"
    assert cli.main(["doctor", "--backend", "cpu"]) == 0
    assert f"tuning file {path.name}: {len(outcomes)} measurements, for " in capsys.readouterr().out
    path.write_text(path.read_text().replace('"device": "', '"device": "Another '))
    _, manifest = serve(model, **others)
    assert any(f"{path.name} is not used: it was measured on Another" in note for note in manifest.notes)
    assert rows(manifest, "rms_norm")[0].provider == "planted/slow"


def test_tune_refuses_a_model_that_does_not_fit(model: Path) -> None:
    table = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**table, "hidden_size": 2**14, "intermediate_size": 2**24}))
    with pytest.raises(MemoryPlanError, match="does not fit"):
        tune(from_overrides(model, KEYS))


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--op", "rms_norn"], "unknown op 'rms_norn'; did you mean 'rms_norm'? The model calls these ops."),
        (["--buckets", "17"], "--buckets 17: steps have 1 to 16 tokens (infer.step_tokens)"),
        (["infer.tp_size=2"], "evener tune runs on one device: leave infer.tp_size and infer.pp_size out"),
    ],
)
def test_untunable_arguments_are_reported(
    words: list[str], fault: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [f"{key}={value}" for key, value in KEYS.items()]
    assert cli.main(["tune", str(model), *keys, *words]) == 2
    assert fault in capsys.readouterr().err


def test_on_a_device_that_captures_steps_captured_calls_are_timed_and_nobody_else_is_a_candidate(
    model: Path, tmp_path: Path
) -> None:
    install_graph_backend(tmp_path / "site")
    keys = {**KEYS, "backend": "graphs"}
    _, outcomes = tune(from_overrides(model, keys), ["rms_norm", "embedding"], [1, 3], 4)
    assert [found.entry.op for found in outcomes].count("embedding") == 2
    for found in outcomes:
        assert not any(measured.provider == "planted/slow" for measured in found.entry.measured)
        if found.entry.op == "rms_norm":
            assert ("planted/slow", "cannot be captured") in found.dropped
        else:
            # Sleeping happens when a call is captured, not when it is replayed.
            assert {m.provider for m in found.entry.measured} == {"planted/rows", "reference"}
            assert max(m.us for m in found.entry.measured) < 2000


@pytest.mark.parametrize(
    ("rows", "changed", "composite", "wrong"),
    [
        (1, 1, True, True), (8, 1, True, False), (8, 2, True, True), (64, 4, True, False), (64, 5, True, True),
        (64, 1, False, True), (64, 0, False, False),
    ],
)  # fmt: skip
def test_only_composites_may_differ_and_in_few_rows(rows: int, changed: int, composite: bool, wrong: bool) -> None:
    want = torch.randn(rows, 16, generator=torch.Generator().manual_seed(0))
    got = want * 1.0001
    got[:changed] = -want[:changed]
    # One row a call, as in steps of one token.
    fault = _differences([[row] for row in want.split(1)], [[row] for row in got.split(1)], 1e-3, composite)
    assert (fault is not None) is wrong
    assert not wrong or f"is off by 2 of the reference in {changed} of {rows} rows" in str(fault)


@pytest.mark.parametrize(
    ("got", "fault"),
    [
        (torch.tensor([1, 2, 4]), "differs from the reference"),
        (torch.tensor([1.0, 2.0, 3.0]), "gives torch.float32 [3] where the reference gives torch.int64 [3]"),
        (torch.tensor([[1, 2, 3]]), "gives torch.int64 [1, 3]"),
    ],
)
def test_integers_shapes_and_types_must_be_those_of_the_reference(got: torch.Tensor, fault: str) -> None:
    assert fault in str(_differences([[torch.tensor([1, 2, 3])]], [[got]], 1.0, True))


def test_a_result_that_is_not_a_number_is_wrong() -> None:
    want = torch.ones(3, 4)
    assert _differences([[want]], [[want * float("nan")]], 1.0, False) is not None

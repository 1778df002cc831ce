"""Tuning files: what they hold, which of them count, and what the resolver makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from evener.contracts.declared import CallSite
from evener.contracts.device import DeviceCapabilities
from evener.contracts.ops import Bucket, Kernel, OpCall, OpFunction, Variant
from evener.engine.facts.manifest_report import ManifestReport, OpChoice, Refusal
from evener.errors import ConfigError, ResolveError
from evener.ops.reference.linear import PLAIN
from evener.ops.reference.state import ReferenceState
from evener.ops.schemas import BUILTIN
from evener.plugins.catalog import Provided
from evener.resolution.buckets import token_buckets
from evener.resolution.candidates import Candidates
from evener.resolution.resolver import Resolver
from evener.tuning_files.measurements import (
    FORMAT,
    BenchEnvironment,
    Entry,
    Measurement,
    TuningFile,
    TuningTable,
    decode,
    read_tuned,
)

HERE = BenchEnvironment("Chip 9", "c9", {"torch": "2.13.0+cpu", "driver": "580.95.05"}, {"acme": "1.2"})
STATIC = {"hidden": 8, "dtype": "float32", "eps": 1e-6, "offset": 0.0}
CALL = OpCall("rms_norm", STATIC, Bucket(1, 1), DeviceCapabilities())


def other(**changes: Mapping[str, str]) -> BenchEnvironment:
    """A bench like ``HERE``, but for some of its conditions or packages."""
    return msgspec.structs.replace(HERE, **{name: {**getattr(HERE, name), **new} for name, new in changes.items()})


def write(path: Path, bench: BenchEnvironment, us: float = 1.0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(TuningFile(FORMAT, bench, [entry(Measurement("acme/x", us))]).encode())


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Wide(Kernel):
    """A kernel for rms_norm that comes in two widths."""

    op = "rms_norm"

    def __init__(self, name: str, priority: int, high: int = 10**9) -> None:
        self.name, self.priority, self._high = name, priority, high
        self.built: list[Variant] = []

    def supports(self, call: OpCall) -> str | None:
        return None if call.bucket.high <= self._high else "is too narrow"

    def variants(self, call: OpCall) -> Sequence[Variant]:
        return [{"width": 4}, {"width": 8}]

    def build(self, call: OpCall) -> OpFunction:
        self.built.append(call.variant)
        return lambda *inputs: (self.name, call.variant)


def entry(*measured: Measurement, tokens: str = "1", static: Mapping[str, Any] = STATIC) -> Entry:
    return Entry("rms_norm", tokens, dict(static), list(measured))


def resolved(*kernels: Kernel, entries: Sequence[Entry] = (), **fields: Any) -> tuple[list[OpChoice], Any]:
    """The manifest's rows, and what the site's callable for one token gives."""
    tuned = TuningTable()
    tuned.add("chip.json", entries)
    available = Candidates(
        schemas={s.name: s for s in BUILTIN}, kernels=[Provided(k, "acme", "acme", "1.2") for k in kernels], states=[],
        reference_state=ReferenceState(), reference_packing=PLAIN, device=DeviceCapabilities(),
        buckets=token_buckets(2), tuned=tuned, **fields,
    )  # fmt: skip
    site = CallSite("norm", "rms_norm", STATIC)
    resolver = Resolver(available)
    resolver.sites([site])
    provider = resolver.manifest.choices[0].provider
    return ManifestReport.of(resolver.manifest).ops, None if provider == "reference" else site.table[0]()


def test_the_fastest_measured_kernel_goes_before_priority_and_the_manifest_names_the_second() -> None:
    slow, fast = Wide("slow", 9), Wide("fast", 1)
    measured = (
        Measurement("acme/fast", 12.3),
        Measurement("acme/fast", 13.0, {"width": 4}),
        Measurement("acme/slow", 15.1),
    )
    rows, result = resolved(slow, fast, entries=[entry(*measured)])
    assert result == ("fast", {})
    assert rows[0].provider == "acme/fast" and rows[0].tokens == ["1"]
    assert rows[0].why == "chosen by tuning file chip.json: 12.3 µs, beats 15.1 µs of acme/slow"
    # The other bucket was not measured.
    assert rows[1].provider == "acme/slow" and rows[1].tokens == ["2"] and not rows[1].why


def test_a_kernel_that_no_file_has_measured_keeps_its_place_by_priority() -> None:
    newer, slow, fast, last = Wide("newer", 10), Wide("slow", 9), Wide("fast", 5), Wide("last", 1)
    entries = [entry(Measurement("acme/fast", 12.3), Measurement("acme/slow", 15.1))]
    rows, result = resolved(newer, slow, fast, last, entries=entries)
    assert result == ("newer", {}) and not rows[0].why
    # One that is behind the measured ones stays there.
    assert resolved(slow, fast, last, entries=entries)[1] == ("fast", {})


def test_a_kernel_is_built_in_the_variant_that_was_fastest() -> None:
    kernel = Wide("wide", 1)
    rows, result = resolved(
        kernel, entries=[entry(Measurement("acme/wide", 2.0, {"width": 8}), Measurement("acme/wide", 3))]
    )
    assert result == ("wide", {"width": 8})
    assert rows[0].provider == "acme/wide[width=8]" and "beats 3.0 µs of acme/wide" in rows[0].why
    assert kernel.built == [{"width": 8}, {}]


def test_a_removed_variant_is_skipped_with_the_reason() -> None:
    rows, result = resolved(
        Wide("wide", 1), entries=[entry(Measurement("acme/wide", 2.0, {"width": 16}), Measurement("acme/wide", 3.0))]
    )
    assert result == ("wide", {})
    assert rows[0].refused == [Refusal("acme/wide", "has no variant [width=16] any more")]


def test_the_reference_may_be_the_fastest() -> None:
    rows, _ = resolved(Wide("wide", 1), entries=[entry(Measurement("reference", 1.0), Measurement("acme/wide", 2.0))])
    assert rows[0].provider == "reference" and "1.0 µs, beats 2.0 µs of acme/wide" in rows[0].why


@pytest.mark.parametrize(
    ("fields", "provider"),
    [
        ({"forced": {"rms_norm": "slow"}}, "acme/slow[width=4]"),
        ({"forced": {"rms_norm": "reference"}}, "reference"),
        ({"reference_ops": "infer.op_impl=ref"}, "reference"),
    ],
)
def test_a_forced_provider_overrides_measurements(fields: dict[str, Any], provider: str) -> None:
    measured = Measurement("acme/fast", 1.0), Measurement("acme/slow", 2.0, {"width": 4}), Measurement("reference", 3.0)
    rows, _ = resolved(Wide("slow", 9), Wide("fast", 1), entries=[entry(*measured)], **fields)
    assert rows[0].provider == provider


def test_max_fallback_none_ignores_a_measured_reference() -> None:
    measured = entry(Measurement("reference", 1.0), Measurement("acme/wide", 2.0))
    rows, _ = resolved(Wide("wide", 1), entries=[measured], max_fallback="none")
    assert rows[0].provider == "acme/wide"
    with pytest.raises(ResolveError):
        resolved(entries=[measured], max_fallback="none")


def test_a_measured_kernel_that_refuses_the_call_is_not_taken() -> None:
    rows, _ = resolved(Wide("fast", 1, high=0), Wide("slow", 0), entries=[entry(Measurement("acme/fast", 1.0))])
    assert rows[0].provider == "acme/slow"
    assert rows[0].refused == [Refusal("acme/fast", "is too narrow")]


@pytest.mark.parametrize("changed", [{"hidden": 16}, {"dtype": "bfloat16"}, {"eps": 1e-5}])
def test_measurements_do_not_apply_to_other_shapes_and_dtypes(changed: dict[str, Any]) -> None:
    rows, _ = resolved(
        Wide("slow", 9), Wide("fast", 1), entries=[entry(Measurement("acme/fast", 1.0), static={**STATIC, **changed})]
    )
    assert [row.provider for row in rows] == ["acme/slow"]


def test_a_truncated_last_bucket_uses_the_full_bucket_s_measurement() -> None:
    call = OpCall("rms_norm", STATIC, Bucket(5, 6), DeviceCapabilities())
    tuned = TuningTable()
    tuned.add("chip.json", [entry(Measurement("acme/fast", 1.0), tokens="5..8")])
    assert tuned.find(call) == ("chip.json", [Measurement("acme/fast", 1.0)])
    assert tuned.find(replace(call, bucket=Bucket(3, 4))) is None


@pytest.mark.parametrize(
    ("there", "reason"),
    [
        (HERE, None),
        (BenchEnvironment("Chip 8", "", {}, {}), f"it was measured on Chip 8, this is {HERE}"),
        (other(conditions={"torch": "2.13.9+x"}), None),
        (other(conditions={"torch": "2.11.0"}), "it was measured with torch 2.11.0, here is 2.13.0+cpu"),
        (other(conditions={"driver": "590.1"}), "it was measured with driver 590.1, here is 580.95.05"),
        (other(packages={"acme": "1.1"}), "it was measured with acme 1.1, here is 1.2"),
        (other(packages={"other": "3"}), "it was measured with other 3, here is none"),
    ],
)
def test_a_tuning_file_applies_only_to_the_same_device_versions_and_packages(
    there: BenchEnvironment, reason: str | None, cache: Path
) -> None:
    write(cache / "evener/tuning/chip.json", there)
    found = read_tuned("auto", HERE, [])
    used = "used" if reason is None else f"not used: {reason}"
    assert found.notes == [f"tuning file chip.json is {used}"]
    assert (found.find(CALL) is not None) is (reason is None)


def test_the_users_files_go_before_those_of_packages(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "chip_package/measured/a.json", HERE, 1.0)
    monkeypatch.syspath_prepend(str(tmp_path))
    packages = ["chip_package.measured"]
    assert read_tuned("auto", HERE, packages).find(CALL) == (
        "chip_package.measured/a.json",
        [Measurement("acme/x", 1.0)],
    )
    write(cache / "evener/tuning/z.json", HERE, 2.0)
    assert read_tuned("auto", HERE, packages).find(CALL) == ("z.json", [Measurement("acme/x", 2.0)])
    assert read_tuned("off", HERE, packages).find(CALL) is None
    write(tmp_path / "mine.json", HERE, 3.0)
    named = read_tuned(str(tmp_path / "mine.json"), HERE, packages)
    assert named.find(CALL) == (str(tmp_path / "mine.json"), [Measurement("acme/x", 3.0)])


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, "No such file"), (b"{", "truncated"), (b"[]", "Expected `object`"),
        (b'{"format": 2, "bench": {"device": "", "variant": "", "conditions": {}, "packages": {}}, "entries": []}',
         "it has format 2, this version reads 1"),
        (b'{"format": 1, "bench": {"device": "", "variant": "", "conditions": {}, "packages": {}}, "entries": '
         b'[{"op": "x", "tokens": "many", "static": {}, "measured": []}]}', "an entry has no bucket"),
    ],
)  # fmt: skip
def test_a_broken_file_is_an_error_if_it_was_asked_for_and_else_a_warning(
    content: bytes | None, fault: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = cache / "evener/tuning/chip.json"
    file.parent.mkdir(parents=True)
    if content is not None:
        file.write_bytes(content)
        (note,) = read_tuned("auto", HERE, []).notes
        assert note.startswith("tuning file chip.json cannot be used: ") and fault in note
        assert note in caplog.messages
    with pytest.raises(ConfigError, match="write a new one: evener tune MODEL --out FILE") as error:
        read_tuned(str(file), HERE, [])
    assert fault in str(error.value) and str(file) in str(error.value)


def test_a_written_file_reads_back_equal_and_is_indented() -> None:
    file = TuningFile(FORMAT, HERE, [entry(Measurement("acme/x", 1.5, {"width": 4}))])
    assert decode(file.encode()) == file
    assert '\n   "op": "rms_norm",\n' in file.encode().decode()

"""The tuning files in this package: whole, and found by the shapes of the models that they were measured for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from model_configs import CONFIGS

import evener_backend_cuda
import evener_kernels_triton
from evener.contracts.declared import LinearWeight
from evener.layers.builder import Builder
from evener.ops.reference.linear import PLAIN
from evener.ops.reference.state import ReferenceState
from evener.ops.schemas import BUILTIN
from evener.plugins.catalog import Provided
from evener.resolution.buckets import token_buckets
from evener.resolution.candidates import Candidates
from evener.resolution.resolver import Resolver
from evener.tuning_files.measurements import TuningTable, decode
from evener_backend_cuda.capability import capabilities
from evener_conformance.naive.model import find_architecture
from evener_kernels_triton import plugin as triton

FILES = sorted((Path(evener_backend_cuda.__file__).parent / "measured").glob("*.json"))
SCHEMAS = {schema.name: schema for schema in BUILTIN}


def test_there_are_files_where_the_descriptor_says() -> None:
    assert evener_backend_cuda.descriptor.tuning == "evener_backend_cuda.measured"
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_tuning_files_are_valid_and_name_existing_kernels(path: Path) -> None:
    file = decode(path.read_bytes())
    assert (file.bench.device, file.bench.variant) == ("NVIDIA H200", "sm_90")
    assert {"torch", "driver", "cuda", "triton"} <= file.bench.conditions.keys()
    assert "triton" in file.bench.packages
    assert file.entries
    assert len({entry.key for entry in file.entries}) == len(file.entries)
    for entry in file.entries:
        assert entry.op in SCHEMAS
        times = [measured.us for measured in entry.measured]
        # What serves anyway goes first if nothing is clearly faster.
        assert times[1:] == sorted(times[1:]) and 0 < times[0] <= 1.03 * min(times)
        for measured in entry.measured:
            package, _, kernel = measured.provider.partition("/")
            known = {f"triton.{op}" for op in evener_kernels_triton.descriptor.ops} | {"torch.linear"}
            assert package in ("reference", "expanded") or (package == "triton" and kernel in known)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_model_shapes_match_the_tuning_entries_and_chosen_variants_still_exist(
    path: Path,
) -> None:
    file, tuned = decode(path.read_bytes()), TuningTable()
    tuned.add(path.name, file.entries)
    config = CONFIGS[path.stem.removeprefix("h200-")]
    device = SimpleNamespace(capabilities=capabilities((9, 0), 132, 232448))
    build = Builder("bfloat16", 1024)
    find_architecture(config["architectures"][0])(config, build)
    given: dict[str, Any] = {"device": device, "options": {}}
    resolver = Resolver(
        Candidates(
            schemas=SCHEMAS, kernels=[Provided(k, "triton", "triton", "0") for k in triton.evener_kernels(**given)],
            states=[Provided(s, "triton", "triton", "0") for s in triton.evener_state_providers(**given)],
            reference_state=ReferenceState(), reference_packing=PLAIN, device=device.capabilities,
            buckets=token_buckets(256), tuned=tuned,
        )
    )  # fmt: skip
    resolver.states(build.slots)
    resolver.packings([w for w in build.weights if isinstance(w, LinearWeight)])
    resolver.sites(build.sites)
    chosen = {(c.op, c.bucket.low) for c in resolver.manifest.choices if c.bucket is not None and c.why}
    assert chosen == {entry.key[:2] for entry in file.entries}
    assert not [reason for c in resolver.manifest.choices for _, reason in c.refused if "any more" in reason]

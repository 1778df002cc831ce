from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest

from evener.config.build import from_overrides
from evener.config.checkpoint import ModelFacts, facts_of, read_model_facts
from evener.config.cpu_cores import usable_cores
from evener.config.packages import Packages
from evener.config.resolve import GIB, DeviceFacts, ResolvedConfig, ResolvedValue, resolve_config
from evener.config.schema import key_specs
from evener.errors import CheckpointError, ConfigError
from evener_inspection.config_command import aligned

HOST = DeviceFacts(
    backend="host", name="Some CPU", dtypes=frozenset({"float32"}), emulated=frozenset({"bfloat16"}),
    host_memory=True, free=8 * GIB,
)  # fmt: skip
CHIP = DeviceFacts(
    backend="chip", name="Some chip", dtypes=frozenset({"bfloat16", "float16", "float32"}), graphs=True, free=60 * GIB
)
MODEL = ModelFacts(path="/data/Some-Model", model_type="llama", dtype="bfloat16", max_positions=8192)


def resolve(
    device: DeviceFacts = HOST,
    model: ModelFacts = MODEL,
    serving: bool = False,
    asked: Mapping[str, object] | None = None,
) -> ResolvedConfig:
    config = from_overrides("/data/Some-Model", asked or {}, Packages(lambda: [])).config
    return resolve_config(config, model, device, serving)


def test_auto_resolves_to_values_with_reasons_without_changing_the_config() -> None:
    resolved = resolve()
    assert (resolved.dtype, resolved.reasons["dtype"]) == ("bfloat16", "the checkpoint's own, emulated on this device")
    assert (resolved.max_seq_len, resolved.max_reqs, resolved.step_tokens) == (8192, 64, 2048)
    assert resolved.use_cuda_graph is False and resolved.block_size == "auto" and resolved.executor == "inline"
    assert resolved.served_model_name == "Some-Model"
    assert resolved.config.dtype == resolved.config.infer.max_reqs == "auto"
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolved.dtype = "float32"  # type: ignore[misc]


def test_an_accelerator_gets_more_requests_graphs_and_what_memory_is_left() -> None:
    resolved = resolve(CHIP)
    assert (resolved.max_reqs, resolved.use_cuda_graph, resolved.kv_memory) == (256, True, None)
    assert resolved.reasons["infer.kv_memory"] == "what is left after warm-up"


@pytest.mark.parametrize(
    ("free", "asked", "expected"),
    [
        (8 * GIB, "auto", int(3.2 * GIB)),
        (100 * GIB, "auto", 4 * GIB),
        (8 * GIB, "0.5", 4 * GIB),
        (8 * GIB, "1GiB", GIB),
    ],
)
def test_state_on_the_host_takes_at_most_4_gib_and_40_percent(free: int, asked: str, expected: int) -> None:
    resolved = resolve(dataclasses.replace(HOST, free=free), asked={"infer.kv_memory": asked})
    assert resolved.kv_memory == pytest.approx(expected, abs=1)


def test_a_type_that_the_device_lacks_is_an_error_when_asked_and_float32_when_not() -> None:
    plain = dataclasses.replace(HOST, emulated=frozenset())
    resolved = resolve(plain)
    assert resolved.dtype == "float32"
    assert resolved.reasons["dtype"] == "the checkpoint is bfloat16, which this device does not support"
    with pytest.raises(
        ConfigError, match="dtype=float16 is not supported on Some CPU, which has float32: leave dtype out"
    ):
        resolve(plain, asked={"dtype": "float16"})


def test_auto_max_seq_len_follows_the_checkpoint_up_to_a_cap() -> None:
    long = dataclasses.replace(MODEL, max_positions=262_144)
    resolved = resolve(model=long)
    assert resolved.max_seq_len == 32_768
    assert (
        "limited to save memory; the checkpoint allows 262144: infer.max_seq_len=262144"
        in resolved.reasons["infer.max_seq_len"]
    )
    assert resolve(model=long, asked={"infer.max_seq_len": 262_144}).max_seq_len == 262_144
    stretched = dataclasses.replace(long, trained_positions=8192)
    assert resolve(model=stretched).max_seq_len == 8192
    assert "allows 262144: infer.max_seq_len=262144" in resolve(model=stretched).reasons["infer.max_seq_len"]
    assert resolve(model=stretched, asked={"infer.max_seq_len": 262_144}).max_seq_len == 262_144
    with pytest.raises(ConfigError, match=r"infer.max_seq_len=9000 is more than the checkpoint's 8192 positions"):
        resolve(asked={"infer.max_seq_len": 9000})
    with pytest.raises(ConfigError, match=r"no max_position_embeddings; set infer.max_seq_len=TOKENS"):
        resolve(model=dataclasses.replace(MODEL, max_positions=None))


def test_capturing_where_the_device_cannot_is_an_error() -> None:
    with pytest.raises(ConfigError, match="Some CPU cannot capture steps; leave it out"):
        resolve(asked={"infer.use_cuda_graph": True})
    assert resolve(CHIP, asked={"infer.use_cuda_graph": False}).use_cuda_graph is False


def test_a_server_gets_a_worker_process_unless_it_is_told_otherwise() -> None:
    assert resolve(serving=True).executor == "process"
    assert resolve(serving=True, asked={"executor": "inline"}).executor == "inline"
    assert resolve(asked={"executor": "process"}).executor == "process"


def test_with_value_returns_a_new_resolved_config() -> None:
    before = resolve()
    after = before.with_value("infer.block_size", 16, "every provider offers it")
    assert (before.block_size, after.block_size) == ("auto", 16)
    assert after.values()["infer.block_size"] == ResolvedValue(16, "every provider offers it")


def test_every_key_is_printed_with_its_value_and_reason() -> None:
    resolved = resolve(asked={"seed": 7})
    found = resolved.values()
    assert found.keys() == key_specs().keys()
    assert all(each.reason for each in found.values())
    assert found["seed"] == ResolvedValue(7, "as asked")
    assert found["infer.depth"] == ResolvedValue(2, "one is computed, one is read")
    assert found["infer.max_reqs"] == ResolvedValue(64, "for host memory") and found["backend"].value == "host"
    assert json.loads(msgspec.json.encode(found))["dtype"]["value"] == "bfloat16"
    assert len(aligned(resolved).splitlines()) == len(found)


def test_both_spellings_of_a_checkpoints_type_and_nested_settings_are_read() -> None:
    assert facts_of("m", {"torch_dtype": "float16"}).dtype == "float16"
    assert facts_of("m", {"dtype": "torch.bfloat16"}).dtype == "bfloat16"
    nested = facts_of("m", {"model_type": "x", "text_config": {"dtype": "bfloat16", "max_position_embeddings": 99}})
    assert (nested.model_type, nested.dtype, nested.max_positions) == ("x", "bfloat16", 99)


@pytest.mark.parametrize(
    ("config", "lengths"),
    [
        ({"max_position_embeddings": 4096, "model_max_length": 4096}, (4096, None)),
        ({"max_position_embeddings": 32768, "seq_length": 8192}, (32768, 8192)),
        ({"max_seq_len": 2048}, (2048, None)),
        ({"seq_length": "long"}, (None, None)),
    ],
)
def test_context_length_is_read_from_every_known_key(
    config: dict[str, object], lengths: tuple[int | None, int | None]
) -> None:
    facts = facts_of("m", config)
    assert (facts.max_positions, facts.trained_positions) == lengths


def test_a_folder_that_cannot_be_used_says_what_to_give(tmp_path: Path, model_folder: Callable[..., Path]) -> None:
    assert read_model_facts(str(model_folder("ok", model_type="llama"))).model_type == "llama"
    with pytest.raises(CheckpointError, match=r"does not exist, or is no folder or plain file; give"):
        read_model_facts(str(tmp_path / "no"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"has no config.json"):
        read_model_facts(str(tmp_path / "empty"))
    (tmp_path / "empty" / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json is not valid JSON"):
        read_model_facts(str(tmp_path / "empty"))


def test_hardware_threads_of_one_core_count_once_and_a_containers_share_limits_them(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(siblings + "\n")
    cgroup = tmp_path / "cgroup"
    cgroup.mkdir()
    cpus = frozenset(range(4))
    assert usable_cores(cpus, tmp_path, cgroup)[0] == 2
    assert usable_cores(frozenset({0, 2}), tmp_path, cgroup)[0] == 1
    (cgroup / "cpu.max").write_text("max 100000\n")
    assert usable_cores(cpus, tmp_path, cgroup)[0] == 2
    (cgroup / "cpu.max").write_text("50000 100000\n")
    assert usable_cores(cpus, tmp_path, cgroup) == (
        1, "the container's CPU quota is 1 of 2 physical cores among the 4 CPUs that this process may use"
    )  # fmt: skip


def test_no_secret_is_shown_with_the_resolved_values() -> None:
    resolved = resolve(asked={"serve.api_keys": ["s3cret", "other"]})
    assert "s3cret" not in aligned(resolved) + str(resolved.values()) + repr(resolved)
    assert resolved.values()["serve.api_keys"] == ResolvedValue("(hidden)", "as asked")
    assert resolve().values()["serve.api_keys"] == ResolvedValue([], "the default")

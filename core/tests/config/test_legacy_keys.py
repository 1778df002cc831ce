from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from evener_keys.command_line import from_command_line
from evener_keys.legacy_keys import (
    LEGACY_KEYS,
    LEGACY_VALUES,
    RemovedKey,
    RenamedKey,
    check_model_family,
    legacy_env_overrides,
    unused_legacy_env_notes,
)

from evener.config import LegacyKeyWarning
from evener.config import from_overrides as for_llm
from evener.config.build import from_overrides
from evener.config.keys import split_command_line
from evener.config.packages import Packages
from evener.config.schema import key_specs, to_flat
from evener.errors import ConfigError
from evener.plugins.catalog import Catalog


@pytest.mark.parametrize(
    ("old", "value", "new", "meant"),
    [
        ("models.tokenizer_path", "/t", "tokenizer", "/t"),
        ("infer.do_load", "False", "load", "dummy"),
        ("infer.do_load", True, "load", "auto"),
        ("infer.seed", 3, "seed", 3),
        ("infer.max_batch_size", 4, "infer.max_reqs", 4),
        ("infer.prefill_chunk_size", "auto", "infer.step_tokens", "auto"),
        ("infer.schedule_overlap", False, "infer.depth", 1),
        ("infer.silence_limit", 2.5, "infer.heartbeat_timeout", 2.5),
        ("infer.step_limit", 0, "infer.step_timeout", 0.0),
        ("keep_dtype_in_checkpoint", "True", "dtype", "auto"),
        ("float_16bit_dtype", "bfloat16", "dtype", "bfloat16"),
        ("infer.raise_lower_bit_float_to", "bfloat16", "infer.quant_activations", "keep"),
        ("infer.op_impl", "torch", "infer.op_impl", "auto"),
        ("setting.global.tensor_para_size", 1, "infer.tp_size", 1),
        ("setting.block_manager.block_token_num", 16, "infer.block_size", 16),
        ("kvcache_mem_gpu", "8192", "infer.kv_memory", 2**33),
        ("port", 8080, "serve.port", 8080),
        ("cpu_layer_num", "58", "infer.cpu_layer_num", 58),
    ],
)
def test_an_old_key_with_an_equivalent_sets_it_and_names_it(
    old: str, value: object, new: str, meant: object, nothing_installed: Packages
) -> None:
    built = from_overrides("m", {old: value}, nothing_installed)
    assert to_flat(built.config)[new] == meant
    assert len(built.notes) == 1 and f"write {new}=" in built.notes[0] and f"{old}={value}" in built.notes[0]


@pytest.mark.parametrize(
    ("old", "why"),
    [
        ("infer.soft_fp8=True", "the device decides in which dtype"),
        ("infer.raise_lower_bit_float_to=float32", "write infer.quant_activations=keep"),
        ("scheduler.prefill_first.num_tasks=100", "there is no prefill phase"),
        ("scheduler.type=fcfs", "there is no prefill phase"),
        ("scheduler.pp_config.enforce_decode_num_tasks_max=False", "set the number: .*decode_num_tasks"),
        ("quant_on_load=True", "quant= says how"),
        ("quant_ckpt_dir=/q", "give the folder of the quantized checkpoint as the model"),
        ("infer.memory_utilization=0.9", "infer.kv_memory"),
        ("models.n_layers=3", "read from its config.json"),
        ("hydra.run.dir=x", "Hydra only reads options here"),
        ("keep_dtype_in_checkpoint=False", "set the dtype, as in dtype=bfloat16"),
    ],
)
def test_an_old_key_without_an_equivalent_is_an_error_that_says_why(
    old: str, why: str, nothing_installed: Packages
) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        from_command_line("m", split_command_line([old]).overrides, packages=nothing_installed)
    assert old.lstrip("+") in str(caught.value)


@pytest.mark.parametrize(
    "old", ["infer.soft_fp8=False", "skip_preprocess=False", "skip_preprocess=True", "quant_on_load=false"]
)
def test_an_old_switch_that_is_off_is_only_a_warning(old: str, nothing_installed: Packages) -> None:
    built = from_command_line("m", split_command_line([old]).overrides, packages=nothing_installed)
    assert "leave it out, it asks for what happens anyway" in built.notes[0]


def test_every_legacy_key_maps_to_an_existing_key_and_shadows_none() -> None:
    keys = key_specs()
    assert {rule.key for rule in LEGACY_KEYS.values() if isinstance(rule, RenamedKey)} <= keys.keys()
    assert not LEGACY_KEYS.keys() & keys.keys()
    assert LEGACY_VALUES.keys() <= keys.keys()
    assert all(rule.reason for rule in LEGACY_KEYS.values() if isinstance(rule, RemovedKey))


def test_legacy_command_line_is_accepted_with_one_warning_per_legacy_key(
    model_folder: Callable[..., Path], nothing_installed: Packages
) -> None:
    folder = model_folder("DeepSeek-R1", model_type="deepseek_v3")
    words = f"""serve.port=21002 infer.cache_type=paged infer.pp_size=1 infer.tp_size=1 models=DeepSeek-R1
        models.ckpt_dir={folder} infer.max_reqs=1 infer.max_seq_len=4096 request.max_new_tokens=100
        infer.use_cuda_graph=True infer.stop_with_eos=False""".split()
    built = from_command_line(None, split_command_line(words).overrides, packages=nothing_installed)
    config = built.config
    assert (config.model, config.serve.served_model_name) == (str(folder), "DeepSeek-R1")
    assert (config.infer.max_reqs, config.infer.max_seq_len, config.request.max_new_tokens) == (1, 4096, 100)
    assert (config.infer.use_cuda_graph, config.infer.stop_with_eos) == (True, False)
    assert len(built.notes) == 2


@pytest.mark.parametrize(
    ("name", "folder", "model_type"),
    [
        ("Qwen2-7B-Instruct", "ckpt", "qwen2"),
        ("Qwen2.5-7B", "ckpt", "qwen2"),
        ("DeepSeek-R1", "ckpt", "deepseek_v3"),
        ("deepseek-r1", "DeepSeek-R1", "anything"),
        ("gemma-3-270m", "ckpt", "gemma3_text"),
        ("Meta-Llama-3-8B", "ckpt", "llama"),
    ],
)
def test_a_models_name_may_be_the_folder_or_the_family(name: str, folder: str, model_type: str) -> None:
    check_model_family(name, f"/data/{folder}", model_type)


@pytest.mark.parametrize(
    ("name", "model_type"), [("Qwen3-8B", "qwen2"), ("Llama-3-8B", "qwen2"), ("gemma-2-2b", "gemma3_text")]
)
def test_a_models_name_of_another_family_is_an_error(
    name: str, model_type: str, model_folder: Callable[..., Path], nothing_installed: Packages
) -> None:
    folder = model_folder(model_type=model_type)
    with pytest.raises(ConfigError, match=f"models={name} was asked for, but .* holds a '{model_type}' checkpoint"):
        from_overrides(None, {"models": name, "models.ckpt_dir": str(folder)}, nothing_installed)


def test_a_served_name_that_was_given_wins_over_models(nothing_installed: Packages) -> None:
    built = from_overrides("/m", {"serve.served_model_name": "mine", "models": "Qwen3-8B"}, nothing_installed)
    assert built.config.serve.served_model_name == "mine"


def test_python_callers_get_old_spellings_as_warnings() -> None:
    with pytest.warns(LegacyKeyWarning, match=r"infer\.do_load is a legacy key; write load=dummy"):
        assert for_llm("m", {"infer.do_load": False}).load == "dummy"


def test_a_legacy_folder_of_cached_weights_counts_if_its_switch_is_on() -> None:
    environ = {"MODEL_CACHE_PATH": "/cache"}
    assert legacy_env_overrides(environ).overrides == ()
    assert legacy_env_overrides({**environ, "ENABLE_MODEL_CACHE": "0"}).overrides == ()
    found = legacy_env_overrides({**environ, "ENABLE_MODEL_CACHE": "1"})
    assert [(each.key, each.value) for each in found.overrides] == [("model_cache", "/cache")]
    assert found.notes == ("MODEL_CACHE_PATH is a legacy variable; write model_cache=/cache",)


def test_unused_legacy_build_variables_are_reported() -> None:
    environ = {"CINFER_WITH_CYTHON": "1", "CHITU_SETUP_JOBS": "4", "PATH": "/bin"}
    notes = unused_legacy_env_notes(environ)
    assert [note.split()[0] for note in notes] == ["CHITU_SETUP_JOBS", "CINFER_WITH_CYTHON"]
    assert all("nothing reads it" in note for note in notes)


def test_legacy_micro_batch_sizes_apply_only_when_their_switches_are_off(nothing_installed: Packages) -> None:
    at = "scheduler.pp_config."
    given = {
        f"{at}prefill_num_tasks_divided_by_pp": False, f"{at}prefill_num_tasks": 8,
        f"{at}enforce_decode_num_tasks_max": True, f"{at}decode_num_tasks": 4,
    }  # fmt: skip
    built = from_overrides("m", given, nothing_installed)
    assert (built.config.infer.pp_prefill_reqs, built.config.infer.pp_decode_reqs) == (8, "auto")
    assert any("decode_num_tasks=4 has no effect while" in note for note in built.notes)


def test_without_a_package_that_knows_old_spellings_an_old_key_is_unknown(
    monkeypatch: pytest.MonkeyPatch, nothing_installed: Packages
) -> None:
    monkeypatch.setattr("evener.plugins.discover.installed_catalog", Catalog)
    with pytest.raises(ConfigError, match=r"unknown option 'infer\.do_load'"):
        from_overrides("m", {"infer.do_load": False}, nothing_installed)
    assert from_overrides("m", {"load": "dummy"}, nothing_installed).config.load == "dummy"

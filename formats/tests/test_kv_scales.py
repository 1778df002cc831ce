"""Scales of keys and values: files, tensors of checkpoints, ranks; broken and hostile files are refused."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evener.contracts.checkpoint import Checkpoint, Headers
from evener.contracts.declared import StateSlot
from evener.contracts.device import DeviceCapabilities
from evener.contracts.quantized.state import StateAnswer, StateRequest
from evener.contracts.state import AttentionSpec, StateProvider, StateSpec, StateTensor
from evener.errors import CheckpointError, ConfigError
from evener.ops.reference.state import ReferenceState
from evener_formats.kv_cache.choice import choose_state
from evener_formats.kv_cache.scale_file import MAX_BYTES, format_scales, parse_scales, read_scale_file
from evener_formats.kv_cache.scales import Scales, Shares
from evener_formats.kv_cache.stored_scales import model_fingerprint

CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64}


class Stored(Checkpoint):
    """A checkpoint in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], texts: Mapping[str, str], **config: Any) -> None:
        self.path, self._tensors = Path("stored"), tensors
        self._texts = {"config.json": json.dumps({**CONFIG, **config}), **texts}

    @property
    def headers(self) -> Headers:
        return {name: (str(t.dtype)[6:], tuple(t.shape)) for name, t in self._tensors.items()}

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def text(self, name: str) -> str | None:
        return self._texts.get(name)


class Device:
    """A device of which nothing is known."""

    capabilities = DeviceCapabilities()


class Replacing(ReferenceState):
    """Stores int8 only."""

    scaled, replaced = frozenset({"int8"}), {"float8_e4m3fn": "int8"}


def ask(
    dtype: str = "fp8_e4m3", scales: Path | None = None, tensors: Mapping[str, torch.Tensor] | None = None,
    texts: Mapping[str, str] | None = None, heads: int = 2, rank: int = 0, ranks: int = 1, kind: str = "full",
    providers: Sequence[StateProvider] = (), **config: Any,
) -> tuple[list[StateSlot], StateAnswer]:  # fmt: skip
    """The slots of two layers, and what was decided about them."""
    spec = StateSpec(kind, tuple(StateTensor(name, (heads, 16), "bfloat16") for name in ("key", "value")))
    attention = AttentionSpec(heads, 16, 0.25, dtype="bfloat16")
    slots = [StateSlot(f"model.layers.{n}.self_attn", spec, attention) for n in range(2)]
    checkpoint = Stored({"model.norm.weight": torch.ones(4), **(tensors or {})}, texts or {}, **config)
    device: Any = Device()
    request = StateRequest(
        dtype, None if scales is None else str(scales), [slots], checkpoint, checkpoint.headers, device, providers,
        rank, ranks,
    )  # fmt: skip
    return slots, choose_state(request)


def file(cache: Any, **more: Any) -> str:
    return json.dumps({"model_type": "llama", "kv_cache": cache, **more})


ONE_RANK = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.25, "1": 0.5}}}


def test_a_file_of_vllm_and_ksanallm_has_one_scale_for_keys_and_values(tmp_path: Path) -> None:
    path = tmp_path / "kv_cache_scales.json"
    path.write_text(file(ONE_RANK))
    slots, answer = ask(scales=path)
    assert [slot.scales for slot in slots] == [((0.25, 0.25), (0.25, 0.25)), ((0.5, 0.5), (0.5, 0.5))]
    assert all((t.dtype, t.wide) == ("float8_e4m3fn", "bfloat16") for t in slots[0].spec.tensors)
    assert f"scales of keys and values: {path}" in answer.notes


def test_a_file_in_the_model_s_folder_is_found_and_one_that_is_named_comes_first(tmp_path: Path) -> None:
    texts = {"kv_cache_scales.json": file(ONE_RANK)}
    assert ask(texts=texts)[0][0].scales == ((0.25, 0.25), (0.25, 0.25))
    path = tmp_path / "named.json"
    path.write_text(file({"scaling_factor": {"0": {"0": 2, "1": 3}}}))
    assert ask(texts=texts, scales=path)[0][0].scales == ((2.0, 2.0), (2.0, 2.0))
    # Without eight bits nobody reads it.
    assert ask("auto", texts={"kv_cache_scales.json": "broken"})[0][0].scales == ()


@pytest.mark.parametrize(
    ("values", "per_head", "rank", "ranks", "heads", "found"),
    [
        ((1.0,), False, 1, 2, 3, (1, 1, 1)),  # one for all
        ((1.0, 2.0), False, 1, 2, 2, (2, 2)),  # one for each rank
        ((1.0, 2.0), False, 0, 1, 4, (1, 1, 2, 2)),  # made on two ranks, read on one
        ((1.0, 2.0), False, 3, 4, 1, (2,)),  # made on two, read on four
        ((1.0, 3.0, 2.0, 4.0), False, 0, 2, 1, (3,)),  # a head of two shares has the larger
        ((1.0, 2.0, 3.0, 4.0), True, 1, 2, 2, (3, 4)),  # one for each head
        ((1.0, 2.0), True, 3, 4, 1, (2,)),  # more ranks than heads: they hold the same
        ((1.0, 2.0), True, 1, 2, 2, (1, 2)),  # a layer that every rank holds whole
        ((1.0, 2.0, 3.0), True, 0, 1, 4, None),
        ((1.0, 2.0, 3.0), False, 0, 1, 4, None),
    ],
)
def test_each_rank_gets_the_scales_of_its_heads(
    values: tuple[float, ...], per_head: bool, rank: int, ranks: int, heads: int, found: Any
) -> None:
    assert Shares(values, per_head).of_rank(rank, ranks, heads) == found


def test_written_scales_are_read_again() -> None:
    layers = {0: (Shares((0.5, 0.25), True), Shares((0.125,))), 1: (Shares((1.0, 3.0), True), Shares((2.0,)))}
    made = Scales("int8", layers, "here", "abc")
    text = format_scales(made, "llama")
    assert parse_scales(text, "here") == made
    # The form that others read has the larger of both.
    assert json.loads(text)["kv_cache"]["scaling_factor"] == {"0": {"0": 0.5, "1": 3.0}}


def test_scales_made_for_another_element_type_are_converted(tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    path.write_text(file(ONE_RANK))
    slots, _ = ask("int8", path)
    assert slots[0].scales[0] == pytest.approx([0.25 * 448 / 127] * 2)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000, "is not valid JSON"), ("nonsense", "is not valid JSON"), ("[]", "has no object kv_cache"),
        (file({"dtype": "int4", "scaling_factor": {}}), "is for 'int4'"), (file({}), "has neither scaling_factor nor"),
        (file({"key_scaling_factor": {"0": {"0": 1}}}), "has neither scaling_factor nor"),
        (file({"scaling_factor": {"0": {"0": float("nan"), "1": 1}}}), "a scale of layer 0 is nan"),
        (file({"scaling_factor": {"0": {"0": 0, "1": 1}}}), "a scale of layer 0 is 0"),
        (file({"scaling_factor": {"0": {"0": -1, "1": 1}}}), "a scale of layer 0 is -1"),
        (file({"scaling_factor": {"0": {"0": float("inf"), "1": 1}}}), "a scale of layer 0 is inf"),
        (file({"scaling_factor": {"0": {"0": 1e-300, "1": 1}}}), "a scale of layer 0 is 1e-300"),
        (file({"scaling_factor": {"0": {"0": 10**400, "1": 1}}}), "a scale of layer 0 is 1000"),
        (file({"scaling_factor": {"0": {"0": True, "1": 1}}}), "a scale of layer 0 is True"),
        (file({"scaling_factor": {"0": {"0": "1", "1": 1}}}), "a scale of layer 0 is 1"),
        (file({"scaling_factor": {"0": {"0": []}}}), "has 0 scales of layer 0"),
        (file({"scaling_factor": {"0": {"0": 1}}}), "has scales of 1 layers, and none of layer 1"),
        (file({"scaling_factor": {"0": {"0": 1, "1": 1, "2": 1}}}), "among them layer 2"),
        (file({"scaling_factor": {"0": {"00": 1}}}), "has layers that are not numbered"),
        (file({"scaling_factor": {"0": {"-1": 1}}}), "has layers that are not numbered"),
        (file({"scaling_factor": {"1": {"0": 1, "1": 1}}}), "does not have ranks 0, 1"),
        (file({"scaling_factor": {"0": {"0": 1, "1": 1}, "1": {"0": 1}}}), "does not have the same layers"),
        (file({"scaling_factor": {"0": {"0": [1, 1, 1], "1": 1}}}), "has 3 and 3 scales of keys and values"),
        (file({"scaling_factor": {"0": {"0": [1] * 5000, "1": 1}}}), "has 5000 scales of layer 0"),
        (file({"scaling_factor": []}), "is no object of 1 to 4096 ranks"),
        (file({"scaling_factor": {str(n): {} for n in range(5000)}}), "is no object of 1 to 4096 ranks"),
        (file(ONE_RANK, fingerprint=7), "has a fingerprint that is no text"),
        (file(ONE_RANK, fingerprint="of another"), "was made for another model"),
    ],
)  # fmt: skip
def test_a_broken_or_hostile_file_is_refused(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    path.write_text(text)
    with pytest.raises(CheckpointError) as caught:
        ask(scales=path)
    assert why in str(caught.value) and len(str(caught.value)) < 500


def test_a_huge_file_a_pipe_and_no_file_are_refused(tmp_path: Path) -> None:
    huge = tmp_path / "huge.json"
    with huge.open("wb") as target:
        target.truncate(MAX_BYTES + 1)
    os.mkfifo(tmp_path / "pipe")
    whys = {"huge.json": "bytes, which is no file", "pipe": "not a regular file", "none": "cannot read"}
    for name, why in whys.items():
        with pytest.raises(CheckpointError, match=why):
            read_scale_file(tmp_path / name)


def test_the_model_s_fingerprint_does_not_depend_on_how_its_weights_are_stored() -> None:
    assert model_fingerprint(CONFIG) == model_fingerprint({**CONFIG, "dtype": "bfloat16", "quantization_config": {}})
    assert model_fingerprint(CONFIG) != model_fingerprint({**CONFIG, "hidden_size": 128})


def scale_tensors(key: str, value: str | None, shape: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    found = {}
    for n in range(2):
        found[f"model.layers.{n}.self_attn.{key}"] = torch.full(shape, 0.5 + n)
        if value is not None:
            found[f"model.layers.{n}.self_attn.{value}"] = torch.full(shape, 0.25 + n)
    return found


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("k_scale", "v_scale"), ("k_proj.output_scale", "v_proj.output_scale"), ("k_proj.k_scale", "v_proj.v_scale"),
        ("attn.k_scale", "attn.v_scale"), ("kv_scale", None),
    ],
)  # fmt: skip
def test_scales_in_a_checkpoint_are_read_by_each_of_their_names(key: str, value: str | None) -> None:
    slots, answer = ask(tensors=scale_tensors(key, value, (1,)))
    assert slots[1].scales == ((1.5, 1.5), (1.25 if value else 1.5,) * 2)
    assert len(answer.read) == (4 if value else 2)  # so that the loader does not call them strangers


def test_a_checkpoint_may_have_a_scale_for_each_head() -> None:
    tensors = {f"model.layers.{n}.self_attn.{k}_scale": torch.tensor([1.0, 2.0]) for n in range(2) for k in "kv"}
    assert ask(tensors=tensors)[0][0].scales == ((1.0, 2.0), (1.0, 2.0))


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        (scale_tensors("k_scale", None), "has a scale of its keys only"),
        ({k: v for k, v in scale_tensors("k_scale", "v_scale").items() if ".0." in k}, "but none for model.layers.1"),
        ({**scale_tensors("k_scale", "v_scale"), "model.layers.0.self_attn.k_scale": torch.tensor(0.0)}, "is 0.0, not"),
        (scale_tensors("k_scale", "v_scale", (2, 3)), r"has the shape \[2, 3\]"),
        ({**scale_tensors("k_scale", "v_scale"), "model.layers.0.self_attn.k_zero_point": torch.tensor(3)}, "is not 0"),
    ],
)
def test_broken_scales_of_a_checkpoint_are_refused(tensors: dict[str, torch.Tensor], why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        ask(tensors=tensors)


SCHEME = {"quantization_config": {"kv_cache_scheme": {"type": "float", "num_bits": 8}}}


def test_auto_does_as_the_checkpoint_says_where_a_kernel_can() -> None:
    tensors, asked = scale_tensors("k_scale", "v_scale"), {**SCHEME}
    slots, answer = ask("auto", tensors=tensors, **asked)
    assert slots[0].spec.tensors[0].wide is None and "which no installed kernel stores here" in answer.notes[0]
    checkpoint = Stored({**tensors, "w": torch.ones(1)}, {}, **asked)
    device: Any = Device()
    choose_state(StateRequest("auto", None, [slots], checkpoint, checkpoint.headers, device, [ReferenceState()]))
    assert slots[0].spec.tensors[0].dtype == "float8_e4m3fn" and slots[0].scales == ((0.5, 0.5), (0.25, 0.25))
    odd = {"quantization_config": {"kv_cache_scheme": {"type": "float", "num_bits": 4}}}
    assert "of 4 bits of float in config.json is not read here" in ask("auto", **odd)[1].notes[0]


def test_a_provider_may_replace_an_element_type_and_the_run_announces_it(caplog: pytest.LogCaptureFixture) -> None:
    tensors = scale_tensors("k_scale", "v_scale")
    slots, answer = ask(tensors=tensors, providers=[Replacing()])
    assert slots[0].spec.tensors[0].dtype == "int8"
    assert slots[0].scales[0] == pytest.approx([0.5 * 448 / 127] * 2)
    said = "the KV cache is stored as int8 instead of fp8_e4m3 (infer.kv_dtype=fp8_e4m3), which reference"
    assert f"{said} does not store" in answer.notes and said in caplog.text


def test_unsupported_requests_are_errors() -> None:
    with pytest.raises(ConfigError, match="evener calibrate stored --text FILE"):
        ask("int8")
    with pytest.raises(ConfigError, match=r"latents .* are stored without scales, in bfloat16 or fp8_e4m3"):
        ask("int8", kind="latent")
    with pytest.raises(ConfigError, match="keeps no keys, values or latents"):
        ask("fp8_e4m3", kind="index")
    with pytest.raises(ConfigError, match="are stored as computed, without scales"):
        ask("auto", Path("x"))
    with pytest.raises(ConfigError, match="are stored as bfloat16, without scales"):
        ask("bfloat16", Path("x"))


def test_e5m2_needs_no_scales_and_bfloat16_has_none() -> None:
    assert ask("fp8_e5m2")[0][0].scales == ((1.0, 1.0), (1.0, 1.0))
    slots, _ = ask("bfloat16")
    assert slots[0].scales == () and slots[0].spec.tensors[0] == replace(slots[0].spec.tensors[0], dtype="bfloat16")


def test_latents_are_stored_without_scales() -> None:
    slots, answer = ask("fp8_e4m3", kind="latent")
    assert answer.notes == ["latents are stored as fp8_e4m3: infer.kv_dtype=fp8_e4m3"] and slots[0].scales == ()

"""Adapters of PEFT: each folder is read, or refused with the reason."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from evener.contracts.adapters import AdapterLimits
from evener.errors import CheckpointError
from evener_formats.peft import CONFIG, WEIGHTS, read_adapter

LIMITS = AdapterLimits(
    targets={"model.layers.0.self_attn.q_proj.weight": (6, 4), "model.layers.0.mlp.down_proj.weight": (4, 10),
             "model.layers.1.self_attn.q_proj.weight": (6, 4)},
    rank=8, loaded=4,
)  # fmt: skip
PLAIN = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none",
         "task_type": "CAUSAL_LM", "lora_dropout": 0.1, "peft_version": "0.18.0", "megatron_core": "megatron.core",
         "use_dora": False, "modules_to_save": None, "init_lora_weights": True}  # fmt: skip
Q, DOWN, OTHER = (name.removesuffix(".weight") for name in LIMITS.targets)


def halves(module: str, rank: int = 2, seed: int = 0, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    rows, columns = LIMITS.targets[f"{module}.weight"]
    draw, prefix = np.random.default_rng(seed), f"base_model.model.{module}.lora_"
    down, up = (draw.standard_normal(size).astype(dtype) for size in ((rank, columns), (rows, rank)))
    return {f"{prefix}A.weight": down, f"{prefix}B.weight": up}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """``write(tensors, **config)``: a folder with an adapter."""

    def make(tensors: Mapping[str, np.ndarray] | bytes | None = None, **config: Any) -> Path:
        tensors = halves(Q) if tensors is None else tensors
        (tmp_path / WEIGHTS).write_bytes(tensors if isinstance(tensors, bytes) else save(dict(tensors)))
        (tmp_path / CONFIG).write_text(json.dumps({**PLAIN, **config}))
        return tmp_path

    return make


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_adapter(folder, LIMITS)
    return str(caught.value)


def test_an_adapter_is_read_as_it_is_stored(write: Callable[..., Path]) -> None:
    stored = {**halves(DOWN, seed=1), **halves(Q)}
    found = read_adapter(write(stored), LIMITS)
    assert found is not None and [each.name for each in found] == [f"{DOWN}.weight", f"{Q}.weight"]
    for each in found:
        prefix = f"base_model.model.{each.name.removesuffix('weight')}"
        assert each.down == stored[f"{prefix}lora_A.weight"].tobytes()
        assert each.up == stored[f"{prefix}lora_B.weight"].tobytes()
        assert (each.rank, each.scale, each.dtype) == (2, 4.0, "float32")


def test_half_precision_is_kept(write: Callable[..., Path]) -> None:
    (found,) = read_adapter(write(halves(Q, dtype=np.float16)), LIMITS) or []
    assert found.dtype == "float16" and len(found.down) == 2 * 4 * 2


def bfloat16(tensors: Mapping[str, np.ndarray]) -> bytes:
    """The tensors, cut off to bfloat16, as a file."""
    header: dict[str, Any] = {}
    data = b""
    for name, tensor in tensors.items():
        cut = (tensor.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        header[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [len(data), len(data) + len(cut)]}
        data += cut
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_bfloat16_is_kept(write: Callable[..., Path]) -> None:
    (found,) = read_adapter(write(bfloat16(halves(Q))), LIMITS) or []
    assert found.dtype == "bfloat16" and len(found.down) == 2 * 4 * 2


@pytest.mark.parametrize(
    ("config", "scales"),
    [({}, {Q: 4.0, OTHER: 4.0}), ({"use_rslora": True}, {Q: 8 / 2**0.5, OTHER: 8 / 2**0.5}),
     ({"alpha_pattern": {"q_proj": 3}}, {Q: 1.5, OTHER: 1.5}),
     ({"alpha_pattern": {"layers.1.self_attn.q_proj": 3}}, {Q: 4.0, OTHER: 1.5}),
     ({"alpha_pattern": {f"^{Q}": 3, "q_proj": 5}}, {Q: 1.5, OTHER: 2.5}),
     ({"alpha_pattern": {"proj": 3}}, {Q: 4.0, OTHER: 4.0})],
)  # fmt: skip
def test_the_scale_is_that_of_peft(
    config: dict[str, Any], scales: dict[str, float], write: Callable[..., Path]
) -> None:
    found = read_adapter(write({**halves(Q), **halves(OTHER)}, **config), LIMITS)
    assert {each.name.removesuffix(".weight"): each.scale for each in found or ()} == pytest.approx(scales)


def test_layers_have_ranks_of_their_own(write: Callable[..., Path]) -> None:
    ranks = {"layers.0.self_attn.q_proj": 3}
    found = read_adapter(write({**halves(Q, 3), **halves(OTHER)}, rank_pattern=ranks), LIMITS)
    assert [(each.rank, each.scale) for each in found or ()] == [(3, 8 / 3), (2, 4.0)]


def test_a_folder_without_the_config_is_not_of_this_format(tmp_path: Path) -> None:
    assert read_adapter(tmp_path, LIMITS) is None
    assert read_adapter(tmp_path / "nowhere", LIMITS) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [({"peft_type": "IA3"}, "peft_type is 'IA3'"), ({"use_dora": True}, "'use_dora' is True"),
     ({"bias": "all"}, "bias is 'all'"), ({"modules_to_save": ["lm_head"]}, r"'modules_to_save' is \['lm_head'\]"),
     ({"lora_bias": True}, "'lora_bias' is True"), ({"fan_in_fan_out": True}, "'fan_in_fan_out' is True"),
     ({"init_lora_weights": "pissa_niter_4"}, "changes the model's own weights"),
     ({"init_lora_weights": ["x"]}, "changes the model's own weights"),
     ({"some_future_key": 7}, "'some_future_key' is 7"), ({"layer_replication": [[0, 4]]}, "'layer_replication'"),
     ({"trainable_token_indices": [1]}, "'trainable_token_indices'"), ({"target_parameters": ["x"]}, "'target_param"),
     ({"r": 0}, "rank as 0"), ({"r": True}, "rank as True"), ({"r": "8"}, "rank as '8'"), ({"r": 1e9}, "rank as 1"),
     ({"lora_alpha": None}, "alpha as None"), ({"lora_alpha": float("nan")}, "alpha as nan"),
     ({"lora_alpha": 1e300}, r"alpha as 1e\+300"), ({"alpha_pattern": {"q_proj": "x"}}, "alpha as 'x'"),
     ({"rank_pattern": {"(a+)+$": 2}}, "only names of layers"), ({"rank_pattern": {"": 2}}, "only names of layers"),
     ({"rank_pattern": [1]}, "not an object"), ({"rank_pattern": {f"n{i}": 1 for i in range(5000)}}, "at most 4096"),
     ({"r": 9}, r"infer\.max_lora_rank=9"), ({"r": 3}, r"rank 3 of this model's layer takes \[3, 4\] and \[6, 3\]")],
)  # fmt: skip
def test_settings_that_would_change_results_are_refused(
    config: dict[str, Any], message: str, write: Callable[..., Path]
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_adapter(write(**config), LIMITS)


def renamed(name: str) -> dict[str, np.ndarray]:
    return {name.format(key.split("lora_")[1]): value for key, value in halves(Q).items()}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [({}, "has no tensor"), (renamed("base_model.model.lm_head.lora_{}"), "'lm_head' is no layer of this model"),
     (renamed("base_model.model.model.layers.9.self_attn.q_proj.lora_{}"), "no layer of this model"),
     (renamed("model.layers.0.self_attn.q_proj.lora_{}"), "is not lora_A or lora_B"),
     ({**halves(Q), "base_model.model.model.embed_tokens.lora_embedding_A": np.zeros(8)}, "is not lora_A or lora_B"),
     ({**halves(Q), f"base_model.model.{Q}.lora_magnitude_vector": np.zeros(6)}, "is not lora_A or lora_B"),
     (dict([*halves(Q).items()][:1]), "has lora_A only"),
     (halves(Q, dtype=np.float64), "stored as F64 and F64"), (halves(Q, dtype=np.int8), "stored as I8 and I8"),
     ({**halves(Q), f"base_model.model.{Q}.lora_A.weight": np.zeros((2, 4), np.float16)}, "stored as F16 and F32"),
     ({**halves(Q), f"base_model.model.{Q}.lora_A.weight": np.zeros((2, 5), np.float32)}, r"has shapes \[2, 5\]"),
     ({**halves(Q), f"base_model.model.{Q}.lora_B.weight": np.zeros((6, 2, 1), np.float32)}, r"and \[6, 2, 1\]"),
     ({**halves(Q), f"base_model.model.{Q}.lora_B.weight": np.full((6, 2), np.inf, np.float32)}, "not finite"),
     ({**halves(Q), f"base_model.model.{Q}.lora_A.weight": np.full((2, 4), np.nan, np.float32)}, "not finite"),
     ({"base_model.model." + "x" * 100_000 + ".lora_A.weight": np.zeros(1)}, "no layer of this model")],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(
    tensors: dict[str, np.ndarray], message: str, write: Callable[..., Path]
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_adapter(write(tensors), LIMITS)
    assert len(str(caught.value)) < 1000


def test_the_refusal_of_an_unknown_layer_says_which_there_are(write: Callable[..., Path]) -> None:
    assert "those are down_proj, q_proj" in refused(write(renamed("base_model.model.x.lora_{}")))


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "link to nothing", "too large", "empty"])
def test_only_regular_files_of_a_plausible_size_are_opened(name: str, kind: str, write: Callable[..., Path]) -> None:
    folder = write()
    path = folder / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link to nothing":
        path.symlink_to(folder / "nothing")
    else:
        with path.open("wb") as file:
            file.truncate(0 if kind == "empty" else 1 << 40)
    assert name in refused(folder)


def test_weights_in_another_file_are_not_read(write: Callable[..., Path]) -> None:
    folder = write()
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    assert "adapter_model.bin, are not read" in refused(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "1", "[" * 100_000, '"' + "x" * 3000, "\ud800", "{}"])
def test_an_invalid_config_is_refused(text: str, write: Callable[..., Path]) -> None:
    folder = write()
    (folder / CONFIG).write_text(text, encoding="utf-8", errors="surrogatepass")
    assert len(refused(folder)) < 1000


def test_a_header_that_does_not_fit_the_file_is_refused(write: Callable[..., Path]) -> None:
    whole = save(halves(Q))
    for data in (b"\xff" * 64, struct.pack("<Q", 1 << 62) + b"{}", whole[:-1], whole + b"x", whole[:20], b"{}"):
        assert WEIGHTS in refused(write(data))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)


@given(
    changes=st.dictionaries(
        st.sampled_from([*PLAIN, "use_rslora", "rank_pattern", "alpha_pattern"]), VALUES, max_size=3
    ),
    seed=st.integers(0, 2**32), cuts=st.integers(0, 4),
)  # fmt: skip
def test_mutated_folders_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any], seed: int, cuts: int
) -> None:
    """Whatever is in a folder, the adapter has the sizes and the finite numbers that the engine relies on."""
    folder, draw = tmp_path_factory.mktemp("adapter"), random.Random(seed)
    data = bytearray(save({**halves(Q), **halves(DOWN)}))
    for _ in range(cuts):
        data[draw.randrange(len(data))] = draw.randrange(256)
    (folder / WEIGHTS).write_bytes(data[: draw.choice([len(data), draw.randrange(len(data))])] if cuts else data)
    (folder / CONFIG).write_text(json.dumps({**PLAIN, **changes}))
    try:
        found = read_adapter(folder, LIMITS)
    except CheckpointError as error:
        assert len(str(error)) < 2000
        return
    assert found
    for each in found:
        rows, columns = LIMITS.targets[each.name]
        size = {"float32": 4, "float16": 2, "bfloat16": 2}[each.dtype]
        assert 1 <= each.rank <= LIMITS.rank and np.isfinite(each.scale)
        assert (len(each.down), len(each.up)) == (each.rank * columns * size, rows * each.rank * size)
        if each.dtype == "float32":
            assert np.isfinite(np.frombuffer(each.down, np.float32)).all()

"""gpt-oss in a GGUF file, with experts in MXFP4: the same tensors, bytes, logits and tokens as from its folder."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from evener_convert.command import convert
from family_runner import SMALL, prompt_of
from gguf_files import LETTERS, TYPES, dequantized, write_gguf
from gguf_gpt_oss import file_tensors, gpt_oss_folder, in_ggml_blocks, keys_of, write_gpt_oss
from llamacpp_answers import llamacpp

from evener.config import from_overrides
from evener.contracts.quant import MXFP4, WeightPart
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener.errors import CheckpointError, EvenerError
from evener.frontend.tokenizer import Tokenizer
from evener.loading.checkpoint import open_checkpoint
from evener_conformance.naive.model import NaiveModel
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.engine import play
from evener_formats.gguf.families import GptOss
from evener_formats.gguf.scheme import GgufScheme
from evener_formats.gguf.stored import split_mxfp4
from evener_formats.mxfp4 import Mxfp4Scheme

EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpt_oss_folder(tmp_path_factory.mktemp("folder"))


def q8_0(name: str) -> str:
    return "Q8_0"


def wide_experts(folder: Path) -> dict[str, torch.Tensor]:
    """The stacks of experts of a file, dequantized."""
    found = {}
    for name, tensor in file_tensors(folder).items():
        if name.endswith("_exps.weight"):
            numbers = gguf.quants.dequantize(tensor.numpy(), gguf.GGMLQuantizationType.MXFP4)
            found[name] = torch.from_numpy(np.array(numbers))
    return found


def filled(scheme: Any, checkpoint: Any, name: str) -> WeightPart:
    part = scheme.part(name, checkpoint.headers)
    roles = scheme.tensors(name, checkpoint.headers)
    tensors = {role: checkpoint.tensor(stored) for role, stored in roles.items()}
    return WeightPart(name, part.rows, part.columns, part.format, tensors)


def greedy(model: Path, ids: Sequence[int], count: int = 24, **keys: Any) -> tuple[list[int], Any]:
    controller, ready = build_controller(from_overrides(str(model), {**SMALL, **keys}))
    asked = NewRequest(id="a", prompt=list(ids), max_tokens=count, sampling=Sampling(temperature=0.0))
    return play(controller, [asked]).tokens["a"], ready.info


def test_blocks_mean_what_the_gguf_library_says() -> None:
    """Every scale with every element in every place; a scale of 255 is NaN here and 2^127 there."""
    noise = torch.Generator().manual_seed(1)
    stored = torch.randint(256, (255, 16, 17), generator=noise, dtype=torch.uint8)
    stored[..., 0] = torch.arange(255, dtype=torch.uint8)[:, None]
    blocks, scales = split_mxfp4(stored)
    part = WeightPart("w", 255, 512, MXFP4, {"weight": blocks, "scale": scales})
    with np.errstate(over="ignore"):
        theirs = gguf.quants.dequantize(stored.flatten(1).numpy(), gguf.GGMLQuantizationType.MXFP4)
    assert np.array_equal(Mxfp4Scheme().dequantize(part, "float32").numpy(), theirs)
    assert torch.equal(in_ggml_blocks(blocks, scales), stored.flatten(1))


def test_a_file_gives_the_tensors_and_the_config_of_the_folder(folder: Path, tmp_path: Path) -> None:
    ours, theirs = open_checkpoint(write_gpt_oss(folder, tmp_path / "m.gguf")), open_checkpoint(folder)
    assert ours.headers == theirs.headers
    for name in theirs.headers:
        assert torch.equal(ours.tensor(name), theirs.tensor(name)), name
    assert {f"{EXPERTS}.gate_up_proj_blocks", f"{EXPERTS}.gate_up_proj_bias"} < ours.copied
    config, wanted = ours.config, theirs.config
    same = ("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
            "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps",
            "tie_word_embeddings", "attention_bias", "sliding_window", "num_local_experts",
            "num_experts_per_tok")  # fmt: skip
    assert {key: config[key] for key in same} == {key: wanted[key] for key in same}
    rope = wanted["rope_parameters"]
    assert {"rope_theta": config["rope_theta"], **config["rope_scaling"]} == rope
    assert config["quantization_config"] == {"quant_method": "gguf"}


def test_a_stack_is_made_once_for_all_of_its_experts_and_released(folder: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gpt_oss(folder, tmp_path / "m.gguf"))
    names = [f"{EXPERTS}.gate_up_proj_{part}" for part in ("blocks", "scales")]
    first = [checkpoint.tensor(name) for name in names]
    assert [checkpoint.tensor(name) is tensor for name, tensor in zip(names, first, strict=True)] == [True, True]
    checkpoint.tensor(f"{EXPERTS}.down_proj_blocks")
    assert checkpoint.tensor(names[0]) is not first[0]
    checkpoint.close()
    assert checkpoint._last is None  # type: ignore[attr-defined]
    assert torch.equal(checkpoint.tensor(names[0]), first[0])


def test_logits_and_tokens_are_those_of_the_folder(folder: Path, tmp_path: Path, one_thread: None) -> None:
    """64 tokens, beyond the window and the context before the scaling of angles."""
    path, ids = write_gpt_oss(folder, tmp_path / "m.gguf"), prompt_of(259)
    theirs = NaiveModel(folder, schemes=(Mxfp4Scheme(),)).logits(ids)
    assert theirs.std() > 0.5
    assert torch.equal(NaiveModel(path, schemes=(GgufScheme(),)).logits(ids), theirs)
    (tokens, info), (wanted, other) = (greedy(model, ids, 64) for model in (path, folder))
    assert tokens == wanted and len(set(tokens)) > 8
    assert info.manifest.packings == other.manifest.packings and info.manifest.dequantized == []
    ours, whole = ({k: getattr(info.memory, k) + info.memory.mapped * (k == "weights") for k in ("weights", "host")}
                   for info in (info, other))  # fmt: skip
    assert ours == whole and info.memory.measured_weights == info.memory.weights


def test_the_rest_in_blocks_beside_experts_in_mxfp4(folder: Path, tmp_path: Path, one_thread: None) -> None:
    """As published files have it: attention and embeddings in Q8_0."""
    path = write_gpt_oss(folder, tmp_path / "m.gguf", q8_0)
    tokens, info = greedy(path, prompt_of(259))
    assert len(set(tokens)) > 8 and info.manifest.dequantized == []
    assert max(NaiveModel(path, schemes=(GgufScheme(),)).greedy_gaps(prompt_of(259), tokens)) < 2e-2


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1", "F16", "BF16", "F32"])
def test_experts_in_another_type_are_read(kind: str, folder: Path, tmp_path: Path) -> None:
    stacks = wide_experts(folder)
    path = write_gpt_oss(folder, tmp_path / "m.gguf", lambda name: kind if "_exps" in name else "F32", **stacks)
    checkpoint, scheme = open_checkpoint(path), GgufScheme()
    for name, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        stored = [stacks[f"blk.0.ffn_{part}_exps.weight"] for part in parts]
        wanted = torch.stack([dequantized(s, kind) for s in stored], dim=2).flatten(1, 2)
        part = filled(scheme, checkpoint, f"{EXPERTS}.{name}")
        for expert, weight in enumerate(part.tensors["weight"]):
            one = WeightPart(name, part.rows, part.columns, part.format, {"weight": weight})
            numbers = scheme.dequantize(one, "float32")
            # Unquantized stacks are [experts, columns, rows].
            assert torch.equal(numbers.T if part.format.plain else numbers, wanted[expert])


@pytest.mark.parametrize("kind", ["Q8_0", "BF16"])
def test_a_model_with_experts_in_another_type_runs(kind: str, folder: Path, tmp_path: Path, one_thread: None) -> None:
    stacks = wide_experts(folder)
    path = write_gpt_oss(folder, tmp_path / "m.gguf", lambda name: kind if "_exps" in name else "F32", **stacks)
    tokens, info = greedy(path, prompt_of(259))
    assert max(NaiveModel(path, schemes=(GgufScheme(),)).greedy_gaps(prompt_of(259), tokens)) < 2e-2
    assert info.manifest.dequantized == []


def test_ranks_cut_experts_without_dequantizing_them(folder: Path, tmp_path: Path, one_thread: None) -> None:
    path = write_gpt_oss(folder, tmp_path / "m.gguf")
    asked = [NewRequest(id="a", prompt=prompt_of(259), max_tokens=30, sampling=Sampling(temperature=0.0))]
    found = []
    for model in (path, folder):
        with rank_threads(from_overrides(str(model), {**SMALL, "infer.tp_size": 2})) as (controller, executor):
            found.append(play(controller, asked).tokens)
        for worker in executor.workers:
            stacks = [w for w in worker.assembly.build.weights if getattr(w, "experts", 0)]
            assert len(stacks) == 4 and {part.format for w in stacks for part in w.parts} == {MXFP4}
            assert [w.value.shape for w in stacks[:2]] == [(5, 64, 64), (5, 64, 32)]
    assert found[0] == found[1] and len(set(found[0]["a"])) > 8


@pytest.mark.parametrize(
    ("drop", "more", "words"),
    [
        (r"blk\.1\.ffn_up_exps\.weight", {}, "lacks the tensor blk.1.ffn_up_exps.weight; fetch the file again"),
        (r"blk\.0\.ffn_gate_exps\.bias", {}, "lacks the tensor blk.0.ffn_gate_exps.bias"),
        ("$", {"blk.0.ffn_up_exps.weight": torch.zeros(5, 32, 34, dtype=torch.uint8)},
         r"gate_up_proj are \[5, 32, 64\] and \[5, 64, 64\], not stacks of equal shape"),
        ("$", {"blk.0.ffn_down_exps.weight": torch.zeros(64, 34, dtype=torch.uint8)},
         r"down_proj are \[64, 64\], not stacks"),
        ("$", {"blk.0.ffn_up_exps.bias": torch.zeros(5, 32)}, r"gate_up_proj_bias are \[5, 32\] and \[5, 64\]"),
        ("$", {f"blk.0.ffn_{part}_exps.bias": torch.zeros(5, 34, dtype=torch.uint8) for part in ("gate", "up")},
         "gate_up_proj_bias is stored as mxfp4, as no bias is; fetch another file"),
        ("$", {"blk.0.ffn_up_exps.weight": torch.zeros(5, 64, 64)},
         "gate_up_proj are stored as float32 and mxfp4, which cannot be one weight; fetch a file with experts in "),
    ],
)  # fmt: skip
def test_stacks_that_do_not_fit_are_refused(
    drop: str, more: dict[str, torch.Tensor], words: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(write_gpt_oss(folder, tmp_path / "m.gguf", drop=drop, **more))


@pytest.mark.parametrize(
    ("drop", "more", "words"),
    [
        (r"blk\.0\.attn_sinks", {}, "1 tensor is missing: model.layers.0.self_attn.sinks"),
        (r"blk\.0\.ffn_down_exps\.bias", {}, "1 tensor is missing: model.layers.0.mlp.experts.down_proj_bias"),
        ("$", {"expert_count": 6}, r"gate_up_proj is \[5, 128, 2, 16\], \[5, 128, 2\], not \[6, 128, 64\]"),
        ("$", {"expert_feed_forward_length": 96}, r"not \[5, 192, 64\]"),
        ("attention.sliding_window", {}, "lacks gpt-oss.attention.sliding_window; fetch the file again"),
        ("expert_feed_forward_length", {}, "lacks gpt-oss.expert_feed_forward_length"),
    ],
)
def test_a_model_that_lacks_something_is_refused(
    drop: str, more: dict[str, Any], words: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=words):
        greedy(write_gpt_oss(folder, tmp_path / "m.gguf", drop=drop, **more), [5])


@pytest.mark.parametrize("name", ["blk.0.ffn_up_exps.weight", "blk.1.ffn_down_exps.weight"])
def test_a_scale_that_is_not_a_number_is_refused(name: str, folder: Path, tmp_path: Path) -> None:
    broken = file_tensors(folder)[name].clone()
    broken[3, 5, 17] = 255
    path = write_gpt_oss(folder, tmp_path / "m.gguf", **{name: broken})
    weight = "gate_up_proj" if "up" in name else "down_proj"
    with pytest.raises(CheckpointError, match=f"is NaN or infinite somewhere.*experts.{weight}"):
        greedy(path, [5])


@pytest.mark.slow
@pytest.mark.parametrize("drop", ["$", r"rope\.scaling"])
def test_log_probabilities_are_nearly_llama_cpps(
    drop: str, folder: Path, tmp_path: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It rounds activations to 8 bits, and the bounds of the scaling of angles to whole dimensions, other than the
    published config. Without that, the tiny model is 0.3 away."""
    path, ids, own = write_gpt_oss(folder, tmp_path / "m.gguf", drop=drop), prompt_of(259), GptOss.rope

    def rounded(self: GptOss) -> dict[str, Any]:
        found = own(self)
        return found | {"rope_scaling": found.get("rope_scaling") and found["rope_scaling"] | {"truncate": True}}

    theirs = torch.tensor(llamacpp({"model": str(path), "ids": ids, "threads": 1}))
    monkeypatch.setattr(GptOss, "rope", rounded)
    logits = NaiveModel(path, schemes=(GgufScheme(),)).logits(ids)[:-1]
    ours = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    away = (ours - theirs).abs()
    print(f"\nlog-probabilities within {away.max():.2g} of llama.cpp, {away.mean():.2g} in the mean")
    assert theirs.std() > 1 and away.mean() < 0.06 and away.max() < 0.35


@pytest.mark.slow
def test_a_text_is_split_as_llama_cpp_splits_it(folder: Path, tmp_path: Path) -> None:
    """Every two letters that follow each other in a word of the text would be one token, were they not split."""
    text = "HelloWorld HTTPServer don't I'LL we'Ve 1234567 x//\n/y  (a)\r\n\n  naïve Façade 你好 étéÀB a_b C3PO\t!?/ "
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    [(letters, _)] = level.pre_tokenize_str(text)
    pairs = dict.fromkeys(pairwise(letters))
    tokens = ["<bos>", "<eos>", *LETTERS, *dict.fromkeys(a + b for a, b in pairs)]
    path = write_gguf(tmp_path / "m.gguf", "gpt-oss", keys_of(open_checkpoint(folder).config), {
        "token_embd.weight": torch.zeros(len(tokens), 64)}, **{
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [*TYPES[:258], *[1] * (len(tokens) - 258)],
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in pairs], "tokenizer.ggml.pre": "gpt-4o",
    })  # fmt: skip
    tokenizer = Tokenizer.of(open_checkpoint(path))
    assert tokenizer is not None
    found = tokenizer.encode(text)
    assert found == llamacpp({"model": str(path), "text": text}) and tokenizer.decode(found, True) == text


def test_a_file_is_converted_to_a_folder_with_the_same_tokens(folder: Path, tmp_path: Path, one_thread: None) -> None:
    path = write_gpt_oss(folder, tmp_path / "m.gguf", q8_0)
    convert(from_overrides(str(path), {}), tmp_path / "made")
    stored = open_checkpoint(tmp_path / "made").headers
    assert stored[f"{EXPERTS}.down_proj_blocks"] == ("uint8", (5, 64, 2, 16))
    (tokens, info), (wanted, other) = (greedy(model, prompt_of(259)) for model in (tmp_path / "made", path))
    assert tokens == wanted and info.manifest.packings == other.manifest.packings


def test_a_damaged_file_either_opens_or_is_refused(folder: Path, tmp_path: Path) -> None:
    path = write_gpt_oss(folder, tmp_path / "m.gguf")
    whole, draw, read = path.read_bytes(), random.Random(3), 0
    begin = whole.index(b"general.architecture")
    end = min(entry.begin for entry in open_checkpoint(path)._header.tensors.values())  # type: ignore[attr-defined]
    names = whole.index(b"token_embd.weight")
    for number in range(60):
        damaged = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            at = draw.randint(begin if number % 3 == 0 else names, end - 8)
            if draw.random() < 0.6:
                damaged[at] = draw.choice([0, 1, 2, 5, 39, 255, damaged[at] ^ 1])
            else:
                damaged[at : at + 8] = struct.pack("<Q", draw.choice([0, 1, 32, 1 << 31, 1 << 63]))
        path.write_bytes(damaged)
        tracemalloc.start()
        try:
            checkpoint = open_checkpoint(path)
            _ = checkpoint.config
            for name, (_, shape) in checkpoint.headers.items():
                assert name not in checkpoint.copied or tuple(checkpoint.tensor(name).shape) == shape
            read += 1
        except EvenerError:
            pass
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak < 20_000_000
    assert 3 < read < 57


def test_the_file_is_opened_without_torch(folder: Path, tmp_path: Path) -> None:
    path = write_gpt_oss(folder, tmp_path / "m.gguf")
    code = (
        "import sys; from evener.loading.checkpoint import open_checkpoint\n"
        "found = open_checkpoint(__import__('pathlib').Path(sys.argv[1])); found.config, found.headers\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

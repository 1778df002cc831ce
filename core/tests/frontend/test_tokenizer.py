"""Tokenizers out of model folders."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, processors

from evener.errors import CheckpointError
from evener.frontend.defaults import GenerationDefaults
from evener.frontend.tokenizer import Tokenizer
from evener.loading.checkpoint import open_files


def load(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.of(open_files(folder))
    assert tokenizer is not None
    return tokenizer


def test_a_folder_without_tokenizer_files_has_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert Tokenizer.of(open_files(tmp_path)) is None


def test_ids_and_text_of_the_tiny_tokenizer(tiny_dir: Path) -> None:
    tokenizer = load(tiny_dir)
    assert tokenizer.encode("A<|im_end|>é") == [65, 258, 0xC3, 0xA9]
    assert tokenizer.decode([65, 258, 0xC3, 0xA9]) == "Aé"
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (259, 258)
    assert tokenizer.token_bytes(0xC3) == b"\xc3"
    assert tokenizer.token_bytes(258) == b"<|im_end|>"
    assert tokenizer.token_bytes(10_000) == b""


def test_bos_is_added_as_the_post_processor_says(tmp_path: Path, byte_level_library: tokenizers.Tokenizer) -> None:
    library = tokenizers.Tokenizer.from_str(byte_level_library.to_str())
    bos = library.token_to_id("<pad>")
    library.post_processor = processors.TemplateProcessing(single="<pad> $A", special_tokens=[("<pad>", bos)])
    library.enable_truncation(2)
    library.enable_padding()
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load(tmp_path)
    plain = tokenizer.encode("a long text that is not cut", add_special_tokens=False)
    assert len(plain) > 2
    assert tokenizer.encode("a long text that is not cut") == [bos, *plain]


def test_special_tokens_come_as_strings_or_objects_from_either_file(tmp_path: Path, tiny_dir: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tiny_dir / "tokenizer.json").read_bytes())
    config = {"eos_token": {"content": "<|im_end|>"}, "pad_token": None, "extra_special_tokens": {"image_token": "<i>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    more = {"bos_token": "<|im_start|>", "eos_token": "other", "additional_special_tokens": ["x", {"content": "y"}]}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(more))
    assert load(tmp_path).special_tokens == {
        "eos_token": "<|im_end|>",
        "bos_token": "<|im_start|>",
        "image_token": "<i>",
        "additional_special_tokens": ["x", "y"],
    }


def test_added_tokens_that_only_the_config_knows_are_added(tmp_path: Path, tiny_dir: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tiny_dir / "tokenizer.json").read_bytes())
    added = {"259": {"content": "<think>", "special": False}, "260": {"content": "<x>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    tokenizer = load(tmp_path)
    assert tokenizer.encode("<think><x>") == [259, 260]
    assert tokenizer.decode([259, 260]) == "<think>"


def test_an_added_token_that_would_get_another_id_is_an_error(tmp_path: Path, tiny_dir: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tiny_dir / "tokenizer.json").read_bytes())
    config = {"added_tokens_decoder": {"400": {"content": "<late>", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"'<late>' id 400.*259.*fetch both again"):
        Tokenizer.of(open_files(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{")
    with pytest.raises(CheckpointError, match=name):
        Tokenizer.of(open_files(tmp_path))


def test_a_slow_tokenizer_without_transformers_is_an_error_that_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CheckpointError, match=r"evener\[slow-tokenizers\]"):
        Tokenizer.of(open_files(tmp_path))


def test_a_folder_with_vocabulary_files_only_goes_through_transformers(
    tmp_path: Path, byte_level_library: tokenizers.Tokenizer
) -> None:
    assert isinstance(byte_level_library.model, models.BPE)
    byte_level_library.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tokenizer = load(tmp_path)
    assert tokenizer.decode(tokenizer.encode("the quick 你好")) == "the quick 你好"


def test_threads_share_a_tokenizer(byte_level: Tokenizer) -> None:
    texts = [f"the quick {i} 你好 é" for i in range(64)]
    with ThreadPoolExecutor(4) as pool:
        ids = list(pool.map(byte_level.encode, texts))
        assert list(pool.map(byte_level.decode, ids)) == texts


def write(folder: Path, generation: object = None, config: object = None) -> Path:
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        if value is not None:
            (folder / name).write_text(json.dumps(value))
    return folder


def test_sampling_defaults_and_eos_ids_come_from_the_generation_config(tmp_path: Path) -> None:
    generation = {"temperature": 0.6, "top_k": 20, "eos_token_id": [5, 7], "do_sample": True}
    folder = write(tmp_path, generation, {"eos_token_id": 9})
    assert GenerationDefaults.of(open_files(folder), 1) == GenerationDefaults(temperature=0.6, top_k=20, eos_ids=(5, 7))


def test_eos_ids_come_from_the_config_and_then_from_the_tokenizer(tmp_path: Path) -> None:
    folder = write(tmp_path, {}, {"eos_token_id": 9})
    assert GenerationDefaults.of(open_files(folder), 1).eos_ids == (9,)
    write(folder, {}, {"text_config": {"eos_token_id": [3]}})
    assert GenerationDefaults.of(open_files(folder), 1).eos_ids == (3,)
    write(folder, {}, {})
    assert GenerationDefaults.of(open_files(folder), 1).eos_ids == (1,)
    assert GenerationDefaults.of(open_files(folder)).eos_ids == ()


@pytest.mark.parametrize("wrong", [{"temperature": "warm"}, {"eos_token_id": "x"}, {"top_k": True}])
def test_a_generation_config_with_a_wrong_type_is_an_error_that_names_the_field(
    tmp_path: Path, wrong: dict[str, object]
) -> None:
    with pytest.raises(CheckpointError, match=next(iter(wrong))):
        GenerationDefaults.of(open_files(write(tmp_path, wrong)))

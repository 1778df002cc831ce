"""``evener convert MODEL NEW.gguf``: the file gives the tensors and tokens of its source, has what llama.cpp expects,
and is there as a whole or not at all; what GGUF cannot say is refused before anything is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece_models
import tokenizers
import torch
from evener_convert.command import convert
from evener_convert.quantized import QuantizedCheckpoint
from gguf_files import LETTERS
from safetensors.torch import save_file
from test_convert import greedy

from evener.config import from_overrides
from evener.errors import CheckpointError, EvenerError
from evener.frontend.chat import open_chat
from evener.frontend.defaults import GenerationDefaults
from evener.frontend.tokenizer import Tokenizer
from evener.loading.checkpoint import open_checkpoint

HEADS, KV_HEADS, DIM, INNER, LAYERS, VOCAB = 4, 2, 16, 256, 2, 451
WIDTH = 256
BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 50000.0, "bos_token_id": 0, "eos_token_id": 1,
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
#: What differs from ``BASE``, by family; two families have one case more.
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Llama 3": {"rope_scaling": LLAMA3, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "Qwen2": {"rope_parameters": {"rope_theta": 1e6, **YARN}, "tie_word_embeddings": True},
    "Qwen3": {"rms_norm_eps": 9.999999974752427e-07},
    "Gemma3": {
        "tie_word_embeddings": True, "query_pre_attn_scalar": DIM, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"], "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {"full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
                            "sliding_attention": {"rope_theta": 9000.0, "rope_type": "default"}},
    },
}  # fmt: skip
ADDED = ["<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<tool>"]
QWEN = ("(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+"
        "|\\s+(?!\\S)|\\s+")  # fmt: skip


def config_of(family: str) -> dict[str, Any]:
    architecture = f"{family.split()[0]}ForCausalLM"
    model_type = {"Gemma3": "gemma3_text"}.get(family, family.split()[0].lower())
    return {**BASE, "architectures": [architecture], "model_type": model_type, **MODELS[family]}


def tensors_of(family: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Random weights, by their names in a folder. Norms are around 1, or around 0 where the family adds 1."""
    config, shapes = config_of(family), {"model.embed_tokens.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCAB, WIDTH)
    q, kv = HEADS * DIM, KV_HEADS * DIM
    linear = {"self_attn.q_proj": (q, WIDTH), "self_attn.k_proj": (kv, WIDTH), "self_attn.v_proj": (kv, WIDTH),
              "self_attn.o_proj": (WIDTH, q), "mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH),
              "mlp.down_proj": (WIDTH, INNER)}  # fmt: skip
    biased = {"Llama 3": tuple(linear), "Qwen2": tuple(linear)[:3]}.get(family, ())
    norms = {"input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,)}
    if family in ("Qwen3", "Gemma3"):
        norms |= {"self_attn.q_norm": (DIM,), "self_attn.k_norm": (DIM,)}
    if family == "Gemma3":
        norms |= {"pre_feedforward_layernorm": (WIDTH,), "post_feedforward_layernorm": (WIDTH,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{name}.weight": shape for name, shape in {**linear, **norms}.items()}
        shapes |= {f"{prefix}{name}.bias": linear[name][:1] for name in biased}
    noise = torch.Generator().manual_seed(5)
    made = {name: 0.1 * torch.randn(shape, generator=noise) for name, shape in shapes.items()}
    start = 0.0 if family == "Gemma3" else 1.0
    return {name: (each + start * name.endswith("norm.weight")).to(dtype) for name, each in made.items()}


def byte_level(family: str) -> dict[str, Any]:
    """A ``tokenizer.json`` as the library of such files writes it, with the family's rules."""
    words = {"Ġ": "t", "Ġt": "h", "Ġth": "e", "i": "n"}
    texts = [*LETTERS, *(f"{a}{b}" for a, b in words.items())]
    vocabulary = {text: number for number, text in enumerate([*ADDED[:2], *texts])}
    whole = family == "Llama 3"
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocabulary, merges=list(words.items()), ignore_merges=whole)
    )
    level = tokenizers.pre_tokenizers.ByteLevel
    pattern = tokenizers.Regex(QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|") if whole else QWEN)
    split = [tokenizers.pre_tokenizers.Split(pattern, "isolated"), level(add_prefix_space=False, use_regex=False)]
    if family == "Qwen2":
        made.normalizer = tokenizers.normalizers.NFC()
    digits = [tokenizers.pre_tokenizers.Digits(individual_digits=True), level(add_prefix_space=False)]
    made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(digits if family == "Llama" else split)
    made.decoder = tokenizers.decoders.ByteLevel()
    found: dict[str, Any] = json.loads(made.to_str())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    ids = [0, 1, *range(len(vocabulary), len(vocabulary) + 3)]
    found["added_tokens"] = [
        {"id": n, "content": text, **plain, "special": text != "<tool>"} for n, text in zip(ids, ADDED, strict=True)
    ]
    if whole:
        begin = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
        found["post_processor"] = {"type": "Sequence", "processors": [
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
            {"type": "TemplateProcessing", "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
             "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
             "special_tokens": {"<bos>": {"id": "<bos>", "ids": [0], "tokens": ["<bos>"]}}},
        ]}  # fmt: skip
    return found


BESIDE: dict[str, Any] = {
    "tokenizer_config.json": {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}, "chat_template": "old"},
    "generation_config.json": {"eos_token_id": [1, 264], "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1},
}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def write_model(folder: Path, family: str = "Llama", dtype: torch.dtype = torch.float32) -> Path:
    folder.mkdir()
    save_file(tensors_of(family, dtype), folder / "model.safetensors", {"format": "pt"})
    texts = {"config.json": config_of(family), "tokenizer.json": byte_level(family), **BESIDE}
    for name, value in texts.items():
        (folder / name).write_text(json.dumps(value))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def written(source: Path, result: Path, **keys: Any) -> Path:
    convert(from_overrides(str(source), keys), result)
    return result


def tokenizer_of(path: Path) -> Tokenizer:
    found = Tokenizer.of(open_checkpoint(path))
    assert found is not None
    return found


@pytest.mark.parametrize("family", MODELS)
def test_an_unquantized_file_gives_the_tensors_and_tokens_of_its_source(
    family: str, tmp_path: Path, one_thread: None
) -> None:
    source = write_model(tmp_path / "source", family, torch.bfloat16)
    made = written(source, tmp_path / "made.gguf")
    ours, theirs = open_checkpoint(source), open_checkpoint(made)
    assert theirs.headers.keys() == ours.headers.keys() and theirs.config["dtype"] == "bfloat16"
    for name, (_, shape) in ours.headers.items():
        wide = theirs.headers[name][0] == ("float32" if len(shape) == 1 else "bfloat16")
        assert wide and torch.equal(theirs.tensor(name).bfloat16(), ours.tensor(name)), name
    assert greedy(made) == greedy(source)
    assert [path.name for path in tmp_path.iterdir()] in (["source", "made.gguf"], ["made.gguf", "source"])


@pytest.mark.parametrize(("family", "quant"), [
    ("Llama 3", "q4_k"), ("Qwen2", "q4_k_m"), ("Gemma3", "q8_0"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("Llama", "q8_0"), ("Qwen3", "q5_1"))),
])  # fmt: skip
def test_a_quantized_file_gives_the_blocks_and_tokens_of_the_same_quantization_while_loading(
    family: str, quant: str, tmp_path: Path, one_thread: None
) -> None:
    source = write_model(tmp_path / "source", family, torch.bfloat16)
    made = written(source, tmp_path / "made.gguf", quant=quant)
    assert greedy(made) == greedy(source, quant=quant)
    folder = written(source, tmp_path / "folder", quant=quant)
    stored, theirs = open_checkpoint(folder), open_checkpoint(made)
    blocks = [name for name, (dtype, _) in stored.headers.items() if dtype == "uint8"]
    assert len(blocks) >= 7 * LAYERS
    for name in blocks:
        stem, _, form = name.rpartition(".")
        assert theirs.headers[stem][0] == form and torch.equal(theirs.tensor(stem), stored.tensor(name)), name


def test_a_folder_of_blocks_becomes_the_file_that_they_would_have_been_written_to(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source")
    direct, folder = (written(source, tmp_path / name, quant="q8_0") for name in ("direct.gguf", "folder"))
    again = written(folder, tmp_path / "again.gguf")
    ours, theirs = open_checkpoint(direct), open_checkpoint(again)
    assert ours.headers == theirs.headers
    assert all(torch.equal(ours.tensor(name), theirs.tensor(name)) for name in ours.headers)


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_a_file_is_written_anew_from_a_file(family: str, tmp_path: Path) -> None:
    first = written(write_model(tmp_path / "source", family), tmp_path / "first.gguf", quant="q8_0")
    again = written(first, tmp_path / "again.gguf")
    ours, theirs = open_checkpoint(first), open_checkpoint(again)
    assert ours.headers == theirs.headers and ours.config == theirs.config
    assert all(torch.equal(ours.tensor(name), theirs.tensor(name)) for name in ours.headers)


def test_the_file_has_the_keys_types_and_row_order_of_llama_cpp(tmp_path: Path) -> None:
    made = gguf.GGUFReader(written(write_model(tmp_path / "tiny-0.1B", "Llama 3"), tmp_path / "made.gguf"))
    wanted = {
        "general.architecture": "llama", "general.name": "tiny-0.1B", "general.file_type": 0,
        "general.quantization_version": 2,
        "llama.context_length": 256, "llama.embedding_length": WIDTH, "llama.block_count": LAYERS,
        "llama.feed_forward_length": INNER, "llama.attention.head_count": HEADS, "llama.vocab_size": VOCAB,
        "llama.attention.head_count_kv": KV_HEADS, "llama.attention.key_length": DIM,
        "llama.attention.value_length": DIM, "llama.rope.dimension_count": DIM, "llama.rope.freq_base": 50000.0,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.eot_token_id": 264, "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": TEMPLATE, "general.sampling.top_k": 20,
    }  # fmt: skip
    assert {key: made.fields[key].contents() for key in wanted} == wanted
    types = made.fields["tokenizer.ggml.token_type"].contents()
    assert (len(types), types[0], types[2], types[263], types[264], types[450]) == (VOCAB, 3, 1, 3, 4, 5)
    assert made.fields["tokenizer.ggml.tokens"].contents(VOCAB - 1) == f"[PAD{VOCAB - 1}]"
    assert made.fields["tokenizer.ggml.merges"].contents(0) == "Ġ t"
    source, tensors = tensors_of("Llama 3"), {each.name: each for each in made.tensors}
    assert all(each.data_offset % 32 == 0 for each in made.tensors) and len(tensors) == len(source) + 1
    q = source["model.layers.1.self_attn.k_proj.weight"].numpy()
    rows = q.reshape(KV_HEADS, 2, DIM // 2, WIDTH).swapaxes(1, 2).reshape(q.shape)
    assert np.array_equal(tensors["blk.1.attn_k.weight"].data, rows)
    bias = source["model.layers.1.self_attn.k_proj.bias"].numpy().reshape(KV_HEADS, 2, DIM // 2)
    assert np.array_equal(tensors["blk.1.attn_k.bias"].data, bias.swapaxes(1, 2).reshape(-1))
    assert np.array_equal(tensors["blk.1.attn_v.weight"].data, source["model.layers.1.self_attn.v_proj.weight"].numpy())
    # Short waves keep their frequency; those longer than the trained context are stretched by the factor.
    divisors = tensors["rope_freqs.weight"].data
    assert divisors.shape == (DIM // 2,) and divisors[0] == 1 and divisors[-1] == 8


def test_norms_of_gemma_are_written_with_one_added_and_its_windows_as_keys(tmp_path: Path) -> None:
    made = gguf.GGUFReader(written(write_model(tmp_path / "source", "Gemma3"), tmp_path / "made.gguf"))
    wanted = {"gemma3.attention.sliding_window": 8, "gemma3.attention.sliding_window_pattern": 2,
              "gemma3.rope.freq_base": 1e6, "gemma3.rope.freq_base_swa": 9000.0, "gemma3.rope.scaling.type": "linear",
              "gemma3.rope.scaling.factor": 8.0}  # fmt: skip
    assert {key: made.fields[key].contents() for key in wanted} == wanted
    tensors, source = {each.name: each.data for each in made.tensors}, tensors_of("Gemma3")
    for name, own in {"output_norm": "model.norm", "blk.0.attn_q_norm": "model.layers.0.self_attn.q_norm",
                      "blk.1.ffn_norm": "model.layers.1.pre_feedforward_layernorm"}.items():  # fmt: skip
        assert np.array_equal(tensors[f"{name}.weight"], (source[f"{own}.weight"] + 1).numpy())


@pytest.mark.parametrize("family", ["Llama", "Llama 3", "Qwen2", "Qwen3"])
def test_the_tokenizer_template_ends_and_sampling_come_along(family: str, tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", family)
    made = written(source, tmp_path / "made.gguf")
    ours, theirs = tokenizer_of(source), tokenizer_of(made)
    for text in ("", " the thin", "a<|im_start|>the<tool> in<|im_end|>", "I'LL 12345 don't\n\n  x", "é e\u0301 你好"):
        ids = ours.encode(text)
        assert theirs.encode(text) == ids and theirs.decode(ids) == ours.decode(ids), text
    assert (theirs.eos_id, theirs.special_tokens["bos_token"]) == (1, "<bos>")
    files = open_checkpoint(made)
    defaults = GenerationDefaults.of(files)
    assert set(defaults.eos_ids) == {1, 263, 264}  # <|im_end|> ends an answer wherever it is a control token
    assert (defaults.temperature, defaults.top_k, defaults.repetition_penalty) == (0.7, 20, 1.1)
    chat = open_chat(files, theirs)
    assert chat.render([{"role": "user", "content": "hi"}]) == "<|im_start|>hi<|im_end|>"
    chat.close()


def sentencepiece_source(folder: Path, prefix: bool) -> Path:
    """A Llama with ``tokenizer.model``, which its family makes a tokenizer of."""
    write_model(folder)
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        (folder / name).unlink()
    model = sentencepiece_models.train(**sentencepiece_models.OPTIONS["Llama"])
    (folder / "tokenizer.model").write_bytes(model if prefix else sentencepiece_models.without_prefix(model))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    return folder


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_comes_along_by_the_scores_of_its_pieces(prefix: bool, tmp_path: Path) -> None:
    source = sentencepiece_source(tmp_path / "source", prefix)
    made = written(source, tmp_path / "made.gguf")
    theirs = tokenizer_of(made)
    library = sentencepiece_models.library((source / "tokenizer.model").read_bytes())
    for text in ("the theatre there and then", "  1234 hello</w>", "\tUnder über", "你好 🙂"):
        assert theirs.encode(text) == [1, *library.encode(text)], text
    fields = gguf.GGUFReader(made).fields
    assert fields["tokenizer.ggml.model"].contents() == "llama"
    assert fields["tokenizer.ggml.add_space_prefix"].contents() is prefix
    types = fields["tokenizer.ggml.token_type"].contents()
    assert (types[:3], types[3], types[-1]) == ([2, 3, 3], 6, 5)


def edit(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        value = json.loads((folder / name).read_text())
        change(value)
        (folder / name).write_text(json.dumps(value))

    return apply


def config(**keys: Any) -> Callable[[Path], None]:
    return edit("config.json", lambda value: value.update(keys))


def tokenizer(*path: str, **keys: Any) -> Callable[[Path], None]:
    def change(value: dict[str, Any]) -> None:
        for key in path:
            value = value[key]
        value.update(keys)

    return edit("tokenizer.json", change)


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def surrogate_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    edit("tokenizer_config.json", lambda value: value.update(chat_template="\ud800"))(folder)


UNIGRAM = {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 0}
STRIPS = {"id": 265, "content": "<mask>", "lstrip": True, "rstrip": False, "single_word": False, "normalized": False,
          "special": True}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "keys", "message"),
    [
        (config(architectures=["MistralForCausalLM"], sliding_window=None), {}, r"a MistralForCausalLM cannot be"),
        (config(), {"quant": "fp8"}, r"compressed-tensors, which a GGUF file cannot hold.*quant=q8_0"),
        (config(), {"infer.tp_size": 2}, r"not split for ranks"),
        (config(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), {}, r"rope_type is 'dynamic'"),
        (config(rope_scaling={**LLAMA3, "high_freq_factor": 5.0}), {}, r"not Llama 3's scaling"),
        (config(rope_scaling={**YARN, "beta_fast": 16.0}), {}, r"cannot say that .*high of this model is 16\.0"),
        (edit("generation_config.json", lambda value: value.update(temperature=1e39)), {}, r"temp would be 1e\+39"),
        (edit("tokenizer_config.json", lambda v: v.update(added_tokens_decoder={"x": {}})), {}, r"without an id"),
        (edit("tokenizer_config.json", lambda v: v.update(added_tokens_decoder={"3": 1})), {}, r"without an id"),
        (tokenizer(post_processor=[7]), {}, r"cannot be used"), (tokenizer(normalizer=7), {}, r"cannot be used"),
        (config(hidden_act="gelu"), {}, r"cannot say that .*activation of this model is gelu"),
        (config(partial_rotary_factor=0.5), {}, r"cannot say that .*dim of this model is 8"),
        (no_tokenizer, {}, r"has no tokenizer.json, and a GGUF file needs"),
        (edit("tokenizer.json", lambda value: value.update(model=UNIGRAM)), {}, r"a model of kind Unigram"),
        (tokenizer("model", "vocab", zz=VOCAB), {}, r"id is not one of the model's 451 rows"),
        (tokenizer("model", "vocab", zz=2), {}, r"two tokens with one id"),
        (tokenizer("model", vocab={"a": "2"}), {}, r"cannot be used"),
        (tokenizer("model", merges=["a"]), {}, r"cannot be used"),
        (tokenizer("model", merges=7), {}, r"cannot be used"), (tokenizer("model", merges=[]), {}, r"has no merges"),
        (surrogate_template, {}, r"cannot be stored in a GGUF file"),
        (tokenizer(normalizer={"type": "NFKC"}), {}, r"changes characters by .*NFKC"),
        (tokenizer(pre_tokenizer={"type": "Whitespace"}), {}, r"rules that have no name in GGUF"),
        (tokenizer(added_tokens=[{"id": -1, "content": "x"}]), {}, r"cannot be used"),
        (tokenizer(added_tokens=[{**STRIPS, "id": 2}]), {}, r"gives the id 2 to '!' and to"),
        (edit("tokenizer.json", lambda value: value["added_tokens"].append(STRIPS)), {}, r"the text 'a<mask>b"),
        (edit("tokenizer_config.json", lambda value: value.update(bos_token="<s>")), {}, r"no token '<s>', which is"),
        (edit("generation_config.json", lambda value: value.update(eos_token_id=[1, VOCAB])), {}, r"that end the"),
        (edit("generation_config.json", lambda value: value.update(eos_token_id=[1, 5, 6, 7])), {}, r"keys for fewer"),
    ],
)  # fmt: skip
def test_a_model_that_gguf_cannot_store_is_refused_before_anything_is_written(
    change: Callable[[Path], None], keys: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    source = write_model(tmp_path / "source")
    change(source)
    with pytest.raises(EvenerError, match=message):
        written(source, tmp_path / "made.gguf", **keys)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_windows_that_gguf_has_no_key_for_are_refused(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", "Qwen2")
    config(use_sliding_window=True, sliding_window=8, max_window_layers=1)(source)
    with pytest.raises(EvenerError, match=r"layers\[1\].*kind of this model is window; it would be read as full"):
        written(source, tmp_path / "made.gguf")


def test_a_tied_head_that_differs_from_the_embedding_is_refused_and_an_equal_one_left_out(tmp_path: Path) -> None:
    source, tensors = write_model(tmp_path / "source", "Qwen2"), tensors_of("Qwen2")
    for head, equal in ((tensors["model.embed_tokens.weight"].clone(), True), (torch.ones(VOCAB, WIDTH), False)):
        save_file({**tensors, "lm_head.weight": head}, source / "model.safetensors", {"format": "pt"})
        if equal:
            assert "lm_head.weight" not in open_checkpoint(written(source, tmp_path / "made.gguf")).headers
            continue
        with pytest.raises(CheckpointError, match=r"stores both lm_head.weight and model.embed_tokens.weight"):
            written(source, tmp_path / "other.gguf")


def interrupt(monkeypatch: pytest.MonkeyPatch, after: int) -> list[str]:
    """Ctrl-C at the tensor number ``after``; the names that are read."""
    read: list[str] = []
    real = QuantizedCheckpoint.tensor

    def tensor(self: QuantizedCheckpoint, name: str) -> torch.Tensor:
        read.append(name)
        if len(read) == after:
            raise KeyboardInterrupt
        return real(self, name)

    monkeypatch.setattr(QuantizedCheckpoint, "tensor", tensor)
    return read


def test_an_interrupted_conversion_leaves_nothing_under_the_name_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_model(tmp_path / "source")
    expected = written(source, tmp_path / "whole.gguf", quant="q8_0").read_bytes()
    monkeypatch.setattr("evener_convert.writer._DURABLE", 1)
    read = interrupt(monkeypatch, 9)
    with pytest.raises(KeyboardInterrupt):
        written(source, tmp_path / "made.gguf", quant="q8_0")
    assert not (tmp_path / "made.gguf").exists() and (tmp_path / ".made.gguf.converting").is_dir()
    begun: Sequence[str] = list(read)
    made = written(source, tmp_path / "made.gguf", quant="q8_0")
    assert read[len(begun)] == begun[-1] and len(set(read)) == len(read) - 1
    assert made.read_bytes() == expected and not (tmp_path / ".made.gguf.converting").exists()
    with pytest.raises(EvenerError, match=r"made.gguf exists; choose another name"):
        written(source, made, quant="q8_0")

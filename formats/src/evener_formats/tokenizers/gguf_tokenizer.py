"""The tokenizer and chat template of a GGUF file, as the files that a model folder has. Torch-free.

There are two kinds: byte-level BPE ("gpt2"), for which the file has only the name of the rules that split text into
words, and SentencePiece BPE ("llama"), for which merges follow from the scores of the pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from evener.errors import CheckpointError, did_you_mean
from evener_formats.tokenizers.sentencepiece_bpe import CONTROL, NORMAL, UNKNOWN, USER, Pieces, decoder, spaces
from evener_formats.tokenizers.tokenizer_json import added_token, assemble, bpe, template_processing

Metadata = Mapping[str, Any]
Files = Mapping[str, Callable[[], dict[str, Any]]]

CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
#: Of the rules of gpt-4o and gpt-oss (o200k): a word begins where letters turn from small to capital.
_BEFORE, _SHORTENED = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BY_THREE = rf"{CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_BY_ONE = rf"{CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"

#: By ``tokenizer.ggml.pre``: the regular expressions that split text into words, applied one after another.
SPLITS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "mellum", "exaone4"), (GPT2,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), (r"\p{N}", GPT2)
    ),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), (_BY_THREE,)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), (_BY_THREE,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), (_BY_ONE,)),
    "gpt-4o": (
        rf"{_BEFORE}{_UPPER}*{_LOWER}+{_SHORTENED}|{_BEFORE}{_UPPER}+{_LOWER}*{_SHORTENED}|\p{{N}}{{1,3}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
        "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    ),
    "deepseek-coder": ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
}
#: Kinds for which a word that is a token is not merged from letters, and text begins with BOS by default.
WHOLE_WORDS = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"})
#: Kinds whose own tokenizers compose characters first (NFC), which the file does not say.
COMPOSES = frozenset({"qwen2", "deepseek-r1-qwen"})

#: Control tokens that end an answer, even if the file does not name them as ``eos`` or ``eot``.
ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>",
    "<｜end▁of▁sentence｜>",
})  # fmt: skip
#: Of the format of gpt-oss: they end an answer, and ``<|end|>`` one message of it.
_MESSAGES = frozenset({"<|return|>", "<|call|>"})
#: From GGUF's names of special tokens to those in ``tokenizer_config.json``.
SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
#: From GGUF's names of sampling defaults to those in ``generation_config.json``.
SAMPLING = {
    "temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip


def tokenizer_files(metadata: Metadata, where: str) -> Files:
    """Functions that make ``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json``, by file name;
    empty if the file has no tokenizer.

    Raises:
        CheckpointError: the tokenizer's kind is not supported, or its lists do not match.
    """
    kind = metadata.get("tokenizer.ggml.model", "none")
    if kind in ("none", "no_vocab"):
        return {}
    source = _GgufTokenizer(metadata, where)
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise CheckpointError(
            f"{where} has a tokenizer of kind {str(kind)[:80]!r}; supported are gpt2 and llama. Give the folder of the "
            "model's own tokenizer: tokenizer=FOLDER"
        )
    return {
        # With an object of its own: the ids of its pieces take tens of megabytes, and are not needed again.
        "tokenizer.json": lambda: builders[kind](_GgufTokenizer(metadata, where)),
        "tokenizer_config.json": source.config, "generation_config.json": source.generation,
    }  # fmt: skip


class _GgufTokenizer:
    """The tokenizer's keys, checked."""

    def __init__(self, metadata: Metadata, where: str) -> None:
        self._metadata, self.where = metadata, where
        tokens: list[str] = self.get("tokens", list)
        types = self.get("token_type", Sequence, [NORMAL] * len(tokens))
        if len(types) != len(tokens) or not set(map(type, tokens)) <= {str}:
            raise CheckpointError(f"{where}: the lists of its tokenizer differ in length or type; fetch the file again")
        self.pieces = Pieces(tokens, (), types)
        self.kind = str(metadata.get("tokenizer.ggml.pre", "default"))

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of ``tokenizer.ggml.<key>``, which must be a ``kind``."""
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if kind is Sequence and hasattr(value, "__len__") and not isinstance(value, str):
            return value
        if not isinstance(value, kind):
            raise CheckpointError(
                f"{self.where}: tokenizer.ggml.{key} is missing or of the wrong type; fetch the file again"
            )
        return value

    def id(self, name: str) -> int | None:
        """The id of a special token, e.g. ``bos``; None if the file names none."""
        value = self._metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if type(value) is int and 0 <= value < len(self.pieces.texts) else None

    def added(self) -> list[dict[str, Any]]:
        """Entries of ``added_tokens``: tokens that are found in a text before it is split."""
        named = {number for name in ("bos", "eos", "eot", "eom") if (number := self.id(name)) is not None}
        return [
            added_token(number, self.pieces.texts[number], special=self.pieces.types[number] != USER)
            for number in sorted({*self.pieces.of_type(CONTROL, USER, UNKNOWN), *named})
            if self.pieces.texts[number]
        ]

    def post_processor(self, add_bos: bool) -> dict[str, Any] | None:
        """The post-processor, which adds BOS and EOS to a text if the file says so."""
        return template_processing(self._end("bos", add_bos), self._end("eos", False))

    def _end(self, name: str, default: bool) -> dict[str, int]:
        number = self.id(name)
        wanted = self.get(f"add_{name}_token", bool, default) and number is not None
        return {self.pieces.texts[number]: number} if wanted and number is not None else {}

    def config(self) -> dict[str, Any]:
        """``tokenizer_config.json``: special tokens and chat templates."""
        config: dict[str, Any] = {
            name: self.pieces.texts[number] for key, name in SPECIAL.items() if (number := self.id(key)) is not None
        }
        template = self._metadata.get("tokenizer.chat_template")
        more = {
            key.removeprefix("tokenizer.chat_template."): text
            for key, text in self._metadata.items()
            if key.startswith("tokenizer.chat_template.") and isinstance(text, str)
        }
        if isinstance(template, str):
            listed = [{"name": name, "template": text} for name, text in {"default": template, **more}.items()]
            config["chat_template"] = listed if more else template
        return config

    def generation(self) -> dict[str, Any]:
        """``generation_config.json``: BOS, the tokens that end an answer, and the file's sampling defaults."""
        controls = {self.pieces.texts[n]: n for n in self.pieces.of_type(CONTROL)}
        ends = [number for name in ("eos", "eot", "eom") if (number := self.id(name)) is not None]
        ends += [number for text, number in controls.items() if text in ENDS]
        if controls.keys() >= _MESSAGES:
            ends = [n for n in ends if n != controls.get("<|end|>")] + [controls[text] for text in sorted(_MESSAGES)]
        generation: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(ends))} if ends else {}
        if (bos := self.id("bos")) is not None:
            generation["bos_token_id"] = bos
        for key, name in SAMPLING.items():
            value = self._metadata.get(f"general.sampling.{key}")
            if type(value) in (int, float):
                # The file has float32; of these numbers the shortest is the one that was written.
                generation[name] = value if isinstance(value, int) else float(f"{value:.7g}")
        return generation


def _byte_level(source: _GgufTokenizer) -> dict[str, Any]:
    if source.kind not in SPLITS:
        raise CheckpointError(
            f"{source.where} splits text as {source.kind[:80]!r}, which is unknown{did_you_mean(source.kind, SPLITS)} "
            "(or give the folder of the model's own tokenizer: tokenizer=FOLDER)"
        )
    known = source.pieces.ids
    splits = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in SPLITS[source.kind]
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return assemble(
        source.added(),
        normalizer={"type": "NFC"} if source.kind in COMPOSES else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [*splits, level]},
        post_processor=source.post_processor(source.kind in WHOLE_WORDS) or level,
        decoder=level,
        model=bpe(known, _merges(source), ignore_merges=source.kind in WHOLE_WORDS),
    )


def _merges(source: _GgufTokenizer) -> list[tuple[str, str]]:
    """The merges of tokens that there are, as texts of the vocabulary: those that a merge is cut into would take tens
    of megabytes more."""
    find, texts, found = source.pieces.ids.get, source.pieces.texts, []
    for merge in source.get("merges", list):
        left, space, right = merge.partition(" ")
        if not space:
            raise CheckpointError(f"{source.where}: a merge of its tokenizer is not two tokens; fetch the file again")
        first, second = find(left), find(right)
        if first is not None and second is not None and find(left + right) is not None:
            found.append((texts[first], texts[second]))
    return found


def _sentencepiece(source: _GgufTokenizer) -> dict[str, Any]:
    scores, count = source.get("scores", Sequence), len(source.pieces.texts)
    if len(scores) != count:
        raise CheckpointError(
            f"{source.where}: its tokenizer has {count} tokens and {len(scores)} scores; fetch the file again"
        )
    prefix, unknown = source.get("add_space_prefix", bool, True), source.id("unknown")
    return assemble(
        source.added(),
        normalizer={"type": "Sequence", "normalizers": spaces(prefix)},
        pre_tokenizer=None,
        post_processor=source.post_processor(True),
        decoder=decoder(prefix),
        model=replace(source.pieces, scores=scores).model(None if unknown is None else source.pieces.texts[unknown]),
    )

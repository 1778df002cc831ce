"""The tokenizer, chat template and sampling defaults of a model folder, as the keys of a GGUF file: the inverse of
``gguf_tokenizer``, whose tables it uses. Torch-free.

A GGUF file names the rules that split text into words, and it has no list of merges for SentencePiece BPE, but a score
for each piece. So only tokenizers of the two kinds that ``gguf_tokenizer`` reads can be written; others are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from evener.contracts.checkpoint import ModelFiles
from evener.errors import CheckpointError
from evener_formats.tokenizers.gguf_tokenizer import (
    COMPOSES,
    CONTRACTIONS,
    ENDS,
    GPT2,
    SAMPLING,
    SPECIAL,
    SPLITS,
    WHOLE_WORDS,
)
from evener_formats.tokenizers.sentencepiece_bpe import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER, spaces

#: Of the names with equal rules, the one that is written; llama.cpp knows all of them.
_WRITTEN = ("gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "stablelm2", "deepseek-v3", "deepseek-coder")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
#: Where spaces are marks already, this splits nothing.
_NO_SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
_USE_ANOTHER = "keep the model as safetensors, or give it a tokenizer.json of a kind that GGUF knows"


def tokenizer_keys(files: ModelFiles, rows: int) -> dict[str, Any]:
    """The keys that begin with ``tokenizer.`` and ``general.sampling.``, with their values.

    Args:
        files: of the model.
        rows: of its embedding. Ids without a token get one that no text has; tokens beyond are left out, because the
            model has no row for them.

    Raises:
        CheckpointError: there is no tokenizer, it is broken, or GGUF cannot express it.
    """
    return _Source(files, rows).keys()


class _Source:
    """The tokenizer's parts, checked."""

    def __init__(self, files: ModelFiles, rows: int) -> None:
        self._files, self._rows, self.where = files, rows, files.where("tokenizer.json")
        self._json = files.json("tokenizer.json")
        self._config = files.json("tokenizer_config.json")
        if not self._json:
            raise CheckpointError(
                f"{files.path} has no tokenizer.json, and a GGUF file needs a tokenizer; save the model's tokenizer as "
                "tokenizer.json with its own code, and put it into the folder"
            )
        self._model = self._part("model", "BPE")
        self._vocabulary = self._read_vocabulary()
        self._merges = list(self._read_merges())
        self._pieces = bool(self._model.get("byte_fallback"))
        self._added = list(self._read_added())

    def keys(self) -> dict[str, Any]:
        """All of them."""
        kind = self._sentencepiece() if self._pieces else self._byte_level()
        texts, types = self._tokens()
        found = {"tokens": texts, "token_type": types, **kind, **self._special(), **self._ends_of_texts()}
        return {
            **{f"tokenizer.ggml.{key}": value for key, value in found.items()}, **self._templates(), **self._sampling(),
        }  # fmt: skip

    def _part(self, name: str, kind: str) -> Mapping[str, Any]:
        part = self._json.get(name)
        if not isinstance(part, Mapping) or part.get("type", kind) != kind:
            found = part.get("type") if isinstance(part, Mapping) else part
            raise self._cannot(f"has a {name} of kind {str(found)[:80]}, and GGUF's tokenizers are {kind}")
        return part

    def _read_vocabulary(self) -> dict[str, int]:
        vocabulary = self._model.get("vocab")
        if not isinstance(vocabulary, Mapping) or not vocabulary:
            raise self._broken("has no vocabulary")
        found = dict(vocabulary)
        if not all(type(number) is int and 0 <= number < self._rows for number in found.values()):
            raise self._broken(f"has a token whose id is not one of the model's {self._rows:,} rows")
        if len(set(found.values())) < len(found):
            raise self._broken("has two tokens with one id")
        return found

    def _read_merges(self) -> Iterator[tuple[str, str]]:
        merges = self._model.get("merges")
        if not isinstance(merges, list) or not merges:
            raise self._broken("has no merges")
        for merge in merges:
            pair = merge.split(" ") if isinstance(merge, str) else merge
            if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
                raise self._broken(f"has the merge {str(merge)[:80]!r}, which is not two tokens")
            yield pair[0], pair[1]

    def _read_added(self) -> Iterator[tuple[int, str, bool]]:
        """Id, text, and whether it is special, of each token that is found in a text before it is split."""
        listed = self._json.get("added_tokens") or []
        more = self._config.get("added_tokens_decoder") or {}
        if not isinstance(listed, list) or not isinstance(more, Mapping):
            raise self._broken("has a wrong list of added tokens")
        if not all(isinstance(entry, Mapping) for entry in [*listed, *more.values()]) or not all(
            re.fullmatch(r"[0-9]{1,9}", key) for key in more
        ):
            raise self._broken("has an added token without an id or a text")
        numbered = [{**entry, "id": int(key)} for key, entry in more.items()]
        for entry in [*listed, *numbered]:
            number, text = entry.get("id"), entry.get("content")
            if type(number) is not int or number < 0 or not isinstance(text, str) or not text:
                raise self._broken(f"has the added token {str(entry)[:120]}")
            if self._vocabulary.get(text, number) != number:
                raise self._broken(f"gives the added token {text[:80]!r} an id that its vocabulary does not give it")
            if number < self._rows:
                yield number, text, bool(entry.get("special"))

    def _tokens(self) -> tuple[list[str], list[int]]:
        """Text and type of each id."""
        texts = [f"[PAD{number}]" for number in range(self._rows)]
        types = [UNUSED] * self._rows
        for text, number in self._vocabulary.items():
            texts[number] = text
            types[number] = BYTE if self._pieces and _BYTE.fullmatch(text) else NORMAL
        for number, text, special in self._added:
            if types[number] != UNUSED and texts[number] != text:
                raise self._broken(f"gives the id {number} to {texts[number][:80]!r} and to {text[:80]!r}")
            texts[number] = text
            types[number] = CONTROL if special else USER
        if self._pieces and (unknown := self._vocabulary.get(str(self._model.get("unk_token")))) is not None:
            types[unknown] = UNKNOWN
        if len(set(texts)) < len(texts):
            raise self._broken("has one text for two ids")
        return texts, types

    def _byte_level(self) -> dict[str, Any]:
        splits = tuple(_splits(self._json.get("pre_tokenizer")))
        normalizer = self._json.get("normalizer")
        if normalizer not in (None, {"type": "NFC"}):
            raise self._cannot(f"changes characters by {str(normalizer)[:120]}, which GGUF cannot say")
        wanted = (splits, bool(self._model.get("ignore_merges")), normalizer is not None)
        for name in _WRITTEN:
            if wanted == (SPLITS[name], name in WHOLE_WORDS, name in COMPOSES):
                spaced = [pair for pair in self._merges if " " in "".join(pair)]
                if spaced:
                    raise self._broken(f"has the merge {spaced[0]} with a space in it")
                return {"model": "gpt2", "pre": name, "merges": [f"{left} {right}" for left, right in self._merges]}
        raise self._cannot("splits text into words by rules that have no name in GGUF")

    def _sentencepiece(self) -> dict[str, Any]:
        normalizer = self._json.get("normalizer") or {}
        parts = normalizer.get("normalizers") if normalizer.get("type") == "Sequence" else [normalizer]
        prefix = next((prefix for prefix in (False, True) if parts == spaces(prefix)), None)
        if prefix is None or self._json.get("pre_tokenizer") not in (None, _NO_SPLIT):
            raise self._cannot("marks or changes spaces in a way that GGUF cannot say")
        scores = [0.0] * self._rows
        for rank, (left, right) in enumerate(self._merges, start=1):
            number = self._vocabulary.get(left + right)
            if number is not None and not scores[number]:
                scores[number] = -float(rank)
        return {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": prefix}

    def _id(self, text: str, what: str) -> int:
        number = self._vocabulary.get(text)
        if number is None:
            number = next((number for number, added, _ in self._added if added == text), None)
        if number is None:
            raise self._broken(f"has no token {text[:80]!r}, which is the model's {what}")
        return number

    def _special(self) -> dict[str, Any]:
        """Ids of special tokens, and of the tokens that end an answer."""
        found: dict[str, int] = {}
        others = self._files.json("special_tokens_map.json")
        for key, name in SPECIAL.items():
            value = self._config.get(name) or others.get(name)
            text = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(text, str):
                found[key] = self._id(text, name)
        if self._pieces and isinstance(unknown := self._model.get("unk_token"), str):
            found["unknown"] = self._id(unknown, "unk_token")
        config, generation = self._files.json("config.json"), self._files.json("generation_config.json")
        if "bos" not in found and type(config.get("bos_token_id")) is int:
            found["bos"] = config["bos_token_id"]
        said = generation.get("eos_token_id")
        said = config.get("eos_token_id") if said is None else said
        ends = said if isinstance(said, list) else [] if said is None else [said]
        if not all(type(number) is int for number in [*ends, *found.values()]) or any(
            not 0 <= number < self._rows for number in [*ends, *found.values()]
        ):
            raise self._broken(f"does not have the tokens {str(ends)[:80]} that end the model's answers")
        if "eos" not in found and ends:
            found["eos"] = ends[0]
        known = {found.get("eos"), *(n for n, text, special in self._added if special and text in ENDS)}
        further = [number for number in dict.fromkeys(ends) if number not in known]
        if len(further) > 2:
            raise self._cannot(f"has {len(ends)} tokens that end an answer ({ends}), and GGUF has keys for fewer")
        found |= dict(zip(("eot", "eom"), further, strict=False))
        return {f"{key}_token_id": number for key, number in found.items()}

    def _ends_of_texts(self) -> dict[str, bool]:
        """Whether a text gets BOS before it and EOS after it."""
        before, after = _around(self._json.get("post_processor"))
        ids = self._special()
        for texts, name in ((before, "bos"), (after, "eos")):
            if texts and [self._id(text, name) for text in texts] != [ids.get(f"{name}_token_id")]:
                raise self._cannot(f"puts {texts} around a text, and GGUF can say only BOS before and EOS after it")
        return {"add_bos_token": bool(before), "add_eos_token": bool(after)}

    def _templates(self) -> dict[str, Any]:
        """Chat templates, from where a folder's are found first."""
        main = self._files.text("chat_template.jinja")
        if main is not None:
            names = self._files.names("additional_chat_templates/*.jinja")
            found = {PurePath(name).stem: self._files.text(name) or "" for name in names} | {"default": main}
        else:
            said = self._files.json("chat_template.json").get("chat_template") or self._config.get("chat_template")
            entries = [{"name": "default", "template": said}] if isinstance(said, str) else said or []
            try:
                found = {entry["name"]: entry["template"] for entry in entries}
            except (TypeError, KeyError):
                raise self._broken("has a chat template without a name or a text") from None
        if not all(isinstance(text, str) for item in found.items() for text in item):
            raise self._broken("has a chat template that is no text")
        if found and "default" not in found:
            raise self._cannot(f"has the chat templates {sorted(found)}, none of which is called default, as in GGUF")
        more = {f"tokenizer.chat_template.{name}": text for name, text in found.items() if name != "default"}
        listed = {"tokenizer.chat_templates": sorted(found.keys() - {"default"})} if more else {}
        return {**({"tokenizer.chat_template": found["default"]} if found else {}), **listed, **more}

    def _sampling(self) -> dict[str, Any]:
        generation = self._files.json("generation_config.json")
        found: dict[str, int | float] = {}
        for key, name in SAMPLING.items():
            value = generation.get(name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                found[f"general.sampling.{key}"] = int(value) if key == "top_k" else float(value)
        return found

    def _broken(self, detail: str) -> CheckpointError:
        return CheckpointError(f"{self.where} {detail}; fetch the files again")

    def _cannot(self, detail: str) -> CheckpointError:
        return CheckpointError(f"{self.where} {detail}; {_USE_ANOTHER}")


def _splits(entry: Any) -> Iterator[str]:
    """The regular expressions of a byte-level pre-tokenizer, spelled as in ``SPLITS``; for what has none, a text that
    is not in it."""
    kind = entry.get("type") if isinstance(entry, Mapping) else None
    pattern = entry.get("pattern") if isinstance(entry, Mapping) else None
    if kind == "Sequence" and isinstance(entry.get("pretokenizers"), Sequence):
        for part in entry["pretokenizers"]:
            yield from _splits(part)
    elif kind == "Split" and isinstance(pattern, Mapping) and isinstance(pattern.get("Regex"), str):
        isolated = entry.get("behavior") == "Isolated" and not entry.get("invert")
        shorter = pattern["Regex"].replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)", CONTRACTIONS)
        yield shorter if isolated else str(entry)
    elif kind == "Digits" and entry.get("individual_digits"):
        yield r"\p{N}"
    elif kind == "ByteLevel" and not entry.get("add_prefix_space"):
        if entry.get("use_regex", True):
            yield GPT2
    else:
        yield str(entry)


def _around(entry: Any) -> tuple[list[str], list[str]]:
    """The tokens that a post-processor puts before and after a text."""
    kind = entry.get("type") if isinstance(entry, Mapping) else None
    if kind == "Sequence":
        pairs = [_around(part) for part in entry.get("processors") or []]
        return [t for before, _ in reversed(pairs) for t in before], [t for _, after in pairs for t in after]
    if kind != "TemplateProcessing":
        return ([], []) if kind in (None, "ByteLevel") else ([str(entry)[:80]], [])
    texts: tuple[list[str], list[str]] = ([], [])
    behind = 0
    for part in entry.get("single") or []:
        if "SpecialToken" in part:
            texts[behind].append(str(part["SpecialToken"].get("id")))
        else:
            behind = 1
    return texts

"""Whether a GGUF file that is going to be written is the same model as its source, seen by the readers of both: the
model's class builds the same from both configs, and both tokenizers give the same ids."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import tokenizers

from evener.contracts.checkpoint import ModelFiles
from evener.errors import ArchitectureError, CheckpointError
from evener.layers.builder import Builder
from evener_convert.source import Source

_AS_SAFETENSORS = "give the name of a folder to store it as safetensors"
#: Texts in which tokenizers of different rules differ: spaces, digits, contractions, scripts, signs, lines.
_TEXTS = (
    "", " ", "a", " a", "  two   spaces    here ", "don't I'LL they've WE'RE", "3 33 333 3333 33333.5 ٣ ½ ²",
    "x = {'a': [1,2]};\n\n\tif (x != 3) {\r\n  return \"é\";\n}  \n", "naïve façade a\u0301 e\u0301 Å",
    "你好，世界。 こんにちは 안녕 привет",
    "🙂 👩‍👩‍👧 ✅ 🦙🦙", "!!!??? ... --- (((", "\t\n \n\n \r\n", "http://a.b/c?d=e&f=%20", "▁mark <0x0A> [PAD1]",
)  # fmt: skip
#: Objects that say nothing of the model: its declarations know the names of files.
_SKIPPED = (Builder,)


def check_same_model(source: Source, config: Mapping[str, Any]) -> None:
    """Compare what the class of ``source`` builds from its own config and from ``config``.

    Raises:
        ArchitectureError: the two differ.
    """
    headers, scheme = source.checkpoint.headers, source.scheme
    built = []
    for each in (source.checkpoint.config, config):
        build = Builder("bfloat16", 2, lambda name: scheme.part(name, headers))
        model = source.family(each, build)
        built.append({"": model, "declared weights": tuple(build.weights), "tied weights": dict(build.ties)})
    away = next(_differences("", built[0], built[1], set()), None)
    if away is not None:
        where, ours, theirs = away
        raise ArchitectureError(
            f"a GGUF file cannot say that {where.lstrip('.')} of this model is {str(ours)[:80]}; it would be read as "
            f"{str(theirs)[:80]}; {_AS_SAFETENSORS}"
        )


def _differences(where: str, ours: Any, theirs: Any, seen: set[int]) -> Iterator[tuple[str, Any, Any]]:
    """Places at which two objects differ. Floats are compared as float32, which a GGUF file has."""
    if ours is theirs or id(ours) in seen or isinstance(ours, _SKIPPED):
        return
    if isinstance(ours, float) and isinstance(theirs, (int, float)):
        if abs(ours - theirs) > 1e-6 * abs(ours):
            yield where, ours, theirs
    elif isinstance(ours, (str, bytes, int, type(None))) or type(ours) is not type(theirs):
        if ours != theirs:
            yield where, ours, theirs
    elif isinstance(ours, Mapping):
        if ours.keys() != theirs.keys():
            yield where, sorted(map(str, ours)), sorted(map(str, theirs))
            return
        for key in ours:
            yield from _differences(f"{where}.{key}", ours[key], theirs[key], seen)
    elif isinstance(ours, (Sequence, frozenset, set)):
        if len(ours) != len(theirs) or isinstance(ours, (frozenset, set)):
            if ours != theirs:
                yield where, ours, theirs
            return
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(f"{where}[{number}]", a, b, seen)
    else:
        seen.add(id(ours))
        names = [*getattr(ours, "__dict__", {}), *getattr(type(ours), "__slots__", ())]
        for name in names:
            yield from _differences(f"{where}.{name}", getattr(ours, name, None), getattr(theirs, name, None), seen)


def check_usable_tokenizer(files: ModelFiles) -> None:
    """Whether the library accepts the tokenizer, and so its parts have the types that they must have.

    Raises:
        CheckpointError: it does not.
    """
    if files.text("tokenizer.json") is not None:
        _library(files, files.json("tokenizer.json"))


def check_same_tokenizer(ours: ModelFiles, theirs: ModelFiles, rows: int) -> None:
    """Compare two tokenizers: the text of each id below ``rows``, merges, and the ids of texts, with every added token
    within them.

    Raises:
        CheckpointError: they differ, or one cannot be used.
    """
    source, written = _tokenizer_json(ours), _tokenizer_json(theirs)
    if _merges(source) != _merges(written):
        raise _other(ours, "its merges do not follow from the scores of pieces, which is all that GGUF has")
    a, b = _library(ours, source), _library(theirs, written)
    for number in range(rows):
        text = a.id_to_token(number)
        if text is not None and text != b.id_to_token(number):
            raise _other(ours, f"the id {number} would be {b.id_to_token(number)!r}, not {text[:80]!r}")
    added = [entry.content for number, entry in a.get_added_tokens_decoder().items() if number < rows]
    for text in (*_TEXTS, *(f"a{token}b {token} c" for token in added)):
        wanted, found = (_ids(each, library, text) for each, library in ((ours, a), (theirs, b)))
        if wanted != found:
            raise _other(ours, f"the text {text[:60]!r} would have the ids {found[:12]}, not {wanted[:12]}")


def _tokenizer_json(files: ModelFiles) -> dict[str, Any]:
    """``tokenizer.json``, with the added tokens that only ``tokenizer_config.json`` has."""
    found, more = files.json("tokenizer.json"), files.json("tokenizer_config.json").get("added_tokens_decoder") or {}
    listed = list(found.get("added_tokens") or [])
    known = {entry["id"] for entry in listed}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    missing = [{**plain, **entry, "id": int(key)} for key, entry in more.items() if int(key) not in known]
    return {**found, "added_tokens": sorted([*listed, *missing], key=lambda entry: entry["id"])}


def _merges(tokenizer: Mapping[str, Any]) -> list[list[str]]:
    """The merges that make a token of tokens, in order; others are never used. Of SentencePiece, merges that make the
    same token are sorted: they have one score, and their order in a file differs between programs."""
    model = tokenizer["model"]
    pairs = [merge.split(" ") if isinstance(merge, str) else list(merge) for merge in model["merges"]]
    known = model["vocab"].keys()
    used = [[a, b] for a, b in pairs if a in known and b in known and a + b in known]
    if not model.get("byte_fallback"):
        return used
    return [pair for _, group in groupby(used, key="".join) for pair in sorted(group)]


def _library(files: ModelFiles, tokenizer: Mapping[str, Any]) -> tokenizers.Tokenizer:
    try:
        library = tokenizers.Tokenizer.from_str(json.dumps(tokenizer))
    except Exception as error:  # the library raises a bare Exception
        where = files.where("tokenizer.json")
        raise CheckpointError(f"{where} cannot be used ({error}); fetch the file again") from error
    library.no_truncation()
    library.no_padding()
    return library


def _ids(files: ModelFiles, library: tokenizers.Tokenizer, text: str) -> list[int]:
    try:
        return list(library.encode(text).ids)
    except BaseException as error:
        # A panic of the library is no ``Exception``.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        where = files.where("tokenizer.json")
        raise CheckpointError(f"{where} fails on the text {text[:60]!r} ({error}); fetch the file again") from error


def _other(files: ModelFiles, detail: str) -> CheckpointError:
    return CheckpointError(
        f"{files.where('tokenizer.json')} is no tokenizer that a GGUF file can hold: {detail}; {_AS_SAFETENSORS}"
    )

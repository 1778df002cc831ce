"""Grammars with the library xgrammar, for ``generation.grammars=xgrammar``. Imported only if it is used: it imports
torch and transformers.

https://github.com/mlc-ai/xgrammar
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLTokenizer

from evener.contracts.grammar.library import GrammarSpec, Matcher
from evener.errors import ConfigError
from evener_generation.grammar_texts import MAX_BLANKS, check_length, choices_of, object_of, parts_of, quoted
from evener_generation.reasoning_tokens import SpecialTokens, with_reasoning
from evener_generation.text_library import TextLibrary

try:
    from xgrammar import CompiledGrammar, GrammarCompiler, GrammarMatcher, TokenizerInfo, VocabType
except ModuleNotFoundError as error:
    raise ConfigError(
        f"generation.grammars=xgrammar needs a package that is not installed ({error.name}); "
        'type: pip install "evener-generation[xgrammar]"'
    ) from error

#: Threads that compile one grammar: they find for each of its states which tokens may come.
_THREADS = 4
#: Bytes that a compiled grammar may take: with a model's tokens, and in the check, where each byte is a token. They
#: grow with its states. For each MiB in the check, a model's tokens take seconds, and up to a hundred times the memory;
#: the library cannot be stopped meanwhile.
_MOST_BYTES, _MOST_BYTES_CHECKED = 128 << 20, 4 << 20
#: What a schema may say. The library passes over other keywords, and a document could break them.
_ANNOTATIONS = frozenset({
    "$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples", "deprecated",
    "readOnly", "writeOnly",
})  # fmt: skip
_KEYWORDS: Mapping[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "boolean": frozenset(), "null": frozenset(),
}  # fmt: skip
#: One character of a string whose length a schema limits. The library by itself also allows characters that may not
#: stand in JSON. Neither has escapes: with a choice between those and characters, a mask takes some 0.5 s.
_CHARACTER = "[ !#-\\[\\]-~\u00a0-\ud7ff\ue000-\U0010ffff]"
#: Of the processor, for one mask or token; usual are tens of microseconds. Ambiguous grammars take more at each token,
#: and all requests wait for it.
_MOST_SECONDS = 0.25
#: In a pattern: characters that a JSON string has only with an escape, which the library would leave out.
_ESCAPED = re.compile(r'["\x00-\x1f]|\\[\\nrtfvbux0c]')
#: One of these says all about a document; beside it the library looks at nothing else.
_ALONE = ("$ref", "const", "enum", "anyOf")
#: At the beginning of the library's errors: the time and a line of its source, and the check that failed there.
_NOISE = re.compile(r"^(\[[\d:]+\] \S+:\d+: )?(Check failed: \(.*?\) is false: )?")
_OTHERS = "leave it out, or ask the operator for generation.grammars=llguidance"


class XgrammarLibrary(TextLibrary):
    """JSON schemas of some keywords (others are refused), regular expressions without look-around, grammars in
    llama.cpp's GBNF and in Lark's syntax as far as the library reads it, and its own structural tags."""

    def __init__(self, tokenizer: str, vocab_size: int) -> None:
        super().__init__(tokenizer, vocab_size)
        #: By the ids that end a text; all requests of one model have the same, so this holds one entry.
        self._opened: dict[tuple[int, ...], _Opened] = {}

    @classmethod
    def _problem(cls, answer: GrammarSpec) -> str | None:
        compiler = _compiler([bytes([each]) for each in range(256)], 257, (256,))
        _compiled(answer, compiler, _MOST_BYTES_CHECKED)
        return None

    def _compile(self, spec: GrammarSpec) -> Matcher:
        if spec.ends not in self._opened:
            self._opened[spec.ends] = self._open(spec.ends)
        opened = self._opened[spec.ends]
        before, answer = parts_of(spec)
        found = None
        if answer is not None:
            found = _XgrammarMatcher(GrammarMatcher(_compiled(answer, opened.compiler)), opened.mask_of(answer))
            if before is None:
                return found
        return with_reasoning(opened.tokenizer, opened.special, self._vocab_size, before or {}, spec.ends, found)

    def _open(self, ends: tuple[int, ...]) -> _Opened:
        tokenizer = LLTokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=list(ends) or None)
        special = SpecialTokens(self._tokenizer, tokenizer)
        # The library knows special tokens by their texts, as tags name them.
        texts = {token: text.encode() for text, token in special.items()}
        count = min(self._vocab_size, tokenizer.vocab_size)
        tokens = [texts.get(each, b"") or tokenizer.decode_bytes([each]) for each in range(count)]
        bits = np.zeros(32 * -(-self._vocab_size // 32), dtype=np.uint8)
        bits[[token for token, text in enumerate(tokens) if text and token not in texts] + list(ends)] = 1
        known = np.packbits(bits, bitorder="little").view(np.int32)[None]
        return _Opened(tokenizer, special, _compiler(tokens, self._vocab_size, ends), known)


class _Opened(NamedTuple):
    """A tokenizer for texts with some ends.

    Attributes:
        special: ids of special tokens by their texts.
        known: the mask of all ids that have a token which is not special, int32 [1, words].
    """

    tokenizer: LLTokenizer
    special: SpecialTokens
    compiler: GrammarCompiler
    known: np.ndarray[Any, Any]

    def mask_of(self, spec: GrammarSpec) -> np.ndarray[Any, Any]:
        """Which ids the texts of a grammar may have: special ones only where a tag names them."""
        if spec.kind != "structural_tag":
            return self.known
        tag, found = json.dumps(object_of(spec.text), ensure_ascii=False), self.known.copy()
        for text, token in self.special.items():
            if text in tag:
                found.view(np.uint8)[0, token >> 3] |= 1 << (token & 7)
        return found


class _XgrammarMatcher(Matcher):
    """The library's matcher.

    Args:
        known: by ``_Opened.mask_of``; the library's masks may have other ids.
    """

    def __init__(self, matcher: GrammarMatcher, known: np.ndarray[Any, Any], wrong: bool = False) -> None:
        self._matcher, self._known, self._wrong, self._slow = matcher, known, wrong, False

    def copy(self) -> Matcher:
        return _XgrammarMatcher(self._matcher.fork(), self._known, self._wrong)

    def mask(self) -> bytes:
        if self._wrong:
            raise ValueError("a token came that the grammar does not allow")
        if self._matcher.is_terminated():
            raise ValueError("the text is complete")
        if self._slow:
            raise ValueError(f"a step of it took more than {_MOST_SECONDS:g} s; make it simpler: with fewer ways "
                             "to write the same text")  # fmt: skip
        bits, began = np.full_like(self._known, -1), time.thread_time()
        try:
            self._matcher.fill_next_token_bitmask(bits)  # which it leaves as it is if any token may come
        except RuntimeError as error:
            raise ValueError(_reason(error)) from error
        self._note_time(began)
        if not (bits := bits & self._known).any():
            raise ValueError("no token may follow: the grammar has a part that nothing fits")
        found: bytes = bits.astype("<i4").tobytes()
        return found

    def accept(self, token: int) -> None:
        self._wrong = self._wrong or not self._takes(token)

    def fitting(self, tokens: list[int]) -> int:
        taken = 0
        while not self._wrong and taken < len(tokens) and self._takes(tokens[taken]):
            taken += 1
        self._matcher.rollback(taken)
        return taken

    def masks(self, tokens: list[int]) -> list[bytes]:
        found = [self.mask()]
        taken = 0
        for token in tokens:
            if not self._takes(token):
                break
            taken += 1
            try:
                found.append(self.mask())
            except ValueError:  # the text is complete, or cannot go on behind this token
                break
        self._matcher.rollback(taken)
        return found

    def _takes(self, token: int) -> bool:
        """Whether the text may go on with ``token``, with which it then does."""
        began = time.thread_time()
        found = not self._matcher.is_terminated() and self._matcher.accept_token(token)
        self._note_time(began)
        return found

    def _note_time(self, began: float) -> None:
        self._slow = self._slow or time.thread_time() - began > _MOST_SECONDS


def _compiler(tokens: list[bytes], vocab_size: int, ends: tuple[int, ...]) -> GrammarCompiler:
    # Compiled grammars are kept by the engine, a bounded number of them.
    info = TokenizerInfo(tokens, VocabType.RAW, vocab_size=vocab_size, stop_token_ids=list(ends) or None)
    return GrammarCompiler(info, max_threads=_THREADS, cache_enabled=False)


def _compiled(spec: GrammarSpec, compiler: GrammarCompiler, most: int | None = None) -> CompiledGrammar:
    """Args:
        most: bytes that it may take; None: as many as with a model's tokens.

    Raises:
        ValueError: it is too long or too large, not what its kind says, or the library does not hold texts to it.
    """
    found, most = _compiled_by_kind(spec, compiler), _MOST_BYTES if most is None else most
    if (size := found.memory_size_bytes) > most:
        raise ValueError(f"compiled by xgrammar it takes {size / 2**20:.1f} MiB, and at most {most >> 20} MiB are "
                         "allowed; use fewer or smaller bounds of lengths, and fewer alternatives")  # fmt: skip
    return found


def _compiled_by_kind(spec: GrammarSpec, compiler: GrammarCompiler) -> CompiledGrammar:
    check_length(spec)
    try:
        match spec.kind:
            case "json_schema":
                schema = json.dumps(_held(_json(spec.text)))
                return compiler.compile_json_schema(schema, strict_mode=False, max_whitespace_cnt=MAX_BLANKS)
            case "regex":
                return compiler.compile_regex(spec.text)
            case "choice":
                return compiler.compile_grammar("root ::= " + " | ".join(map(quoted, choices_of(spec.text))))
            case "structural_tag":
                tag = object_of(spec.text)
                form = json.dumps({"type": "structural_tag", "format": _held_tag(tag.get("format", tag))})
                return compiler.compile_structural_tag(form)
            case _ if "::=" in spec.text:
                return compiler.compile_grammar(spec.text)
            case _:
                return compiler.compile_lark(spec.text)
    except RuntimeError as error:
        raise ValueError(_reason(error)) from error


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("the schema is nested too deeply") from error


def _held_tag(tag: Any) -> Any:
    """A structural tag whose JSON texts the library holds to their schemas.

    Raises:
        ValueError: it does not know how.
    """
    if isinstance(tag, list):
        return [_held_tag(each) for each in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("min_chars") or (tag.get("type") == "regex" and {"excludes", "max_chars"} & tag.keys()):
        raise ValueError(f"xgrammar cannot hold a text between marks to a pattern or a least length; {_OTHERS}")
    if tag.get("type") == "json_schema":
        return {"max_whitespace_cnt": MAX_BLANKS, **tag, "json_schema": _held(tag.get("json_schema"))}
    return {name: _held_tag(each) for name, each in tag.items()}


def _held(schema: Any) -> Any:
    """A schema of which the library holds documents to every word.

    Raises:
        ValueError: it says something else.
    """
    if schema is True or schema == {}:
        return schema
    if not isinstance(schema, dict):
        raise ValueError(f"xgrammar takes an object as a schema, not {json.dumps(schema)[:60]}")
    if wrong := sorted(set(schema) - _allowed_beside(schema)):
        raise ValueError(f"xgrammar does not hold documents to {wrong[0]!r} here; {_OTHERS}")
    found = dict(schema)
    for name in ("properties", "$defs", "definitions"):
        if name in schema:
            found[name] = {key: _held(each) for key, each in _object_at(schema, name).items()}
    for name in ("anyOf", "prefixItems"):
        if not isinstance(schema.get(name, []), list):
            raise ValueError(f"{name} of a schema is a list")
        found.update({name: [_held(each) for each in schema[name]]} if name in schema else {})
    for name in ("items", "additionalProperties"):
        if name in schema and schema[name] is not False:
            found[name] = _held(schema[name])
    if "pattern" in schema and (not isinstance(schema["pattern"], str) or _ESCAPED.search(schema["pattern"])):
        raise ValueError(f"xgrammar cannot escape what this 'pattern' asks for; {_OTHERS}")
    if "minLength" in schema or "maxLength" in schema:
        least, most = found.pop("minLength", 0), found.pop("maxLength", "")
        if not all(type(each) is int and each >= 0 for each in (least, most or 0)):
            raise ValueError("minLength and maxLength of a schema are integers of at least 0")
        found["pattern"] = f"^{_CHARACTER}{{{least},{most}}}$"
    return found


def _object_at(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = schema.get(name, {})
    if not isinstance(value, dict):
        raise ValueError(f"{name} of a schema is an object")
    return value


def _allowed_beside(schema: Mapping[str, Any]) -> frozenset[str]:
    """The keywords that a schema may have, with what else it says."""
    for name in _ALONE:
        if name in schema:
            return _ANNOTATIONS | {name} | (_type_of_all(schema) if name in ("const", "enum") else frozenset())
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise ValueError(f"a type of a schema is a text, not {json.dumps(kinds)[:60]}")
    allowed = _ANNOTATIONS | {"type"}
    if len(kinds) == 1:
        allowed |= _KEYWORDS.get(kinds[0], frozenset())
    # The library looks at the first of these alone.
    if "pattern" in schema or "format" in schema:
        allowed -= {"minLength", "maxLength"}
    return allowed - {"format"} if "pattern" in schema else allowed


def _type_of_all(schema: Mapping[str, Any]) -> frozenset[str]:
    """``type``, if all values that the schema lists are of its type."""
    of = {"string": str, "boolean": bool, "object": dict, "array": list, "null": type(None)}
    values = [schema["const"]] if "const" in schema else schema["enum"]
    if not isinstance(values, list) or not isinstance(name := schema.get("type"), str):
        return frozenset()
    alike = name in of and all(type(each) is of[name] for each in values)
    numbers = name in ("integer", "number") and all(type(each) is int for each in values)
    return frozenset({"type"}) if alike or numbers else frozenset()


def _reason(error: Exception) -> str:
    """The library's error without where in its source that was."""
    lines = str(error).strip().splitlines() or ["the library gives no reason"]
    return _NOISE.sub("", lines[0])[:300]

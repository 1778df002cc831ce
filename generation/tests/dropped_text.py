"""What each format drops of a model's text, and whether an answer has all the rest of it, in order.

A text is lost unless it stands in the content, the reasoning, the name, the id or the arguments of a call. What a
format may drop is declared here, with the reason:

- *Marks* of the format: ``marks``. They say what the text between them is.
- *Blank characters* beside marks: the format or the model puts them there for reading.
- *Words* of the format, ``words``: what stands in its heads beside names.
- In a call as a JSON object: brackets, commas, keys, quotes, and members that a call of the API has no place for. These
  are complete members such as ``"type": "function"``, an ``id`` behind the arguments, and arguments that are ``null``.

Marks, words and blanks are dropped beside calls and reasoning only: content is what the model wrote, character by
character. Exceptions are marks without text, ``hollow``: a section of DeepSeek and Kimi K2 without any call, and marks
in a head of harmony that is none.

Some text is given out as JSON, with the same meaning: names and arguments that were JSON strings, and the values of
formats that are not JSON.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from evener.contracts.generation.parsed import CallArguments, CallStart, Content, Parsed
from evener.contracts.generation.parsers import Parser
from evener_generation.harmony import MARKS, HarmonyReasoning, HarmonyTools
from evener_generation.reasoning.tags import BracketThink, Think
from evener_generation.tools.json_calls import Hermes, Llama3, Mistral
from evener_generation.tools.parameters import Glm4, Qwen3Coder
from evener_generation.tools.pythonic import Pythonic
from evener_generation.tools.sections import DeepSeekV3, DeepSeekV31, KimiK2

#: Places in the raw text behind some of it, from a place before it.
Reader = Callable[[str, int], Iterable[int]]


@dataclass
class Call:
    """A call as a parser gave it out; ``pieces``: of its arguments."""

    name: str
    id: str
    pieces: list[str]

    @property
    def arguments(self) -> str:
        """All of them."""
        return "".join(self.pieces)


def exactly(text: str) -> Reader:
    """The text, as it is."""
    return lambda raw, at: [at + len(text)] if raw.startswith(text, at) else []


def matching(pattern: str) -> Reader:
    """A regular expression."""
    compiled = re.compile(pattern)
    return lambda raw, at: [found.end()] if (found := compiled.match(raw, at)) else []


@dataclass(frozen=True)
class Format:
    """What a format drops.

    Attributes:
        marks: those that its parser declares, or reads.
        words: regular expressions of other text beside calls.
        readers: how a call stands in the raw text; with ``pieces``, only what it has before its arguments.
        thinks: reasoning or a message may be empty, so what stands around it may be dropped between any two pieces.
        pieces: how each piece of its arguments does, where content may stand between two.
        hollow: a regular expression of marks that have nothing between them.
    """

    marks: Sequence[str]
    readers: Callable[[Call], list[Reader]]
    words: Sequence[str] = ()
    hollow: str = ""
    thinks: bool = False
    pieces: Callable[[str], list[Reader]] | None = None


_DECODER = json.JSONDecoder()


def member(raw: str, at: int) -> tuple[str, int, Any, int] | None:
    """A key, the place of its value, the value, and the place behind it; None: no complete member is there."""
    try:
        key, behind = _DECODER.raw_decode(raw, at)
        colon = re.compile(r"\s*:\s*").match(raw, behind)
        if not isinstance(key, str) or colon is None:
            return None
        value, end = _DECODER.raw_decode(raw, colon.end())
    except (ValueError, RecursionError):
        return None
    return key, colon.end(), value, end


def json_object(call: Call) -> list[Reader]:
    """A call as a JSON object, which may break off behind what a call needs."""

    def read(raw: str, at: int) -> Iterable[int]:
        ends: set[int] = set()
        if not raw.startswith("{", at):
            return ends
        states = [(at + 1, False, False)]
        while states:
            at, named, argued = states.pop()
            done = named and (argued or call.arguments == "{}")
            if done:
                ends.add(at)  # it breaks off here
            blank = re.compile(r"\s*,?\s*").match(raw, at)
            assert blank is not None
            place = blank.end()
            if done and raw.startswith("}", place):
                ends.add(place + 1)
            key = re.compile(r'"(arguments|parameters)"\s*:\s*').match(raw, place)
            if key is not None and not argued and raw.startswith(call.arguments, key.end()):
                # Verbatim, and perhaps without its end.
                states.append((key.end() + len(call.arguments), named, True))
            if (found := member(raw, place)) is None:
                continue
            word, start, value, end = found
            if word == "name" and not named and value == call.name:
                states.append((end, True, argued))
            elif word in ("arguments", "parameters") and not argued and (
                value == call.arguments or (value in (None, "") and call.arguments == "{}")
            ):  # fmt: skip
                states.append((end, named, True))
            elif word == "id" and not (named and argued):
                if call.id == (value if isinstance(value, str) else raw[start:end]):
                    states.append((end, named, argued))
            elif word not in ("name", "arguments", "parameters"):
                states.append((end, named, argued))
        return ends

    return [read]


def verbatim(call: Call) -> list[Reader]:
    """The name, or an id that holds it, and the arguments, which need not be there."""
    held = re.fullmatch(rf"(functions\.)?{re.escape(call.name)}(:[^:]*)?", call.id)
    head = exactly(call.id if held else call.name)
    return [head, exactly("" if call.arguments == "{}" else call.arguments), matching(r"(?:\{\})?")]


def mistral(call: Call) -> list[Reader]:
    """Either form."""
    listed = json_object(call)[0]
    head = re.escape(call.name) + (rf"\s*\[CALL_ID\]\s*{re.escape(call.id)}" if call.id else "")

    def read(raw: str, at: int) -> Iterable[int]:
        found = re.compile(rf"{head}\s*(\[CALL_ID\]\s*)?(\[ARGS\]\s*)?").match(raw, at)
        named = [] if found is None else exactly(call.arguments)(raw, found.end())
        return {*listed(raw, at), *named}

    return [read]


def tagged(call: Call) -> list[Reader]:
    """A name, and in Qwen's format the end of its mark."""
    return [matching(re.escape(call.name) + r"(\s*>)?")]


def parameter(piece: str) -> list[Reader]:
    """A key and its value, which is text or given out as JSON; or the end of all."""
    if piece in ("}", "{}"):
        return [exactly("")]
    key, behind = _DECODER.raw_decode(piece, piece.index('"'))
    text = piece[behind:].removeprefix(": ")
    value = json.loads(text)
    words = {"true": "(?i:true)", "false": "(?i:false)", "null": "(?i:none|null)"}
    ways = [re.escape(text), *([words[text]] if text in words else [])]
    ways += [re.escape(value)] if isinstance(value, str) else []
    # A key of GLM may have its closing mark anywhere.
    name = r"(?:</arg_key>)?".join(map(re.escape, key))
    return [matching(name + r"(\s*>)?"), matching("|".join(sorted(ways, key=len, reverse=True)))]


def head(call: Call) -> list[Reader]:
    """A head of harmony with the function's name, and the arguments."""
    name, word = rf"\s*to=functions\.{re.escape(call.name)}(?![\w.-])", r"(\s*<\|constrain\|>\s*\w*|\s+(json|code))?"
    start, channel = r"<\|start\|>assistant", r"\s*<\|channel\|>\s*\w*"
    arguments = "" if call.arguments == "{}" else call.arguments
    pattern = rf"{start}({name}({channel})?|({channel})?{name}){word}\s*<\|message\|>"
    return [matching(pattern), exactly(arguments), matching(r"(?:\{\})?")]


_THREE = ("<function=", "<parameter=", "</parameter>", "</function>")
FORMATS: dict[type[Parser], Format] = {
    Hermes: Format((Hermes.opening, Hermes.closing), json_object),
    Llama3: Format(Llama3.special_tokens, json_object, words=[";"]),  # between calls
    Mistral: Format(Mistral.special_tokens, mistral, words=[r"\[(?=\s*\{)", ",", r"\]"]),  # the list of calls
    Qwen3Coder: Format(("<tool_call>", "</tool_call>", *_THREE), tagged, pieces=parameter),
    Glm4: Format(
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        tagged, pieces=parameter,
    ),
    # The kind of a call, and a block of Markdown around its arguments.
    DeepSeekV3: Format(DeepSeekV3.special_tokens, verbatim, words=["function(?=<)", r"```json\n", r"\n```(?=<)"],
                       hollow=r"<｜tool▁calls▁begin｜>\s*<｜tool▁calls▁end｜>"),
    DeepSeekV31: Format(DeepSeekV31.special_tokens, verbatim, words=["function(?=<)", r"```json\n", r"\n```(?=<)"],
                        hollow=r"<｜tool▁calls▁begin｜>\s*<｜tool▁calls▁end｜>"),
    KimiK2: Format(KimiK2.special_tokens, verbatim,
                   hollow=r"<\|tool_calls_section_begin\|>\s*<\|tool_calls_section_end\|>"),
    # A head whose kind of message is no call is content, as it is; so are its marks.
    HarmonyTools: Format(("<|call|>", "<|end|>"), head),
    Think: Format((Think.opening, Think.closing), verbatim, thinks=True),
    BracketThink: Format((BracketThink.opening, BracketThink.closing), verbatim, thinks=True),
    # The role, the channel and the kind of content of a message say what it is.
    HarmonyReasoning: Format(
        HarmonyReasoning.special_tokens, verbatim, thinks=True,
        words=[r"(?:<\|start\|>)?assistant", r"<\|channel\|>\s*\w+", r"<\|constrain\|>\s*\w+", r"(?<=\s)(json|code)"],
        # Marks between the words of a head that is none.
        hollow="|".join(map(re.escape, MARKS)),
    ),
}  # fmt: skip


def lost(kind: type[Parser], raw: str, found: Sequence[Parsed]) -> str | None:
    """What an answer lacks, with what stands before and behind it; None: nothing is lost.

    Args:
        found: what the parser gave out for ``raw``.
    """
    if kind is Pythonic and any(isinstance(each, CallStart) for each in found):
        return _lost_of_python(raw, found)
    try:
        return _lost(kind, raw, found)
    except json.JSONDecodeError as error:
        return f"a parameter was not given out as JSON: {error}"


def _lost(kind: type[Parser], raw: str, found: Sequence[Parsed]) -> str | None:
    form = FORMATS.get(kind, Format((), verbatim))
    dropped = [re.compile(each) for each in (r"\s", *map(re.escape, form.marks), *form.words)]
    places, furthest, before = {0}, 0, "content"
    for what, reader in [*_readers(form, found), ("content", lambda raw, at: [at])]:
        if form.thinks or (before, what) != ("content", "content"):
            places = _closure(raw, places, dropped)
        elif form.hollow:
            places = _closure(raw, places, [re.compile(form.hollow)])
        furthest = max(places, default=furthest)
        places = {end for place in places for end in reader(raw, place)}
        before = what
    if len(raw) in places:
        return None
    return f"behind {raw[:furthest]!r}: {raw[furthest:]!r}"


def _closure(raw: str, places: set[int], dropped: Sequence[re.Pattern[str]]) -> set[int]:
    """The places, and those behind what may be dropped from there on."""
    found, waiting = set(places), list(places)
    while waiting:
        place = waiting.pop()
        ends = {end.end() for each in dropped if (end := each.match(raw, place))}
        waiting += ends - found
        found |= ends
    return found


def _readers(form: Format, found: Sequence[Parsed]) -> list[tuple[str, Reader]]:
    """Each piece of the answer: what it is, and how it stands in the raw text."""
    calls: dict[int, Call] = {}
    for each in found:
        if isinstance(each, CallStart):
            calls[each.index] = Call(each.name, each.id, [])
        elif isinstance(each, CallArguments):
            calls[each.index].pieces.append(each.text)
    readers: list[tuple[str, Reader]] = []
    for each in found:
        if isinstance(each, CallStart):
            readers += [("call", reader) for reader in form.readers(calls[each.index])]
        elif isinstance(each, CallArguments):
            readers += [("call", reader) for reader in (form.pieces(each.text) if form.pieces else ())]
        else:
            what = "content" if isinstance(each, Content) else "reasoning"
            readers.append((what, _with_hollow(each.text, form.hollow) if form.hollow else exactly(each.text)))
    return readers


def _with_hollow(text: str, hollow: str) -> Reader:
    """A text that may have had hollow sections between its characters."""
    empty = [re.compile(hollow)]

    def read(raw: str, at: int) -> Iterable[int]:
        places = {at}
        for character in text:
            places = {each + 1 for each in _closure(raw, places, empty) if raw.startswith(character, each)}
        return places

    return read


def _lost_of_python(raw: str, found: Sequence[Parsed]) -> str | None:
    """Of a list of calls: names, and values as Python's tokens give them, must be those of the answer, in order."""
    text = raw.strip().removeprefix(Pythonic.special_tokens[0]).strip().removesuffix(Pythonic.special_tokens[1]).strip()
    raw_leaves: list[Any] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            words = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
            raw_leaves.append(words.get(token.string, unicodedata.normalize("NFKC", token.string)))
        elif token.type == tokenize.NUMBER or token.type == tokenize.STRING:
            raw_leaves.append(ast.literal_eval(token.string))
        elif token.type == tokenize.OP:
            # A sign is the number's; brackets, commas and the like are marks of the format.
            raw_leaves += ["-"] if token.string == "-" else []
            if token.string not in (*"[](){},=:.-+",):
                return f"{token.string!r}"
        elif token.type not in (tokenize.NEWLINE, tokenize.NL, tokenize.ENDMARKER):
            return f"{token.string!r}"
    calls: list[Call] = []
    for each in found:
        if isinstance(each, CallStart):
            calls.append(Call(each.name, each.id, []))
        elif isinstance(each, CallArguments):
            calls[-1].pieces.append(each.text)
        else:
            return f"content beside calls: {each}"
    given: list[Any] = []
    for call in calls:
        given += call.name.split(".")
        try:
            given += _leaves(json.loads(call.arguments))
        except json.JSONDecodeError as error:
            return f"the arguments were not given out as JSON: {error}"
    # Texts that stand side by side are one text.
    return None if _joined(raw_leaves) == _joined(given) else f"{raw_leaves} is not {given}"


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and value < 0:
        yield from ("-", -value)
    else:
        yield value


def _joined(leaves: Sequence[Any]) -> list[Any]:
    """All texts between other values as one, and each other value with its kind: 1 is not True."""
    found: list[Any] = [""]
    for each in leaves:
        if isinstance(each, str) and each != "-":
            found[-1] += each
        else:
            found += [(type(each), each), ""]
    return found

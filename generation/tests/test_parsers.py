"""Parsers of tool calls and reasoning, over each format's examples and mutations of them, cut at every character."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from dropped_text import lost

from evener.contracts.generation.parsed import CallArguments, CallStart, Content, Parsed, Reasoning
from evener.contracts.generation.parsers import Parser, ToolParser
from evener_generation import descriptor
from evener_generation.harmony import HarmonyReasoning, HarmonyTools
from evener_generation.reasoning.tags import BracketThink, Think
from evener_generation.tools.json_calls import Hermes, Llama3, Mistral
from evener_generation.tools.parameters import Glm4, Qwen3Coder
from evener_generation.tools.pythonic import Pythonic
from evener_generation.tools.sections import DeepSeekV3, DeepSeekV31, KimiK2

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "units": {"type": "array"},
                    "exact": {"type": "boolean"},
                },
            },
        },
    }
]
PARIS = {"city": "Paris"}


@dataclass
class Answer:
    """What all events of a stream make together."""

    content: str = ""
    reasoning: str = ""
    names: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)

    @property
    def calls(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(text)) for name, text in zip(self.names, self.arguments, strict=True)]


def joined(found: Iterable[Parsed]) -> Answer:
    answer = Answer()
    for each in found:
        if isinstance(each, Content):
            answer.content += each.text
        elif isinstance(each, Reasoning):
            answer.reasoning += each.text
        elif isinstance(each, CallStart):
            assert each.index == len(answer.names), "calls come in order"
            answer.names.append(each.name)
            answer.ids.append(each.id)
            answer.arguments.append("")
        else:
            assert isinstance(each, CallArguments) and each.index == len(answer.names) - 1
            answer.arguments[-1] += each.text
    return answer


def parsed(parser: Parser, pieces: Sequence[str]) -> Answer:
    found = [each for piece in pieces for each in parser.feed(piece)]
    assert all(not isinstance(each, (Content, Reasoning, CallArguments)) or each.text for each in found)
    return joined([*found, *parser.finish()])


def tool_parser(kind: type[ToolParser]) -> ToolParser:
    return kind(TOOLS)


DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_B, _C, _S, _E, _F = DEEPSEEK
#: Parser, text, content, calls. The texts are what the models' chat templates write for an earlier answer.
EXAMPLES: list[tuple[type[ToolParser], str, str, list[tuple[str, Any]]]] = [
    (Hermes, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>', "",
     [("get_weather", PARIS)]),
    (Hermes, 'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
     '<tool_call>\n{"arguments": {"city": "a } \\" </b> {"}, "name": "get_weather"}\n</tool_call>', "Let me look.",
     [("get_weather", PARIS), ("get_weather", {"city": 'a } " </b> {'})]),
    (Hermes, '<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
    (Hermes, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
    (Hermes, '<tool_call>{"id": 7, "name": "f", "arguments": {}} </tool_call> bye', "bye", [("f", {})]),
    (Llama3, '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", [("get_weather", PARIS)]),
    (Llama3, '<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {"x": [1, {"y": 2}]}}', "",
     [("a", {}), ("b", {"x": [1, {"y": 2}]})]),
    (Mistral, '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "abc"}, '
     '{"name": "f", "arguments": {}}]', "", [("get_weather", PARIS), ("f", {})]),
    (Mistral, 'Yes. [TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]f[ARGS]{}', "Yes.",
     [("get_weather", PARIS), ("f", {})]),
    (Qwen3Coder, "I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
     "<parameter=days>\n3\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n</function>\n</tool_call>", "I look.",
     [("get_weather", {"city": "Paris", "days": 3, "exact": True})]),
    (Qwen3Coder, "<function=get_weather>\n<parameter=city>\nline <b>\nline\n</parameter>\n</function>\n<tool_call>\n"
     "<function=now>\n</function>\n</tool_call>", "", [("get_weather", {"city": "line <b>\nline"}), ("now", {})]),
    (Glm4, "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>units</arg_key>\n"
     '<arg_value>["C"]</arg_value>\n</tool_call>', "", [("get_weather", {"city": "Paris", "units": ["C"]})]),
    (Glm4, "<tool_call>now</tool_call>\n<tool_call>get_weather<arg_key>city</arg_key><arg_value>5</arg_value>"
     "</tool_call>", "", [("now", {}), ("get_weather", {"city": "5"})]),
    (DeepSeekV3, f'{_B}{_C}function{_S}get_weather\n```json\n{{"city": "Paris"}}\n```{_E}\n{_C}function{_S}now\n'
     f"```json\n{{}}\n```{_E}{_F}", "", [("get_weather", PARIS), ("now", {})]),
    (DeepSeekV31, f'Let me see.{_B}{_C}get_weather{_S}{{"city": "Paris"}}{_E}{_C}now{_S}{{}}{_E}{_F}', "Let me see.",
     [("get_weather", PARIS), ("now", {})]),
    (KimiK2, "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
     '{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
     "<|tool_call_end|><|tool_calls_section_end|>", "", [("get_weather", PARIS), ("now", {})]),
    (Pythonic, '[get_weather(city="Paris", days=-3), time.now(), f(a=[1, None, {"b": True}])]', "",
     [("get_weather", {"city": "Paris", "days": -3}), ("time.now", {}), ("f", {"a": [1, None, {"b": True}]})]),
    (HarmonyTools, "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
     '{"city": "Paris"}<|call|>', "", [("get_weather", PARIS)]),
]  # fmt: skip
#: Text of each kind that is no call, though it looks like one at first.
PLAIN: list[tuple[type[ToolParser], str]] = [
    *(
        (kind, text)
        for kind in dict.fromkeys(example[0] for example in EXAMPLES)
        for text in ("Hello.", "a < b {}", "")
    ),
    (Hermes, 'Write <tool_call>{"nome": 1}</tool_call> for a call.'),
    (Hermes, "Write <tool_call> for a call, <tool_call>{ for another"),
    (Llama3, '{"answer": 42}'),
    (Llama3, '{"name": 5, "parameters": {}} is wrong'),
    (Mistral, "[TOOL_CALLS] what?"),
    (Qwen3Coder, "<tool_call> of duty"),
    (Qwen3Coder, "<function=\nf>"),
    (Glm4, "a <tool_call> of duty</tool_call>"),
    (DeepSeekV3, f"{_B} no"),
    (DeepSeekV31, f"{_B}{_C}name{_E}"),
    (KimiK2, "<|tool_calls_section_begin|><|tool_call_begin|>x<|tool_call_end|>"),
    (Pythonic, "[1, 2, 3]"),
    (Pythonic, "[f(x)]"),
    (Pythonic, "[f(**x)] and more"),
]


@pytest.mark.parametrize(
    ("kind", "text", "content", "calls"), EXAMPLES, ids=lambda each: getattr(each, "__name__", None)
)
def test_each_formats_examples_are_read_however_they_are_cut(
    kind: type[ToolParser], text: str, content: str, calls: list[tuple[str, Any]]
) -> None:
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        answer = parsed(tool_parser(kind), pieces)
        assert (answer.content, answer.calls) == (content, calls), pieces


@pytest.mark.parametrize(("kind", "text"), PLAIN, ids=lambda each: getattr(each, "__name__", None))
def test_text_without_a_call_is_content_unchanged(kind: type[ToolParser], text: str) -> None:
    for pieces in ([text], list(text)):
        answer = parsed(tool_parser(kind), pieces)
        assert (answer.content, answer.names) == (text, [])


def test_arguments_come_while_they_are_written() -> None:
    parser = Hermes()
    assert parser.feed('<tool_call>{"name": "f", "argu') == []
    assert parser.feed('ments": {"te') == [CallStart(0, "f"), CallArguments(0, '{"te')]
    assert parser.feed('xt": "long') == [CallArguments(0, 'xt": "long')]


def test_kimi_gives_its_own_ids() -> None:
    example = next(text for kind, text, *_ in EXAMPLES if kind is KimiK2)
    assert parsed(KimiK2(), [example]).ids == ["functions.get_weather:0", "functions.now:1"]


def test_an_answer_that_ends_within_a_call_keeps_what_was_written() -> None:
    answer = parsed(Hermes(), ['Yes. <tool_call>{"name": "f", "arguments": {"city": "Par'])
    assert (answer.content, answer.names, answer.arguments) == ("Yes.", ["f"], ['{"city": "Par'])
    assert parsed(Hermes(), ['Yes. <tool_call>{"nam']).content == 'Yes. <tool_call>{"nam'


THINKING: list[tuple[type[Think] | type[BracketThink] | type[HarmonyReasoning], str, str, str, str]] = [
    (Think, "", "<think>\nI add.\n</think>\n\nIt is 4.", "I add.\n", "It is 4."),
    (Think, "<think>\n", "I add.</think>It is 4.", "I add.", "It is 4."),
    (Think, "<think>\n\n</think>\n\n", "It is <think> 4.", "", "It is <think> 4."),
    (Think, "", "It is </think> 4.", "", "It is </think> 4."),
    (Think, "<think>", "I never end", "I never end", ""),
    (BracketThink, "", "[THINK]a[/THINK]b", "a", "b"),
    (HarmonyReasoning, "<|start|>assistant", "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>"
     "final<|message|>It is 4.", "I add.", "It is 4."),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "prompt", "text", "reasoning", "content"), THINKING)
def test_reasoning_is_separated_however_it_is_cut(
    kind: type[Think], prompt: str, text: str, reasoning: str, content: str
) -> None:
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        answer = parsed(kind(prompt), pieces)
        assert (answer.reasoning, answer.content) == (reasoning, content), pieces


def test_harmony_gives_its_calls_to_the_tool_parser() -> None:
    text = (
        "<|channel|>analysis<|message|>Weather.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "Paris"}'
    )
    for pieces in ([text], list(text)):
        first, second = HarmonyReasoning("<|start|>assistant"), HarmonyTools(TOOLS)
        found: list[Parsed] = []
        events = [*(each for piece in pieces for each in first.feed(piece)), *first.finish()]
        for each in events:
            found += second.feed(each.text) if isinstance(each, Content) else [each]
        answer = joined([*found, *second.finish()])
        assert (answer.reasoning, answer.content, answer.calls) == ("Weather.", "", [("get_weather", PARIS)])


def test_a_head_of_harmony_without_a_message_says_nothing_unless_it_has_text() -> None:
    final = "<|start|>assistant<|channel|>final<|message|>Hi."
    for empty in ("<|start|>assistant\n<|end|>", "<|end|>", "<|start|>assistant", ""):
        for pieces in ([empty + final], list(empty + final)):
            assert parsed(HarmonyReasoning("<|start|>assistant"), pieces).content == "Hi.", pieces
        assert parsed(HarmonyReasoning("<|start|>assistant"), [empty]).content == ""
    assert parsed(HarmonyReasoning("<|start|>assistant"), ["Hello.<|end|>"]).content == "Hello.<|end|>"


def test_text_behind_a_call_of_deepseek_is_content_and_the_same_however_it_is_cut() -> None:
    begin, end = DeepSeekV31.section
    text = f"{begin}{DeepSeekV31.call[0]}now{DeepSeekV31.separator}{{}}{DeepSeekV31.call[1]} Odd.{begin}{end}"
    whole = parsed(tool_parser(DeepSeekV31), [text])
    assert (whole.names, whole.content) == (["now"], "Odd.")
    assert parsed(tool_parser(DeepSeekV31), list(text)) == whole


def given_out(parser: Parser, pieces: Iterable[str]) -> list[Parsed]:
    """All that a parser finds, as it comes."""
    found = [each for piece in pieces for each in parser.feed(piece)]
    return [*found, *parser.finish()]


def mutated(text: str, rng: random.Random) -> str:
    """The text with some pieces removed, repeated, moved or replaced."""
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(text) + 1)
        stop = min(len(text), start + rng.choice((1, 2, 5, 20)))
        piece = rng.choice(("", text[start:stop] * 2, rng.choice('{}[]",:<>\\ \n=x1é｜'), text[-start:][:30]))
        text = text[:start] + piece + text[stop:]
    return text


@pytest.mark.parametrize("count", [60, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", dict.fromkeys(example[0] for example in EXAMPLES), ids=lambda kind: kind.__name__)
def test_mutated_calls_raise_nothing_and_give_the_same_however_they_are_cut(kind: type[ToolParser], count: int) -> None:
    rng, examples = random.Random(count), [example for each, example, *_ in EXAMPLES if each is kind]
    for place in range(count):
        text = mutated(examples[place % len(examples)], rng)
        found = given_out(tool_parser(kind), [text])
        assert parsed(tool_parser(kind), list(text)) == joined(found), text
        assert not (missing := lost(kind, text, found)), missing


@pytest.mark.parametrize("count", [60, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [Think, BracketThink, HarmonyReasoning])
def test_mutated_reasoning_raises_nothing_and_gives_the_same_however_it_is_cut(kind: type[Think], count: int) -> None:
    rng, examples = random.Random(count), [example for example in THINKING if example[0] is kind]
    for place in range(count):
        _, prompt, example, *_ = examples[place % len(examples)]
        text = mutated(example, rng)
        found = given_out(kind(prompt), [text])
        assert parsed(kind(prompt), list(text)) == joined(found), text
        assert not (missing := lost(kind, text, found)), missing


#: Format, text, and what its parser gives out: text that does not belong to a call comes back.
KEPT: list[tuple[type[ToolParser], str, str, list[tuple[str, str]]]] = [
    (Hermes, '<tool_call>{"name": "f", "city": "Paris"}</tool_call>', '<tool_call>{"name": "f", "city": "Paris"}'
     "</tool_call>", []),
    (Hermes, '<tool_call>{"name": "f", "arguments": {}, "x": Paris}', ', "x": Paris}', [("f", "{}")]),
    (Hermes, '<tool_call>{"name": "f", "arguments": {}, "say', ', "say', [("f", "{}")]),
    (Hermes, '<tool_call>{"name": "f", "arguments": {}, "name": "g"}', ', "name": "g"}', [("f", "{}")]),
    (Hermes, '<tool_call>{"name": "\\ud800", "arguments": {}}', '<tool_call>{"name": "\\ud800", "arguments": {}}', []),
    (Llama3, '{"name": "f", "parameters": {}}; and then', "; and then", [("f", "{}")]),
    (Mistral, '[TOOL_CALLS][{"name": "f", "arguments": {}}, and then', ", and then", [("f", "{}")]),
    (Mistral, '[TOOL_CALLS]f[ARGS]Paris{"a": 1}', '[TOOL_CALLS]f[ARGS]Paris{"a": 1}', []),
    (Qwen3Coder, "<function=f>\n<parameter=city", "<parameter=city", [("f", "")]),
    (Qwen3Coder, "<function=a<function=now>\n</function>", "<function=a", [("now", "{}")]),
    (Glm4, "<tool_call>f<arg_key>city</tool_call> bye", "<arg_key>citybye", [("f", "{}")]),
    (DeepSeekV3, f"{_B}{_C}function{_S}city{_C}function{_S}now\n```json\n{{}}\n```{_E}{_F}",
     f"{_B}{_C}function{_S}city", [("now", "{}")]),
    (Pythonic, "[f(a=1, a=2)]", "[f(a=1, a=2)]", []),
    (Pythonic, "[f(a={'b': 1, 'b': 2})]", "[f(a={'b': 1, 'b': 2})]", []),
    (Pythonic, "[f(a=1)  # no\n]", "[f(a=1)  # no\n]", []),
    (Pythonic, "[f('x')(a=1)]", "[f('x')(a=1)]", []),
    (HarmonyTools, "<|start|>assistant Odd <|channel|>commentary to=functions.f<|message|>{}",
     "<|start|>assistant Odd <|channel|>commentary to=functions.f<|message|>{}", []),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "content", "calls"), KEPT, ids=lambda each: getattr(each, "__name__", None))
def test_text_that_does_not_belong_to_a_call_is_content(
    kind: type[ToolParser], text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        answer = parsed(tool_parser(kind), pieces)
        found = list(zip(answer.names, answer.arguments, strict=True))
        assert (answer.content, found) == (content, calls), pieces


def test_words_in_a_head_of_harmony_that_are_none_are_content() -> None:
    text = "Odd <|channel|>final<|message|>It is 4.<|end|> Even <|start|>assistant to=browser.open<|message|>5"
    for pieces in ([text], list(text)):
        assert parsed(HarmonyReasoning(), pieces).content == "Odd It is 4. Even to=browser.open5"


@pytest.mark.parametrize("kind", dict.fromkeys(example[0] for example in EXAMPLES), ids=lambda kind: kind.__name__)
def test_the_check_finds_each_character_that_an_answer_lacks(kind: type[ToolParser]) -> None:
    for text, *_ in (example[1:] for example in EXAMPLES if example[0] is kind):
        found = given_out(tool_parser(kind), [text])
        assert lost(kind, text, found) is None
        for place, each in enumerate(found):
            taken = each.name if isinstance(each, CallStart) else each.text
            for at, character in enumerate(taken):
                if character.isalnum():
                    less = without(each, taken[:at] + taken[at + 1 :])
                    assert lost(kind, text, [*found[:place], less, *found[place + 1 :]]), (less, text)


def without(each: Parsed, text: str) -> Parsed:
    """An event with another text."""
    return replace(each, name=text) if isinstance(each, CallStart) else replace(each, text=text)


#: What stands in the chat templates of the models.
TEMPLATES = {
    "hermes": 'For each function call, return a json object within <tool_call></tool_call> tags: "arguments"',
    "qwen3_coder": "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>",
    "glm4": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>",
    "llama3": '{"name": function name, "parameters": dictionary of argument name and its value}',
    "mistral": '{{- "[TOOL_CALLS][" }}',
    "deepseek_v3": f"{_C}' + tool['type'] + '{_S}' + name + '\\n' + '```json'",
    "deepseek_v31": f"{_C}' + name + '{_S}",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "pythonic": "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
    "harmony": "<|start|>assistant<|channel|>final<|message|>",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_one_parser_recognizes_each_template(name: str) -> None:
    import importlib

    kinds = {}
    for each, path in descriptor.tool_parsers.items():
        module, _, attribute = path.partition(":")
        kinds[each] = getattr(importlib.import_module(module), attribute)
    assert [each for each, kind in kinds.items() if kind.recognizes(TEMPLATES[name])] == [name]
    assert TEMPLATES.keys() == kinds.keys()

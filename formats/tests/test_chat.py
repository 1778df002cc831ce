"""Conversations to text, as transformers renders them, and no further than a model may go."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evener.errors import CheckpointError, RequestError, TemplateError
from evener.frontend.chat import open_chat
from evener.frontend.tokenizer import Tokenizer
from evener.loading.checkpoint import open_files
from evener_formats.chat.messages import normalize
from evener_formats.chat.render import Renderer
from evener_formats.chat.templates import TemplateChat

USER = {"role": "user", "content": "hi"}
FUNCTION = {"name": "f", "description": "<a> & 'é'", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": " é <b> "}],
    [USER, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}],
]
WRITTEN = [
    "{% for m in messages %}[{{ m['role'] }}] {{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}",
    "{{ bos_token }}{%- for m in messages %}\n    {%- if m.role == 'user' %}\n  U:{{ m.content }}\n"
    "    {% else %}\n  O\n  {% endif %}\n{% endfor %}",
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}{{ eos_token }}",
    "{% if tools %}{{ tools | tojson }}|{{ tools | tojson(indent=2) }}{% endif %}{{ messages | length }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ dict(a=1) }}",
    "{{ strftime_now('%Y') }}{{ documents is none }}{{ messages[-1].content[::-1] }}{{ undefined_name }}",
]


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    renderer = Renderer(time_limit=120.0)
    yield renderer
    renderer.close()


def chat(renderer: Renderer, template: str) -> TemplateChat:
    return TemplateChat({"default": template}, {"bos_token": "<s>", "eos_token": "</s>"}, renderer)


def oracle(template: str, messages: list[dict[str, Any]], **more: Any) -> str:
    from transformers.utils import chat_template_utils as utils

    rendered, _ = utils.render_jinja_template(
        conversations=[messages], chat_template=template, bos_token="<s>", eos_token="</s>", **more
    )
    return str(rendered[0])


@pytest.mark.parametrize("template", WRITTEN)
def test_templates_render_as_transformers_renders_them(renderer: Renderer, template: str) -> None:
    for messages in CONVERSATIONS:
        for more in ({"add_generation_prompt": True}, {"add_generation_prompt": False, "tools": TOOLS}):
            assert chat(renderer, template).render(messages, **more) == oracle(template, messages, **more)


@pytest.mark.parametrize("template", WRITTEN[:3])
def test_a_final_message_is_continued_as_transformers_does(renderer: Renderer, template: str) -> None:
    messages = [USER, {"role": "assistant", "content": "The answer is  "}]
    if template == WRITTEN[1]:
        messages = [{"role": "user", "content": "tell me"}]
    ours = chat(renderer, template).render(messages, continue_final_message=True)
    assert ours == oracle(template, messages, continue_final_message=True)


@pytest.mark.model
def test_a_real_models_chats_are_those_of_transformers(smollm2_dir: Path) -> None:
    import transformers

    reference = transformers.AutoTokenizer.from_pretrained(smollm2_dir)
    tokenizer = Tokenizer.of(open_files(smollm2_dir))
    assert tokenizer is not None
    ours = open_chat(open_files(smollm2_dir), tokenizer)
    for messages in CONVERSATIONS:
        for more in ({"add_generation_prompt": True}, {"add_generation_prompt": False, "tools": TOOLS}):
            text = ours.render(messages, **more)
            assert text == reference.apply_chat_template(messages, tokenize=False, **more)
            ids = reference.apply_chat_template(messages, return_dict=False, **more)
            assert tokenizer.encode(text, add_special_tokens=False) == ids
    ours.close()


def test_raise_exception_is_the_templates_own_error(renderer: Renderer) -> None:
    with pytest.raises(TemplateError, match="roles must alternate") as caught:
        chat(renderer, "{{ raise_exception('roles must alternate') }}").render([USER])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    ["{% if %}", "{{ messages[7].content }}", "{{ 1 / 0 }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"],
)
def test_a_template_that_fails_is_an_error_and_the_next_one_works(renderer: Renderer, template: str) -> None:
    with pytest.raises(TemplateError, match="chat template refused"):
        chat(renderer, template).render([USER])
    assert chat(renderer, "ok").render([USER]) == "ok"


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "limit", "why"),
    [
        (ENDLESS, 0.25, r"longer than 0\.25 s"),
        ("{{ 7 ** (9 ** 9) }}", 0.25, r"longer than 0\.25 s"),
        ("{{ 'x' * 10 ** 11 }}", 120.0, "it needs more than 512 MiB of memory"),
    ],
)
def test_a_template_cannot_hang_or_fill_the_server(template: str, limit: float, why: str) -> None:
    renderer = Renderer(time_limit=limit)
    with pytest.raises(TemplateError, match=why):
        chat(renderer, template).render([USER])
    assert chat(renderer, "ok").render([USER]) == "ok"
    renderer.close()


def stopped(time_limit: float) -> tuple[Renderer, subprocess.Popen[bytes]]:
    """A renderer whose process stands still, and that process."""
    renderer = Renderer(time_limit)
    renderer.start()
    assert renderer._process is not None
    renderer._process.send_signal(signal.SIGSTOP)
    return renderer, renderer._process


def test_template_time_limit_counts_cpu_time() -> None:
    renderer, process = stopped(1.0)
    later = threading.Timer(1.5, process.send_signal, (signal.SIGCONT,))
    later.start()
    assert chat(renderer, "ok").render([USER]) == "ok"
    later.join()
    renderer.close()


def test_stalled_render_process_is_killed_after_a_wall_clock_timeout() -> None:
    renderer, _ = stopped(0.1)
    with pytest.raises(TemplateError, match=r"longer than 0\.1 s"):
        chat(renderer, "ok").render([USER])
    renderer.close()


def test_a_render_process_that_was_killed_is_replaced() -> None:
    renderer = Renderer()
    assert chat(renderer, "one").render([USER]) == "one"
    assert renderer._process is not None
    renderer._process.kill()
    renderer._process.wait()
    assert chat(renderer, "two").render([USER]) == "two"
    renderer.close()
    renderer.close()


def test_large_conversations_and_half_surrogates_pass_the_pipe(renderer: Renderer) -> None:
    text = "é\ud800" * 300_000
    assert chat(renderer, "{{ messages[0].content }}").render([{"role": "user", "content": text}]) == text


def test_developer_role_becomes_system_if_the_template_lacks_it(renderer: Renderer) -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert chat(renderer, "{{ messages[0].role }}").render(messages) == "system"
    assert chat(renderer, "{# developer #}{{ messages[0].role }}").render(messages) == "developer"


def test_text_parts_are_joined_by_line_ends() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert normalize([{"role": "user", "content": parts}]) == [{"role": "user", "content": "a\nb"}]


def test_arguments_of_tool_calls_become_objects_and_empty_fields_are_left_out() -> None:
    call: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []}
    plain = normalize([message, {"role": "tool", "tool_call_id": "c", "content": "2"}])
    assert plain[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert plain[0]["content"] == ""
    assert set(plain[0]) == {"role", "content", "tool_calls"}
    assert plain[1] == {"role": "tool", "tool_call_id": "c", "content": "2"}
    assert call["function"]["arguments"] == '{"a": 1}'


def test_reasoning_is_passed_under_both_template_field_names() -> None:
    plain = normalize([{"role": "assistant", "content": "x", "reasoning": "why"}])[0]
    assert (plain["reasoning_content"], plain["thinking"]) == ("why", "why")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"role": 7, "content": ""}], "messages[0].role"),
        ([USER, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{**USER, "audio": {"id": "x"}}], "messages[0].audio"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_a_message_that_cannot_be_used_is_an_error_that_names_its_place(messages: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        normalize(messages)
    assert caught.value.param == param


def test_templates_are_found_in_their_own_files_before_the_tokenizers(tmp_path: Path, renderer: Renderer) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    found = open_chat(open_files(tmp_path))
    assert (found.render([USER]), found.render([USER], tools=TOOLS)) == ("plain", "tools")
    found.close()
    (tmp_path / "chat_template.jinja").write_text("own file")
    found = open_chat(open_files(tmp_path))
    assert found.render([USER], tools=TOOLS) == "own file"
    found.close()


def test_a_model_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    found = open_chat(open_files(tmp_path))
    assert not found.available
    with pytest.raises(TemplateError, match="no chat template: send a prompt to completions"):
        found.render([USER])


def test_a_malformed_list_of_templates_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "x"}]}))
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        open_chat(open_files(tmp_path))


def test_a_huge_template_is_refused_before_it_is_compiled(renderer: Renderer) -> None:
    with pytest.raises(TemplateError, match=r"the model's chat template has 10,500,000 characters, too many"):
        chat(renderer, "{{ 1 }}" * 1_500_000).render([USER])

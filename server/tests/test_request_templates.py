"""Chat templates in requests: only if the operator trusts them, and within the limits of the model's own."""

from __future__ import annotations

from typing import Any

import pytest

from evener.engine.wire.messages import NewRequest
from evener_server.options import ServerOptions

TOOLS = "{% for tool in tools %}{{ tool.function.name }}{% endfor %} Answer with <tool_call>{{ messages[0].content }}"
SHOUTS = "{{ messages[0].content | upper }}{{ mark }}"
TRUSTING = ServerOptions(trust_request_chat_template=True)


@pytest.fixture
def trusting(make_api: Any) -> Any:
    return make_api(options=TRUSTING)


def prompt(api: Any) -> str:
    last = [message for message in api.engine.sent if isinstance(message, NewRequest)][-1]
    text: str = api.llm.tokenizer.decode(last.prompt, skip_special_tokens=False)
    return text


def test_a_template_is_refused_unless_the_operator_trusts_requests(api: Any, error: Any) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "chat_template": SHOUTS}
    for response in (api.chat(chat_template=SHOUTS), api.post("/tokenize", body)):
        assert response.status_code == 400
        found = error(response)
        assert found["param"] == "chat_template" and found["code"] == "unsupported_parameter"
        assert "server.trust_request_chat_template=true" in found["message"]


def test_a_trusted_template_renders_its_own_request_only(trusting: Any, sse: Any) -> None:
    assert trusting.chat().status_code == 200
    models_own = prompt(trusting)
    assert trusting.chat(chat_template=SHOUTS, chat_template_kwargs={"mark": "!"}).status_code == 200
    assert prompt(trusting) == "HI!"
    assert sse(trusting.chat(chat_template=SHOUTS, stream=True))[-1] == "[DONE]"
    assert prompt(trusting) == "HI"
    body = {"messages": [{"role": "user", "content": "hi"}], "chat_template": SHOUTS}
    assert trusting.post("/tokenize", body).json()["tokens"] == list(b"HI")
    assert trusting.chat().status_code == 200
    assert prompt(trusting) == models_own != "HI"


def test_tools_and_reasoning_are_read_as_the_template_of_the_request_says(trusting: Any, error: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    asked: dict[str, Any] = {"tools": [tool], "chat_template": TOOLS}
    assert trusting.chat(**asked).status_code == 200
    assert prompt(trusting) == "f Answer with <tool_call>hi"
    assert "no place for tools" in error(trusting.chat(tools=[tool], chat_template=SHOUTS))["message"]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ messages", "unexpected"),
        ("{{ raise_exception('not these') }}", "not these"),
        ("{{ ().__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ 'x' * 10 ** 11 }}", "memory"),
        ("x" * 65_537, "65536"),
        ("", "1 character"),
        (["x"], "string"),
    ],
)
def test_a_template_that_cannot_be_rendered_is_refused_and_named(
    trusting: Any, error: Any, template: Any, said: str
) -> None:
    response = trusting.chat(chat_template=template)
    assert response.status_code == 400
    assert error(response)["param"] == "chat_template" and said in error(response)["message"]
    assert trusting.chat().status_code == 200


def test_a_template_among_the_variables_is_refused(trusting: Any, error: Any) -> None:
    response = trusting.chat(chat_template_kwargs={"chat_template": SHOUTS})
    assert response.status_code == 400 and error(response)["param"] == "chat_template_kwargs"
    assert trusting.chat(chat_template_kwargs={"chat_template": None}).status_code == 200

"""Renders chat templates as transformers does. Runs in the render process: see ``render``.

A template comes with the model and is not trusted. jinja's immutable sandbox protects the interpreter's internals. The
process around it limits time and memory, which a sandbox cannot do (``{{ 'x' * 10**10 }}`` is one C call).
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import exceptions, ext, nodes, runtime, utils
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class _Generation(ext.Extension):
    """``{% generation %} … {% endgeneration %}`` marks the assistant's tokens for training; here only the body is
    rendered."""

    tags = {"generation"}  # noqa: RUF012  jinja's own declaration is an instance attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: runtime.Macro) -> str:
        return str(caller())


class _Dict:
    """The ``dict`` of a template: creates dicts, and has no attributes through which a template leaves the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(utils.Namespace):
    """The ``namespace`` of a template; attribute names must not begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # As jinja's own: ``namespace(self=…)`` works.
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def compile_template(source: str) -> jinja2.Template:
    """A template in the same environment as in transformers.

    Raises:
        jinja2.TemplateError: a syntax error.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
    )
    return environment.from_string(source)


def render(
    template: jinja2.Template, messages: list[dict[str, Any]], continue_final_message: bool, variables: dict[str, Any]
) -> str:
    """The text of a conversation. With ``continue_final_message`` it ends within the last message, so that the model
    continues it.

    Raises:
        jinja2.TemplateError: the template refused the messages, or does not show the message to continue.
        Exception: an expression in the template may raise anything.
    """
    if not continue_final_message:
        return template.render(messages=messages, **variables)
    last = {**messages[-1], "content": messages[-1]["content"] + _CONTINUE_TAG}
    text = template.render(messages=[*messages[:-1], last], **variables)
    at = text.rfind(_CONTINUE_TAG.strip())
    if at < 0:
        raise jinja2.TemplateError("the template does not show the final message, so it cannot be continued")
    # If the tag's own space is missing, the template trims messages: trim the text before the tag too.
    whole = text[at : at + len(_CONTINUE_TAG)] == _CONTINUE_TAG
    return text[:at] if whole else text[:at].rstrip()


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise exceptions.SecurityError(
            f"a chat template cannot store {name!r} on a namespace: names must not begin with '_'"
        )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    # jinja's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

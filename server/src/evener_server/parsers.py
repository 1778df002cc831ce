"""Which parsers read a model's tool calls and reasoning: those that the operator names, or that know its template."""

from __future__ import annotations

import functools
from typing import Any, cast

from evener.contracts.generation.chat import Chat
from evener.contracts.generation.parsers import Parser, ReasoningParser, ToolParser
from evener.errors import RequestError, TemplateError, UnknownNameError
from evener.plugins.discover import installed_catalog
from evener_server.options import AUTO, NONE, ServerOptions

#: Chat templates whose parsers are remembered.
_KEPT = 8


class Parsers:
    """The parsers for one model.

    Raises:
        UnknownNameError: no installed package has a parser that the options name.
    """

    def __init__(self, options: ServerOptions) -> None:
        catalog = installed_catalog()
        self._tool = _Kind("tool parser", "server.tool_parser", options.tool_parser, catalog)
        self._reasoning = _Kind("reasoning parser", "server.reasoning_parser", options.reasoning_parser, catalog)

    def tool(self, chat: Chat) -> type[ToolParser]:
        """The parser of tool calls.

        Raises:
            RequestError: the model takes no tools, or no parser knows its format.
            TemplateError: the model has no chat template.
        """
        found = self._tool.of(template_for_tools(chat))
        if found is None:
            raise RequestError(
                "tools were sent, but no installed parser knows how this model writes its calls; the operator can name "
                f"one: server.tool_parser={'|'.join(self._tool.names)}", "tools", "unsupported_parameter",
            )  # fmt: skip
        return cast("type[ToolParser]", found)

    def reasoning(self, chat: Chat, with_tools: bool) -> type[ReasoningParser] | None:
        """The parser of reasoning; None for a model that is not known to write any."""
        try:
            return cast("type[ReasoningParser] | None", self._reasoning.of(chat.template(with_tools)))
        except TemplateError:
            return None  # the request fails for it, with its own message


def template_for_tools(chat: Chat) -> str:
    """The template that shows the model its tools.

    Raises:
        RequestError: it has no place for them.
        TemplateError: the model has no chat template.
    """
    template = chat.template(with_tools=True)
    if "tools" not in template:
        raise RequestError(
            "tools were sent, but this model's chat template has no place for tools: send none, or the operator can "
            "give the model another template: server.chat_template=FILE", "tools", "unsupported_parameter",
        )  # fmt: skip
    return template


class _Kind:
    """All installed parsers of one kind."""

    def __init__(self, what: str, option: str, chosen: str, catalog: Any) -> None:
        self._found = catalog.lazy_imports(what)
        self.names = sorted(self._found)
        if chosen not in (AUTO, NONE, *self.names):
            hint = f"Set {option} to one of them, to {AUTO} or to {NONE}."
            raise UnknownNameError(what, chosen, self.names, hint)
        self._chosen = chosen
        #: The parser for a chat template. Few are kept: requests may bring their own.
        self.of = functools.lru_cache(_KEPT)(self._look_up)

    def _look_up(self, template: str) -> type[Parser] | None:
        if self._chosen != AUTO:
            return None if self._chosen == NONE else self._found[self._chosen].load()
        kinds = (self._found[name].load() for name in self.names)
        return next((kind for kind in kinds if kind.recognizes(template)), None)

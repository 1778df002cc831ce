"""What an answer has to be: ``response_format`` of OpenAI's API, ``structured_outputs`` and ``guided_*`` of vLLM's."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from evener.contracts.grammar.library import GrammarSpec
from evener.errors import RequestError
from evener_server.messages import Body

#: Of the texts that one may be chosen from.
MOST_CHOICES = 4096
#: Any JSON object.
_OBJECT = '{"type":"object"}'

Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MOST_CHOICES)]


class JsonSchema(Body):
    """A schema and its name. It is always kept to, whatever ``strict`` says."""

    model_config = ConfigDict(extra="ignore")

    name: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class Structure(Body):
    """One tag of a structural tag in the form that vLLM and SGLang had first."""

    model_config = ConfigDict(extra="ignore")

    begin: Annotated[str, Field(min_length=1)]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    end: str

    def tag(self) -> dict[str, Any]:
        """In the present form."""
        content = {"type": "json_schema", "json_schema": self.json_schema}
        return {"type": "tag", "begin": self.begin, "content": content, "end": self.end}


class ResponseFormat(Body):
    """OpenAI's ``response_format``."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    #: Of a structural tag.
    format: dict[str, Any] | None = None
    # Of one in the earlier form.
    structures: Annotated[list[Structure], Field(min_length=1, max_length=MOST_CHOICES)] | None = None
    triggers: Choices | None = None

    def grammar(self) -> GrammarSpec | None:
        """The grammar of the answer; None if it may be any text.

        Raises:
            RequestError: the schema is missing.
        """
        if self.type == "text":
            return None
        if self.type == "json_object":
            return GrammarSpec(kind="json_schema", text=_OBJECT)
        if self.type == "structural_tag":
            return GrammarSpec(kind="structural_tag", text=json.dumps({"format": self._structural_tag()}))
        if self.json_schema is None or self.json_schema.json_schema is None:
            raise RequestError(
                'response_format of type json_schema needs {"json_schema": {"name": …, "schema": {…}}}',
                "response_format.json_schema",
            )
        return _of_schema(self.json_schema.json_schema)

    def _structural_tag(self) -> dict[str, Any]:
        if self.format is not None:
            return self.format
        if self.structures is None or self.triggers is None:
            raise RequestError(
                'response_format of type structural_tag needs {"format": {"type": …}}, or structures and triggers',
                "response_format.format",
            )
        tags = [structure.tag() for structure in self.structures]
        return {"type": "triggered_tags", "triggers": self.triggers, "tags": tags}


class StructuredOutputs(Body):
    """vLLM's ``structured_outputs``: exactly one of these. ``grammar`` is in Lark's syntax or in GBNF."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    schema_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    #: JSON text, or the object itself.
    structural_tag: dict[str, Any] | str | None = None

    def spec(self, param: str) -> GrammarSpec | None:
        """The grammar; None if all fields are empty.

        Raises:
            RequestError: there are several.
        """
        found = [
            None if self.schema_ is None else _of_schema(self.schema_),
            None if self.regex is None else GrammarSpec(kind="regex", text=self.regex),
            None if self.choice is None else GrammarSpec(kind="choice", text=json.dumps(self.choice)),
            None if self.grammar is None else GrammarSpec(kind="lark", text=self.grammar),
            GrammarSpec(kind="json_schema", text=_OBJECT) if self.json_object else None,
            None if self.structural_tag is None else _of_tag(self.structural_tag, param),
        ]
        return only(found, param)


def only(found: list[GrammarSpec | None], param: str) -> GrammarSpec | None:
    """The one grammar that was sent; None if there is none.

    Raises:
        RequestError: there are several.
    """
    sent = [each for each in found if each is not None]
    if len(sent) > 1:
        raise RequestError("the answer can follow one grammar only; send one of the fields that ask for one", param)
    return sent[0] if sent else None


def only_ids(ids: list[int]) -> GrammarSpec:
    """Nothing but these tokens, and the end of a text only if it is one of them."""
    # A text is complete, so that any end may follow, after more tokens than a context has.
    return GrammarSpec(kind="lark", text=f"start: <[{','.join(map(str, sorted(set(ids))))}]>{{{2**31 - 1}}}")


def _of_schema(schema: dict[str, Any] | str) -> GrammarSpec:
    return GrammarSpec(kind="json_schema", text=schema if isinstance(schema, str) else json.dumps(schema))


def _of_tag(tag: dict[str, Any] | str, param: str) -> GrammarSpec:
    try:
        found = json.loads(tag) if isinstance(tag, str) else tag
        if isinstance(found, dict) and "structures" in found:
            form = ResponseFormat.model_validate({**found, "type": "structural_tag"})
        else:
            form = ResponseFormat.model_validate({"type": "structural_tag", "format": found.get("format", found)})
    except (ValueError, RecursionError, AttributeError) as error:
        message = f"{param}.structural_tag is no structural tag: it needs a format, or structures and triggers"
        raise RequestError(message, f"{param}.structural_tag") from error
    return GrammarSpec(kind="structural_tag", text=json.dumps({"format": form._structural_tag()}))

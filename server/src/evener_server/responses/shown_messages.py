"""``enable_response_messages``: what the model was sent and said, in the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evener.contracts.generation.parsers import ReasoningParser
from evener.frontend.tokenizer import Tokenizer
from evener_generation.message_reader import MessageReader


def shown_messages(
    parser: type[ReasoningParser] | None, tokenizer: Tokenizer | None, asked: Sequence[int], answered: Sequence[int]
) -> dict[str, list[dict[str, Any]]]:
    """``input_messages`` and ``output_messages``, fields of vLLM's API: messages if the model's format consists of
    messages that can be read from its text, as gpt-oss' does; else one entry each with the text and its tokens.

    Args:
        parser: of the model's reasoning.
        asked, answered: the tokens of the prompt, and of the answer so far.
    """
    texts = ["" if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=False) for ids in (asked, answered)]
    if tokenizer is not None and parser is not None and issubclass(parser, MessageReader):
        read, written = parser.messages(texts[0], texts[1])
        return {"input_messages": list(read), "output_messages": list(written)}
    read, written = (
        [{"type": "raw_message_tokens", "tokens": ids, "message": text}]
        for ids, text in zip((asked, answered), texts, strict=True)
    )
    return {"input_messages": read, "output_messages": written}

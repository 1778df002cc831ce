"""The newest turns of a conversation that is longer than the context: ``truncation: "auto"`` of the Responses API."""

from __future__ import annotations

from evener.contracts.media import MediaPrompt
from evener.errors import ContextLengthError
from evener_server.prompt_tokens import PromptTokens
from evener_server.protocol import ChatBody

#: Messages that go with every turn.
_LASTING = ("system", "developer")
#: The part of the context that is kept for an answer of which no length was asked.
_PART = 4


async def newest_turns(prompts: PromptTokens, body: ChatBody) -> ChatBody:
    """``body`` without as many of its oldest turns as it must lose to fit the context with its answer. A turn begins
    with a message of the user; the last one stays, and so do messages of the system.

    Raises:
        RequestError: the template refuses the messages.
    """
    answer = body.requested_max_tokens() or prompts.context // _PART
    begins = [i for i, message in enumerate(body.messages) if message.role == "user"][1:]
    if not begins or await _fits(prompts, body, answer):
        return body
    # The first that fits, or the last: halving needs few of them made and rendered.
    low, high = 0, len(begins) - 1
    while low < high:
        middle = (low + high) // 2
        if await _fits(prompts, _from(body, begins[middle]), answer):
            high = middle
        else:
            low = middle + 1
    return _from(body, begins[low])


def _from(body: ChatBody, begin: int) -> ChatBody:
    kept = [message for i, message in enumerate(body.messages) if i >= begin or message.role in _LASTING]
    return body.model_copy(update={"messages": kept})


async def _fits(prompts: PromptTokens, body: ChatBody, answer: int) -> bool:
    try:
        # A prompt far too long is refused by its size, without tokenizing it.
        found = await prompts.conversation(body, bool(body.add_special_tokens))
    except ContextLengthError:
        return False
    ids = found.ids if isinstance(found, MediaPrompt) else found
    return len(ids) + answer <= prompts.context

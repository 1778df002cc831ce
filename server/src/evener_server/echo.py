"""``echo``: a completion that begins with its prompt."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

from evener.contracts.outputs import Delta
from evener.frontend.tokenizer import Tokenizer
from evener_server.generation import Generation


async def with_echo(
    generation: Generation, tokenizer: Tokenizer | None, scored: bool
) -> AsyncIterator[tuple[int, Delta]]:
    """Choices and their deltas; the first delta of each choice begins with the prompt's text and, if ``scored``, with
    its ids and their log-probabilities (an empty entry for the first token).

    Only sample 0 of a prompt has the prompt's log-probabilities: deltas of the other samples wait for them.
    """
    entries = generation.prompt_logprobs
    held: dict[int, Delta] = {}
    begun: set[int] = set()
    async for choice, delta in generation:
        prompt = choice // generation.n
        stream = generation.streams[prompt]
        if choice in held:
            held[choice].merge(delta)
        else:
            held[choice] = delta
        if scored and len(entries[prompt]) < len(stream.prompt_token_ids):
            continue
        for ready in sorted(c for c in held if c // generation.n == prompt):
            shown = held.pop(ready)
            if ready not in begun:
                begun.add(ready)
                text = stream.prompt
                if text is None:
                    text = "" if tokenizer is None else tokenizer.decode(stream.prompt_token_ids)
                shown = replace(shown, text=text + shown.text)
                if scored:
                    shown.token_ids = stream.prompt_token_ids + shown.token_ids
                    shown.logprobs = [*(entry or {} for entry in entries[prompt]), *(shown.logprobs or [])]
            yield ready, shown

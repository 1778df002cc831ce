"""The prompt of a request to KsanaLLM's API as the engine takes it: ids, with embeddings in place of some."""

from __future__ import annotations

import numpy as np

from evener.contracts.media import MediaPrompt, make_item
from evener.errors import ContextLengthError, RequestError
from evener_server.ksanallm.body import Embeddings
from evener_server.prompt_tokens import PromptTokens


async def ids_of(prompts: PromptTokens, text: str | None, ids: list[int] | None, place: str = "") -> list[int]:
    """The ids of a prompt.

    Args:
        ids: given by the client; they win.
        place: comes before the names of fields, in errors.

    Raises:
        RequestError: it does not fit the context, or there is no tokenizer.
    """
    if ids is None:
        ids = await prompts.text(text or "", True, f"{place}prompt")
        if not ids:
            raise RequestError(f"{place}prompt is empty; send at least one token", f"{place}prompt")
        return ids
    if len(ids) >= prompts.context:
        message = f"{place}input_tokens has {len(ids)} ids, which do not fit the context of {prompts.context} with a "
        raise ContextLengthError(f"{message}new one: shorten it", f"{place}input_tokens")
    return ids


def with_rows(ids: list[int], rows: Embeddings | None, width: int, place: str = "") -> list[int] | MediaPrompt:
    """The prompt with ``rows`` in place of the embeddings of some tokens.

    Args:
        width: numbers of a row.

    Raises:
        RequestError: they have another width, or do not fit into the prompt.
    """
    given = [] if rows is None else list(zip(rows.pos or (), rows.embeddings or (), strict=True))
    if not given:
        return ids
    items, free = [], 0
    for number in sorted(range(len(given)), key=lambda number: given[number][0]):
        at, values = given[number]
        name = f"{place}input_refit_embedding.embeddings[{number}]"
        if not values or len(values) % width:
            message = f"{name} has {len(values)} numbers; a row of this model has {width}: send one or more rows"
            raise RequestError(message, name)
        count = len(values) // width
        if at < free or at + count > len(ids):
            message = f"{name} has {count} rows from position {at} on, which do not fit into the prompt's {len(ids)} "
            raise RequestError(f"{message}tokens beside the others; send other positions", name)
        array = np.array(values, dtype=np.float64)
        if np.abs(array).max() > np.finfo(np.float32).max:
            raise RequestError(f"{name} has a number that is too large for float32; send smaller ones", name)
        items.append(make_item(at, array.astype(np.float32).reshape(count, width)))
        free = at + count
    return MediaPrompt(ids, items)

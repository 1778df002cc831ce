"""Another replica answers if one is lost before its answer began. An answer that has begun cannot be begun again: it
ends with an error."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable

from evener_deploy.exchange import Head, Question, ReplicaLost

logger = logging.getLogger(__name__)

#: How often a request is given to a replica, and the seconds before each time after the first.
PAUSES = (0.0, 0.1, 0.5, 1.0, 2.0, 4.0)

Ask = Callable[[Question], AsyncIterator[Head | bytes]]


async def begin(ask: Ask, question: Question) -> tuple[Head, AsyncIterator[bytes]]:
    """The head of an answer and its body, of the first replica whose body begins.

    A head alone does not count: a stream's is sent before its first token is computed.

    Args:
        ask: gives the question to some replica that is not known to be lost.

    Raises:
        ReplicaLost: as many replicas were lost as there are ``PAUSES``.
    """
    for number, pause in enumerate(PAUSES, 1):
        await asyncio.sleep(pause)
        answer = ask(question)
        try:
            head = await anext(answer)
            assert isinstance(head, Head), "an answer begins with its head"
            first = await anext(answer, b"")
            assert isinstance(first, bytes)
            return head, _rest(head, first, answer)
        except ReplicaLost as error:
            logger.warning("%s %s: a replica was lost before its answer began (time %d): %s",
                           question.method, question.path, number, error)  # fmt: skip
            last = error
        except BaseException:
            await _close(answer)
            raise
    raise last


async def _rest(head: Head, first: bytes, answer: AsyncIterator[Head | bytes]) -> AsyncIterator[bytes]:
    try:
        yield first
        async for piece in answer:
            assert isinstance(piece, bytes)
            yield piece
    except ReplicaLost as error:
        logger.error("a replica was lost while it answered: %s", error)
        kind = next((value for name, value in head.headers if name.lower() == "content-type"), "")
        if not kind.startswith("text/event-stream"):
            raise  # the connection breaks: the client sees that the answer is not whole
        yield b"data: " + error_body(f"the replica that answered was lost: {error}") + b"\n\n"
    finally:
        await _close(answer)


def error_body(message: str) -> bytes:
    """An error in OpenAI's shape."""
    return json.dumps(
        {"error": {"message": message, "type": "server_error", "param": None, "code": "replica_lost"}}
    ).encode()


async def _close(answer: AsyncIterator[Head | bytes]) -> None:
    if (close := getattr(answer, "aclose", None)) is not None:
        await close()

"""The request-plugin contract: change a request before it runs, or a response before it is sent.

Announce a class in ``Descriptor.request_plugins``. A run uses the plugins in ``request.plugins=NAME,NAME``, in that
order. If a plugin fails, the request fails, with the plugin's name in the error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from evener.contracts.outputs import Delta, RequestOutput


class RequestPlugin(ABC):
    """Runs in the front end. There is one object per model; its methods may be called from several threads."""

    @abstractmethod
    def prepare(self, model_dir: str, options: Mapping[str, Any]) -> None:
        """Called once, before the first request."""

    def preprocess(self, request: dict[str, Any]) -> dict[str, Any]:
        """(optional) Return the request as it should run. Default: unchanged.

        Args:
            request: ``prompt`` (text, for a chat after its template, or token ids), ``params`` (``SamplingParams``,
                frozen: replace it), ``kind`` ("chat", "completion" or "embed"), ``media`` (a list of ``MediaItem``,
                usually empty) and ``request_id`` (that of the response and its pieces; it cannot be changed). To
                add rows of your own, return token ids as ``prompt``, with any ids as placeholders, and
                ``evener.contracts.media.make_item(position, rows)`` in ``media``.

        Raises:
            RequestError: refuse the request; the caller gets the message.
        """
        return request

    def postprocess(self, response: RequestOutput) -> RequestOutput:
        """(optional) The whole response. Default: unchanged."""
        return response

    def postprocess_chunk(self, chunk: Delta) -> Delta:
        """(optional) One streamed piece. Default: unchanged."""
        return chunk

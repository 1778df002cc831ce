"""The request-plugin contract: touch a request before it runs and a response before it is sent.

Announce a class in ``Descriptor.request_plugins``; a run uses those that ``request.plugins=NAME,NAME`` names, in that
order. A failure in a plugin fails the request, with the plugin's name in the error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evener.frontend.outputs import Delta, RequestOutput


class RequestPlugin(ABC):
    """Runs in the front end. One object a model; its methods may be called from several threads."""

    @abstractmethod
    def prepare(self, model_dir: str, options: Mapping[str, Any]) -> None:
        """Called once, before the first request."""

    def preprocess(self, request: dict[str, Any]) -> dict[str, Any]:
        """(optional) The request, to be returned as it shall be run. Default: unchanged.

        Args:
            request: ``prompt`` (text, a chat's after its template, or token ids), ``params`` (``SamplingParams``,
                frozen: replace it), ``kind`` ("chat" or "completion") and ``media`` (a list of ``MediaItem`` that stand
                for tokens; empty for most). Rows of your own: return token ids as ``prompt``, any ids where the rows
                shall stand, and ``evener.contracts.media.make_item(position, rows)`` in ``media``.

        Raises:
            RequestError: the request is refused; the caller gets the message.
        """
        return request

    def postprocess(self, response: RequestOutput) -> RequestOutput:
        """(optional) The whole response. Default: unchanged."""
        return response

    def postprocess_chunk(self, chunk: Delta) -> Delta:
        """(optional) One streamed piece. Default: unchanged."""
        return chunk

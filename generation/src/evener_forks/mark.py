"""What a request of a search tells the controller. It travels in ``NewRequest.transfer``."""

from __future__ import annotations

import msgspec

#: Tells a mark from what other connectors are told.
_PREFIX = "fork "


class ForkMark(msgspec.Struct, frozen=True, array_like=True):
    """The request's state is kept when it has ended, until its search goes on without it.

    Attributes:
        search: id of the search.
        parent: id of the ended request whose state it starts from; "": none.
        parents: all requests whose state this step of the search needs; other states of the search are not needed.
    """

    search: str
    parent: str
    parents: list[str]

    def to_text(self) -> str:
        """The mark as the text of ``SamplingParams.transfer``."""
        return _PREFIX + msgspec.json.encode(self).decode()

    @staticmethod
    def from_text(text: str) -> ForkMark | None:
        """The mark that ``to_text`` has written; None for any other text."""
        if not text.startswith(_PREFIX):
            return None
        try:
            return msgspec.json.decode(text[len(_PREFIX) :], type=ForkMark)
        except msgspec.DecodeError:  # somebody else's text that begins alike
            return None

"""What a child process reads from its parent before anything else: one line of JSON on its standard input."""

from __future__ import annotations

from typing import Any

import msgspec

from evener.distributed.contact import Contact
from evener.distributed.world import RankPlacement


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a child process is to run: a controller or a worker.

    Attributes:
        config: its configuration, as ``config.schema.to_flat`` returns it.
        bound: whether the system kills it when its parent ends, even while it is stopped.
        address: of a controller: the common prefix of its channel's socket files.
        contact, place: of a worker: where its controller is, and which rank it is itself.
    """

    config: dict[str, Any]
    bound: bool = False
    address: str = ""
    contact: Contact = Contact([])
    place: RankPlacement = RankPlacement()

"""What servers say to each other, and a server's controller to its own ranks: msgpack, one message a frame."""

from __future__ import annotations

import msgspec

#: Raised when the meaning of messages or of exported bytes changes.
VERSION = 1


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    """The first message, of who was called: a number that was never used before."""

    version: int
    nonce: bytes


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    """That the sender has the key, and a number of its own."""

    nonce: bytes
    mac: bytes


class Lookup(msgspec.Struct, frozen=True, tag="lookup"):
    """Which blocks with these digests (32 bytes each, one after another) are held? ``request``: the request they were
    held for."""

    fingerprint: str
    request: str
    digests: bytes


class Found(msgspec.Struct, frozen=True, tag="found"):
    """For each group, the block of each digest, 0: none. They may be read until ``Release``; ``reading`` names that."""

    reading: int
    blocks: list[list[int]]


class Release(msgspec.Struct, frozen=True, tag="release"):
    """All was read that was found, or none of it is needed."""

    reading: int


class Released(msgspec.Struct, frozen=True, tag="released"):
    """``valid``: all blocks stayed locked while they were read, so the data is consistent."""

    valid: bool


class Read(msgspec.Struct, frozen=True, tag="read"):
    """To a rank: send these blocks (parallel lists)."""

    groups: list[int]
    blocks: list[int]


class Data(msgspec.Struct, frozen=True, tag="data"):
    """So many bytes follow, without frames: the blocks in the canonical layout, in the order asked for."""

    nbytes: int


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """To a rank of one's own: read these blocks from the same rank of a peer, and keep each at its place."""

    host: str
    port: int
    seconds: float
    places: list[int]
    groups: list[int]
    blocks: list[int]


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """To a rank of one's own: forget these places."""

    places: list[int]


class Done(msgspec.Struct, frozen=True, tag="done"):
    """It was done."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """It was not done, and why."""

    reason: str


#: What may be asked of who was called.
Request = Lookup | Release | Read | Fetch | Drop
#: And what it answers.
Answer = Found | Released | Data | Done | Refused

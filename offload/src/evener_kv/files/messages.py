"""What the controller asks a rank about its files, and the answers."""

from __future__ import annotations

import msgspec


class Open(msgspec.Struct, frozen=True, tag=True):
    """Use the files of runs with this fingerprint: of the model and all that its state depends on."""

    fingerprint: str


class Opened(msgspec.Struct, frozen=True, tag=True):
    """Bytes of a file of each group, 0: this rank has none; and how many ``Known`` follow."""

    file_bytes: list[int]
    parts: int


class Known(msgspec.Struct, frozen=True, tag=True):
    """Blocks that have a file: their groups, and their digests one after another."""

    groups: list[int]
    digests: bytes


class Copy(msgspec.Struct, frozen=True, tag=True):
    """Copy blocks between places of host memory and files, when the rank has begun the first ``after`` of its moves.

    Attributes:
        store: to files, otherwise from files.
        places: of host memory; ``groups`` and ``digests`` as in ``Known``.
        gone, gone_groups: blocks whose files are removed first.
    """

    store: bool
    after: int
    groups: list[int]
    digests: bytes
    places: list[int]
    gone_groups: list[int]
    gone: bytes


class Copied(msgspec.Struct, frozen=True, tag=True):
    """For each block whether it worked."""

    done: list[bool]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The files cannot be used."""

    reason: str


Request = Open | Copy
Answer = Opened | Known | Copied | Failed

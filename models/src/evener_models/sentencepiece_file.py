"""SentencePiece's ``tokenizer.model``, read without its library. Torch-free.

The file is a protocol buffer of six kinds of fields that matter here, declared in SentencePiece's
sentencepiece_model.proto. Its library does not tell which pieces a user defined, nor how text is normalized; generated
code does, but needs a ``protobuf`` of its own version. So the wire format is read here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from evener.errors import CheckpointError
from evener_models.sentencepiece_bpe import NORMAL, Pieces

_KINDS = {1: "unigram", 2: "BPE", 3: "word", 4: "character"}
_BPE = 2
#: Fields by message: of ModelProto, of one piece, of TrainerSpec, of NormalizerSpec.
_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _SPACE_BEHIND = 3, 24
_CHARACTERS, _PREFIX, _FEWER_SPACES, _MARK_SPACES = 2, 3, 4, 5
#: Wire types.
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5


@dataclass(frozen=True)
class SentencePieceModel:
    """What a file says.

    Attributes:
        pieces: the vocabulary.
        characters: compiled rules that replace characters before all else; empty: none.
        prefix: a space is put before a text.
        fewer_spaces: spaces around a text are left out, several within it become one.
    """

    pieces: Pieces
    characters: bytes
    prefix: bool
    fewer_spaces: bool


def read_model(data: bytes, where: str) -> SentencePieceModel:
    """Read the bytes of a file that messages call ``where``.

    Raises:
        CheckpointError: it is broken, or is no BPE that puts spaces before words.
    """
    try:
        fields = list(_fields(data))
        pieces = [_piece(value) for number, value in fields if number == _PIECE]
        trainer, normalizer = (
            dict(_fields(b"".join(_bytes(value) for number, value in fields if number == part)))
            for part in (_TRAINER, _NORMALIZER)
        )
        kind, characters = trainer.get(_MODEL_TYPE, 1), _bytes(normalizer.get(_CHARACTERS, b""))
    except (ValueError, struct.error) as error:
        raise CheckpointError(f"{where} is not a SentencePiece model ({error}); fetch the file again") from error
    if not pieces:
        raise CheckpointError(f"{where} is not a SentencePiece model (no pieces); fetch the file again")
    if kind != _BPE or trainer.get(_SPACE_BEHIND) or not normalizer.get(_MARK_SPACES, 1):
        known = f"of kind {_KINDS.get(kind, kind)}" if isinstance(kind, int) and kind != _BPE else "with other spaces"
        raise CheckpointError(
            f"{where} is a SentencePiece model {known}, and BPE with marks before words is read; save the tokenizer as "
            "tokenizer.json with its own code, and put it into the folder"
        )
    texts, scores, types = zip(*pieces, strict=True)
    return SentencePieceModel(
        Pieces(texts, scores, types), characters, bool(normalizer.get(_PREFIX, 1)),
        bool(normalizer.get(_FEWER_SPACES, 1)),
    )  # fmt: skip


def _piece(value: int | bytes) -> tuple[str, float, int]:
    fields = dict(_fields(_bytes(value)))
    kind, (score,) = fields.get(_TYPE, NORMAL), struct.unpack("<f", _bytes(fields.get(_SCORE, bytes(4))))
    if not isinstance(kind, int):
        raise ValueError("the type of a piece is no number")
    return _bytes(fields.get(_TEXT, b"")).decode("utf-8"), score, kind


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where bytes belong")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of a message's fields: an int of a varint, else its bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == _BYTES:
            length, at = _varint(data, at)
        elif wire in (_FOUR, _EIGHT):
            length = 4 if wire == _FOUR else 8
        else:
            raise ValueError(f"a field of kind {wire} at byte {at}")
        if at + length > len(data):
            raise ValueError("it ends within a field")
        yield number, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, the lowest first, and where it ends."""
    value = shift = 0
    while at < len(data) and shift < 64:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at
    raise ValueError("it ends within a number")

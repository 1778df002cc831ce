"""SentencePiece's ``tokenizer.model``, read without its library. Torch-free.

The file is a protocol buffer, declared in SentencePiece's sentencepiece_model.proto. SentencePiece's library does not
tell which pieces are user-defined, nor how text is normalized. Code generated from the declaration does, but depends on
one version of ``protobuf``. So this module reads the wire format.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from evener.errors import CheckpointError
from evener_formats.tokenizers.sentencepiece_bpe import NORMAL, Pieces

_KINDS = {1: "unigram", 2: "BPE", 3: "word", 4: "character"}
_BPE = 2
#: Fields by message: of ModelProto, of one piece, of TrainerSpec, of NormalizerSpec.
_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _TREAT_WHITESPACE_AS_SUFFIX = 3, 24
_PRECOMPILED_CHARSMAP, _PREFIX, _REMOVE_EXTRA_WHITESPACES, _ESCAPE_WHITESPACES = 2, 3, 4, 5
#: Wire types.
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5


@dataclass(frozen=True)
class SentencePieceModel:
    """The contents of a ``tokenizer.model``.

    Attributes:
        pieces: the vocabulary.
        characters: compiled rules that replace characters first; empty: none.
        prefix: whether a space is added before a text.
        remove_extra_whitespaces: whether spaces around a text are removed, and several in a row become one.
    """

    pieces: Pieces
    characters: bytes
    prefix: bool
    remove_extra_whitespaces: bool


def read_model(data: bytes, where: str) -> SentencePieceModel:
    """Read the bytes of a ``tokenizer.model``; ``where`` names it in messages.

    Raises:
        CheckpointError: the file is broken, or it is not a BPE model that marks spaces before words.
    """
    try:
        fields = list(_fields(data))
        pieces = [_piece(value) for number, value in fields if number == _PIECE]
        trainer, normalizer = (
            dict(_fields(b"".join(_bytes(value) for number, value in fields if number == part)))
            for part in (_TRAINER, _NORMALIZER)
        )
        kind, characters = trainer.get(_MODEL_TYPE, 1), _bytes(normalizer.get(_PRECOMPILED_CHARSMAP, b""))
    except (ValueError, struct.error) as error:
        raise CheckpointError(f"{where} is not a SentencePiece model ({error}); fetch the file again") from error
    if not pieces:
        raise CheckpointError(f"{where} is not a SentencePiece model (no pieces); fetch the file again")
    if kind != _BPE or trainer.get(_TREAT_WHITESPACE_AS_SUFFIX) or not normalizer.get(_ESCAPE_WHITESPACES, 1):
        known = f"of kind {_KINDS.get(kind, kind)}" if isinstance(kind, int) and kind != _BPE else "with other spaces"
        raise CheckpointError(
            f"{where} is a SentencePiece model {known}; supported is BPE with marks before words. Save it as "
            "tokenizer.json with its own code, and put it into the folder"
        )
    texts, scores, types = zip(*pieces, strict=True)
    return SentencePieceModel(
        Pieces(texts, scores, types), characters, bool(normalizer.get(_PREFIX, 1)),
        bool(normalizer.get(_REMOVE_EXTRA_WHITESPACES, 1)),
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
    """The numbers and values of a message's fields: an int for a varint, otherwise bytes."""
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
    """A number stored in seven bits per byte, the lowest first, and the index after it."""
    value = shift = 0
    while at < len(data) and shift < 64:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at
    raise ValueError("it ends within a number")

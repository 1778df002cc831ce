"""A tokenizer in a tiktoken file, as a ``tokenizer.json``. Torch-free.

The file has one line per token: its bytes in base64, and its rank. A word that is a token stays whole. Otherwise two
neighbours become one token if their joined bytes are a token, the lowest rank first.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from typing import Any

from evener.errors import CheckpointError
from evener_formats.tokenizers.tokenizer_json import added_token, assemble, bpe, template_processing


def read_ranks(text: str, where: str) -> dict[bytes, int]:
    """The rank (which is the id) of each token in ``text``; ``where`` names the file in messages.

    Raises:
        CheckpointError: a line is not a token and its rank, or the ranks have gaps.
    """
    ranks = dict(_lines(text, where))
    if sorted(ranks.values()) != list(range(len(ranks))) or not ranks:
        raise CheckpointError(f"{where} does not number its tokens from 0 without gaps; fetch the file again")
    return ranks


def tiktoken_to_json(
    ranks: Mapping[bytes, int], split: str, special: Mapping[str, int], before: Mapping[str, int], compose: bool
) -> dict[str, Any]:
    """The ``tokenizer.json``.

    Args:
        ranks: from ``read_ranks``.
        split: the regular expression whose matches are words.
        special: ids of the tokens after the vocabulary.
        before: those among them that begin every text.
        compose: whether characters are composed first (NFC).
    """
    spelt = _byte_letters()
    letters = {token: "".join(spelt[byte] for byte in token) for token in ranks}
    words = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
    bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    merges = [[letters[left], letters[right]] for left, right in _merges(ranks)]
    return assemble(
        [added_token(number, text) for text, number in special.items()],
        normalizer={"type": "NFC"} if compose else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [words, bytewise]},
        model=bpe({letters[token]: rank for token, rank in ranks.items()}, merges, ignore_merges=True),
        post_processor=template_processing(before, {}),
        decoder=bytewise,
    )


def _lines(text: str, where: str) -> Iterator[tuple[bytes, int]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                token, rank = line.split()
                yield base64.b64decode(token, validate=True), int(rank)
            except (ValueError, binascii.Error) as error:
                raise CheckpointError(
                    f"{where}: line {number} is not a token and its rank; fetch the file again"
                ) from error


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Every pair of tokens whose joined bytes are a third token, in the order of its rank. The order among the pairs of
    one token does not matter: no two of them can occur at the same place."""
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
        yield from ((left, right) for left, right in pairs if left in ranks and right in ranks)


def _byte_letters() -> dict[int, str]:
    """The letter for each byte in byte-level BPE (Radford et al. 2019); printable bytes stand for themselves."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {**{byte: chr(byte) for byte in shown}, **{byte: chr(256 + n) for n, byte in enumerate(hidden)}}

"""``suffix``: a text between two others, by models that were trained to fill in the middle.

Such a model reads the text before the gap and the text after it, each behind a mark of its own, and then writes the
middle (Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle"). The marks are special
tokens. Families spell them differently, so the tokenizer shows which a model knows.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from evener.errors import RequestError
from evener.frontend.tokenizer import Tokenizer


class Gap(enum.Enum):
    """The two texts around a gap."""

    BEFORE = enum.auto()
    AFTER = enum.auto()


@dataclass(frozen=True)
class GapMarks:
    """The special tokens of one spelling, and the prompt that is made of them.

    Attributes:
        marks: the special tokens; a tokenizer that has all of them uses this spelling.
        pieces: the prompt, piece by piece: a mark, ``BEFORE`` or ``AFTER``.
    """

    marks: tuple[str, ...]
    pieces: tuple[str | Gap, ...]


def _before_first(before: str, after: str, middle: str) -> GapMarks:
    return GapMarks((before, after, middle), (before, Gap.BEFORE, after, Gap.AFTER, middle))


#: Spellings of published models: Qwen Coder and CodeGemma, StarCoder and Granite, DeepSeek Coder, Codestral.
SPELLINGS = (
    _before_first("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    _before_first("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    _before_first("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    GapMarks(("[SUFFIX]", "[PREFIX]"), ("[SUFFIX]", Gap.AFTER, "[PREFIX]", Gap.BEFORE)),
)


def spelling_of(tokenizer: Tokenizer) -> GapMarks | None:
    """The spelling whose marks the tokenizer has; None: the model cannot fill in the middle."""
    return next((each for each in SPELLINGS if all(_is_token(mark, tokenizer) for mark in each.marks)), None)


def with_suffix(prompt: object, suffix: str, spelling: GapMarks | None) -> str:
    """The prompt that asks for the text between ``prompt`` and ``suffix``.

    Raises:
        RequestError: ``prompt`` is not a text, or the model cannot fill in the middle.
    """
    if not isinstance(prompt, str):
        raise RequestError("suffix needs the prompt as text; send text, or leave suffix out", "suffix")
    if spelling is None:
        raise RequestError(
            "suffix is not supported by this model: its tokenizer has no tokens to fill in the middle; leave it out, "
            "or use a model for code, such as Qwen2.5-Coder",
            "suffix",
        )
    texts = {Gap.BEFORE: prompt, Gap.AFTER: suffix}
    return "".join(texts[piece] if isinstance(piece, Gap) else piece for piece in spelling.pieces)


def _is_token(text: str, tokenizer: Tokenizer) -> bool:
    return len(tokenizer.encode(text, False)) == 1

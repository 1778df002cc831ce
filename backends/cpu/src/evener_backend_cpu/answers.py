"""Calls of ``routed_experts`` that a device asks for in a captured step: one call of the C++ library answers all."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_P, _I = ctypes.c_void_p, ctypes.c_int64


class Routed(ctypes.Structure):
    """``struct Routed`` of aside.h."""

    _fields_ = [
        ("experts", _P), ("tokens", _I), ("x", _P), ("ids", _P), ("weights", _P), ("y", _P), ("threads", _I),
    ]  # fmt: skip


class Asked(ctypes.Structure):
    """``struct Asked`` of answer.h."""

    _fields_ = [("ready", _P), ("done", _P), ("call", Routed), ("expert_bytes", _I)]


class Answered(ctypes.Structure):
    """``struct Answered`` of answer.h."""

    _fields_ = [("nanoseconds", _I), ("read_bytes", _I)]


@dataclass(frozen=True)
class Question:
    """A place in a step where a device asks.

    Attributes:
        answer: the library's function.
        none: computes no row, as often as a step begins: another step may have had other weights in the same place. It
            keeps what is at the addresses.
        asked: addresses, also of the words.
    """

    answer: Any
    none: Callable[[], object]
    asked: Asked


class Answers:
    """Answers the questions of a step, one after another."""

    def __init__(self, questions: Sequence[Question]) -> None:
        self._questions = questions
        self._asked = (Asked * len(questions))(*(question.asked for question in questions))

    def __call__(self, rows: int | None, threads: int, waiting: int) -> tuple[int, int]:
        """Wait until each is asked, compute its first ``rows`` rows (None: all), and say so. After an error the others
        are answered without products.

        Args:
            waiting: address of two int64: that of the word that is waited for, or 0; and whether to give up, which is
                looked at after a word was unlocked.

        Returns:
            nanoseconds of products, and bytes of experts that they read.

        Raises:
            Exception: the first error, once all are answered.
        """
        spent, failure = Answered(), None
        try:
            for question in self._questions:
                question.none()
        except Exception as error:
            failure, rows = error, 0
        self._questions[0].answer(
            ctypes.addressof(self._asked), len(self._asked), -1 if rows is None else rows, threads, waiting,
            ctypes.addressof(spent),
        )  # fmt: skip
        if failure is not None:
            raise failure
        return spent.nanoseconds, spent.read_bytes

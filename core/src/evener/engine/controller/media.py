"""What the scheduler asks about the media of requests. It hands over its ``NewRequest``, ``Request`` and
``PlannedRow``s as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evener.plugins.discover import installed_catalog


class Media:
    """The media of an engine in which no request can have any; ``open_media`` finds others."""

    def rejection_reason(self, message: Any) -> str | None:
        """Why the request's media can never run; None if they can."""
        return "media in prompts need another package; type: pip install evener-generation" if message.media else None

    def allowed_tokens(self, request: Any, count: int) -> int:
        """How many of the request's next ``count`` tokens the step can compute, as far as its media are concerned."""
        return count

    def take(self, request: Any, count: int) -> None:
        """Plan the media of the request's next ``count`` tokens, which ``allowed_tokens`` has allowed."""

    def release(self, request: Any) -> None:
        """The request needs no media any more: it has ended or was preempted."""

    def build_step_media(self, rows: Sequence[Any]) -> Any | None:
        """The ``StepMedia`` of the step with these rows, in their order; None if it has none. The calls after this one
        plan the next step."""
        return None


def open_media(room: int, step_rows: int) -> Media:
    """The planner of an installed package: the worker keeps ``room`` rows, and a step encodes ``step_rows``."""
    planner = installed_catalog().lazy_imports("part of media").get("planner")
    return planner.load()(room, step_rows) if planner else Media()

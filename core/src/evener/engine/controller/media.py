"""What the scheduler asks about the media of requests. The arguments of type ``Any`` are its own ``NewRequest``,
``Request`` and ``PlannedRow`` objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evener.plugins.discover import installed_catalog


class Media:
    """Plans the media of requests. This base class is for an engine whose requests can have none; ``open_media`` finds
    the class of a package."""

    def rejection_reason(self, message: Any) -> str | None:
        """Why the request's media can never run; None if they can."""
        return "media in prompts need another package; type: pip install evener-generation" if message.media else None

    def allowed_tokens(self, request: Any, count: int) -> int:
        """How many of the request's next ``count`` tokens the step can compute, as far as its media are concerned."""
        return count

    def take(self, request: Any, count: int) -> None:
        """Plan the media of the request's next ``count`` tokens, which ``allowed_tokens`` has allowed."""

    def release(self, request: Any) -> None:
        """The request no longer needs its media: it has ended or was preempted."""

    def build_step_media(self, rows: Sequence[Any]) -> Any | None:
        """The ``StepMedia`` of the step with these rows, in their order; None if it has none. Later calls plan the next
        step."""
        return None


def open_media(room: int, step_rows: int) -> Media:
    """The planner of an installed package, else the base class. The worker keeps at most ``room`` embedding rows, and a
    step encodes at most ``step_rows``."""
    planner = installed_catalog().lazy_imports("part of media").get("planner")
    return planner.load()(room, step_rows) if planner else Media()

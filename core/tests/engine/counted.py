"""The counters of an engine, its connector's among them."""

from __future__ import annotations

from evener.engine.controller.controller import Controller
from evener.engine.wire.messages import GetStats, StatsReport


def counters(controller: Controller) -> dict[str, int]:
    """By name. What the ranks have counted comes with the results of steps; the connector's own are those of now."""
    (report,) = controller.handle([GetStats()])
    assert isinstance(report, StatsReport)
    return {**report.counters, **controller.scheduler.connector.counters}

"""The periodic log line: what happened since the previous one."""

from __future__ import annotations

import asyncio
import logging
import time

from evener.engine.wire.messages import StatsReport
from evener.errors import EngineDeadError
from evener_server.service import Service

logger = logging.getLogger("evener_server.stats_logger")


class StatsLogger:
    """Logs one line of statistics per interval; nothing if nothing happened."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._seen = self._counts(None)
        self._then = time.monotonic()

    async def run(self, interval: float) -> None:
        """Log a line every ``interval`` seconds, until cancelled or the engine has stopped."""
        while True:
            await asyncio.sleep(interval)
            try:
                report = await self._service.llm.stats()
            except EngineDeadError:
                return
            line = self.line(report, time.monotonic())
            if line is not None:
                logger.info(line)

    def line(self, report: StatsReport, now: float) -> str | None:
        """The line at time ``now`` (seconds); None if no counter changed and no request is open."""
        seen, counts, seconds = self._seen, self._counts(report), now - self._then
        self._seen, self._then = counts, now
        if counts == seen and not (report.running or report.waiting):
            return None
        new = {name: counts[name] - seen[name] for name in counts}
        share = report.blocks_used / report.blocks if report.blocks else 0.0
        parts = [
            f"running {report.running}, waiting {report.waiting}",
            f"KV cache {share:.0%}",
            f"prompt {new['prompt'] / seconds:.1f} tokens/s",
            f"generation {new['generation'] / seconds:.1f} tokens/s",
            f"ended {new['ended']}",
        ]
        if new["queried"]:
            parts.append(f"prefix hits {new['cached'] / new['queried']:.0%}")
        if new["first"]:
            parts.append(f"first token after {1000 * new['first_seconds'] / new['first']:.0f} ms")
        if new["preemptions"]:
            parts.append(f"preempted {new['preemptions']}")
        return "; ".join(parts)

    def _counts(self, report: StatsReport | None) -> dict[str, float]:
        own = self._service.metrics
        return {
            "prompt": own.prompt_tokens, "generation": own.generation_tokens, "ended": sum(own.finished.values()),
            "first": own.time_to_first_token.count, "first_seconds": own.time_to_first_token.sum,
            "cached": report.cached_tokens if report else 0, "queried": report.queried_tokens if report else 0,
            "preemptions": report.preemptions if report else 0,
        }  # fmt: skip

"""Sends malformed requests to a real engine over its HTTP application, and says what came of them::

    python tests/request_fuzzer.py --count 100000
    python tests/request_fuzzer.py --count 1000 --first 17

Every thousand requests have a seed of their own, from ``--first`` on. A 5xx, an answer that does not end as it should,
a request that takes more than 20 seconds, a traceback in the log, or state that is left afterwards ends the run with
that request and exit status 1. ``tests/test_http_fuzz.py`` runs a part of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from asgi_calls import InProcess
from malformed_requests import Malformed
from test_http_fuzz import BATCH, TINY, check, good_answer, make_model

from evener_server.body import BodyLimits

#: Requests of one seed, and the seconds that a batch may take.
SHARE, LIMIT = 1000, 20.0


class Tracebacks(logging.Handler):
    """Collects the log's records that carry an exception."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or "Traceback" in record.getMessage():
            self.found.append(record.getMessage())


def main(argv: Sequence[str]) -> int:
    """0 if nothing happened that must not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="requests; rounded up to thousands")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    args = parser.parse_args(argv)
    tracebacks = Tracebacks()
    logging.getLogger().addHandler(tracebacks)
    try:
        return send(args.count, args.first, tracebacks)
    finally:
        logging.getLogger().removeHandler(tracebacks)


def send(count: int, first_seed: int, tracebacks: Tracebacks) -> int:
    """``main`` with the log watched."""
    seen, longest = Counter[int](), 0.0
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "tiny")
        with InProcess(model, TINY, BodyLimits(max_bytes=100_000, timeout=0.3)) as server:
            before = good_answer(server)
            for number in range(first_seed, first_seed + -(-count // SHARE)):
                calls = list(itertools.islice(Malformed("tiny", number), SHARE))
                for first in range(0, SHARE, BATCH):
                    part, began = calls[first : first + BATCH], time.monotonic()
                    for call, answer in zip(part, server.calls(part), strict=True):
                        try:
                            check(call, answer)
                        except Exception as error:
                            print(f"seed {number}: {type(error).__name__}: {error}\n{call}\n{str(answer)[:2000]}")
                            return 1
                        seen[answer.status] += 1
                    longest = max(longest, time.monotonic() - began)
                    if longest > LIMIT or tracebacks.found:
                        print(f"seed {number}, requests from {first}: {longest:.1f} s, {tracebacks.found[:3]}")
                        return 1
                server.at_rest()
            if good_answer(server) != before:
                print("the server's answer to a good request has changed")
                return 1
    statuses = {str(status): count for status, count in sorted(seen.items())}
    print(json.dumps({"requests": sum(seen.values()), "statuses": statuses, "longest_batch_s": round(longest, 2)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

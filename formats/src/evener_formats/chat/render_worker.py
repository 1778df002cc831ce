"""The render process: reads requests, renders and answers until its input ends. Started by ``render``.

One message is one line of JSON. The process limits its own memory, and with SIGPROF, which ends it even inside a C
call, the CPU time of a rendering.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, BinaryIO

import jinja2

from evener_formats.chat.template import compile_template, render


def main(extra_bytes: int, limit_s: float) -> None:
    """Read requests from stdin and answer on stdout.

    Args:
        extra_bytes: memory that rendering may use in addition to what the process uses now.
        limit_s: seconds of CPU time after which SIGPROF ends the process.
    """
    _limit_memory(extra_bytes)
    answers = sys.stdout.buffer
    answers.write(b"ready\n")
    answers.flush()
    serve(sys.stdin.buffer, answers, extra_bytes, limit_s)


def serve(requests: BinaryIO, answers: BinaryIO, extra_bytes: int, limit_s: float) -> None:
    """Answer each line with ``{"text": …}`` or ``{"error": …}``."""
    compiled = lru_cache(8)(compile_template)  # few: requests may bring their own templates
    for line in requests:
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        answers.write(json.dumps(_answer(json.loads(line), compiled, extra_bytes)).encode() + b"\n")
        answers.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


def _answer(request: dict[str, Any], compiled: Callable[[str], jinja2.Template], extra: int) -> dict[str, str]:
    try:
        template = compiled(request["template"])
        text = render(template, request["messages"], request["continue_final_message"], request["variables"])
    except MemoryError:
        return {"error": f"it needs more than {extra >> 20} MiB of memory"}
    except jinja2.TemplateError as error:
        return {"error": str(error.message or type(error).__name__)}
    except Exception as error:  # an expression in a template may raise anything
        return {"error": f"{type(error).__name__}: {error}"}
    return {"text": text}


def _limit_memory(extra_bytes: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + extra_bytes
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))

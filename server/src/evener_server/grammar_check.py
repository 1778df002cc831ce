"""Checks a request's grammar in a process of its own, before the engine sees it: compiling a hostile grammar may take
for ever, or overflow the stack of the process.

The process is this module: ``python -m evener_server.grammar_check MODULE:CLASS`` reads a ``GrammarSpec`` and writes
what ``GrammarLibrary.problem`` says. It has less stack than the engine's thread has when it compiles the same grammar.
The limits are for the grammar: what the library took to be imported is added to them.
"""

from __future__ import annotations

import asyncio
import importlib
import math
import resource
import signal
import sys
import threading
import time
from collections import OrderedDict
from pathlib import Path

import msgspec

from evener.contracts.grammar.library import GrammarLibrary, GrammarSpec
from evener.errors import RequestError
from evener.plugins.discover import installed_catalog

#: Of one grammar.
MAX_CHARACTERS = 1 << 18
#: Seconds that one check may take; of the processor, and by the clock, as a busy machine takes its time.
CPU_SECONDS, SECONDS = 5, 60.0
_MEMORY, _STACK = 1 << 30, 1 << 20
#: What the process runs.
_PROGRAM = ("-m", __name__)
#: Verdicts that are kept, and checks at a time.
_KEPT, _AT_A_TIME = 128, 2


class GrammarChecks:
    """Verdicts on grammars; those on the last few hundred are kept.

    Args:
        name: of an installed grammar library; None: the one whose name sorts first.
    """

    def __init__(self, name: str | None = None) -> None:
        found = installed_catalog().lazy_imports("grammar engine")
        self._library = found[name or min(found)].path if found else None
        self._verdicts: OrderedDict[GrammarSpec, str] = OrderedDict()
        self._turns = asyncio.Semaphore(_AT_A_TIME)

    async def check(self, spec: GrammarSpec, param: str) -> None:
        """Check a grammar that the field ``param`` asks for.

        Raises:
            RequestError: it cannot be used, or no library is installed.
        """
        if self._library is None:
            message = 'structured output is not installed here; the operator can type: pip install "evener[serve]"'
            raise RequestError(message, param, "unsupported_parameter")
        if len(spec.text) > MAX_CHARACTERS:
            message = f"{param} has a grammar of {len(spec.text)} characters; at most {MAX_CHARACTERS} are allowed"
            raise RequestError(message, param)
        if spec.kind == "any":
            return
        verdict = self._verdicts.get(spec)
        if verdict is None:
            async with self._turns:
                verdict = await self._ask(spec)
        self._verdicts[spec] = verdict
        self._verdicts.move_to_end(spec)
        if len(self._verdicts) > _KEPT:
            self._verdicts.popitem(last=False)
        if verdict:
            raise RequestError(f"{param} cannot be used: {verdict}", param)

    async def _ask(self, spec: GrammarSpec) -> str:
        """Why the grammar cannot be used; "" if it can."""
        assert self._library is not None, "checked by the caller"
        process = await asyncio.create_subprocess_exec(
            sys.executable, *_PROGRAM, self._library,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            said, _ = await asyncio.wait_for(process.communicate(msgspec.json.encode(spec)), SECONDS)
        except asyncio.TimeoutError:
            return f"compiling it took longer than {SECONDS:g} s"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode == -signal.SIGXCPU:
            return f"compiling it takes more than {CPU_SECONDS} s"
        if process.returncode != 0:
            return "compiling it failed: it may be nested too deeply, or need too much memory"
        return said.decode()


def main(library: str) -> None:
    """Check the grammar on standard input."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    module, _, name = library.partition(":")
    kind: type[GrammarLibrary] = getattr(importlib.import_module(module), name)
    seconds, pages = math.ceil(time.process_time()), int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + _MEMORY
    resource.setrlimit(resource.RLIMIT_CPU, (seconds + CPU_SECONDS, seconds + CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=GrammarSpec)
    threading.stack_size(_STACK)
    verdicts: list[str] = []
    thread = threading.Thread(target=lambda: verdicts.append(kind.problem(spec) or ""))
    thread.start()
    thread.join()
    if not verdicts:
        sys.exit("the library has failed")  # with an exception, which the thread has printed
    sys.stdout.write(verdicts[0])


if __name__ == "__main__":
    main(*sys.argv[1:])

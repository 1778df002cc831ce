"""Compiles grammars in a thread of its own, so that no step waits, and keeps those that were used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from evener.contracts.grammar.library import GrammarLibrary, GrammarSpec, Matcher
from evener.errors import EvenerError

#: Compiled grammars that are kept.
_KEPT = 64


class GrammarCompiler:
    """The compiled grammars of one engine.

    Args:
        open_library: makes the library; called in the thread, when the first grammar comes. Raises ``EvenerError`` if
            there is none.
    """

    def __init__(self, open_library: Callable[[], GrammarLibrary]) -> None:
        self._open_library = open_library
        self._library: GrammarLibrary | None = None
        self._thread = ThreadPoolExecutor(1, "evener-grammars")
        self._compiled: OrderedDict[GrammarSpec, Future[Matcher]] = OrderedDict()

    def ready(self, spec: GrammarSpec | None) -> bool:
        """Whether ``spec`` is compiled, or has failed. If it is new, it is compiled from now on. True for None."""
        return spec is None or self._future(spec).done()

    def matcher(self, spec: GrammarSpec) -> Matcher:
        """A new matcher of a grammar that is ready.

        Raises:
            EvenerError: it could not be compiled.
        """
        return self._future(spec).result().copy()

    def _future(self, spec: GrammarSpec) -> Future[Matcher]:
        # What must not be repeated depends on the prompt, and stands beside the compiled grammar.
        spec = msgspec.structs.replace(spec, no_repeat=(0, 0))
        if spec not in self._compiled:
            self._compiled[spec] = self._thread.submit(self._compile, spec)
            for old in [each for each, future in self._compiled.items() if future.done()][:-_KEPT]:
                del self._compiled[old]
        self._compiled.move_to_end(spec)
        return self._compiled[spec]

    def _compile(self, spec: GrammarSpec) -> Matcher:
        try:
            self._library = self._library or self._open_library()
            return self._library.compile(spec)
        except EvenerError:
            raise
        except Exception as error:  # a package may raise anything: it ends one request, not the engine
            raise EvenerError(f"the grammar cannot be used: {error}; send another one") from error

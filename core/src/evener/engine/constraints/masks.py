"""Masks of token ids for the sequences that have a grammar."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial

import msgspec

from evener.config.schema import Config
from evener.contracts.grammar.library import Matcher
from evener.engine.constraints.compiler import GrammarCompiler
from evener.engine.constraints.grammars import Grammars, Sequence
from evener.engine.constraints.library import open_grammar_library
from evener.engine.wire.plan import Plan, StepResult


class GrammarMasks(Grammars):
    """Puts a mask into a plan for each sampled row whose slot has a grammar.

    A mask depends on the token before it: the scheduler plans such a row only when that token was read. An admission
    carries a sequence's tokens, so a sequence that was preempted gets its matcher's state back.

    Args:
        compiler: has the grammars of every admission ready.
    """

    @classmethod
    def of(cls, config: Config, vocab_size: int) -> GrammarMasks:
        """With the installed grammar library, which is opened when the first grammar comes."""
        return cls(GrammarCompiler(partial(open_grammar_library, config, vocab_size)))

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._matchers: dict[int, Matcher] = {}
        self._failed: dict[int, str] = {}
        self._plans: deque[Plan] = deque()

    def masked(self, plan: Plan) -> Plan:
        for admission in plan.admissions:
            self._failed.pop(admission.slot, None)
            self._matchers.pop(admission.slot, None)
            if admission.sampling.grammar is None:
                continue
            try:
                matcher = self._compiler.matcher(admission.sampling.grammar)
                for token in admission.tokens[admission.prompt :]:
                    matcher.accept(token)
                self._matchers[admission.slot] = matcher
            except Exception as error:  # a package may raise anything: it ends one request, not the engine
                self._failed[admission.slot] = str(error)
        masks = list(self._masks(plan)) if self._matchers else []
        self._plans.append(plan)
        return msgspec.structs.replace(plan, masks=masks) if masks else plan

    def _masks(self, plan: Plan) -> Iterator[tuple[int, bytes]]:
        for index, row in enumerate(plan.samples):
            slot = plan.slots[row]
            if slot not in self._matchers:
                continue
            try:
                yield index, self._matchers[slot].mask()
            except Exception as error:
                self._failed[slot] = f"the text cannot follow its grammar any further: {error}"

    def sampled(self, result: StepResult) -> StepResult:
        plan = self._plans.popleft()
        for row, token in zip(plan.samples, result.ids, strict=True):
            if plan.slots[row] in self._matchers:
                self._matchers[plan.slots[row]].accept(token)
        return result

    def ready(self, request: Sequence) -> bool:
        return self._compiler.ready(request.message.sampling.grammar)

    def failures(self, running: Iterable[Sequence]) -> list[tuple[str, str]]:
        failed, self._failed = self._failed, {}
        return [(request.id, failed[request.slot]) for request in running if request.slot in failed]

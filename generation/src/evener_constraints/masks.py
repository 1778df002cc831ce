"""Masks of token ids for the sequences that have a grammar."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from functools import partial
from weakref import WeakValueDictionary

import msgspec

from evener.config.schema import Config
from evener.contracts.grammar.library import Matcher
from evener.engine.controller.grammars import Grammars, Sequence
from evener.engine.wire.executor import Executor
from evener.engine.wire.plan import Plan, StepMasks, StepResult
from evener_constraints.compiler import GrammarCompiler
from evener_constraints.library import open_grammar_library
from evener_constraints.no_repeats import NoRepeats, PromptSequences


class GrammarMasks(Grammars):
    """Makes a mask for each sampled row whose slot has a grammar.

    A mask depends on the token before it. So the masks of a plan are made when the plans before it were read, while the
    worker computes its hidden states already. An admission carries a sequence's tokens, so a sequence that was
    preempted gets its matcher's state back.

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
        self._prompts: WeakValueDictionary[tuple[tuple[int, int], bytes], PromptSequences] = WeakValueDictionary()
        self._plans: deque[Plan] = deque()

    def submit(self, plan: Plan, executor: Executor) -> None:
        for admission in plan.admissions:
            self._failed.pop(admission.slot, None)
            self._matchers.pop(admission.slot, None)
            if admission.sampling.grammar is None:
                continue
            try:
                matcher = self._compiler.matcher(admission.sampling.grammar)
                if any(sizes := admission.sampling.grammar.no_repeat):
                    matcher = NoRepeats(self._sequences(sizes, admission.tokens[: admission.prompt]), matcher)
                for token in admission.tokens[admission.prompt :]:
                    matcher.accept(token)
                self._matchers[admission.slot] = matcher
            except Exception as error:  # a package may raise anything: it ends one request, not the engine
                self._failed[admission.slot] = str(error)
        samples = enumerate(plan.samples) if self._matchers else ()
        if masked := [index for index, row in samples if plan.slots[row] in self._matchers]:
            plan = self.owed = msgspec.structs.replace(plan, masked=masked)
        self._plans.append(plan)
        executor.submit(plan)
        self._send_masks(executor)

    def _sequences(self, sizes: tuple[int, int], prompt: list[int]) -> PromptSequences:
        """Those of a prompt, as long as a sample of it runs."""
        key = sizes, array("i", prompt).tobytes()
        if (found := self._prompts.get(key)) is None:
            found = self._prompts[key] = PromptSequences(sizes, prompt)
        return found

    def _send_masks(self, executor: Executor) -> None:
        """Once for each plan that has any, as soon as no unread plan samples one of its rows' tokens."""
        if (plan := self.owed) is None:
            return
        slots = [plan.slots[plan.samples[index]] for index in plan.masked]
        unread = {each.slots[row] for each in self._plans if each is not plan for row in each.samples}
        if unread.isdisjoint(slots):
            self.owed = None
            executor.submit(StepMasks(plan=plan.id, masks=list(map(self._mask, slots))))

    def _mask(self, slot: int) -> bytes:
        try:
            return self._matchers[slot].mask()
        except Exception as error:  # also where a text has ended, and a plan that was made before goes on with it
            self._failed[slot] = f"the text cannot follow its grammar any further: {error}"
            return b""

    def read(self, executor: Executor) -> StepResult:
        result, plan = executor.read(), self._plans.popleft()
        for row, token in zip(plan.samples, result.ids, strict=True):
            if plan.slots[row] in self._matchers:
                self._matchers[plan.slots[row]].accept(token)
        self._send_masks(executor)  # before the result is used: the device waits for them
        return result

    def ready(self, request: Sequence) -> bool:
        return self._compiler.ready(request.message.sampling.grammar)

    def failures(self, running: Iterable[Sequence]) -> list[tuple[str, str]]:
        failed, self._failed = self._failed, {}
        return [(request.id, failed[request.slot]) for request in running if request.slot in failed]

"""Masks of token ids for the sequences that have a grammar."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from weakref import WeakValueDictionary

import msgspec

from evener.config.schema import Config
from evener.contracts.generation.drafter import BY_WORKER
from evener.contracts.grammar.library import Matcher
from evener.engine.controller.grammars import Grammars, Sequence
from evener.engine.wire.executor import Executor
from evener.engine.wire.plan import Plan, StepMasks, StepResult
from evener_constraints.compiler import GrammarCompiler
from evener_constraints.library import find_grammar_library, open_grammar_library
from evener_constraints.no_repeats import NoRepeats, PromptSequences
from evener_generation.forced_tokens import forced_by


@dataclass
class _Submitted:
    """A plan in flight.

    Attributes:
        drafts: by row, the tokens that were proposed for it; ``BY_WORKER`` while the worker's draft model has them.
        usable: by row with a mask, how many of them may come: those behind are wrong, whatever is sampled.
    """

    plan: Plan
    drafts: dict[int, list[int]]
    usable: dict[int, int] = field(default_factory=dict)

    @property
    def rows(self) -> list[int]:
        """The rows that sample, in order."""
        return list(dict.fromkeys(self.plan.samples))


class GrammarMasks(Grammars):
    """Makes a mask for each sampled row whose slot has a grammar.

    A mask depends on the token before it. So the masks of a plan are made when the plans before it were read, while the
    worker computes its hidden states already. An admission carries a sequence's tokens, so a sequence that was
    preempted gets its matcher's state back.

    With proposed tokens a row has several masks, each as if those before it came. Those that a grammar forbids are cut
    before they are planned. What a draft model proposes is known once it has run, in the step that waits for the masks.
    When the result is read, the matcher goes on with the tokens that the request gets.

    Args:
        compiler: has the grammars of every admission ready.
    """

    @classmethod
    def of(cls, config: Config, vocab_size: int) -> GrammarMasks:
        """With the grammar library that ``config`` names, which is opened when the first grammar comes.

        Raises:
            ConfigError: that library is not installed.
        """
        if config.options.get("generation", {}).get("grammars"):
            find_grammar_library(config)
        return cls(GrammarCompiler(partial(open_grammar_library, config, vocab_size)))

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._matchers: dict[int, Matcher] = {}
        self._failed: dict[int, str] = {}
        self._prompts: WeakValueDictionary[tuple[tuple[int, int], bytes], PromptSequences] = WeakValueDictionary()
        self._plans: deque[_Submitted] = deque()

    def fitting(self, request: Sequence, drafts: list[int]) -> list[int]:
        matcher = self._matchers.get(request.slot)
        if matcher is None or not drafts or BY_WORKER in drafts:
            return drafts
        try:
            return drafts[: matcher.fitting(drafts)]
        except Exception as error:  # a package may raise anything: it ends one request, not the engine
            self._failed[request.slot] = f"its grammar cannot judge what was proposed: {error}"
            return []

    def forced(self, request: Sequence) -> list[int] | None:
        """Tokens that its grammar leaves a request no choice about, if all its tokens were read; None: it has none."""
        if request.message.sampling.grammar is None:
            return None
        matcher = self._matchers.get(request.slot)
        try:
            return forced_by(matcher)
        except Exception as error:  # a package may raise anything: it ends one request, not the engine
            self._failed[request.slot] = f"its grammar cannot say what must come: {error}"
            return []

    def prepare(self, plan: Plan) -> Plan:
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
            plan = self.awaiting_masks = msgspec.structs.replace(plan, masked=masked)
        self._plans.append(_Submitted(plan, {each.row: each.ids for each in plan.drafts}))
        return plan

    def submitted(self, executor: Executor) -> None:
        self._send_masks(executor)
        if self.awaiting_masks is not None:
            self._check_ends(self._plans[-1])

    def _check_ends(self, of: _Submitted) -> None:
        """Note which texts cannot go on, of those whose masks depend on what a draft model proposes: when they are
        made, the step's tokens are read at once."""
        for row in {of.plan.samples[index] for index in of.plan.masked}:
            if BY_WORKER in of.drafts.get(row, ()):
                self._masks(of, row, [])

    def _sequences(self, sizes: tuple[int, int], prompt: list[int]) -> PromptSequences:
        """The token sequences of a prompt, kept as long as a sample of it runs."""
        key = sizes, array("i", prompt).tobytes()
        if (found := self._prompts.get(key)) is None:
            found = self._prompts[key] = PromptSequences(sizes, prompt)
        return found

    def _send_masks(self, executor: Executor) -> None:
        """Once for each plan that has any, as soon as the tokens that they depend on are known: no unread plan samples
        one of its rows' tokens, and a draft model has proposed what it does."""
        if (plan := self.awaiting_masks) is None:
            return
        newest, rows = self._plans[-1], list(dict.fromkeys(plan.samples[index] for index in plan.masked))
        unread = {each.plan.slots[row] for each in self._plans if each is not newest for row in each.plan.samples}
        unknown = newest.drafts and any(BY_WORKER in newest.drafts.get(row, ()) for row in rows)
        if not unknown and unread.isdisjoint(plan.slots[row] for row in rows):
            self.awaiting_masks = None
            masks: list[object] = [
                mask for row in rows for mask in self._masks(newest, row, newest.drafts.get(row, []))
            ]
            executor.submit(StepMasks(plan=plan.id, masks=masks))

    def _masks(self, of: _Submitted, row: int, drafts: list[int]) -> Iterable[bytes | memoryview]:
        """The masks of a row, after its last certain token and after each proposed one."""
        slot = of.plan.slots[row]
        try:
            made = [id for id in drafts if id >= 0] if drafts else drafts  # the worker may have made none
            found = self._matchers[slot].masks(made)
        except Exception as error:  # also where a text has ended, and a plan that was made before goes on with it
            self._failed[slot] = f"the text cannot follow its grammar any further: {error}"
            found = [b""]
        of.usable[row] = len(found) - 1
        missing = len(drafts) + 1 - len(found)
        return [*found, *[b""] * missing] if missing else found

    def read(self, executor: Executor) -> StepResult:
        while (result := executor.read()).proposed:
            of = self._plans[0]
            of.drafts = {each.row: ids for each, ids in zip(of.plan.drafts, result.drafts, strict=True)}
            self._send_masks(executor)
        of = self._plans.popleft()
        if of.drafts:
            self._take_drafted(of, result.ids)
        elif self._matchers:
            for row, token in zip(of.plan.samples, result.ids, strict=True):
                if (matcher := self._matchers.get(of.plan.slots[row])) is not None:
                    matcher.accept(token)
        self._send_masks(executor)  # before the result is used: the device waits for them
        return self._without_unusable(of, result) if of.drafts else result

    def _take_drafted(self, of: _Submitted, ids: list[int]) -> None:
        """The texts of a plan with drafts go on."""
        sampled = iter(ids)
        for row in of.rows:
            usable = of.drafts.get(row, [])[: of.usable.get(row)]
            self._go_on(of.plan.slots[row], list(islice(sampled, 1 + len(of.drafts.get(row, ())))), usable)

    def _go_on(self, slot: int, sampled: list[int], usable: list[int]) -> None:
        """The text of a slot goes on with the tokens up to the first that was not proposed."""
        if (matcher := self._matchers.get(slot)) is None:
            return
        for at, token in enumerate(sampled):
            matcher.accept(token)
            if at >= len(usable) or token != usable[at]:
                return

    def _without_unusable(self, of: _Submitted, result: StepResult) -> StepResult:
        """The result, in which drafts without a mask are never right."""
        if all(usable == len(of.drafts.get(row, ())) for row, usable in of.usable.items()):
            return result
        drafts = []
        for each in of.plan.drafts:
            ids = of.drafts[each.row]
            usable = of.usable.get(each.row, len(ids))
            drafts.append(ids[:usable] + [min(id, BY_WORKER) for id in ids[usable:]])
        return msgspec.structs.replace(result, drafts=drafts)

    def ready(self, request: Sequence) -> bool:
        return self._compiler.ready(request.message.sampling.grammar)

    def failures(self, running: Iterable[Sequence]) -> list[tuple[str, str]]:
        if not self._failed:
            return []
        failed, self._failed = self._failed, {}
        return [(request.id, failed[request.slot]) for request in running if request.slot in failed]

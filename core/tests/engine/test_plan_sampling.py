"""Each plan says how its own samples are drawn, though plans in a row seldom differ in that."""

from __future__ import annotations

from typing import Any

from evener.engine.wire.messages import LogitBias, NewRequest, Sampling
from evener.engine.wire.plan import Plan
from evener_conformance.reference.executor import strict_controller

KINDS = [
    Sampling(temperature=0.0), Sampling(temperature=0.9, seed=1), Sampling(temperature=0.0, logprobs=3),
    Sampling(temperature=0.7, top_k=5), Sampling(temperature=0.0, bias=[LogitBias(5, 1.0)]),
    Sampling(temperature=0.0, logprobs=0, logprob_ids=[3, 4]), Sampling(temperature=0.5, presence_penalty=0.5),
]  # fmt: skip


def test_a_plan_follows_the_requests_that_come_and_go(make_config: Any) -> None:
    settings = {"infer.max_reqs": 3, "infer.depth": 2, "reference.delay": True}
    controller, _ = strict_controller(make_config("Llama", {"num_hidden_layers": 1}, **settings))
    plans: list[Plan] = []
    submit = controller.executor.submit
    controller.executor.submit = lambda order: (plans.append(order), submit(order))[1]  # type: ignore[method-assign, func-returns-value, arg-type]
    # Answers of different lengths in three slots: the kinds in a plan change at many steps, and stay at others.
    for index, kind in enumerate([*KINDS, *KINDS[:2]]):
        message = NewRequest(id=str(index), prompt=[1 + index, 2, 3], max_tokens=3 + index % 4, sampling=kind)
        controller.handle([message])
    while not controller.idle:
        controller.step()
    held: dict[int, Sampling] = {}
    seen = set()
    for plan in plans:
        held |= {each.slot: each.sampling for each in plan.admissions}
        how, own = plan.sampling, [held[plan.slots[row]] for row in plan.samples]
        assert how.random == [i for i, s in enumerate(own) if s.temperature > 0]
        assert how.filtered == any(s.top_k for s in own)
        assert how.logprobs == [i for i, s in enumerate(own) if s.logprobs is not None]
        assert how.top_logprobs == max((s.logprobs or 0 for s in own), default=0)
        assert how.penalized == [i for i, s in enumerate(own) if s.presence_penalty]
        assert how.biased == [i for i, s in enumerate(own) if s.bias]
        named = [s.logprob_ids for s in own if s.logprobs is not None]
        assert how.named == (named if any(named) else [])
        seen.add(tuple(plan.slots))
    assert len(plans) > 12 and len(seen) > 1

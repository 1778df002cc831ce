"""Routing through a map of experts to slots gives what a loop over the experts gives."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from evener.contracts.experts import ExpertMap
from evener.contracts.quant import PackedWeight, WeightPart, plain
from evener.ops.parts import load_reference
from evener.ops.reference.linear import PLAIN
from evener.ops.schemas import BUILTIN
from evener_conformance.kit.ops import forbid_nested_ops

SCHEMAS = {schema.name: schema for schema in BUILTIN}
EXPERTS, TOP, HIDDEN, INNER, TOKENS = 5, 2, 12, 7, 23


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


UP, DOWN = noise(EXPERTS, INNER, HIDDEN, seed=1), noise(EXPERTS, HIDDEN, INNER, seed=2)


def stack(matrices: torch.Tensor, slots: Sequence[int]) -> PackedWeight:
    """Slot i holds the matrix of expert ``slots[i]``."""
    rows, columns = matrices.shape[1:]
    parts = [[WeightPart(f"{e}", rows, columns, plain("float32"), {"weight": matrices[e]})] for e in slots]
    return PLAIN.pack_stack(parts, len(slots), "float32", torch.device("cpu"))


def through(experts: ExpertMap, slots: Sequence[int], x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The expert block as a layer computes it: route, map, two grouped linears, weighted sum."""
    static = {"experts": EXPERTS, "top": TOP, "scoring": "softmax", "renormalize": True, "scale": 1.0, "groups": 1,
              "top_groups": 1, "group_best": 1}  # fmt: skip
    ids, weights = load_reference(SCHEMAS["route"])(static, forbid_nested_ops)(logits, None)
    where = experts(ids, torch.arange(len(x), dtype=torch.int32)).flatten()
    h = x.repeat_interleave(TOP, 0)
    for matrices in (UP, DOWN):
        sizes = {"experts": len(slots), "columns": matrices.shape[2], "rows": matrices.shape[1], "dtype": "float32"}
        run = load_reference(SCHEMAS["grouped_linear"])({**sizes, "weight": None}, forbid_nested_ops)
        h = run(h, stack(matrices, slots), where[:, None]).squeeze(1)
    mixed: torch.Tensor = (h.unflatten(0, (-1, TOP)) * weights[..., None]).sum(1)
    return mixed


def dense(x: torch.Tensor, logits: torch.Tensor, here: Sequence[int]) -> torch.Tensor:
    """Every expert for every token, one at a time, weighted by the renormalised top probabilities."""
    out = torch.zeros_like(x)
    probabilities = logits.softmax(-1)
    for t in range(len(x)):
        best = probabilities[t].topk(TOP).indices.tolist()
        total = probabilities[t, best].sum()
        for e in best:
            if e in here:
                out[t] += probabilities[t, e] / total * (DOWN[e] @ (UP[e] @ x[t]))
    return out


@pytest.fixture
def step() -> tuple[torch.Tensor, torch.Tensor]:
    return noise(TOKENS, HIDDEN, seed=3), noise(TOKENS, EXPERTS, seed=4)


def test_a_map_of_one_slot_for_each_expert_gives_what_the_experts_give(
    step: tuple[torch.Tensor, torch.Tensor],
) -> None:
    one = ExpertMap(torch.arange(EXPERTS, dtype=torch.int32)[:, None], torch.ones(EXPERTS, dtype=torch.int32))
    torch.testing.assert_close(through(one, range(EXPERTS), *step), dense(*step, range(EXPERTS)))


def test_redundant_experts_change_routing_but_not_results(step: tuple[torch.Tensor, torch.Tensor]) -> None:
    slots = [4, 3, 2, 1, 0, 2, 2, 0]
    table = torch.tensor([[4, 7, -1], [3, -1, -1], [2, 5, 6], [1, -1, -1], [0, -1, -1]], dtype=torch.int32)
    experts = ExpertMap(table, torch.tensor([2, 1, 3, 1, 1], dtype=torch.int32))
    torch.testing.assert_close(through(experts, slots, *step), dense(*step, range(EXPERTS)))
    where = experts(torch.full((6, 1), 2, dtype=torch.int32), torch.arange(6, dtype=torch.int32))
    assert where.flatten().tolist() == [2, 5, 6, 2, 5, 6]


def test_experts_of_other_ranks_contribute_zero(step: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Each of two ranks has some experts; the sum over the ranks is everything."""
    parts = []
    for here in ([0, 3], [1, 2, 4]):
        table = torch.full((EXPERTS, 1), -1, dtype=torch.int32)
        table[here, 0] = torch.arange(len(here), dtype=torch.int32)
        experts = ExpertMap(table, (table[:, 0] >= 0).int())
        parts.append(through(experts, here, *step))
        torch.testing.assert_close(parts[-1], dense(*step, here))
    torch.testing.assert_close(parts[0] + parts[1], dense(*step, range(EXPERTS)))


def test_the_map_keeps_shape_and_type_and_takes_any_salt() -> None:
    experts = ExpertMap(torch.tensor([[0, 1], [2, -1]], dtype=torch.int32), torch.tensor([2, 1], dtype=torch.int32))
    logical = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
    for dtype in (torch.int32, torch.int64):
        where = experts(logical, torch.tensor([7, 2**31 - 2], dtype=dtype))
        assert where.dtype == torch.int32 and where.tolist() == [[1, 2], [2, 0]]
    assert experts(logical[:0], torch.empty(0, dtype=torch.int32)).shape == (0, 2)

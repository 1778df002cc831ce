"""What a block of experts means: its expansion into other ops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from evener.contracts.ops import OpFunction, Use
from evener.ops.composites import linear_static
from evener.ops.norms import add_norm, any_norm
from evener.ops.ranks import summed

if TYPE_CHECKING:
    import torch

    from evener.contracts.quant import PackedWeight

ROUTE = ("experts", "top", "scoring", "groups", "top_groups", "group_best", "renormalize", "scale")


class MoEWeights(NamedTuple):
    """What a ``moe_block`` needs beside its inputs; None where the model has no such weight.

    Stacked weights and biases are indexed by slot.

    Attributes:
        norm: [hidden], of the norm before; a layer norm's is float32, and a biased one's [2 * hidden], the bias behind
            the weight.
        router: [experts, hidden]; its products are float32.
        gate_up: a stack of [2 * inner, hidden], the gate's rows first; for clamped_swiglu in turn with those of up.
        down: a stack of [hidden, inner].
        slots: int32 [experts, copies], where each expert is (``ExpertMap``).
        copies: int32 [experts], how many slots each has.
        router_bias: [experts].
        correction: float32 [experts], added to scores for the choice only.
        gate_up_bias: [slots, 2 * inner].
        down_bias: [slots, hidden]; of ranks one has it.
        shared_gate_up: [2 * shared_inner, hidden], of the shared experts.
        shared_down: [hidden, shared_inner].
        shared_gate: [1, hidden]; its product's sigmoid is a factor on what the shared experts give.
        post_norm: [hidden], of the norm after the block; as ``norm``.
    """

    norm: torch.Tensor
    router: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    slots: torch.Tensor
    copies: torch.Tensor
    router_bias: torch.Tensor | None = None
    correction: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    shared_gate_up: PackedWeight | None = None
    shared_down: PackedWeight | None = None
    shared_gate: PackedWeight | None = None
    post_norm: torch.Tensor | None = None


def _act(static: Mapping[str, Any], use: Use, inner: int, each: int = 1) -> OpFunction:
    """For ``each`` rows a token."""
    kind = {k: static[k] for k in ("activation", "dtype", "alpha", "limit")}
    return use("act_and_mul", sizes={"T": each}, inner=inner, **kind)


def _routed(static: Mapping[str, Any], use: Use) -> OpFunction:
    """Normed rows [T, hidden] and weights to what the chosen experts add up to."""
    score = use("linear", **linear_static(static["router"]))
    route = use("route", **{k: static[k] for k in ROUTE})
    place = use("place_experts", experts=static["experts"])
    weigh_input, top = static["weigh_input"], static["top"]
    rise = use("grouped_linear", sizes={"T" if weigh_input else "K": top}, **linear_static(static["gate_up"]))
    act = _act(static, use, static["inner"], top)
    fall = use("grouped_linear", sizes={"T": top}, **linear_static(static["down"]))
    mix = use("mix_experts", sizes={"K": top}, hidden=static["hidden"], dtype=static["dtype"])

    def run(x: torch.Tensor, w: MoEWeights) -> torch.Tensor:
        ids, weights = route(score(x, w.router, w.router_bias), w.correction)
        slots = place(ids, w.slots, w.copies)
        single = slots.reshape(-1, 1)
        if weigh_input:
            rows = (x.float()[:, None] * weights[..., None]).flatten(0, 1).to(x.dtype)
            raised = rise(rows, w.gate_up, single, w.gate_up_bias)
            weights = weights.new_ones(weights.shape)
        else:
            raised = rise(x, w.gate_up, slots, w.gate_up_bias)
        h = act(raised.flatten(0, 1))
        del raised  # what stands between two products is the largest of all
        fallen = fall(h, w.down, single, w.down_bias)
        del h
        return mix(fallen.view(*slots.shape, -1), weights)  # type: ignore[no-any-return]

    return run


def _shared(static: Mapping[str, Any], use: Use) -> OpFunction | None:
    """The experts that every row passes through; None if there are none."""
    if not static["shared_inner"]:
        return None
    rise, fall = (use("linear", **linear_static(static[k])) for k in ("shared_gate_up", "shared_down"))
    act = _act(static, use, static["shared_inner"])
    gate = use("linear", **linear_static(static["shared_gate"])) if static["shared_gate"] is not None else None

    def run(x: torch.Tensor, w: MoEWeights) -> torch.Tensor:
        y: torch.Tensor = fall(act(rise(x, w.shared_gate_up, None)), w.shared_down, None)
        return y if gate is None else y * gate(x, w.shared_gate, None).sigmoid()

    return run


def moe_block(static: Mapping[str, Any], use: Use) -> OpFunction:
    if static["communicator"] is not None:
        return summed("moe_block", static, use, weights=2)
    begin, routed, shared = add_norm(static, use), _routed(static, use), _shared(static, use)
    post = any_norm(static, use) if static["post_norm"] else None

    def run(x: torch.Tensor, residual: torch.Tensor, w: MoEWeights) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = begin(x, residual, w.norm)
        y = routed(x, w)
        if shared is not None:
            y = y + shared(x, w)
        return (post(y, w.post_norm) if post is not None else y), residual

    return run

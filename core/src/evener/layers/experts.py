"""A block of experts as a layer declares it: router, one stack of weights a projection, shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evener.layers.builder import Builder
from evener.layers.declared import LinearWeight, Table, WeightGroup, joined
from evener.layers.norms import norm_weight
from evener.layers.settings import known_activation
from evener.ops.expert_composites import MoEWeights

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Experts of one layer; names refer to the checkpoint, relative to the layer.

    Attributes:
        experts: how many there are.
        top: how many a token has.
        inner: width between the projections of one.
        activation: as ``act_and_mul`` has it, as are ``alpha`` and ``limit``.
        scoring: as ``route`` has it, as are ``groups``, ``top_groups``, ``group_best``, ``renormalize`` and ``scale``.
        weigh_input: routing weights are factors on the experts' inputs.
        bias: router and experts have biases (experts' as stacked tensors).
        correction: name of the bias that is for choosing only, or None.
        shared_inner: width of the shared experts together; 0 if there are none.
        router: name of the router.
        at: prefix of the experts' tensors; an expert's number follows.
        projections: names of gate, up and down of one expert.
        transposed: stacked tensors are stored as [experts, columns, rows].
        shared: prefix of the shared experts.
        shared_gate: name of the gate on them, or None.
        post_norm: name of a norm after the block, or None.
        norm: name of the norm before.
    """

    experts: int
    top: int
    inner: int
    activation: str = "silu"
    alpha: float = 1.0
    limit: float = 0.0
    scoring: str = "softmax"
    groups: int = 1
    top_groups: int = 1
    group_best: int = 1
    renormalize: bool = True
    scale: float = 1.0
    weigh_input: bool = False
    bias: bool = False
    correction: str | None = None
    shared_inner: int = 0
    router: str = "mlp.gate"
    at: str = "mlp.experts"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    transposed: bool = False
    shared: str = "mlp.shared_experts"
    shared_gate: str | None = None
    post_norm: str | None = None
    norm: str = "post_attention_layernorm"

    def declare(self, build: Builder, prefix: str, common: Mapping[str, Any]) -> tuple[WeightGroup, dict[str, Any]]:
        """The block of layer ``prefix``; ``common``: hidden, dtype, eps and offset of its norms."""
        hidden, count, at = common["hidden"], self.experts, f"{prefix}.{self.at}"
        gate, up, down = (f"{at}.{{}}.{name}.weight" for name in self.projections)
        router_parts = {f"{prefix}.{self.router}.weight": count}
        rise, fall = [gate, up, f"{at}.gate_up_proj"], [down, f"{at}.down_proj"]
        inner = build.share_inner(self.inner, "inner features of an expert", rise, fall)
        # Stacked tensors hold gates, then ups; or pairs of one each, where the activation takes them so.
        paired, both = self.activation == "clamped_swiglu", 2 * self.inner
        raised = [inner * 2] if paired else joined(inner.behind(first, both) for first in (0, self.inner))
        stacked = [(f"{at}.gate_up_proj", span) for span in raised]
        linears: dict[str, LinearWeight | None] = {
            "router": build.linear(f"{prefix}.{self.router}", router_parts, hidden, out="float32"),
            "gate_up": build.experts(
                f"{at}.gate_up", count, stacked if paired else {gate: inner, up: inner}, hidden, stacked=stacked,
                transposed=self.transposed,
            ),
            "down": build.experts(
                f"{at}.down", count, {down: hidden}, inner, stacked={f"{at}.down_proj": hidden},
                transposed=self.transposed,
            ),
            **self._declare_shared(build, prefix, hidden),
        }  # fmt: skip

        def bias(name: str, *shape: int, wide: bool = False, **more: Any) -> Any:
            return build.weight(name, *shape, dummy="zeros", dtype="float32" if wide else None, **more)

        gate_up_bias, down_bias = f"{at}.gate_up_proj_bias", f"{at}.down_proj_bias"
        cut: dict[str, Any] = {"sources": [gate_up_bias] * len(raised), "spans": raised, "axis": 1}

        weights = build.group(
            MoEWeights, norm=norm_weight(build, prefix, self.norm, hidden, common),
            post_norm=norm_weight(build, prefix, self.post_norm, hidden, common),
            **linears, **resident(build, prefix, count),
            router_bias=bias(f"{prefix}.{self.router}.bias", count) if self.bias else None,
            correction=bias(f"{prefix}.{self.correction}", count, wide=True) if self.correction else None,
            gate_up_bias=bias(gate_up_bias, count, 2 * inner.size, **cut) if self.bias else None,
            down_bias=bias(down_bias, count, hidden) if self.bias and build.once(down_bias) else None,
        )  # fmt: skip
        names = ("experts", "top", "scoring", "groups", "top_groups", "group_best", "renormalize", "scale",
                 "activation", "alpha", "limit", "weigh_input")  # fmt: skip
        known_activation(self.activation, "clamped_swiglu")
        static = {**common, **{name: getattr(self, name) for name in names}, **linears, "inner": inner.size}
        shared = linears["shared_down"]
        static["shared_inner"] = 0 if shared is None else shared.columns
        return weights, {**static, "post_norm": self.post_norm is not None, "communicator": build.communicator}

    def _declare_shared(self, build: Builder, prefix: str, hidden: int) -> dict[str, LinearWeight | None]:
        found: dict[str, LinearWeight | None] = dict.fromkeys(("shared_gate_up", "shared_down", "shared_gate"))
        if self.shared_inner:
            at = f"{prefix}.{self.shared}"
            rise, fall = [f"{at}.gate_proj.weight", f"{at}.up_proj.weight"], [f"{at}.down_proj.weight"]
            inner = build.share_inner(self.shared_inner, "inner features of the shared experts", rise, fall)
            found["shared_gate_up"] = build.linear(f"{at}.gate_up_proj", dict.fromkeys(rise, inner), hidden)
            found["shared_down"] = build.linear(f"{at}.down_proj", dict.fromkeys(fall, hidden), inner)
        if self.shared_gate is not None:
            name = f"{prefix}.{self.shared_gate}"
            found["shared_gate"] = build.linear(name, {f"{name}.weight": 1}, hidden)
        return found


def resident(build: Builder, prefix: str, experts: int) -> dict[str, Table]:
    """The map that gives every expert one slot, its own number. One a layer: balancing changes them one by one."""

    def slots(device: torch.device) -> torch.Tensor:
        import torch

        return torch.arange(experts, dtype=torch.int32, device=device)[:, None]

    found = {"slots": build.table(("expert slots", prefix), experts * 4, slots)}
    copies = build.table(("expert copies", prefix), experts * 4, lambda device: slots(device).squeeze(1) * 0 + 1)
    return {**found, "copies": copies}

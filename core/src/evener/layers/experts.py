"""A block of experts as a layer declares it: router, one stack of weights a projection, shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evener.layers.builder import Builder
from evener.layers.declared import LinearWeight, Table, WeightGroup
from evener.layers.norms import norm_weight
from evener.ops.expert_composites import MoEWeights

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Experts of one layer; names refer to the checkpoint, relative to the layer.

    Attributes:
        experts, top, inner: how many, how many a token, and the width of one.
        activation, alpha, limit: as ``act_and_mul`` has them.
        scoring, groups, top_groups, group_best, renormalize, scale: as ``route`` has them.
        weigh_input: routing weights are factors on the experts' inputs.
        bias: router and experts have biases (experts' as stacked tensors).
        correction: name of the bias that is for choosing only, or None.
        shared_inner: width of the shared experts together; 0 if there are none.
        router: name of the router; at: prefix of the experts' tensors; projections: gate, up and down of one expert.
        transposed: stacked tensors are stored as [experts, columns, rows].
        shared: prefix of the shared experts; shared_gate: name of the gate on them, or None.
        post_norm, norm: names of the norms after (or None) and before.
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
        linears: dict[str, LinearWeight | None] = {
            "router": build.linear(f"{prefix}.{self.router}", router_parts, hidden, out="float32"),
            "gate_up": build.experts(
                f"{at}.gate_up", count, {gate: self.inner, up: self.inner}, hidden,
                stacked={f"{at}.gate_up_proj": 2 * self.inner}, transposed=self.transposed,
            ),
            "down": build.experts(
                f"{at}.down", count, {down: hidden}, self.inner, stacked={f"{at}.down_proj": hidden},
                transposed=self.transposed,
            ),
            **self._declare_shared(build, prefix, hidden),
        }  # fmt: skip

        def bias(name: str, *shape: int, wide: bool = False) -> Any:
            return build.weight(name, *shape, dummy="zeros", dtype="float32" if wide else None)

        weights = build.group(
            MoEWeights, norm=norm_weight(build, prefix, self.norm, hidden, common),
            post_norm=norm_weight(build, prefix, self.post_norm, hidden, common),
            **linears, **resident(build, prefix, count),
            router_bias=bias(f"{prefix}.{self.router}.bias", count) if self.bias else None,
            correction=bias(f"{prefix}.{self.correction}", count, wide=True) if self.correction else None,
            gate_up_bias=bias(f"{at}.gate_up_proj_bias", count, 2 * self.inner) if self.bias else None,
            down_bias=bias(f"{at}.down_proj_bias", count, hidden) if self.bias else None,
        )  # fmt: skip
        names = ("experts", "top", "scoring", "groups", "top_groups", "group_best", "renormalize", "scale", "inner",
                 "activation", "alpha", "limit", "weigh_input", "shared_inner")  # fmt: skip
        static = {**common, **{name: getattr(self, name) for name in names}, **linears}
        return weights, {**static, "post_norm": self.post_norm is not None}

    def _declare_shared(self, build: Builder, prefix: str, hidden: int) -> dict[str, LinearWeight | None]:
        found: dict[str, LinearWeight | None] = dict.fromkeys(("shared_gate_up", "shared_down", "shared_gate"))
        if self.shared_inner:
            at = f"{prefix}.{self.shared}"
            rise = {f"{at}.gate_proj.weight": self.shared_inner, f"{at}.up_proj.weight": self.shared_inner}
            found["shared_gate_up"] = build.linear(f"{at}.gate_up_proj", rise, hidden)
            found["shared_down"] = build.linear(
                f"{at}.down_proj", {f"{at}.down_proj.weight": hidden}, self.shared_inner
            )
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

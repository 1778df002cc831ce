"""Mixture of experts: how a layer declares its router, its experts (one stack per projection) and shared experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evener.contracts.declared import LinearWeight, Table, WeightGroup
from evener.contracts.sizes import merge_spans
from evener.contracts.statics import MoEStatic, NormStatic
from evener.contracts.weights import MoEWeights
from evener.errors import ArchitectureError
from evener.layers.builder import Builder
from evener.layers.config_json import known_activation
from evener.layers.norms import norm_weight

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Experts of one layer. Names are the checkpoint's, relative to the layer, without ``.weight`` and ``.bias``.

    Attributes:
        experts: number of experts.
        top: experts per token.
        inner: width between the projections of one expert.
        activation: one that the op ``act_and_mul`` knows.
        alpha, limit: parameters of the activation ``clamped_swiglu``.
        scoring: how logits become weights. This and the next five are parameters of the op ``route``.
        groups: equal groups of neighbouring experts, of which a token uses some; 1: none.
        top_groups: groups per token.
        group_best: how many of a group's best scores are added up to rank it.
        renormalize: whether the weights of the chosen experts are divided by their sum.
        scale: factor on the weights.
        router_weight_on_input: whether the weights are factors on the experts' inputs, not on their results.
        bias: whether the router and the experts have biases (those of experts as stacked tensors).
        correction: name of a bias on the scores that is used to choose experts only, or None.
        shared_inner: width of all shared experts together; 0: none.
        router: name of the router.
        prefix: of the experts' tensors; the expert's number follows.
        projections: names of gate, up and down of one expert.
        transposed: whether stacked tensors are stored as [experts, columns, rows].
        shared: prefix of the shared experts.
        shared_gate: name of the sigmoid gate on the shared experts' result, or None.
        post_norm: name of a norm after the block, or None.
        norm: name of the norm before the block.
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
    router_weight_on_input: bool = False
    bias: bool = False
    correction: str | None = None
    shared_inner: int = 0
    router: str = "mlp.gate"
    prefix: str = "mlp.experts"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    transposed: bool = False
    shared: str = "mlp.shared_experts"
    shared_gate: str | None = None
    post_norm: str | None = None
    norm: str = "post_attention_layernorm"

    def declare(self, build: Builder, prefix: str, common: NormStatic) -> tuple[WeightGroup, MoEStatic]:
        """Declare the experts of layer ``prefix``: their weights, and the static parameters of their ``moe_block``."""
        hidden, count, module = common["hidden"], self.experts, f"{prefix}.{self.prefix}"
        each, rest = divmod(count, self.groups)
        if rest or self.group_best > each or not self.top <= each * self.top_groups <= count:
            raise ArchitectureError(
                f"{module}: a token cannot use {self.top} of {count} experts, from {self.top_groups} of {self.groups} "
                f"equal groups that are ranked by their best {self.group_best}; correct these numbers in config.json"
            )
        gate, up, down, both_of_one = (f"{module}.{{}}.{n}.weight" for n in (*self.projections, "gate_up_proj"))
        router_parts = {f"{prefix}.{self.router}.weight": count}
        gate_up_names, down_names = [gate, up, f"{module}.gate_up_proj"], [down, f"{module}.down_proj"]
        group = build.expert_group(count)
        inner = group.shard_inner(self.inner, "features in an expert (see infer.ep_size)", gate_up_names, down_names)
        # Stacked tensors hold all gate rows, then all up rows; for clamped_swiglu, gate and up rows alternate.
        paired, both = self.activation == "clamped_swiglu", 2 * self.inner
        gate_up_spans = [inner * 2] if paired else merge_spans(inner.shifted(first, both) for first in (0, self.inner))
        stacked = [(f"{module}.gate_up_proj", span) for span in gate_up_spans]
        parts = stacked if paired else [(gate, inner), (up, inner)]
        # Rows alternate in a matrix of one expert, too.
        parts = [(both_of_one, inner * 2)] if paired and any(build.stored([both_of_one])) else parts
        router = build.linear(f"{prefix}.{self.router}", router_parts, hidden, out="float32")
        gate_up_linear = group.experts(
            f"{module}.gate_up", count, parts, hidden, stacked=stacked, transposed=self.transposed
        )
        down_linear = group.experts(
            f"{module}.down", count, {down: hidden}, inner, stacked={down_names[1]: hidden}, transposed=self.transposed
        )
        shared_gate_up, shared_down, shared_gate = self._declare_shared(build, prefix, hidden)

        def bias(name: str, *shape: int, wide: bool = False, build: Builder = build, **more: Any) -> Any:
            return build.weight(name, *shape, dummy="zeros", dtype="float32" if wide else None, **more)

        gate_up_bias, down_bias = f"{module}.gate_up_proj_bias", f"{module}.down_proj_bias"
        own_bias = self.bias and group.on_first_rank(down_bias)
        cut: dict[str, Any] = {"sources": [gate_up_bias] * len(gate_up_spans), "spans": gate_up_spans, "axis": 1}

        weights = build.group(
            MoEWeights, norm=norm_weight(build, prefix, self.norm, hidden, common),
            post_norm=norm_weight(build, prefix, self.post_norm, hidden, common),
            router=router, gate_up=gate_up_linear, down=down_linear, shared_gate_up=shared_gate_up,
            shared_down=shared_down, shared_gate=shared_gate, **identity_expert_map(group, prefix, count),
            router_bias=bias(f"{prefix}.{self.router}.bias", count) if self.bias else None,
            correction=bias(f"{prefix}.{self.correction}", count, wide=True) if self.correction else None,
            gate_up_bias=bias(gate_up_bias, count, 2 * inner.size, build=group, **cut) if self.bias else None,
            down_bias=bias(down_bias, count, hidden, build=group) if own_bias else None,
        )  # fmt: skip
        static: MoEStatic = {
            **common, "experts": count, "top": self.top, "scoring": self.scoring, "groups": self.groups,
            "top_groups": self.top_groups, "group_best": self.group_best, "renormalize": self.renormalize,
            "scale": self.scale, "inner": inner.size, "alpha": self.alpha, "limit": self.limit,
            "activation": known_activation(self.activation, "clamped_swiglu"),
            "router_weight_on_input": self.router_weight_on_input, "router": router, "gate_up": gate_up_linear,
            "down": down_linear, "shared_inner": 0 if shared_down is None else shared_down.columns,
            "shared_gate_up": shared_gate_up, "shared_down": shared_down, "shared_gate": shared_gate,
            "post_norm": self.post_norm is not None, "communicator": build.communicator,
            "placement": None,
        }  # fmt: skip
        return weights, static

    def _declare_shared(self, build: Builder, prefix: str, hidden: int) -> tuple[LinearWeight | None, ...]:
        """Gate and up, down, and the sigmoid gate of the shared experts."""
        gate_up = down = gate = None
        if self.shared_inner:
            module = f"{prefix}.{self.shared}"
            gate_up_names = [f"{module}.gate_proj.weight", f"{module}.up_proj.weight"]
            down_names = [f"{module}.down_proj.weight"]
            inner = build.shard_inner(self.shared_inner, "inner features of shared experts", gate_up_names, down_names)
            gate_up = build.linear(f"{module}.gate_up_proj", dict.fromkeys(gate_up_names, inner), hidden)
            down = build.linear(f"{module}.down_proj", dict.fromkeys(down_names, hidden), inner)
        if self.shared_gate is not None:
            name = f"{prefix}.{self.shared_gate}"
            gate = build.linear(name, {f"{name}.weight": 1}, hidden)
        return gate_up, down, gate


def identity_expert_map(build: Builder, prefix: str, experts: int) -> dict[str, Table]:
    """The expert map in which every expert has one slot, its own number. Each layer has a map of its own, because load
    balancing changes them layer by layer."""

    def slots(device: torch.device) -> torch.Tensor:
        import torch

        return torch.arange(experts, dtype=torch.int32, device=device)[:, None]

    found = {"slots": build.table(("expert slots", prefix), experts * 4, slots)}
    copies = build.table(("expert copies", prefix), experts * 4, lambda device: slots(device).squeeze(1) * 0 + 1)
    return {**found, "copies": copies}

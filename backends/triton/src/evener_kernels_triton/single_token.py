"""One token's experts: the choice of experts and their products in two launches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from evener.contracts.declared import LinearWeight
from evener.contracts.ops import OpCall
from evener.contracts.quant import PackedWeight
from evener.contracts.statics import MoEStatic, RouteStatic
from evener.contracts.weights import MoEWeights
from evener_kernels_triton.jit.experts import single_token_down_kernel, single_token_up_kernel
from evener_kernels_triton.linear import gemv, is_packed, is_stored, persistent_gemv, project_rows
from evener_kernels_triton.primitives import act_rows, norm_rows, rows_of
from evener_kernels_triton.stored import WORD, words
from evener_kernels_triton.tuning import SingleToken, Tuning, power_of_two

#: From x, residual and weights to the sum of all experts and the residual after it.
Block = Callable[[torch.Tensor, torch.Tensor, MoEWeights], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Choice:
    """How experts are chosen: the static parameters of ``route``, as arguments of the kernels."""

    scale: float
    sizes: Mapping[str, Any]

    @classmethod
    def of(cls, static: RouteStatic) -> Choice:
        """From the op's parameters."""
        groups = static["groups"]
        each = static["experts"] // groups
        sizes = {
            "SCORING": static["scoring"], "TOP": static["top"], "GROUPS": groups, "EACH": each,
            "TOP_GROUPS": static["top_groups"], "GROUP_BEST": static["group_best"],
            "RENORMALIZE": bool(static["renormalize"]), "GP": power_of_two(groups), "EP": power_of_two(each),
        }  # fmt: skip
        return cls(float(static["scale"]), sizes)

    @property
    def places(self) -> int:
        """Number of experts with padding."""
        return int(self.sizes["GP"] * self.sizes["EP"])


def shared_weights(s: MoEStatic) -> list[LinearWeight]:
    """The weights of the shared experts; none if the layer has no such experts."""
    declared = (s["shared_gate_up"], s["shared_down"], s["shared_gate"]) if s["shared_inner"] else ()
    return [weight for weight in declared if weight is not None]


def needs_own_launch(weight: LinearWeight) -> bool:
    """Whether products of one token with ``weight`` have neither norm nor activation in them."""
    return is_packed(weight) or (is_stored(weight) and weight.columns % WORD > 0)


def shared_choices(tuning: Tuning, s: MoEStatic) -> int:
    """How many choices the shared experts are of one token, each as wide as an expert; 0 if they have launches of their
    own: another width, rows that are not aligned, weights that are not plain, too many lines of a tile without a
    choice."""
    wide = s["shared_inner"]
    declared = (s["gate_up"], s["down"], *shared_weights(s)[:2])
    if not wide or wide % s["inner"] or s["inner"] % 16 or any(is_packed(w) or is_stored(w) for w in declared):
        return 0
    choices = s["top"] + wide // s["inner"]
    apart = tuning.part("shared").changed("apart") or 4 * choices < 3 * power_of_two(choices)
    return 0 if apart else wide // s["inner"]


def single_token_block(tuning: Tuning, call: OpCall, sizes: SingleToken) -> Block:
    """One token: each program does the routing for itself, which saves launches. Shared experts are choices that are
    always made, or have launches of their own."""
    s = cast(MoEStatic, call.static)
    dtype = getattr(torch, s["dtype"])
    choice, top, inner, hidden = Choice.of(s), s["top"], s["inner"], s["hidden"]
    norm: dict[str, Any] = {"eps": s["eps"], "offset": s["offset"]}
    up, down, more = sizes.up, sizes.down, shared_choices(tuning, s)
    apart = any(needs_own_launch(w) for w in shared_weights(s))
    projects = {id(w): project_rows(tuning, call, torch.float32 if w is s["shared_gate"] else dtype, w)
                for w in shared_weights(s)}  # fmt: skip

    def project(declared: LinearWeight | None, x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        return projects[id(declared)](x, weight.data, None)

    stored = any(is_stored(w) for w in shared_weights(s)[:1])

    def gate_of(total: torch.Tensor, weight: PackedWeight, w: MoEWeights) -> torch.Tensor:
        return persistent_gemv(tuning, total, weight.data, torch.float32, gain=w.norm, **norm)

    def shared(total: torch.Tensor, w: MoEWeights) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if not s["shared_inner"]:
            return None, None
        assert w.shared_gate_up is not None and w.shared_down is not None, "declared with shared experts"
        if more:
            return None, None if w.shared_gate is None else gate_of(total, w.shared_gate, w)
        gate_up_weight, down_weight, gate = w.shared_gate_up.data, w.shared_down.data, None
        if apart:
            y, _ = norm_rows(tuning, total, None, w.norm, s["eps"], s["offset"], dtype)
            wide = project(s["shared_gate_up"], y, w.shared_gate_up)
            if w.shared_gate is not None:
                gate = project(s["shared_gate"], y, w.shared_gate)
            inside = act_rows(tuning, wide, s["shared_inner"], s["activation"])
            return project(s["shared_down"], inside, w.shared_down), gate
        if tuning.persistent_gemv(s["shared_inner"], hidden, 2, stored) is not None:
            inside = persistent_gemv(
                tuning, total, gate_up_weight, dtype, gain=w.norm, activation=s["activation"], **norm
            )
        else:
            y, _ = norm_rows(tuning, total, None, w.norm, s["eps"], s["offset"], dtype)
            inside = gemv(tuning, y, gate_up_weight, dtype, activation=s["activation"])
        if w.shared_gate is not None:
            gate = gate_of(total, w.shared_gate, w)
        return gemv(tuning, inside, down_weight, dtype), gate

    def run(x: torch.Tensor, residual: torch.Tensor, w: MoEWeights) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        logits = persistent_gemv(
            tuning, rows_of(x), w.router.data, torch.float32, bias=w.router_bias, residual=rows_of(residual),
            total=total, gain=w.norm, **norm,
        )  # fmt: skip
        extra, gate = shared(total, w)
        inside = torch.empty(top + more, inner, dtype=dtype, device=x.device)
        y = torch.empty(1, hidden, dtype=dtype, device=x.device)
        common = {"CORRECT": w.correction is not None, "OVERLAP": tuning.overlap, **choice.sizes, **tuning.launch}
        correction, most = w.correction if w.correction is not None else logits, w.slots.shape[1]
        up_elements, up_scales, up_blocks, up_form = words(w.gate_up.data)
        down_elements, down_scales, down_blocks, down_form = words(w.down.data)
        always = (w.shared_gate_up, w.shared_down) if more else (None, None)
        shared_up, shared_down = (each.data if each is not None else x for each in always)
        tile, aligned = down.k, all(each.data_ptr() % 16 == 0 for each in (down_elements, shared_down))
        # Keep these two in order: the second reads what the first has waited for.
        single_token_up_kernel[(top + more, min(up.m, -(-inner // up.n)))](
            logits, correction, w.slots, total, w.norm, up_elements, up_scales,
            w.gate_up_bias if w.gate_up_bias is not None else x, shared_up, inside, most, inner, hidden, up_blocks,
            up_scales.stride(0) if up_form.kind else 0, choice.scale, s["eps"], s["offset"], float(s["alpha"]),
            float(s["limit"]), BIAS=w.gate_up_bias is not None, ACT=s["activation"], EXTRA=more, BN=up.n, BK=up.k,
            num_warps=up.warps, **up_form.word_constants(tuning.converts), **common,
        )  # fmt: skip
        single_token_down_kernel[(-(-hidden // down.n),)](
            logits, correction, w.slots, inside, down_elements, down_scales,
            w.down_bias if w.down_bias is not None else x, shared_down, extra if extra is not None else x,
            gate if gate is not None else x, y, most, hidden, inner, down_blocks,
            down_scales.stride(0) if down_form.kind else 0, choice.scale, BIAS=w.down_bias is not None,
            EXTRA=more, ALIGNED=aligned, ADD=extra is not None, GATE=gate is not None, TP=power_of_two(top + more),
            BN=down.n, BK=tile, AHEAD=min(3, -(-inner // tile)), ROLL=down.stages > 1, num_warps=down.warps,
            **down_form.word_constants(tuning.converts), **common,
        )  # fmt: skip
        return y, total

    return run

"""Experts: routing, products with the matrices of a stack, and the whole block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch

from evener.contracts.declared import LinearWeight
from evener.contracts.experts import ExpertMap
from evener.contracts.ops import OpCall, OpFunction, Variant
from evener.contracts.quant import PackedWeight, Rounding
from evener.contracts.statics import ExpertsStatic, MoEStatic, RouteStatic
from evener.contracts.weights import MoEWeights
from evener.ops.reference.linear import PLAIN
from evener_kernels_triton.jit.experts import (
    grouped_large_kernel,
    grouped_small_kernel,
    mix_kernel,
)
from evener_kernels_triton.jit.routing import list_kernel, route_kernel, score_kernel
from evener_kernels_triton.kernel import ACTIVATIONS, PRECISION, TritonKernel
from evener_kernels_triton.linear import (
    Matrix,
    ProductKernel,
    is_packed,
    is_stored,
    product_bytes,
    project_rows,
    within,
)
from evener_kernels_triton.packed import PACKED, PackedMatrix, segments_of
from evener_kernels_triton.packed_experts import ExpertAssignment, packed_grouped
from evener_kernels_triton.primitives import act_rows, norm_rows, rows_of
from evener_kernels_triton.rounded import RoundedRows, norm_round, rounding_bytes, rounds
from evener_kernels_triton.rounded_experts import rounded_grouped
from evener_kernels_triton.rounded_values import round_values, rounded_values_bytes, rounds_values
from evener_kernels_triton.single_token import (
    Block,
    Choice,
    needs_own_launch,
    shared_choices,
    shared_weights,
    single_token_block,
)
from evener_kernels_triton.stored import STORED, pieces
from evener_kernels_triton.tuning import Tuning, power_of_two
from evener_kernels_triton.variants import (
    combined,
    grouped_variants,
    persistent_gemv_variants,
    rounded_grouped_variants,
    single_token_down_variants,
)

#: Up to this many tokens, every program searches all choices for its own instead of reading a list; no tile is smaller.
MAX_DIRECT_TOKENS = 16
#: Routing compares every expert with every other one, so their number is limited.
MAX_EXPERTS = 512
#: Most pairs that are listed at a time if one list may get all of them. The lists of 128 matrices then take 16 MiB, and
#: an even distribution gives each matrix 256 pairs, enough to read the matrix again.
MAX_PAIRS = 32768
#: Bytes of the copies of x that matrices in act-order get at a time, if a token's alone are not more.
MAX_GATHERED = 128 << 20
#: Limit on the matrices that a row names, which may be more than are here: some may be on other ranks.
MAX_MATRICES_PER_ROW = 32
GATED = (*ACTIVATIONS, "clamped_swiglu")


def route(
    tuning: Tuning, choice: Choice, logits: torch.Tensor, correction: torch.Tensor | None, *,
    bias: torch.Tensor | None = None, slots: torch.Tensor | None = None, copies: torch.Tensor | None = None,
    lists: torch.Tensor | None = None, counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Ids (slots, if a map is given) and weights, each [T, top]. ``logits``: float32 [T, experts], or [parts, T,
    experts] to be summed. ``lists`` and ``counts`` (zeros) of ``ExpertAssignment`` are also written, if given."""
    parts = logits.shape[0] if logits.dim() == 3 else 1
    logits = rows_of(logits)
    tokens, top = logits.shape[-2], choice.sizes["TOP"]
    ids = torch.empty(tokens, top, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, top, dtype=torch.float32, device=logits.device)
    if tokens:
        route_kernel[(tokens,)](
            logits, bias if bias is not None else logits, correction if correction is not None else logits,
            slots if slots is not None else ids, copies if copies is not None else ids, ids, weights,
            lists if lists is not None else ids, counts if counts is not None else ids,
            logits.stride(-2), logits.stride(0) if parts > 1 else 0, slots.shape[1] if slots is not None else 1,
            lists.shape[1] if lists is not None else 1, choice.scale, PLACE=slots is not None, LIST=lists is not None,
            PARTS=parts, BIAS=bias is not None, CORRECT=correction is not None,
            OVERLAP=tuning.overlap, num_warps=1, **choice.sizes, **tuning.launch,
        )  # fmt: skip
    return ids, weights


def scores(tuning: Tuning, x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, columns] times a router's weight [experts, columns], in float32, as parts [parts, T, experts]. ``counts``
    are set to zero."""
    (tokens, columns), experts = x.shape, weight.shape[0]
    p, parts = tuning.scores(tokens, experts, columns, weight.element_size())
    y = torch.empty(parts, tokens, experts, dtype=torch.float32, device=x.device)
    each = -(-columns // (parts * p.k)) * p.k
    score_kernel[(-(-tokens // p.m), -(-experts // p.n), parts)](
        x, weight, y, counts if counts is not None else y, tokens, experts, columns,
        len(counts) if counts is not None else 0, x.stride(0), each,
        COUNTS=power_of_two(len(counts)) if counts is not None else 0, BM=p.m, BN=p.n, BK=p.k, PRECISION=PRECISION,
        OVERLAP=tuning.overlap, num_warps=p.warps, num_stages=p.stages, **tuning.launch,
    )  # fmt: skip
    return y if parts > 1 else y[0]


def sort(tuning: Tuning, slots: torch.Tensor, matrices: int, room: int) -> ExpertAssignment:
    """Lists of at most ``room`` pairs for each matrix. Their sizes stay on the device, so that this can be captured."""
    lists = torch.empty(matrices, room, dtype=torch.int32, device=slots.device)
    counts = torch.empty(matrices, dtype=torch.int32, device=slots.device)
    pairs = slots.numel()
    chunk = max(16, min(8192 if tuning.shared >= 96 << 10 else 2048, power_of_two(pairs)))
    list_kernel[(matrices,)](
        slots, lists, counts, pairs, room, CHUNK=chunk, OVERLAP=tuning.overlap, num_warps=4 if chunk <= 2048 else 16,
        **tuning.launch,
    )  # fmt: skip
    return ExpertAssignment(slots, lists, counts)


def grouped(
    tuning: Tuning, x: torch.Tensor, weight: Matrix, y: torch.Tensor, work: ExpertAssignment, *, share: bool,
    bias: torch.Tensor | None = None, activation: str = "", alpha: float = 1.0, limit: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """y [pairs, rows] = weight [matrices, rows, columns] of the pair's matrix times x, which has one row for each pair,
    or for each token (``share``). An activation halves the rows."""
    if isinstance(weight, PackedMatrix):
        return packed_grouped(tuning, x, weight, y, work, share=share, bias=bias, activation=activation, alpha=alpha,
                              limit=limit)  # fmt: skip
    (tokens, top), matrices, listed = work.slots.shape, weight.shape[0], work.lists is not None
    pairs = tokens * top
    columns, halves = weight.shape[2], 2 if activation else 1
    rows = weight.shape[1] // halves
    elements, scales, blocks, form = pieces(weight)
    p = within(tuning.grouped(pairs, matrices, rows, columns, halves, x.element_size()), form)
    lists, counts = (work.lists, work.counts) if listed else (work.slots, work.slots)
    assert lists is not None, "listed"
    extra = bias if bias is not None else x
    common = {
        "TOP": top, "SHARE": share, "ACT": activation, "BIAS": bias is not None, "BM": p.m, "BN": p.n,
        "BK": p.k, "EVEN": columns % p.k == 0, "PRECISION": PRECISION, "OVERLAP": tuning.overlap, "num_warps": p.warps,
        "num_stages": p.stages, **form.constants(tuning.ptx), **tuning.launch,
    }  # fmt: skip
    each = scales.stride(0) if form.kind else 0
    across = -(-rows // p.n)
    if p.flip or not listed:
        grouped_small_kernel[(matrices * across,)](
            x, elements, scales, extra, y, work.slots, lists, counts, tokens, lists.shape[1], rows, columns, blocks,
            each, x.stride(0), y.stride(0), alpha, limit, TP=0 if listed else power_of_two(top), **common,
        )  # fmt: skip
    else:
        grouped_large_kernel[((pairs // p.m + min(pairs, matrices)) * across,)](
            x, elements, scales, extra, y, lists, counts, matrices, lists.shape[1], rows, columns, blocks, each,
            x.stride(0), y.stride(0), alpha, limit, EP=power_of_two(matrices), **common,
        )  # fmt: skip
    return y


def mix(
    tuning: Tuning, x: torch.Tensor, weights: torch.Tensor, *, slots: torch.Tensor | None = None,
    extra: torch.Tensor | None = None, gate: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """x [T, top, hidden] and weights [T, top] to [T, hidden]; see ``mix_kernel``."""
    x, weights = rows_of(x), weights.contiguous()
    tokens, top, hidden = x.shape
    y = torch.empty(tokens, hidden, dtype=x.dtype, device=x.device)
    if tokens:
        block = min(1024, power_of_two(hidden))
        mix_kernel[(tokens, -(-hidden // block))](
            x, weights, slots if slots is not None else x, extra if extra is not None else x,
            gate if gate is not None else x, y, hidden, x.stride(0), x.stride(1),
            extra.stride(0) if extra is not None else 0, SOME=slots is not None, ADD=extra is not None,
            GATE=gate is not None, TOP=top, TP=power_of_two(top), BLOCK=block, OVERLAP=tuning.overlap,
            num_warps=max(1, min(4, block // 256)), **tuning.launch,
        )  # fmt: skip
    return y


class TritonRoute(TritonKernel):
    """One program for each token; an expert's rank is the number of better ones."""

    op = "route"
    batch_invariant = True

    def _unsupported_reason(self, call: OpCall) -> str | None:
        return _too_many_experts(call)

    def build(self, call: OpCall) -> OpFunction:
        tuning, choice = self.tuning, Choice.of(cast(RouteStatic, call.static))

        def run(logits: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            return route(tuning, choice, logits, bias)

        return run


Stack = Callable[..., torch.Tensor]


def project_pairs(tuning: Tuning, call: OpCall, weight: LinearWeight) -> Stack:
    """``grouped`` or ``rounded_grouped`` for a token bucket and a stack, with these sizes."""
    if (how := rounds_values(weight)) is not None:
        return partial(_rounded_values_grouped, tuning, how)
    return partial(rounded_grouped if rounds(tuning, call.bucket.high, weight) else grouped, tuning)


def _rounded_values_grouped(tuning: Tuning, how: Rounding, x: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
    """``packed_grouped`` of rounded activations."""
    rows, factors = round_values(tuning, x, how)
    return packed_grouped(tuning, rows, *rest, factors=factors, **more)


class TritonGroupedLinear(ProductKernel):
    """Pairs are sorted by matrix, then one launch covers all matrices with pairs; very many pairs go in parts."""

    op = "grouped_linear"
    packings = (PLAIN, STORED, PACKED)

    def build(self, call: OpCall) -> OpFunction:
        tuning, rows = self.tuning, call.static["rows"]
        most = _most_pairs(call)
        project = project_pairs(tuning, call, call.static["weight"])

        def run(
            x: torch.Tensor, weight: PackedWeight, slots: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            y = torch.zeros(*slots.shape, rows, dtype=x.dtype, device=x.device)
            if slots.numel():
                each = max(1, most // slots.shape[1])
                parts = (t.split(each) for t in (rows_of(x), slots.contiguous(), y))
                for some, mine, out in zip(*parts, strict=True):
                    # Here a row may name the same matrix twice, so one list may get all pairs.
                    work = sort(tuning, mine, weight.data.shape[0], mine.numel())
                    project(some, weight.data, out.view(-1, rows), work, share=True, bias=bias)
                    del work  # before the next
            return y

        return run

    def workspace(self, call: OpCall) -> int:
        # The call does not say how many matrices a row names.
        matrices = call.static["experts"]
        names = max(matrices, MAX_MATRICES_PER_ROW)
        pairs = min(call.bucket.high * names, max(_most_pairs(call), names))
        weight = call.static["weight"]
        rounded = rounded_values_bytes(call.bucket.high, weight, getattr(torch, call.static["dtype"]).itemsize)
        if rounds(self.tuning, call.bucket.high, weight):
            rounded = rounding_bytes(call.bucket.high, weight.columns, weight.parts[0].format)
        element = getattr(torch, call.static["dtype"]).itemsize
        gathered = pairs * (weight.columns * element + 4) if _in_act_order(weight) else 0
        return int(4 * matrices * (pairs + 1)) + rounded + gathered


class TritonMixExperts(TritonKernel):
    """A weighted sum in one pass."""

    op = "mix_experts"
    batch_invariant = True

    def build(self, call: OpCall) -> OpFunction:
        def run(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return mix(self.tuning, x, weights)

        return run


def _in_act_order(weight: LinearWeight) -> bool:
    return is_packed(weight) and any(part.format.order == "act" for part in weight.parts)


def _most_pairs(call: OpCall) -> int:
    """Pairs that ``grouped_linear`` takes at a time."""
    weight, element = call.static["weight"], getattr(torch, call.static["dtype"]).itemsize
    return min(MAX_PAIRS, MAX_GATHERED // (weight.columns * element)) if _in_act_order(weight) else MAX_PAIRS


def _unread_stacks(gate_up: LinearWeight, down: LinearWeight, activation: str, on_input: bool) -> str | None:
    """Why the products of experts cannot be computed; None if they can."""
    if _in_act_order(gate_up) or _in_act_order(down):
        return "reads experts in act-order in products of their own"
    if is_packed(gate_up) and len(list(segments_of(gate_up.parts))) > 1:
        return "reads gate and up of one format"
    if activation not in GATED:
        return f"does not know activation {activation!r}"
    return "weights the experts' results, not their inputs" if on_input else None


def _rounding_bytes(tuning: Tuning, call: OpCall, s: MoEStatic | ExpertsStatic) -> int:
    """Bytes of rounded activations of the larger of the experts' products."""
    tokens, element = call.bucket.high, getattr(torch, s["dtype"]).itemsize
    return max(
        rounding_bytes(pairs, weight.columns, weight.parts[0].format) if rounds(tuning, tokens, weight)
        else rounded_values_bytes(pairs, weight, element)
        for weight, pairs in ((s["gate_up"], tokens), (s["down"], tokens * s["top"]))
    )  # fmt: skip


def _too_many_experts(call: OpCall) -> str | None:
    places = Choice.of(cast(RouteStatic, call.static)).places
    return None if places <= MAX_EXPERTS else f"routes among at most {MAX_EXPERTS} experts"


class TritonMoeBlock(ProductKernel):
    """One token: norm and router, then the rows of its experts in one pass. More tokens: sorted by expert."""

    op = "moe_block"
    packings = (PLAIN, STORED, PACKED)

    def _unsupported_reason(self, call: OpCall) -> str | None:
        s = cast(MoEStatic, call.static)
        if is_stored(s["router"]):
            return "reads the router's weight in the compute dtype"
        if reason := _unread_stacks(s["gate_up"], s["down"], s["activation"], s["router_weight_on_input"]):
            return reason
        if s["shared_inner"] and s["activation"] not in ACTIVATIONS:
            return f"does not know activation {s['activation']!r} of shared experts"
        return _too_many_experts(call)

    def workspace(self, call: OpCall) -> int:
        s, tokens = cast(MoEStatic, call.static), call.bucket.high
        size: int = getattr(torch, s["dtype"]).itemsize
        # Normed rows and the shared experts' result are kept until the final sum; the shared experts' products come
        # first.
        wide = [3 * s["shared_inner"], s["hidden"] * bool(s["shared_inner"]) + s["top"] * (s["inner"] + s["hidden"])]
        wide.append(s["shared_inner"] + s["top"] * s["inner"])  # of one token, shared experts may be choices
        tuning = self.tuning.with_changes(call.variant)
        sums = max((product_bytes(tuning, call, w) for w in shared_weights(s)), default=0)
        sums += _rounding_bytes(self.tuning, call, s)
        return int(tokens * ((s["hidden"] + max(wide)) * size + 4 * s["experts"])) + sums

    def variants(self, call: OpCall) -> Sequence[Variant]:
        s, tuning = cast(MoEStatic, call.static), self.tuning
        up, down = s["gate_up"], s["down"]
        choices = s["top"] + shared_choices(tuning, s)
        single_token = tuning.single_token(s["hidden"], s["inner"], choices, is_stored(down) or choices > s["top"])
        if is_packed(up) or is_packed(down):
            return []
        if call.bucket.high == 1 and single_token is not None:
            down_sizes = single_token_down_variants(single_token.down)
            sizes = combined({"up": persistent_gemv_variants(single_token.up), "down": down_sizes})
            return [*sizes, {"shared.apart": 1}] if choices > s["top"] else sizes
        tried = dict[str, Sequence[Variant]]()
        for part, weight, halves in (("up", up, 2), ("down", down, 1)):
            rule = rounded_grouped_variants if rounds(tuning, call.bucket.high, weight) else grouped_variants
            tried[part] = rule(tuning, call, up.experts, weight.rows // halves, weight.columns, halves)
        return combined(tried)

    def build(self, call: OpCall) -> OpFunction:
        tuning, s = self.tuning.with_changes(call.variant), cast(MoEStatic, call.static)
        dtype = getattr(torch, s["dtype"])
        choices = s["top"] + shared_choices(tuning, s)
        single_token = tuning.single_token(s["hidden"], s["inner"], choices, is_stored(s["down"]) or choices > s["top"])
        first = tuning.persistent_gemv(s["experts"], s["hidden"], 1)
        whole = not any(needs_own_launch(s[name]) for name in ("gate_up", "down"))
        if call.bucket.high == 1 and single_token is not None and first is not None and whole:
            run = single_token_block(tuning, call, single_token)
        else:
            run = _multi_token_block(tuning, call)

        def block(x: torch.Tensor, residual: torch.Tensor, w: MoEWeights) -> tuple[torch.Tensor, torch.Tensor]:
            y, total = run(x, residual, w)
            if s["post_norm"]:
                assert w.post_norm is not None, "declared with the flag"
                y, _ = norm_rows(tuning, y, None, w.post_norm, s["eps"], s["offset"], dtype)
            return y, total

        return block


class TritonRoutedExperts(ProductKernel):
    """The chosen experts alone, where their choice must be known before they are computed: the activation is part of
    the first product, and few tokens need no lists."""

    op = "routed_experts"
    packings = (PLAIN, STORED, PACKED)

    def _unsupported_reason(self, call: OpCall) -> str | None:
        s = cast(ExpertsStatic, call.static)
        return _unread_stacks(s["gate_up"], s["down"], s["activation"], s["router_weight_on_input"])

    def workspace(self, call: OpCall) -> int:
        s, tokens = cast(ExpertsStatic, call.static), call.bucket.high
        wide = s["top"] * (s["inner"] + s["hidden"]) * getattr(torch, s["dtype"]).itemsize
        return int(tokens * (wide + 4 * s["gate_up"].experts)) + _rounding_bytes(self.tuning, call, s)

    def build(self, call: OpCall) -> OpFunction:
        tuning, s = self.tuning, cast(ExpertsStatic, call.static)
        dtype, top, inner, hidden = getattr(torch, s["dtype"]), s["top"], s["inner"], s["hidden"]
        act: dict[str, Any] = {"activation": s["activation"], "alpha": float(s["alpha"]), "limit": float(s["limit"])}
        list_all = any(rounds(tuning, call.bucket.high, s[name]) for name in ("gate_up", "down"))
        gate_up = project_pairs(tuning.part("up"), call, s["gate_up"])
        down = project_pairs(tuning.part("down"), call, s["down"])

        def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w: MoEWeights) -> torch.Tensor:
            x, tokens = rows_of(x), x.shape[0]
            if not tokens:
                return x
            if w.slots.shape[1] == 1:
                slots = w.slots.view(-1).index_select(0, ids.reshape(-1)).view(ids.shape)
            else:
                slots = ExpertMap(w.slots, w.copies)(ids, torch.arange(tokens, dtype=torch.int32, device=x.device))
            # A token's experts are distinct, and so are their slots: a slot gets a token at most once.
            listed = list_all or tokens > MAX_DIRECT_TOKENS
            work = ExpertAssignment(slots, None, None)
            if listed:
                work = sort(tuning, slots, w.gate_up.data.shape[0], tokens)
            inside = torch.empty(tokens * top, inner, dtype=dtype, device=x.device)
            gate_up(x, w.gate_up.data, inside, work, share=True, bias=w.gate_up_bias, **act)
            rows = torch.empty(tokens * top, hidden, dtype=dtype, device=x.device)
            down(inside, w.down.data, rows, work, share=False, bias=w.down_bias)
            return mix(tuning, rows.view(tokens, top, hidden), weights, slots=slots)

        return run


def _multi_token_block(tuning: Tuning, call: OpCall) -> Block:
    """Any number of tokens."""
    s = cast(MoEStatic, call.static)
    dtype = getattr(torch, s["dtype"])
    choice, top, inner, hidden = Choice.of(s), s["top"], s["inner"], s["hidden"]
    act: dict[str, Any] = {"activation": s["activation"], "alpha": float(s["alpha"]), "limit": float(s["limit"])}

    names = ("shared_gate_up", "shared_down", "shared_gate")
    declared = {name: s[name] for name in names if s["shared_inner"]}  # type: ignore[literal-required]
    rounding = rounds(tuning, call.bucket.high, s["gate_up"])
    # Products of rounded activations are of pairs that are listed.
    list_all = rounding or rounds(tuning, call.bucket.high, s["down"])
    gate_up = project_pairs(tuning.part("up"), call, s["gate_up"])
    down = project_pairs(tuning.part("down"), call, s["down"])
    projects = {name: project_rows(tuning, call, dtype, w) for name, w in declared.items() if w is not None}

    def project(name: str, x: torch.Tensor, weight: PackedWeight | None) -> torch.Tensor:
        assert weight is not None, "declared with shared experts"
        return projects[name](x, weight.data, None)

    def run(x: torch.Tensor, residual: torch.Tensor, w: MoEWeights) -> tuple[torch.Tensor, torch.Tensor]:
        given: torch.Tensor | RoundedRows
        if rounding:
            given, total, y = norm_round(
                tuning, x, residual, w.norm, s["eps"], s["offset"], dtype, w.gate_up.data, keep=True
            )
        else:
            y, total = norm_rows(tuning, x, residual, w.norm, s["eps"], s["offset"], dtype)
            given = y
        assert total is not None, "there is a residual"
        tokens = y.shape[0]
        if not tokens:
            return y, total
        extra = gate = None
        if s["shared_inner"]:
            # Not named: the wide rows are free while the next product runs.
            extra = project(
                "shared_down",
                act_rows(tuning, project("shared_gate_up", y, w.shared_gate_up), s["shared_inner"], s["activation"]),
                w.shared_down,
            )
            gate = project("shared_gate", y, w.shared_gate) if s["shared_gate"] is not None else None
        matrices, lists, counts = w.gate_up.data.shape[0], None, None
        if list_all or tokens > MAX_DIRECT_TOKENS:
            # A token's experts are distinct, and so are their slots: a slot gets a token at most once.
            lists = torch.empty(matrices, tokens, dtype=torch.int32, device=y.device)
            counts = torch.empty(matrices, dtype=torch.int32, device=y.device)
        slots, weights = route(
            tuning, choice, scores(tuning, y, w.router.data, counts), w.correction, bias=w.router_bias, slots=w.slots,
            copies=w.copies, lists=lists, counts=counts,
        )  # fmt: skip
        work = ExpertAssignment(slots, lists, counts)
        inside = torch.empty(tokens * top, inner, dtype=dtype, device=y.device)
        gate_up(given, w.gate_up.data, inside, work, share=True, bias=w.gate_up_bias, **act)
        down_output = torch.empty(tokens * top, hidden, dtype=dtype, device=y.device)
        down(inside, w.down.data, down_output, work, share=False, bias=w.down_bias)
        return mix(tuning, down_output.view(tokens, top, hidden), weights, slots=slots, extra=extra, gate=gate), total

    return run


EXPERTS: tuple[Any, ...] = (TritonRoute, TritonGroupedLinear, TritonMixExperts, TritonRoutedExperts, TritonMoeBlock)

"""Experts: routing, products with the matrices of a stack, and the whole block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evener.contracts.ops import OpCall, OpFunction, Variant
from evener.contracts.quant import PackedWeight
from evener.ops.expert_composites import MoEWeights
from evener.ops.reference.linear import PLAIN
from evener_kernels_triton.jit.experts import few_kernel, lone_down_kernel, lone_up_kernel, many_kernel, mix_kernel
from evener_kernels_triton.jit.routing import list_kernel, route_kernel, score_kernel
from evener_kernels_triton.kernel import ACTIVATIONS, PRECISION, TritonKernel
from evener_kernels_triton.linear import few, gemv, many, partial_sums, stream
from evener_kernels_triton.primitives import act_rows, norm_rows, rows_of
from evener_kernels_triton.tuning import Lone, Tuning, power_of_two
from evener_kernels_triton.variants import combined, rises, stacks, streams

#: Most tokens whose choices every program looks through for its own instead of reading a list: no tile is smaller.
DIRECT = 16
#: Choosing compares every expert with every other one.
MOST_EXPERTS = 512
#: Most pairs that are listed at a time where a list may get all of them. The lists of 128 matrices take 16 MiB then,
#: and each matrix gets 256 pairs if all get the same, which are worth reading it again.
MOST_PAIRS = 32768
#: Most matrices that a row names where there are fewer: some may be on other ranks.
MOST_NAMED = 32
GATED = (*ACTIVATIONS, "clamped_swiglu")


@dataclass(frozen=True)
class Choice:
    """How experts are chosen: the static parameters of ``route`` as the kernels take them."""

    scale: float
    sizes: Mapping[str, Any]

    @classmethod
    def of(cls, static: Mapping[str, Any]) -> Choice:
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
        """Experts with padding."""
        return int(self.sizes["GP"] * self.sizes["EP"])


def route(
    tuning: Tuning, choice: Choice, logits: torch.Tensor, correction: torch.Tensor | None, *,
    bias: torch.Tensor | None = None, slots: torch.Tensor | None = None, copies: torch.Tensor | None = None,
    lists: torch.Tensor | None = None, counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Ids (slots, where a map is given) and weights, each [T, top]. ``logits`` float32 [T, experts], or [parts, T,
    experts] to be summed. ``lists`` and ``counts`` (zeros) of ``Work`` are written too where they are given."""
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


def scores(
    tuning: Tuning, x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor | None = None
) -> torch.Tensor:
    """x [T, columns] times a router's weight [experts, columns], in float32, in parts [parts, T, experts]. ``counts``
    become zeros."""
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


@dataclass(frozen=True)
class Work:
    """Which pairs (token, choice) go to which matrix.

    Attributes:
        slots: int32 [T, top], the matrix of each pair; -1 for none.
        lists: int32 [matrices, room], the pairs of each; None if programs are to find them in ``slots``.
        counts: int32 [matrices], how many.
    """

    slots: torch.Tensor
    lists: torch.Tensor | None
    counts: torch.Tensor | None


def sort(tuning: Tuning, slots: torch.Tensor, matrices: int, room: int) -> Work:
    """Lists of at most ``room`` pairs a matrix. Their sizes stay on the device, so that this can be captured."""
    lists = torch.empty(matrices, room, dtype=torch.int32, device=slots.device)
    counts = torch.empty(matrices, dtype=torch.int32, device=slots.device)
    pairs = slots.numel()
    chunk = max(16, min(8192 if tuning.shared >= 96 << 10 else 2048, power_of_two(pairs)))
    list_kernel[(matrices,)](
        slots, lists, counts, pairs, room, CHUNK=chunk, OVERLAP=tuning.overlap, num_warps=4 if chunk <= 2048 else 16,
        **tuning.launch,
    )  # fmt: skip
    return Work(slots, lists, counts)


def grouped(
    tuning: Tuning, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, work: Work, *, share: bool,
    bias: torch.Tensor | None = None, activation: str = "", alpha: float = 1.0, limit: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """y [pairs, rows] = weight [matrices, rows, columns] by pair times x, a row a pair, or a row a token (``share``);
    with an activation behind it, which halves the rows."""
    (tokens, top), matrices, listed = work.slots.shape, weight.shape[0], work.lists is not None
    pairs = tokens * top
    columns, halves = weight.shape[2], 2 if activation else 1
    rows = weight.shape[1] // halves
    p = tuning.grouped(pairs, matrices, rows, columns, halves, weight.element_size())
    lists, counts = (work.lists, work.counts) if listed else (work.slots, work.slots)
    assert lists is not None, "listed"
    extra = bias if bias is not None else x
    common = {
        "TOP": top, "SHARE": share, "ACT": activation, "BIAS": bias is not None, "BM": p.m, "BN": p.n,
        "BK": p.k, "EVEN": columns % p.k == 0, "PRECISION": PRECISION, "OVERLAP": tuning.overlap, "num_warps": p.warps,
        "num_stages": p.stages, **tuning.launch,
    }  # fmt: skip
    across = -(-rows // p.n)
    if p.flip or not listed:
        few_kernel[(matrices * across,)](
            x, weight, extra, y, work.slots, lists, counts, tokens, lists.shape[1], rows, columns, x.stride(0),
            y.stride(0), alpha, limit, TP=0 if listed else power_of_two(top), **common,
        )  # fmt: skip
    else:
        many_kernel[((pairs // p.m + min(pairs, matrices)) * across,)](
            x, weight, extra, y, lists, counts, matrices, lists.shape[1], rows, columns, x.stride(0), y.stride(0),
            alpha, limit, EP=power_of_two(matrices), **common,
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
    """One token a program; an expert's rank is the number of those before it."""

    op = "route"
    batch_invariant = True

    def _judge(self, call: OpCall) -> str | None:
        return _too_many(call)

    def build(self, call: OpCall) -> OpFunction:
        tuning, choice = self.tuning, Choice.of(call.static)

        def run(logits: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            return route(tuning, choice, logits, bias)

        return run


class TritonGroupedLinear(TritonKernel):
    """Pairs sorted by matrix, then one launch over all matrices that have some; of very many, a part at a time."""

    op = "grouped_linear"
    packings = (PLAIN,)

    def build(self, call: OpCall) -> OpFunction:
        tuning, rows = self.tuning, call.static["rows"]

        def run(
            x: torch.Tensor, weight: PackedWeight, slots: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            y = torch.zeros(*slots.shape, rows, dtype=x.dtype, device=x.device)
            if slots.numel():
                each = max(1, MOST_PAIRS // slots.shape[1])
                parts = (t.split(each) for t in (rows_of(x), slots.contiguous(), y))
                for some, mine, out in zip(*parts, strict=True):
                    # A row may name a matrix twice here, so that one list can take all pairs.
                    work = sort(tuning, mine, weight.data.shape[0], mine.numel())
                    grouped(tuning, some, weight.data, out.view(-1, rows), work, share=True, bias=bias)
                    del work  # before the next
            return y

        return run

    def workspace(self, call: OpCall) -> int:
        # How many matrices a row names is not told.
        matrices = call.static["experts"]
        pairs = min(call.bucket.high * max(matrices, MOST_NAMED), MOST_PAIRS)
        return int(4 * matrices * (pairs + 1))


class TritonMixExperts(TritonKernel):
    """A weighted sum in one pass."""

    op = "mix_experts"
    batch_invariant = True

    def build(self, call: OpCall) -> OpFunction:
        def run(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return mix(self.tuning, x, weights)

        return run


def _too_many(call: OpCall) -> str | None:
    places = Choice.of(call.static).places
    return None if places <= MOST_EXPERTS else f"compares at most {MOST_EXPERTS} experts with each other"


#: Normed rows (or, of one token, the stream) and weights to what all experts add up to.
Experts = Callable[[torch.Tensor, MoEWeights], torch.Tensor]


class TritonMoeBlock(TritonKernel):
    """One token: norm and router, then the rows of its experts as one stream. More: sorted by expert."""

    op = "moe_block"
    packings = (PLAIN,)

    def _judge(self, call: OpCall) -> str | None:
        s = call.static
        if s["activation"] not in GATED:
            return f"does not know activation {s['activation']!r}"
        if s["shared_inner"] and s["activation"] not in ACTIVATIONS:
            return f"does not know activation {s['activation']!r} of shared experts"
        if s["weigh_input"]:
            return "weighs results, not inputs"
        return _too_many(call)

    def workspace(self, call: OpCall) -> int:
        s, tokens = call.static, call.bucket.high
        size: int = getattr(torch, s["dtype"]).itemsize
        # Normed rows and what shared experts give are there until all is mixed; their own products come first.
        wide = 3 * s["shared_inner"], s["hidden"] * bool(s["shared_inner"]) + s["top"] * (s["inner"] + s["hidden"])
        shared = (s["shared_gate_up"], s["shared_down"], s["shared_gate"]) if s["shared_inner"] else ()
        tuning = self.tuning.varied(call.variant)
        sums = max((partial_sums(tuning, call, w.rows, w.columns) for w in shared if w is not None), default=0)
        return int(tokens * ((s["hidden"] + max(wide)) * size + 4 * s["experts"])) + sums

    def variants(self, call: OpCall) -> Sequence[Variant]:
        s, tuning = call.static, self.tuning
        lone, up, down = tuning.lone(s["hidden"], s["inner"], s["top"]), s["gate_up"], s["down"]
        if call.bucket.high == 1 and lone is not None:
            return combined({"up": streams(lone.up), "down": rises(lone.down)})
        sizes = (up.rows // 2, up.columns, 2), (down.rows, down.columns, 1)
        each = (stacks(tuning, call, up.experts, *of) for of in sizes)
        return combined(dict(zip(("up", "down"), each, strict=True)))

    def build(self, call: OpCall) -> OpFunction:
        tuning, s, dtype = self.tuning.varied(call.variant), call.static, getattr(torch, call.static["dtype"])
        lone = tuning.lone(s["hidden"], s["inner"], s["top"])
        first = tuning.stream(s["experts"], s["hidden"], 1)
        if call.bucket.high == 1 and lone is not None and first is not None:
            run = _one(tuning, call, lone)
        else:
            run = _some(tuning, call)

        def block(x: torch.Tensor, residual: torch.Tensor, w: MoEWeights) -> tuple[torch.Tensor, torch.Tensor]:
            y, total = run(x, residual, w)
            if s["post_norm"]:
                assert w.post_norm is not None, "declared with the flag"
                y, _ = norm_rows(tuning, y, None, w.post_norm, s["eps"], s["offset"], dtype)
            return y, total

        return block


Block = Callable[[torch.Tensor, torch.Tensor, MoEWeights], tuple[torch.Tensor, torch.Tensor]]


def _some(tuning: Tuning, call: OpCall) -> Block:
    """Any number of tokens."""
    s, dtype = call.static, getattr(torch, call.static["dtype"])
    choice, top, inner, hidden = Choice.of(s), s["top"], s["inner"], s["hidden"]
    act = {"activation": s["activation"], "alpha": float(s["alpha"]), "limit": float(s["limit"])}

    def project(x: torch.Tensor, weight: PackedWeight | None) -> torch.Tensor:
        assert weight is not None, "declared with shared experts"
        own = tuning.few(call.bucket.high, weight.data.shape[0])
        return few(tuning, dtype, x, weight.data) if own else many(dtype, x, weight.data)

    def run(x: torch.Tensor, residual: torch.Tensor, w: MoEWeights) -> tuple[torch.Tensor, torch.Tensor]:
        y, total = norm_rows(tuning, x, residual, w.norm, s["eps"], s["offset"], dtype)
        assert total is not None, "there is a residual"
        tokens = y.shape[0]
        if not tokens:
            return y, total
        extra = gate = None
        if s["shared_inner"]:
            extra = project(act_rows(tuning, project(y, w.shared_gate_up), s["shared_inner"], s["activation"]),
                            w.shared_down)  # fmt: skip
            gate = project(y, w.shared_gate) if s["shared_gate"] is not None else None
        matrices, lists, counts = w.gate_up.data.shape[0], None, None
        if tokens > DIRECT:
            # A token's experts differ, and so do their slots: a slot gets a token once at most.
            lists = torch.empty(matrices, tokens, dtype=torch.int32, device=y.device)
            counts = torch.empty(matrices, dtype=torch.int32, device=y.device)
        slots, weights = route(
            tuning, choice, scores(tuning, y, w.router.data, counts), w.correction, bias=w.router_bias, slots=w.slots,
            copies=w.copies, lists=lists, counts=counts,
        )  # fmt: skip
        work = Work(slots, lists, counts)
        inside = torch.empty(tokens * top, inner, dtype=dtype, device=y.device)
        grouped(tuning.part("up"), y, w.gate_up.data, inside, work, share=True, bias=w.gate_up_bias, **act)
        fallen = torch.empty(tokens * top, hidden, dtype=dtype, device=y.device)
        grouped(tuning.part("down"), inside, w.down.data, fallen, work, share=False, bias=w.down_bias)
        return mix(tuning, fallen.view(tokens, top, hidden), weights, slots=slots, extra=extra, gate=gate), total

    return run


def _one(tuning: Tuning, call: OpCall, sizes: Lone) -> Block:
    """One token: the choice is made by each program for itself, which saves the launches between."""
    s, dtype = call.static, getattr(torch, call.static["dtype"])
    choice, top, inner, hidden = Choice.of(s), s["top"], s["inner"], s["hidden"]
    norm = {"eps": s["eps"], "offset": s["offset"]}
    up, down = sizes.up, sizes.down

    def shared(total: torch.Tensor, w: MoEWeights) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if not s["shared_inner"]:
            return None, None
        assert w.shared_gate_up is not None and w.shared_down is not None, "declared with shared experts"
        rise, fall, gate = w.shared_gate_up.data, w.shared_down.data, None
        if tuning.stream(s["shared_inner"], hidden, 2) is not None:
            inside = stream(tuning, total, rise, dtype, gain=w.norm, activation=s["activation"], **norm)
        else:
            y, _ = norm_rows(tuning, total, None, w.norm, s["eps"], s["offset"], dtype)
            inside = gemv(tuning, y, rise, dtype, activation=s["activation"])
        if s["shared_gate"] is not None:
            assert w.shared_gate is not None, "declared"
            gate = stream(tuning, total, w.shared_gate.data, torch.float32, gain=w.norm, **norm)
        return gemv(tuning, inside, fall, dtype), gate

    def run(x: torch.Tensor, residual: torch.Tensor, w: MoEWeights) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        logits = stream(
            tuning, rows_of(x), w.router.data, torch.float32, bias=w.router_bias, residual=rows_of(residual),
            total=total, gain=w.norm, **norm,
        )  # fmt: skip
        extra, gate = shared(total, w)
        inside = torch.empty(top, inner, dtype=dtype, device=x.device)
        y = torch.empty(1, hidden, dtype=dtype, device=x.device)
        common = {"CORRECT": w.correction is not None, "OVERLAP": tuning.overlap, **choice.sizes, **tuning.launch}
        correction, most = w.correction if w.correction is not None else logits, w.slots.shape[1]
        # These two follow each other: the second starts on what the first has waited for.
        lone_up_kernel[(top, min(up.m, -(-inner // up.n)))](
            logits, correction, w.slots, total, w.norm, w.gate_up.data,
            w.gate_up_bias if w.gate_up_bias is not None else x, inside, most, inner, hidden, choice.scale, s["eps"],
            s["offset"], float(s["alpha"]), float(s["limit"]), BIAS=w.gate_up_bias is not None, ACT=s["activation"],
            BN=up.n, BK=up.k, num_warps=up.warps, **common,
        )  # fmt: skip
        lone_down_kernel[(-(-hidden // down.n),)](
            logits, correction, w.slots, inside, w.down.data, w.down_bias if w.down_bias is not None else x,
            extra if extra is not None else x, gate if gate is not None else x, y, most, hidden, inner, choice.scale,
            BIAS=w.down_bias is not None, ADD=extra is not None, GATE=gate is not None, TP=power_of_two(top),
            BN=down.n, BK=down.k, AHEAD=min(3, -(-inner // down.k)), num_warps=down.warps, **common,
        )  # fmt: skip
        return y, total

    return run


EXPERTS: tuple[Any, ...] = (TritonRoute, TritonGroupedLinear, TritonMixExperts, TritonMoeBlock)

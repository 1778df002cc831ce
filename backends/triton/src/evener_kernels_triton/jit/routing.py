"""Which experts a token goes to, and which tokens an expert gets; sums of scores over parts of the columns."""

import triton
import triton.language as tl

from evener_kernels_triton.jit.launch import fast_launch


@fast_launch
@triton.jit
def score_kernel(
    x, w, parts, counts, tokens, experts, columns, matrices, x_row, each,
    COUNTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """parts[s] = x @ wᵀ over columns ``s * each`` to ``(s + 1) * each``, in float32: program (tokens, experts, s).
    COUNTS: if not 0, at least ``matrices``, whose ``counts`` are set to 0 for a later kernel."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if COUNTS > 0:
        # The first program resets all of them, the others none.
        matrix = tl.arange(0, COUNTS) + COUNTS * (tl.program_id(0) + tl.program_id(1) + tl.program_id(2))
        tl.store(counts + matrix, tl.zeros([COUNTS], tl.int32), mask=matrix < matrices)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    part = tl.program_id(2)
    there = m < tokens
    inside = n < experts
    first = part * each
    last = tl.minimum(first + each, columns)
    acc = tl.zeros([BM, BN], tl.float32)
    for k in range(first, last, BK):
        c = k + tl.arange(0, BK)
        real = c < last
        a = tl.load(x + m.to(tl.int64)[:, None] * x_row + c[None, :], mask=there[:, None] & real[None, :], other=0.0)
        b = tl.load(w + n[:, None] * columns + c[None, :], mask=inside[:, None] & real[None, :], other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
    at = (part * tokens + m).to(tl.int64)[:, None] * experts + n[None, :]
    tl.store(parts + at, acc, mask=there[:, None] & inside[None, :])


@triton.jit
def chosen(
    logits, part, router_bias, correction, scale,
    PARTS: tl.constexpr, BIAS: tl.constexpr, CORRECT: tl.constexpr, SCORING: tl.constexpr, TOP: tl.constexpr,
    GROUPS: tl.constexpr, EACH: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr,
    RENORMALIZE: tl.constexpr, GP: tl.constexpr, EP: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """For every place of a padded [GP, EP] grid of groups and experts: the expert, its rank, whether it is one of the
    TOP, its weight. ``logits``: those of the token, PARTS of them ``part`` elements apart, which are summed.

    A rank is the number of experts that are better, or equal with a lower id: the lowest id wins ties. Many warps
    compare all with all, which needs little communication; SEARCH, for one warp, repeatedly takes the best.
    """
    i = tl.arange(0, GP * EP)
    group = i // EP
    real = (i % EP < EACH) & (group < GROUPS)
    expert = group * EACH + i % EP
    if PARTS == 1:
        s = tl.load(logits + expert, mask=real, other=0.0).to(tl.float32)
    else:
        each = tl.arange(0, PARTS)[:, None] * part + expert[None, :]
        s = tl.sum(tl.load(logits + each, mask=real[None, :], other=0.0), 0)
    if BIAS:
        s += tl.load(router_bias + expert, mask=real, other=0.0).to(tl.float32)
    wanted = s
    if SCORING == "softmax":
        s = tl.exp(tl.where(real, s, float("-inf")) - tl.max(tl.where(real, s, float("-inf")), 0))
        s = s / tl.sum(s, 0)
    elif SCORING == "sigmoid":
        s = 1.0 / (1.0 + tl.exp(-s))
    # Softmax keeps the order, so ranks are computed from the logits and need not wait for it.
    if SCORING != "softmax" or CORRECT or TOP_GROUPS < GROUPS:
        wanted = s
    if CORRECT:
        wanted += tl.load(correction + expert, mask=real, other=0.0)
    if TOP_GROUPS < GROUPS:
        grid = tl.reshape(wanted, (GP, EP))
        valid = tl.reshape(real, (GP, EP))
        at = tl.arange(0, EP)
        tie = (grid[:, None, :] == grid[:, :, None]) & (at[None, None, :] < at[None, :, None])
        ahead = ((grid[:, None, :] > grid[:, :, None]) | tie) & valid[:, None, :]
        counted = valid & (tl.sum(ahead.to(tl.int32), 2) < GROUP_BEST)
        total = tl.sum(tl.where(counted, grid, 0.0), 1)
        g = tl.arange(0, GP)
        lead = (total[None, :] > total[:, None]) | ((total[None, :] == total[:, None]) & (g[None, :] < g[:, None]))
        kept = tl.sum((lead & (g < GROUPS)[None, :]).to(tl.int32), 1) < TOP_GROUPS
        wanted = tl.reshape(tl.where(kept[:, None] & valid, grid, float("-inf")), (GP * EP,))
    # NaN is neither better nor worse than anything, so several experts would get the same rank.
    wanted = tl.where(wanted == wanted, wanted, float("-inf"))
    if SEARCH:
        # Ordered as integers, with the position in the low bits: no two are equal. Adding 0 turns -0.0 into 0.0.
        bits = (wanted + 0.0).to(tl.int32, bitcast=True)
        order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) * 4294967296 + (GP * EP - i)
        order = tl.where(real, order, -9223372036854775807)
        rank = tl.full([GP * EP], GP * EP, tl.int32)
        for r in tl.static_range(TOP):
            hit = order == tl.max(order, 0)
            rank = tl.where(hit, r, rank)
            order = tl.where(hit, -9223372036854775807, order)
    else:
        tie = (wanted[None, :] == wanted[:, None]) & (i[None, :] < i[:, None])
        rank = tl.sum((((wanted[None, :] > wanted[:, None]) | tie) & real[None, :]).to(tl.int32), 1)
    taken = real & (rank < TOP)
    weight = tl.where(taken, s, 0.0)
    if SCORING == "softmax_top":
        weight = tl.where(taken, tl.exp(s - tl.max(tl.where(taken, s, float("-inf")), 0)), 0.0)
        weight = weight / tl.sum(weight, 0)
    if RENORMALIZE:
        weight = weight / tl.sum(weight, 0)
    return expert, rank, taken, weight * scale


@fast_launch
@triton.jit
def route_kernel(
    logits, router_bias, correction, slots, copies, ids, weights, lists, counts, logits_row, part, most, room, scale,
    PLACE: tl.constexpr, LIST: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, CORRECT: tl.constexpr,
    SCORING: tl.constexpr, TOP: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr, TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr, RENORMALIZE: tl.constexpr, GP: tl.constexpr, EP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program for each token: ids of its experts, best first, and their weights. PLACE: slots instead of ids; an
    expert has up to ``most``. LIST: the pair (token, choice) is also added to the list of its slot, as by
    ``list_kernel`` but in the order in which programs run; ``counts`` must be 0 before."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    expert, rank, taken, weight = chosen(
        logits + token * logits_row, part, router_bias, correction, scale, PARTS, BIAS, CORRECT, SCORING, TOP, GROUPS,
        EACH, TOP_GROUPS, GROUP_BEST, RENORMALIZE, GP, EP, True,
    )  # fmt: skip
    if PLACE:
        spread = tl.maximum(tl.load(copies + expert, mask=taken, other=1), 1)
        expert = tl.load(slots + expert * most + (token % spread), mask=taken)
    at = token * TOP + rank
    tl.store(ids + at, expert.to(tl.int32), mask=taken)
    tl.store(weights + at, weight, mask=taken)
    if LIST:
        mine = taken & (expert >= 0)
        place = tl.atomic_add(counts + expert, 1, mask=mine, sem="relaxed")
        tl.store(lists + expert.to(tl.int64) * room + place, at.to(tl.int32), mask=mine)


@fast_launch
@triton.jit
def list_kernel(slots, lists, counts, pairs, room, CHUNK: tl.constexpr, OVERLAP: tl.constexpr):
    """One program for each slot: which of the ``pairs`` (token, choice) go there, in order, and how many."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.program_id(0)
    own = lists + slot.to(tl.int64) * room
    total = 0
    for first in range(0, pairs, CHUNK):
        pair = first + tl.arange(0, CHUNK)
        hit = (tl.load(slots + pair, mask=pair < pairs, other=-1) == slot).to(tl.int32)
        tl.store(own + total + tl.cumsum(hit, 0) - 1, pair, mask=hit != 0)
        total += tl.sum(hit, 0)
    tl.store(counts + slot, total)

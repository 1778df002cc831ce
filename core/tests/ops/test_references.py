"""Cases fit their schemas, and every reference agrees with a formula written without it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from evener.contracts.ops import OpCase, OpSchema
from evener.contracts.quant import WeightPart
from evener.errors import DescriptorError
from evener.ops.norms import any_norm, head_norm
from evener.ops.reference.sampling import filtered, gumbel, hash32
from evener.ops.schemas import PRIMITIVES
from evener_conformance.kit.cases import load_cases
from evener_conformance.kit.ops import difference, expansion, expected, outputs_of

DTYPES = ["float32", "bfloat16", "float16"]
SCHEMAS = {schema.name: schema for schema in PRIMITIVES}
Static = Mapping[str, Any]


def cases(schema: OpSchema, dtype: str) -> list[OpCase]:
    return list(load_cases(schema)(dtype, torch.Generator().manual_seed(1)))


def embedding(s: Static, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return torch.stack([table[int(i)] for i in ids]) * s["scale"] if len(ids) else table[:0]


def rms_norm(s: Static, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (s["hidden"],), weight + s["offset"], s["eps"])


def add_rms_norm(s: Static, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    return rms_norm(s, x + residual, weight), x + residual


def layer_norm(s: Static, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    return F.layer_norm(x, (s["hidden"],), weight, bias, s["eps"])


def stacked(parts: tuple[WeightPart, ...]) -> torch.Tensor:
    return torch.cat([p.tensors["weight"].float() for p in parts])


def linear(s: Static, x: torch.Tensor, parts: tuple[WeightPart, ...], bias: torch.Tensor | None) -> torch.Tensor:
    y = torch.einsum("tc,rc->tr", x, stacked(parts))
    return y if bias is None else y + bias


def grouped_linear(s: Static, x: torch.Tensor, stack: Any, slots: torch.Tensor, bias: torch.Tensor | None) -> Any:
    y = torch.zeros(*slots.shape, s["rows"])
    for t, row in enumerate(slots.tolist()):
        for k, slot in enumerate(row):
            if slot >= 0:
                y[t, k] = stacked(stack[slot]) @ x[t] + (0 if bias is None else bias[slot])
    return y


def place_experts(s: Static, ids: torch.Tensor, slots: torch.Tensor, copies: torch.Tensor) -> torch.Tensor:
    places = [[int(slots[e, t % max(1, int(copies[e]))]) for e in row] for t, row in enumerate(ids.tolist())]
    return torch.tensor(places, dtype=torch.int32).view(ids.shape)


def mix_experts(s: Static, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.einsum("tkh,tk->th", x, weights)


def rotary(s: Static, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, table: torch.Tensor) -> Any:
    """Rotation of a pair is multiplication of a complex number by exp(i·angle)."""
    dim = s["rotary_dim"]
    turn = torch.complex(table[:, : dim // 2], table[:, dim // 2 :])[positions.long()][:, None]

    def turned(x: torch.Tensor) -> torch.Tensor:
        part = x[..., :dim]
        pairs = part.unflatten(-1, (-1, 2)) if s["interleaved"] else part.unflatten(-1, (2, -1)).transpose(-1, -2)
        new = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
        new = new.flatten(-2) if s["interleaved"] else new.transpose(-1, -2).flatten(-2)
        return torch.cat((new, x[..., dim:]), dim=-1)

    return turned(query), turned(key)


def act_and_mul(s: Static, x: torch.Tensor) -> torch.Tensor:
    if s["activation"] == "clamped_swiglu":
        pairs = x.view(len(x), -1, 2)
        g, u = pairs[..., 0].clamp(max=s["limit"]), pairs[..., 1].clamp(-s["limit"], s["limit"])
        return g / (1 + torch.exp(-s["alpha"] * g)) * (u + 1)
    return activate(s, x[:, : s["inner"]]) * x[:, s["inner"] :]


def activate(s: Static, a: torch.Tensor) -> torch.Tensor:
    kinds: dict[str, Callable[[], torch.Tensor]] = {
        "silu": lambda: a / (1 + torch.exp(-a)),
        "gelu": lambda: a * 0.5 * (1 + torch.erf(a / math.sqrt(2))),
        "gelu_tanh": lambda: a * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))),
        "relu": lambda: a * (a > 0),
        "relu_squared": lambda: a * a * (a > 0),
    }
    return kinds[s["activation"]]()


def take_rows(s: Static, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.stack([x[int(i)] for i in rows]) if len(rows) else x[:0]


def softcap(s: Static, x: torch.Tensor) -> torch.Tensor:
    cap: float = s["cap"]
    e = torch.exp(-2 * x.double().abs() / cap)
    return (x.sign() * cap * (1 - e) / (1 + e)).float()


def encode_attention(s: Static, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("thd,shd->hts", query.double(), key.double()) * s["scale"]
    weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
    return torch.einsum("hts,shd->thd", weights, value.double()).float()


def kept_groups(s: Static, wanted: list[float]) -> list[int]:
    """Experts of the groups whose best scores add up to most."""
    size = s["experts"] // s["groups"]
    totals = [sum(sorted(wanted[g * size : (g + 1) * size])[-s["group_best"] :]) for g in range(s["groups"])]
    order = sorted(range(s["groups"]), key=lambda g: (-totals[g], g))[: s["top_groups"]]
    return [i for i in range(s["experts"]) if i // size in order]


def route(s: Static, logits: torch.Tensor, bias: torch.Tensor | None) -> Any:
    ids, weights = [], []
    for row in logits.double():
        softmax = torch.exp(row) / torch.exp(row).sum()
        score = {"sigmoid": 1 / (1 + torch.exp(-row)), "softmax": softmax, "softmax_top": row}[s["scoring"]]
        wanted = (score if bias is None else score + bias).float().tolist()
        best = sorted(kept_groups(s, wanted), key=lambda i: (-wanted[i], i))[: s["top"]]
        score = torch.exp(score) / torch.exp(score[best]).sum() if s["scoring"] == "softmax_top" else score
        chosen = score[best] / (score[best].sum() if s["renormalize"] else 1)
        ids.append(best)
        weights.append((chosen * s["scale"]).float())
    return torch.tensor(ids, dtype=torch.int32), torch.stack(weights)


def greedy(s: Static, logits: torch.Tensor) -> torch.Tensor:
    return torch.tensor([row.index(max(row)) for row in logits.tolist()], dtype=torch.int32)


def lowbias32(x: int) -> int:
    """Wellons' hash in plain Python."""
    x = ((x ^ x >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ x >> 15) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ x >> 16


def noise(seed: int, position: int, token: int) -> float:
    start = (lowbias32(seed & 0xFFFFFFFF) + position * 0x9E3779B9) & 0xFFFFFFFF
    uniform = ((lowbias32(lowbias32(start) ^ lowbias32(token)) >> 8) + 0.5) / (1 << 24)
    return -math.log(-math.log(uniform))


def kept(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, float]:
    """Ids that survive the filters, with their scores."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: top_k or None]
    top = logits[order[0]]
    mass = [math.exp((logits[i] - top) / temperature) for i in order]
    total, before = sum(mass), 0.0
    left: dict[int, float] = {}
    for i, m in zip(order, mass, strict=True):
        if (not left or before / total < top_p) and m >= min_p * mass[0]:
            left[i] = logits[i] / temperature
        before += m
    return left


def sample(s: Static, logits: torch.Tensor, *columns: torch.Tensor) -> torch.Tensor:
    ids = []
    for row, t, k, p, m, seed, position in zip(logits.tolist(), *(c.tolist() for c in columns), strict=True):
        if t <= 0:
            ids.append(row.index(max(row)))
            continue
        left = kept(row, t, k, p, m)
        ids.append(max(left, key=lambda i: left[i] + noise(seed, position, i)))
    return torch.tensor(ids, dtype=torch.int32)


def add_bias(s: Static, logits: torch.Tensor, *entries: torch.Tensor) -> torch.Tensor:
    out = logits.clone()
    for r, (ids, values, until, position) in enumerate(zip(*(e.tolist() for e in entries), strict=True)):
        for i, value, end in zip(ids, values, until, strict=True):
            if position < end:
                out[r, i] += value
    return out


def penalize(
    s: Static, logits: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor, prompt: torch.Tensor,
    lengths: torch.Tensor, longest: int, *penalties: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    out = logits.clone()
    for r, (repetition, frequency, presence) in enumerate(zip(*(p.tolist() for p in penalties), strict=True)):
        known = tokens[slots[r], : lengths[r]].tolist()
        for i in set(known):
            out[r, i] = out[r, i] / repetition if out[r, i] > 0 else out[r, i] * repetition
        for i in set(known[prompt[r] :]):
            out[r, i] = out[r, i] - frequency * known[prompt[r] :].count(i) - presence
    return out


def apply_mask(s: Static, logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    out = logits.clone()
    for r, words in enumerate(mask.tolist()):
        for v in range(s["vocab"]):
            if not (words[v // 32] >> (v % 32)) & 1:
                out[r, v] = -math.inf
    return out


def logprobs(s: Static, logits: torch.Tensor, ids: torch.Tensor, top: int) -> Any:
    wide = logits.double()
    values = (wide - wide.exp().sum(-1, keepdim=True).log()).float()
    chosen = torch.stack([values[r, i] for r, i in enumerate(ids.tolist())])
    order = torch.tensor([sorted(range(s["vocab"]), key=lambda i: (-row[i], i))[:top] for row in logits.tolist()])
    order = order.view(len(ids), top).long()
    return chosen, values.gather(1, order), order.int()


FORMULAS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        embedding, rms_norm, add_rms_norm, layer_norm, linear, grouped_linear, rotary, act_and_mul,
        activate, take_rows, softcap, route, place_experts, mix_experts, greedy, sample, add_bias, penalize, apply_mask,
        logprobs, encode_attention,
    )
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCHEMAS)
def test_cases_fit_their_schema(name: str, dtype: str) -> None:
    schema = SCHEMAS[name]
    made = cases(schema, dtype)
    assert len(made) >= 2
    for case in made:
        assert case.static.keys() == schema.static.keys()
        assert case.static.get("dtype", dtype) == dtype
        sizes: dict[str, int] = {k: v for k, v in case.static.items() if isinstance(v, int)}
        for declared, value in zip(schema.inputs, case.inputs, strict=True):
            if declared.dtype == "packed":
                value = value if isinstance(value[0], WeightPart) else value[0]
                assert [(p.rows, p.columns) for p in value] == [tuple(p.tensors["weight"].shape) for p in value]
                assert [(p.name, p.rows, p.format) for p in value] == [
                    (p.name, p.rows, p.format) for p in case.static["weight"].parts
                ]
            elif isinstance(value, torch.Tensor):
                wanted = dtype if declared.dtype == "*" else declared.dtype
                assert value.dtype == getattr(torch, wanted), declared.name
                if "…" not in declared.shape:
                    assert value.dim() == len(declared.shape), declared.name
                for dimension, size in zip(declared.shape[::-1], value.shape[::-1], strict=False):
                    if isinstance(dimension, str) and dimension.isidentifier():
                        assert sizes.setdefault(dimension, size) == size, f"{declared.name}: {dimension}"
            else:
                assert declared.optional or declared.dtype == "int", declared.name


@pytest.mark.parametrize("name", SCHEMAS)
def test_cases_are_the_same_for_the_same_seed(name: str) -> None:
    first, again = cases(SCHEMAS[name], "float32"), cases(SCHEMAS[name], "float32")
    for a, b in zip(first, again, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.inputs, b.inputs, strict=True) if isinstance(x, torch.Tensor))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_reference_agrees_with_an_independent_formula(name: str, dtype: str) -> None:
    schema = SCHEMAS[name]
    for case in cases(schema, dtype):
        wide = [v.float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in case.inputs]
        want = outputs_of(FORMULAS[name](case.static, *wide))
        got = expected(schema, case)
        assert len(got) == len(want) == len(schema.outputs)
        for declared, a, b in zip(schema.outputs, got, want, strict=True):
            assert a.dtype == getattr(torch, "float32" if declared.dtype in ("*", "out") else declared.dtype)
            problem = difference(a, b, {"float32": (1e-5, 1e-5)}, "float32")
            assert problem is None, f"{name}.{declared.name}: {problem}"


def test_every_primitive_has_a_formula_here() -> None:
    assert FORMULAS.keys() == SCHEMAS.keys()


def test_an_op_without_cases_cannot_be_checked() -> None:
    schema = OpSchema(name="odd", doc="", static={}, inputs=(), outputs=(), reference="x:y")
    with pytest.raises(DescriptorError, match="op 'odd' has no test cases; add cases='module:function'"):
        load_cases(schema)


def test_the_hash_is_lowbias32_in_wrapped_integers() -> None:
    values = [0, 1, -1, 2**31 - 1, -(2**31), 123456789]
    got = hash32(torch.tensor(values, dtype=torch.int32)).tolist()
    assert [g & 0xFFFFFFFF for g in got] == [lowbias32(v & 0xFFFFFFFF) for v in values]


def test_noise_depends_on_seed_position_and_id_alone() -> None:
    seeds, positions = torch.tensor([[3], [-7]], dtype=torch.int32), torch.tensor([[0], [900]], dtype=torch.int32)
    got = gumbel(seeds, positions, torch.arange(50, dtype=torch.int32)[None])
    want = torch.tensor([[noise(s, p, t) for t in range(50)] for s, p in ((3, 0), (-7, 900))])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_samples_follow_the_filtered_distribution() -> None:
    """20,000 draws of one row at different positions: counts within five standard deviations."""
    logits, draws = torch.tensor([2.0, 1.5, 1.0, 0.0, -1.0, -6.0]), 20_000
    schema = SCHEMAS["sample"]
    inputs = (
        logits.expand(draws, -1), torch.full((draws,), 0.9), torch.full((draws,), 5, dtype=torch.int32),
        torch.full((draws,), 0.97), torch.full((draws,), 0.02), torch.full((draws,), 11, dtype=torch.int32),
        torch.arange(draws, dtype=torch.int32),
    )  # fmt: skip
    ids = expected(schema, OpCase({"vocab": 6, "filters": True}, inputs))[0]
    left = kept(logits.tolist(), 0.9, 5, 0.97, 0.02)
    total = sum(math.exp(v) for v in left.values())
    for i in range(6):
        p = math.exp(left[i]) / total if i in left else 0.0
        assert abs(int((ids == i).sum()) - draws * p) <= 5 * math.sqrt(draws * p * (1 - p)), f"id {i}"


def test_sampling_filters_match_the_naive_definition() -> None:
    generator = torch.Generator().manual_seed(4)
    scores = torch.randn(40, 37, generator=generator) * 3
    for top_k, top_p, min_p in ((0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.7, 0.0), (0, 1.0, 0.2), (9, 0.5, 0.05)):
        rows = len(scores)
        ids, values = filtered(
            scores, torch.full((rows,), top_k), torch.full((rows,), top_p), torch.full((rows,), min_p)
        )
        for r in range(rows):
            got = {int(i) for i, v in zip(ids[r], values[r], strict=True) if v > -math.inf}
            assert got == set(kept(scores[r].tolist(), 1.0, top_k, top_p, min_p))


@pytest.mark.parametrize(("kind", "biased"), [("layer", False), ("biased_layer", True)])
def test_the_offset_is_added_to_the_weight_of_a_layer_norm_and_not_to_its_bias(kind: str, biased: bool) -> None:
    x, gain, bias = torch.randn(3, 8), torch.randn(8), torch.randn(8)
    static = {"hidden": 8, "dtype": "float32", "eps": 1e-5, "offset": 1.0, "norm": kind}
    norm = any_norm(static, expansion(SCHEMAS))
    weight = torch.cat([gain, bias]) if biased else gain
    torch.testing.assert_close(norm(x, weight), F.layer_norm(x, (8,), gain + 1.0, bias if biased else None, 1e-5))


def test_the_offset_is_added_to_the_weights_of_layer_norms_of_each_head() -> None:
    x, gains = torch.randn(3, 2, 8), torch.randn(2, 8)
    static = {"hidden": 16, "dtype": "float32", "eps": 1e-5, "offset": 1.0, "norm": "rms", "head_dim": 8,
              "qk_norm_over": "each"}  # fmt: skip
    norm = head_norm(static, expansion(SCHEMAS), 2)
    torch.testing.assert_close(norm(x, gains.flatten()), F.layer_norm(x, (8,), eps=1e-5) * (gains + 1.0))

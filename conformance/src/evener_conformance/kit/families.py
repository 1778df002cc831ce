"""Families of decoder layers that the check of composites builds: one for each kind of layer and of detail.

A family of layers has several details. If a kernel refuses a family for one detail, the other details are checked one
at a time, each added to a family that the kernel accepts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from evener.layers.decoder import AttentionConfig, MLPConfig
from evener.layers.experts import MoEConfig
from evener.layers.gated_delta import DeltaConfig, GatedAttentionConfig
from evener.layers.latent import IndexConfig, LatentConfig
from evener.layers.rotary import RotaryConfig, TemperatureConfig

#: Positions of the model that is checked.
MAX_POSITIONS = 192
#: New tokens of two requests, by step: prompts, a decode step, one of each, decode of the first request alone, and many
#: rows: kernels often take another path for one row, and from some number of rows on, rarely above 128.
STEPS = ((17, 5), (1, 1), (1, 20), (1,), (131, 6))
#: Composites that only these mixers call; ``index_block`` only a sparse one.
_MIXER_COMPOSITES: dict[type, tuple[str, ...]] = {
    LatentConfig: ("latent_attention_block", "latent_attend", "index_block"), DeltaConfig: ("delta_block",),
    GatedAttentionConfig: ("gated_attention_block",),
}  # fmt: skip
#: Which configs' details an op sees; "": those of the layer or the head.
_CONFIGS_SEEN_BY_OP = {
    "mlp_block": ("mlp", ""), "moe_block": ("mlp", ""), "attention_block": ("attention", ""), "head": ("",),
    "routed_experts": ("mlp",),
    "norm_qkv_rotary_write": ("attention", ""),
}  # fmt: skip
#: Fields of a family and its configs that are names and sizes, not details.
_SIZE_FIELDS = {
    "name", "storage", "routers", "state", "attention", "mlp", "absorb", "eps", "hidden", "vocab", "heads", "kv_heads",
    "head_dim", "inner", "experts", "top", "at", "qkv", "gate_up", "down", "key_heads", "key_dim", "value_dim", "width",
    "nope_dim", "rope_dim", "rank",
}  # fmt: skip
#: Static parameters that are sizes, or the same in every family.
UNINFORMATIVE_PARAMETERS = (_SIZE_FIELDS | {"dtype", "rotary_dim", "q_rank", "shared_inner"}) - {"eps"}
#: Details that mean nothing without others.
_DEPENDENT_FIELDS = {
    "gated": ("gated", "gate_up"), "qk_norm_over": ("qk_norm", "qk_norm_over"), "qk_norms": ("qk_norm", "qk_norms"),
    "groups": ("groups", "top_groups", "group_best", "scoring", "correction", "experts", "top"),
    "shared_gate": ("shared_inner", "shared_gate"), "alpha": ("alpha", "limit", "activation"),
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One kind of decoder layer.

    ``spread``: its first expert has two copies, and its last one is on another rank. ``divided``: its stacks hold the
    second half of its experts only; another rank has the others. ``storage``: the storage of its linear weights; plain
    if empty. ``routers``: of its routers too. ``state``: the element type of quantized keys and values; as computed if
    empty.
    """

    name: str
    attention: AttentionConfig | LatentConfig | DeltaConfig | GatedAttentionConfig
    mlp: MLPConfig | MoEConfig
    offset: float = 0.0
    cap: float | None = None
    norm: str = "rms"
    scale: float = 1.0
    absorb: str = "auto"
    eps: float = 0.1  # so large that a kernel with another epsilon is seen
    hidden: int = 96
    vocab: int = 67
    spread: bool = False
    divided: bool = False
    storage: str = ""
    routers: bool = False
    state: str = ""

    def calls(self, op: str) -> bool:
        """Whether its layers call this composite. What several kinds of layer call counts for plain attention."""
        if isinstance(self.mlp, MoEConfig) or op in ("moe_block", "routed_experts"):
            return isinstance(self.mlp, MoEConfig) and op in ("moe_block", "routed_experts")
        if op == "index_block":
            return isinstance(self.attention, LatentConfig) and self.attention.index is not None
        own = _MIXER_COMPOSITES.get(type(self.attention))
        return op in own if own else not any(op in others for others in _MIXER_COMPOSITES.values())

    @property
    def steps(self) -> tuple[tuple[int, ...], ...]:
        """Steps to check. A sparse index is not given the tallest one: rounding alone could choose other tokens. Deep
        and wide products are slow where kernels are interpreted, so they get a step of one token and one of several."""
        if max(self.hidden, self.mlp.inner) > 4096:
            return STEPS[2:4]
        index = self.attention.index if isinstance(self.attention, LatentConfig) else None
        return STEPS if index is None or index.top >= MAX_POSITIONS else STEPS[:-1]

    def for_dtype(self, dtype: str) -> Family:
        """The family for a compute dtype. With a narrow one rounding could choose other tokens or experts, so all are
        chosen."""
        how, mlp = self.attention, self.mlp
        if dtype != "float32" and isinstance(mlp, MoEConfig) and mlp.correction is None:
            return replace(self, mlp=replace(mlp, top=mlp.experts))
        if dtype == "float32" or not isinstance(how, LatentConfig) or how.index is None:
            return self
        return replace(self, attention=replace(how, index=replace(how.index, top=MAX_POSITIONS)))


def families() -> tuple[Family, ...]:
    """Grouped heads; windows, caps, offsets and norms on both sides; biases, partial and interleaved rotation; experts,
    also with copies and on other ranks; other mixers; multiples of 64, for kernels that take no other sizes; deep and
    wide products; and rare details: layer norms, plain MLPs, one norm over all heads, merged gate and up, chunks,
    sinks, norms without weights, no rotation, linear biases (ALiBi), factors on queries."""
    return (
        Family(
            "grouped", AttentionConfig(heads=9, kv_heads=3, head_dim=64, rotary=RotaryConfig(64)), MLPConfig(inner=160)
        ),
        Family(
            "windowed",
            AttentionConfig(
                heads=2, kv_heads=1, head_dim=32, rotary=RotaryConfig(32), qk_norm=True, post_norm="post", window=12,
                softcap=20.0,
            ),
            MLPConfig(inner=72, activation="gelu_tanh", post_norm="post_mlp"),
            1.0,
            30.0,
        ),
        Family(
            "biased",
            AttentionConfig(
                heads=4, kv_heads=4, head_dim=16, rotary=RotaryConfig(8, interleaved=True), qkv_bias=True, o_bias=True
            ),
            MLPConfig(inner=40, bias=True, activation="gelu"),
        ),
        *_other_mixers(),
        *_multiples_of_64(),
        *_deep_and_wide(),
        *_quantized(),
        Family(
            "layer-normed",
            AttentionConfig(
                heads=4, kv_heads=2, head_dim=16, rotary=RotaryConfig(16), qkv=("qkv",), qk_norm=True,
                qk_norm_over="each", post_norm="post",
            ),
            MLPConfig(inner=56, gated=False, gate_up=("up",), activation="relu", bias=True),
            norm="biased_layer", scale=0.5,
        ),
        Family(
            "parallel",
            AttentionConfig(
                heads=2, kv_heads=2, head_dim=32, rotary=RotaryConfig(32), qk_norm=True, qk_norm_over="all"
            ),
            MLPConfig(inner=48, gate_up=("gate_up",), parallel=True, post_norm="post_mlp"), norm="layer",
        ),
        Family(
            "local",
            AttentionConfig(
                heads=4, kv_heads=2, head_dim=32, rotary=RotaryConfig(32, interleaved=True), chunk=9, qk_norm=True,
                qk_norms=None, sinks=True,
            ),
            MLPConfig(inner=40),
        ),
        Family(
            "alibi",
            AttentionConfig(
                heads=4, kv_heads=1, head_dim=16, rotary=RotaryConfig(0), slopes=(0.25, 0.0625, 0.015625, 0.00390625),
                temperature=TemperatureConfig(5, 0.7),
            ),
            MLPConfig(inner=40),
        ),
        Family(
            "expert",
            AttentionConfig(heads=2, kv_heads=1, head_dim=32, rotary=RotaryConfig(32)),
            MoEConfig(
                experts=6, top=2, inner=40, scoring="sigmoid", correction="correction", groups=3, top_groups=2,
                group_best=2, scale=2.5, shared_inner=24, shared_gate="gate", post_norm="post_mlp",
            ),
            hidden=104,  # no multiple of 16, 32 or 64: the end of a row is a path of its own in vector code
        ),
        Family(
            "plain expert", AttentionConfig(heads=2, kv_heads=1, head_dim=32, rotary=RotaryConfig(32)),
            MoEConfig(experts=5, top=2, inner=40),
        ),
        Family(
            "spread expert", AttentionConfig(heads=2, kv_heads=1, head_dim=32, rotary=RotaryConfig(32)),
            MoEConfig(experts=5, top=3, inner=40), spread=True,
        ),
        Family(
            "divided expert", AttentionConfig(heads=2, kv_heads=1, head_dim=32, rotary=RotaryConfig(32)),
            MoEConfig(experts=7, top=2, inner=40), divided=True,
        ),
        Family(
            "biased expert",
            AttentionConfig(heads=2, kv_heads=1, head_dim=32, rotary=RotaryConfig(32)),
            MoEConfig(
                experts=3, top=3, inner=24, scoring="softmax_top", renormalize=False, bias=True,
                activation="clamped_swiglu", alpha=1.702, limit=7.0,
            ),
        ),
    )  # fmt: skip


def _other_mixers() -> tuple[Family, ...]:
    """Latent attention in each form, a sparse index, a recurrence, gated attention."""
    return (
        Family(
            "latent",
            LatentConfig(heads=3, nope_dim=20, rope_dim=8, value_dim=24, rank=40, q_rank=None,
                         rotary=RotaryConfig(8, interleaved=True)),
            MLPConfig(inner=40),
        ),
        Family(
            "latent queries",
            LatentConfig(heads=5, nope_dim=16, rope_dim=16, value_dim=16, rank=32, q_rank=48, rotary=RotaryConfig(16),
                         bias=True),
            MLPConfig(inner=40),
        ),
        Family(
            "latent products",
            LatentConfig(heads=3, nope_dim=20, rope_dim=8, value_dim=24, rank=40, q_rank=32, rotary=RotaryConfig(8)),
            MLPConfig(inner=40), absorb="absorb",
        ),
        Family(
            "latent expanded",
            LatentConfig(heads=3, nope_dim=20, rope_dim=8, value_dim=24, rank=40, q_rank=None, rotary=RotaryConfig(8)),
            MLPConfig(inner=40), absorb="none",
        ),
        Family(
            "sparse",
            LatentConfig(heads=3, nope_dim=16, rope_dim=8, value_dim=16, rank=24, q_rank=32, rotary=RotaryConfig(8),
                         index=IndexConfig(heads=4, head_dim=16, top=9)),
            MLPConfig(inner=40),
        ),
        Family("recurrent", DeltaConfig(heads=4, key_heads=2, key_dim=12, value_dim=10, width=4), MLPConfig(inner=40)),
        Family(
            "gated", GatedAttentionConfig(heads=6, kv_heads=2, head_dim=20, rotary=RotaryConfig(8), bias=True),
            MLPConfig(inner=40), 1.0,
        ),
    )  # fmt: skip


def _multiples_of_64() -> tuple[Family, ...]:
    """Hidden sizes 128 and 256 for each composite. All other sizes are multiples of 64 too."""
    rotary, mlp = RotaryConfig(64), MLPConfig(inner=128)
    latent = LatentConfig(heads=2, nope_dim=64, rope_dim=64, value_dim=64, rank=128, q_rank=128, rotary=rotary)
    made = (
        ("plain", AttentionConfig(heads=4, kv_heads=2, head_dim=64, rotary=rotary), mlp),
        ("expert", AttentionConfig(heads=2, kv_heads=1, head_dim=64, rotary=rotary),
         MoEConfig(experts=4, top=2, inner=128)),
        ("latent", latent, mlp),
        ("sparse", replace(latent, index=IndexConfig(heads=2, head_dim=64, top=64)), mlp),
        ("recurrent", DeltaConfig(heads=4, key_heads=2, key_dim=64, value_dim=64, width=4), mlp),
        ("gated", GatedAttentionConfig(heads=4, kv_heads=2, head_dim=64, rotary=rotary), mlp),
    )  # fmt: skip
    return tuple(
        Family(f"{name} of {hidden}", how, each, hidden=hidden, vocab=256) for name, how, each in made
        for hidden in (128, 256)
    )  # fmt: skip


def _deep_and_wide() -> tuple[Family, ...]:
    """Products over more than 4,096 columns, and with more than 8,192 rows: a kernel walks them in several tiles, and a
    layer's own kernel is not that of the op ``linear``."""
    attention = AttentionConfig(heads=2, kv_heads=1, head_dim=64, rotary=RotaryConfig(64))
    return (
        Family("deep", attention, MLPConfig(inner=64), hidden=4352, vocab=64),
        # A kernel that shares one token's layer out to a whole device takes no smaller one.
        Family(
            "shared", AttentionConfig(heads=16, kv_heads=8, head_dim=64, rotary=RotaryConfig(64), qk_norm=True),
            MLPConfig(inner=768), hidden=512, vocab=64,
        ),
        Family("wide", attention, MLPConfig(inner=8256), hidden=128, vocab=8256),
        # One token's experts, walked by the programs of a whole device more than once.
        Family("deep expert", attention, MoEConfig(experts=3, top=3, inner=400), hidden=2048, vocab=64),
        Family(
            "deep biased expert", attention,
            MoEConfig(experts=3, top=3, inner=400, scoring="softmax_top", renormalize=False, bias=True,
                      activation="clamped_swiglu", alpha=1.702, limit=7.0),
            hidden=2048, vocab=64,
        ),
        # A kernel that shares one token's experts out to a whole device takes no smaller ones.
        Family(
            "shared out expert", attention, MoEConfig(experts=4, top=2, inner=256, renormalize=False, scale=1.5),
            hidden=512, vocab=64,
        ),
    )  # fmt: skip


def _quantized() -> tuple[Family, ...]:
    """Layers whose weights stay as they are stored, for kernels whose packings take them."""
    attention = AttentionConfig(heads=4, kv_heads=2, head_dim=32, rotary=RotaryConfig(32))
    experts = MoEConfig(experts=4, top=2, inner=64, shared_inner=32, shared_gate="gate")
    kinds = (("quantized", MLPConfig(inner=160)), ("quantized expert", experts))
    stored = (
        ("", 128, "q8_0"), ("float8 ", 256, "e4m3 by block"), ("int8 ", 128, "int8 by row"),
        ("float8 rounding ", 256, "e4m3 by block, x by 128"), ("int8 rounding ", 128, "int8 by row, x by token"),
    )  # fmt: skip
    whole = Family("wholly quantized expert", attention, experts, hidden=128, vocab=80, storage="q8_0", routers=True)
    # Rows of down are whole groups.
    experts_128 = replace(experts, inner=128, shared_inner=128)
    integers = (
        Family("int4 " + name, attention, mlp, hidden=256, vocab=80, storage="uint4 by 128")
        for name, mlp in (("quantized", MLPConfig(inner=256)), ("quantized expert", experts_128))
    )
    others = (
        Family(before + name, attention, mlp, hidden=hidden, vocab=80, storage=storage)
        for before, hidden, storage in stored
        for name, mlp in kinds
    )
    return whole, *integers, *others


def single_option_families(op: str, taken: Sequence[Family], asked: Sequence[Family]) -> Iterator[Family]:
    """The first family in ``taken``, each time with one detail that only refused families in ``asked`` have."""
    parts = _CONFIGS_SEEN_BY_OP.get(op, ("attention", "mlp", ""))
    seen = {(part, name, repr(value)) for family in taken for part, name, value in _family_options(family, parts)}
    for family in asked if taken else ():
        for part, name, value in _family_options(family, parts):
            base: Any = getattr(taken[0], part) if part else taken[0]
            same = not part or type(base) is type(getattr(family, part))
            if same and (part, name, repr(value)) not in seen:
                seen.add((part, name, repr(value)))
                source = getattr(family, part) if part else family
                other = replace(base, **{each: getattr(source, each) for each in _DEPENDENT_FIELDS.get(name, (name,))})
                changed: dict[str, Any] = {part: other} if part else {name: value}
                yield replace(taken[0], **changed, name=f"{taken[0].name} layers with {name} {value} as {family.name}")


def _family_options(family: Family, parts: Sequence[str]) -> Iterator[tuple[str, str, Any]]:
    """Details of a family, without sizes: (config, field, value)."""
    for part in parts:
        value = getattr(family, part) if part else family
        for each in fields(value):
            if each.name not in _SIZE_FIELDS:
                yield part, each.name, getattr(value, each.name)

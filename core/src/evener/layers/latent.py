"""Multi-head latent attention (DeepSeek-AI 2024, MLA) of one layer, and the indexer of its sparse form."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evener.contracts.architecture import Step
from evener.contracts.declared import LinearWeight, Span, StateSlot, WeightGroup
from evener.contracts.state import AttentionSpec, StateSpec, StateTensor
from evener.contracts.statics import IndexStatic, LatentStatic, NormStatic
from evener.contracts.weights import IndexWeights, LatentWeights
from evener.errors import ArchitectureError
from evener.layers.builder import Builder, Parts
from evener.layers.norms import norm_weight
from evener.layers.rotary import RotaryConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class IndexConfig:
    """The indexer of a sparse layer (DeepSeek-AI 2025, DSA).

    Attributes:
        heads: index heads.
        head_dim: width of an index head's query, and of the key that all of them share.
        top: how many earlier tokens attention reads per query.
    """

    heads: int
    head_dim: int
    top: int


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention of one layer. In brackets: the key in DeepSeek's ``config.json``.

    Attributes:
        heads: query heads (``num_attention_heads``).
        nope_dim: part of a head's query and key that is not rotated (``qk_nope_head_dim``).
        rope_dim: the rotated part (``qk_rope_head_dim``).
        value_dim: width of a head's value (``v_head_dim``).
        rank: width of the latent of keys and values (``kv_lora_rank``).
        q_rank: width of the queries' latent (``q_lora_rank``); None: queries are projected directly.
        rotary: rotary position embedding, ``rope_dim`` wide.
        scale: factor on the scores; None: ``(nope_dim + rope_dim) ** -0.5``.
        bias: whether the down-projections and the output projection have biases (``attention_bias``).
        index: the indexer of sparse attention, or None.
        norm: name of the norm before attention.
    """

    heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rank: int
    q_rank: int | None
    rotary: RotaryConfig
    scale: float | None = None
    bias: bool = False
    index: IndexConfig | None = None
    norm: str = "input_layernorm"

    def declare(self, build: Builder, prefix: str, common: NormStatic) -> LatentAttention:
        """Declare the mixer of layer ``prefix``; ``common`` are the static parameters that the layer's blocks share."""
        return LatentAttention(build, prefix, common, self)


class LatentAttention:
    """Norm, latent attention and output projection: one call of ``latent_attention_block``.

    ``build.absorb`` chooses how it is computed; "auto" is "absorb-without-precomp". ``build.index_top`` overrides how
    many tokens a sparse layer reads per query; 0 makes it dense.
    """

    def __init__(self, build: Builder, prefix: str, common: NormStatic, c: LatentConfig) -> None:
        module, hidden = f"{prefix}.self_attn", common["hidden"]
        self._build, self._module, self._config, self._hidden = build, module, c, hidden
        self._absorb = "absorb-without-precomp" if build.absorb == "auto" else build.absorb
        top = build.index_top
        if top is None and c.index is not None:
            top = c.index.top
        sparse = c.index is not None and bool(top)
        self._heads, _ = build.shard_heads(c.heads, c.heads)
        heads = self._heads.size
        self.slot = self._declare_state(top if sparse else None)
        q_a = (f"{module}.q_a_proj.weight", c.q_rank) if c.q_rank else (f"{module}.q_proj.weight", self._q_rows)
        down_parts: Parts = (q_a, (f"{module}.kv_a_proj_with_mqa.weight", c.rank + c.rope_dim))
        kv_b_name, kv_b_rows = f"{module}.kv_b_proj.weight", self._heads * (c.nope_dim + c.value_dim)
        o_parts = {f"{module}.o_proj.weight": hidden}
        down = build.linear(f"{module}.down_proj", down_parts, hidden)
        kv_b = build.linear(f"{module}.kv_b_proj", {kv_b_name: kv_b_rows}, c.rank)
        o = build.linear(f"{module}.o_proj", o_parts, self._heads * c.value_dim)
        q_b = {f"{module}.q_b_proj.weight": self._q_rows}
        q = build.linear(f"{module}.q_b", q_b, c.q_rank) if c.q_rank else None
        matrices = self._absorb != "none" or sparse
        self.weights: WeightGroup = build.group(
            LatentWeights, down=down, kv_b=kv_b, o=o, q=q, norm=norm_weight(build, prefix, c.norm, hidden, common),
            kv_norm=build.weight(f"{module}.kv_a_layernorm.weight", c.rank, dummy="ones"),
            q_norm=build.weight(f"{module}.q_a_layernorm.weight", c.q_rank, dummy="ones") if c.q_rank else None,
            cos_sin=c.rotary.table(build, c.rope_dim),
            down_bias=build.biases(down_parts, f"{module}.down_bias") if c.bias else None,
            o_bias=build.biases(o_parts, f"{module}.o_bias", summed=True) if c.bias else None,
            heads=build.weight(kv_b_name, kv_b_rows, c.rank) if matrices else None,
            **(self._declare_products() if self._absorb == "absorb" and not sparse else {}),
        )  # fmt: skip
        if not sparse:
            build.ignore(rf"{re.escape(module)}\.indexer\..*")
        self.index = self._declare_index(c.index, top or 0, hidden) if c.index is not None and sparse else None
        static: LatentStatic = {
            **common, "down": down, "kv_b": kv_b, "o": o, "q": q, "communicator": build.communicator, "heads": heads,
            "nope_dim": c.nope_dim, "rope_dim": c.rope_dim, "value_dim": c.value_dim, "rank": c.rank,
            "q_rank": c.q_rank, "interleaved": c.rotary.interleaved, "absorb": self._absorb, "sparse": sparse,
            "state": self.slot, "index": self.index and self.index[2],
        }  # fmt: skip
        self.site = build.op("latent_attention_block", module, **static)

    @property
    def _q_rows(self) -> Span:
        return self._heads * (self._config.nope_dim + self._config.rope_dim)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream is ``x + residual``. Returns the next such pair, each [T, hidden]."""
        slot = self.slot
        more: tuple[Any, ...] = ()
        if self.index is not None:
            group, index, _ = self.index
            more = (group.values, index.views, step.metas[index.group])
        return self.site.table[step.bucket](  # type: ignore[no-any-return]
            x, residual, step.positions, self.weights.values, slot.views, step.metas[slot.group], *more
        )

    def _declare_state(self, top: int | None) -> StateSlot:
        c, dtype = self._config, self._build.state_dtype
        spec = StateSpec("latent", (StateTensor("latent", (c.rank,), dtype), StateTensor("rope", (c.rope_dim,), dtype)))
        scale = (c.nope_dim + c.rope_dim) ** -0.5 if c.scale is None else c.scale
        parts = self._absorb != "none" and top is None
        attention = AttentionSpec(
            self._heads.size, c.rank + c.rope_dim, scale, dtype=self._build.dtype, top=top, split_decode=parts
        )
        return self._build.state(self._module, spec, attention)

    def _declare_products(self) -> dict[str, Any]:
        """For absorb="absorb": products of the up-projection with the query's and the output's projections, which are
        computed once, when the weights are loaded."""
        c, module, hidden = self._config, self._module, self._hidden
        heads, nope, rank = self._heads.size, c.nope_dim, c.rank
        kv_b = {f"{module}.kv_b_proj.weight": (self._heads * (nope + c.value_dim), rank)}
        columns = c.q_rank or hidden
        queries = {f"{module}.q_b_proj.weight" if c.q_rank else f"{module}.q_proj.weight": (self._q_rows, columns)}

        def q_product(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            import torch

            q, kv = (t.float().unflatten(0, (heads, -1)) for t in tensors)
            lowered = kv[:, :nope].transpose(1, 2) @ q[:, :nope]
            made: torch.Tensor = torch.cat((lowered, q[:, nope:]), dim=1).flatten(0, 1)
            return made.to(tensors[0].dtype)

        def o_product(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            o, kv = tensors[0].float().unflatten(1, (heads, -1)), tensors[1].float().unflatten(0, (heads, -1))
            made: torch.Tensor = o.transpose(0, 1) @ kv[:, nope:]  # [heads, hidden, rank]
            return made.transpose(0, 1).flatten(1).to(tensors[0].dtype)

        build = self._build
        o = {f"{module}.o_proj.weight": (hidden, self._heads * c.value_dim)}
        wide = heads * (rank + c.rope_dim)
        return {
            "q_product": build.precomputed(f"{module}.q_product", wide, columns, {**queries, **kv_b}, q_product),
            "o_product": build.precomputed(f"{module}.o_product", hidden, heads * rank, {**o, **kv_b}, o_product),
        }

    def _declare_index(self, c: IndexConfig, top: int, hidden: int) -> tuple[WeightGroup, StateSlot, IndexStatic]:
        build, module, dtype = self._build, f"{self._module}.indexer", self._build.dtype
        if self._config.q_rank is None:
            raise ArchitectureError(f"{module} reads the queries' latent; give its width, q_lora_rank in config.json")

        def linear(name: str, rows: int, columns: int) -> LinearWeight:
            return build.linear(f"{module}.{name}", {f"{module}.{name}.weight": rows}, columns)

        q = linear("wq_b", c.heads * c.head_dim, self._config.q_rank)
        k, weights = linear("wk", c.head_dim, hidden), linear("weights_proj", c.heads, hidden)
        spec = StateSpec("index", (StateTensor("key", (c.head_dim,), dtype),))
        slot = build.state(module, spec, AttentionSpec(c.heads, c.head_dim, 1.0, dtype=dtype, top=top))
        group = build.group(
            IndexWeights, q=q, k=k, weights=weights,
            k_norm=build.weight(f"{module}.k_norm.weight", c.head_dim, dummy="ones"),
            k_norm_bias=build.weight(f"{module}.k_norm.bias", c.head_dim, dummy="zeros"),
            cos_sin=self._config.rotary.table(build, c.head_dim),
        )  # fmt: skip
        static: IndexStatic = {
            "hidden": hidden, "heads": c.heads, "head_dim": c.head_dim, "rope_dim": self._config.rope_dim,
            "dtype": dtype, "state": slot, "q": q, "k": k, "weights": weights,
        }  # fmt: skip
        return group, slot, static

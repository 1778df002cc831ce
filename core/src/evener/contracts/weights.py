"""Weights of composite ops: what the inputs ``weights``, ``attention`` and ``mlp`` hold.

Each field is a tensor, the ``PackedWeight`` of a declared ``LinearWeight``, or None. With tensor parallelism, each rank
has its part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from evener.contracts.quant import PackedWeight


class AttentionWeights(NamedTuple):
    """The weights of ``attention_block``; None where the model has no such weight.

    Attributes:
        norm: [hidden], of the norm before the block. Of a layer norm it is float32; with a bias it is [2 * hidden], the
            weight and then the bias.
        qkv: queries, keys and values, in this order; rows (heads + kv_heads) * head_dim + kv_heads * value_dim.
        o: the output projection, [hidden, heads * value_dim].
        cos_sin: float32 [positions, rotary_dim], as ``rotary`` takes it.
        qkv_bias: [rows of qkv].
        o_bias: [hidden]; only one rank has it, the others have None.
        q_norm: [head_dim], of the norm of each query head; if ``qk_norm_over`` is not "head", [heads * head_dim].
        k_norm: the same for keys.
        sinks: [heads], see ``AttentionSpec.sinks``.
        post_norm: [hidden], of the norm after the output projection; see ``norm``.
        query_scale: float32 [positions], factors on queries, after rotary; the products are rounded to the compute
            dtype.
    """

    norm: torch.Tensor | None
    qkv: PackedWeight
    o: PackedWeight
    cos_sin: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    post_norm: torch.Tensor | None = None
    query_scale: torch.Tensor | None = None


class MLPWeights(NamedTuple):
    """The weights of ``mlp_block``; None where the model has no such weight.

    Attributes:
        norm: [hidden], of the norm before the block. Of a layer norm it is float32; with a bias it is [2 * hidden], the
            weight and then the bias.
        gate_up: [2 * inner, hidden], the gate's rows first; [inner, hidden] without a gate.
        down: [hidden, inner].
        gate_up_bias: [rows of gate_up].
        down_bias: [hidden]; only one rank has it, the others have None.
        post_norm: [hidden], of the norm after the down projection; see ``norm``.
    """

    norm: torch.Tensor | None
    gate_up: PackedWeight
    down: PackedWeight
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    post_norm: torch.Tensor | None = None


class MoEWeights(NamedTuple):
    """The weights of ``moe_block``; None where the model has no such weight.

    Stacked weights and biases are indexed by slot.

    Attributes:
        norm: [hidden], of the norm before the block. Of a layer norm it is float32; with a bias it is [2 * hidden], the
            weight and then the bias.
        router: [experts, hidden]; its products are float32.
        gate_up: a stack of [2 * inner, hidden], the gate's rows first; for clamped_swiglu the rows of gate and up
            alternate.
        down: a stack of [hidden, inner].
        slots: int32 [experts, copies], see ``ExpertMap``.
        copies: int32 [experts], see ``ExpertMap``.
        router_bias: [experts].
        correction: float32 [experts], added to the scores when experts are chosen, not to their weights.
        gate_up_bias: [slots, 2 * inner].
        down_bias: [slots, hidden]; only one rank has it, the others have None.
        shared_gate_up: [2 * shared_inner, hidden], of the shared experts.
        shared_down: [hidden, shared_inner].
        shared_gate: [1, hidden]; the sigmoid of its product is a factor on the result of the shared experts.
        post_norm: [hidden], of the norm after the block; see ``norm``.
    """

    norm: torch.Tensor
    router: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    slots: torch.Tensor
    copies: torch.Tensor
    router_bias: torch.Tensor | None = None
    correction: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    shared_gate_up: PackedWeight | None = None
    shared_down: PackedWeight | None = None
    shared_gate: PackedWeight | None = None
    post_norm: torch.Tensor | None = None


class LatentWeights(NamedTuple):
    """The weights of ``latent_attention_block``; None where the model has no such weight.

    Attributes:
        norm: [hidden], of the norm before the block.
        down: gives the queries (or their latent, if there is ``q``), the latent and the rotated key.
        kv_norm: [rank], of the norm of the latent.
        kv_b: [heads * (nope_dim + value_dim), rank], gives keys and values from latents.
        o: the output projection, [hidden, heads * value_dim].
        cos_sin: float32 [positions, rope_dim], as ``rotary`` takes it.
        q: [heads * (nope_dim + rope_dim), q_rank], gives queries from their latent.
        q_norm: [q_rank], of the norm of the queries' latent.
        down_bias: [rows of down].
        o_bias: [hidden]; only one rank has it, the others have None.
        heads: ``kv_b`` as a tensor, not packed.
        q_product: [heads * (rank + rope_dim), …], ``q`` (or the queries' rows of ``down``) multiplied by the key part
            of ``kv_b``: absorption then needs one product instead of two.
        o_product: [hidden, heads * rank], ``o`` multiplied by the value part of ``kv_b``, for the same reason.
    """

    norm: torch.Tensor
    down: PackedWeight
    kv_norm: torch.Tensor
    kv_b: PackedWeight
    o: PackedWeight
    cos_sin: torch.Tensor
    q: PackedWeight | None = None
    q_norm: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    heads: torch.Tensor | None = None
    q_product: torch.Tensor | None = None
    o_product: torch.Tensor | None = None


class IndexWeights(NamedTuple):
    """The weights of ``index_block``.

    Attributes:
        q: [heads * head_dim, q_rank], gives the index's queries from the latent of the attention's queries.
        k: [head_dim, hidden], gives the key.
        weights: [heads, hidden], gives the weights of the heads.
        k_norm: [head_dim], of the layer norm of the key.
        k_norm_bias: [head_dim], its bias.
        cos_sin: float32 [positions, rope_dim], as ``rotary`` takes it.
    """

    q: PackedWeight
    k: PackedWeight
    weights: PackedWeight
    k_norm: torch.Tensor
    k_norm_bias: torch.Tensor
    cos_sin: torch.Tensor


class DeltaWeights(NamedTuple):
    """The weights of ``delta_block``.

    Attributes:
        norm: [hidden], of the norm before the block.
        in_proj: gives queries, keys, values and gates; the rows of one key head are contiguous.
        filters: [channels, 1, width], of the causal convolution.
        a_log: float32 [heads], as ``delta_gates`` takes it.
        dt_bias: float32 [heads], as ``delta_gates`` takes it.
        inner_norm: [value_dim], of the gated norm; without ``offset``.
        o: the output projection, [hidden, heads * value_dim].
    """

    norm: torch.Tensor
    in_proj: PackedWeight
    filters: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    inner_norm: torch.Tensor
    o: PackedWeight


class GatedAttentionWeights(NamedTuple):
    """The weights of ``gated_attention_block``; None where the model has no such weight.

    Attributes:
        norm: [hidden], of the norm before the block.
        qkv: queries with their gates (each head's query, then its gate), keys, values.
        o: the output projection, [hidden, heads * head_dim].
        cos_sin: float32 [positions, rotary_dim], as ``rotary`` takes it.
        q_norm: [head_dim], of the norm of each query head.
        k_norm: [head_dim], of the norm of each key head.
        qkv_bias: [rows of qkv].
        o_bias: [hidden]; only one rank has it, the others have None.
    """

    norm: torch.Tensor
    qkv: PackedWeight
    o: PackedWeight
    cos_sin: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None

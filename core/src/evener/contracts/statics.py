"""Typed records of the composite ops' static parameters: the names in ``OpCall.static``, with their types.

Each record is a ``TypedDict``, so at run time the static parameters stay a plain dict. The layers build them; the ops'
references and the kernels read them. A kernel casts once, and a type checker then finds a misspelt name::

    s = cast(MLPStatic, call.static)
    rows = s["gate_up"].rows

The text beside a type says what the parameter means; ``describe`` makes ``OpSchema.static`` from these texts. Sizes are
those of one tensor parallel rank, except where the text says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypedDict, get_type_hints

from evener.contracts.communicator import Communicator
from evener.contracts.declared import LinearWeight, StackedWeight, StateSlot
from evener.contracts.placement import Placement


def describe(record: type) -> dict[str, str]:
    """``OpSchema.static`` of an op whose static parameters are ``record``: each name with its text."""
    return {name: hint.__metadata__[0] for name, hint in get_type_hints(record, include_extras=True).items()}


def select(static: Mapping[str, Any], record: type) -> dict[str, Any]:
    """The static parameters that ``record`` names, out of those of a larger block."""
    return {name: value for name, value in static.items() if name in record.__annotations__}


class RowsStatic(TypedDict):
    """Part of almost every record."""

    hidden: Annotated[int, "H, width of the rows"]
    dtype: Annotated[str, "compute dtype"]


class RanksStatic(TypedDict):
    """Part of the records of blocks that tensor parallel ranks share."""

    communicator: Annotated[Communicator | None, "of the ranks that share the block and combine its results; or None"]


class NormStatic(RowsStatic):
    """Part of every block's record: the layer's norms, which are all of one kind."""

    eps: Annotated[float, "added to the mean square or the variance"]
    offset: Annotated[float, "added to the norm's weight (often 1.0)"]
    norm: Annotated[str, "rms, layer, biased_layer (weight and bias are one tensor) or bare_layer (neither)"]


class BlockStatic(NormStatic):
    """Part of the records of attention and MLP."""

    pre_norm: Annotated[bool, "False: no norm before the block"]


class OutputStatic(RanksStatic):
    """Part of the records of attention, MLP and experts: what happens to the block's result."""

    post_norm: Annotated[bool, "whether there is a norm after the block"]


class StateStatic(TypedDict):
    """Part of the records of blocks with state."""

    state: Annotated[StateSlot, "the layer's StateSlot"]


class QKVStatic(BlockStatic, StateStatic):
    """``norm_qkv_rotary_write``."""

    heads: Annotated[int, "query heads"]
    kv_heads: Annotated[int, "key and value heads"]
    head_dim: Annotated[int, "D of queries and keys"]
    value_dim: Annotated[int, "D of values"]
    rotary_dim: Annotated[int, "leading part of each head that is rotated; 0: none"]
    interleaved: Annotated[bool, "rotate pairs (2i, 2i+1) instead of halves"]
    qk_norm: Annotated[bool, "normalize queries and keys before rotating"]
    qk_norm_over: Annotated[str, "head: each head; each: each head, with its own weights (layer norm); all: all heads"]
    qk_norm_ranks: Annotated[Communicator | None, "of the ranks that share these heads, for a norm of all; or None"]
    qkv: Annotated[LinearWeight, "the declared LinearWeight of q, k, v"]


class AttentionStatic(QKVStatic, OutputStatic):
    """``attention_block``."""

    o: Annotated[LinearWeight, "the declared LinearWeight of the output projection"]
    query_scale: Annotated[bool, "whether queries have factors by position"]


class MLPStatic(BlockStatic, OutputStatic):
    """``mlp_block``."""

    inner: Annotated[int, "width between the two linears"]
    activation: Annotated[str, "silu, gelu, gelu_tanh, relu or relu_squared"]
    gated: Annotated[bool, "False: activation(up) instead of activation(gate) * up"]
    bias: Annotated[bool, "whether all its projections have biases"]
    gate_up: Annotated[LinearWeight, "the declared LinearWeight of gate and up, or of up alone"]
    down: Annotated[LinearWeight, "the declared LinearWeight of down"]


class ChosenStatic(TypedDict):
    """Part of the records of experts: how many there are."""

    experts: Annotated[int, "E, number of experts"]
    top: Annotated[int, "experts per token"]


class RouteStatic(ChosenStatic):
    """``route``, and part of the record of experts."""

    scoring: Annotated[str, "softmax, sigmoid, or softmax_top: choose by the logits, then softmax over the chosen"]
    groups: Annotated[int, "equal groups of neighbouring experts; 1: none"]
    top_groups: Annotated[int, "groups per token"]
    group_best: Annotated[int, "how many of a group's best scores are added up to rank it"]
    renormalize: Annotated[bool, "weights sum to 1"]
    scale: Annotated[float, "factor on the weights"]


class StacksStatic(TypedDict):
    """Part of the records of experts: their weights, and what they compute."""

    inner: Annotated[int, "width between the two linears of an expert"]
    activation: Annotated[str, "as for act_and_mul"]
    alpha: Annotated[float, "of clamped_swiglu"]
    limit: Annotated[float, "of clamped_swiglu"]
    router_weight_on_input: Annotated[bool, "routing weights are factors on the experts' inputs, not on their results"]
    gate_up: Annotated[StackedWeight, "the declared StackedWeight of gate and up"]
    down: Annotated[StackedWeight, "the declared StackedWeight of down"]
    placement: Annotated[Placement | None, "where the experts are; None: on the device"]


class ExpertsStatic(RowsStatic, ChosenStatic, StacksStatic):
    """``routed_experts``."""


class MoEStatic(NormStatic, RouteStatic, OutputStatic, StacksStatic):
    """``moe_block``."""

    router: Annotated[LinearWeight, "the declared LinearWeight of the router, out float32"]
    shared_inner: Annotated[int, "width of all shared experts together; 0: none"]
    shared_gate_up: Annotated[LinearWeight | None, "their declared LinearWeight of gate and up, or None"]
    shared_down: Annotated[LinearWeight | None, "their declared LinearWeight of down, or None"]
    shared_gate: Annotated[LinearWeight | None, "the declared LinearWeight of their sigmoid gate, or None"]


class DecoderLayerStatic(RowsStatic):
    """``decoder_layer``."""

    attention: Annotated[AttentionStatic, "static of the attention_block"]
    mlp: Annotated[MLPStatic, "static of the mlp_block"]
    parallel: Annotated[bool, "whether attention and MLP read the same stream"]


class LatentHeadsStatic(StateStatic):
    """Part of the records of latent attention: its heads."""

    heads: Annotated[int, "query heads"]
    nope_dim: Annotated[int, "part of a head's query and key that is not rotated"]
    value_dim: Annotated[int, "width of a head's value"]
    rank: Annotated[int, "width of the latent"]
    kv_b: Annotated[LinearWeight, "the declared LinearWeight that makes keys and values from latents"]
    absorb: Annotated[str, "none, absorb-without-precomp or absorb"]
    sparse: Annotated[bool, "whether each query reads chosen tokens only"]


class LatentAttendStatic(LatentHeadsStatic):
    """``latent_attend``."""

    dtype: Annotated[str, "compute dtype"]


class IndexStatic(RowsStatic, StateStatic):
    """``index_block``."""

    heads: Annotated[int, "index heads"]
    head_dim: Annotated[int, "D of queries and the key"]
    rope_dim: Annotated[int, "leading part that is rotated"]
    q: Annotated[LinearWeight, "the declared LinearWeight of the queries"]
    k: Annotated[LinearWeight, "of the key"]
    weights: Annotated[LinearWeight, "of the heads' weights"]


class LatentStatic(NormStatic, LatentHeadsStatic, RanksStatic):
    """``latent_attention_block``. Eps and offset are the first norm's; inner norms are RMS norms with eps 1e-6."""

    rope_dim: Annotated[int, "rotated part of a head's query, and of the key that all heads share"]
    q_rank: Annotated[int | None, "width of the queries' latent; None: queries are projected directly"]
    interleaved: Annotated[bool, "rotate pairs (2i, 2i+1) instead of halves"]
    down: Annotated[LinearWeight, "the declared LinearWeight of (queries or their latent), latent and rotated key"]
    q: Annotated[LinearWeight | None, "of the queries from their latent, or None"]
    o: Annotated[LinearWeight, "of the output projection"]
    index: Annotated[IndexStatic | None, "static of the index_block, or None"]


class DeltaStatic(NormStatic, RanksStatic, StateStatic):
    """``delta_block``."""

    heads: Annotated[int, "value heads"]
    key_heads: Annotated[int, "query and key heads"]
    key_dim: Annotated[int, "width of a head's query and key"]
    value_dim: Annotated[int, "width of a head's value"]
    in_proj: Annotated[LinearWeight, "the declared LinearWeight of queries, keys, values and gates"]
    o: Annotated[LinearWeight, "the declared LinearWeight of the output projection"]


class GatedAttentionStatic(NormStatic, RanksStatic, StateStatic):
    """``gated_attention_block``."""

    heads: Annotated[int, "query heads"]
    kv_heads: Annotated[int, "key and value heads"]
    head_dim: Annotated[int, "D"]
    rotary_dim: Annotated[int, "leading part of each head that is rotated"]
    qkv: Annotated[LinearWeight, "the declared LinearWeight of queries with gates, keys, values"]
    o: Annotated[LinearWeight, "the declared LinearWeight of the output projection"]


class HeadStatic(NormStatic, RanksStatic):
    """``head`` and ``vocab_greedy``."""

    vocab: Annotated[int, "V, of all ranks"]
    weight: Annotated[LinearWeight, "the declared LinearWeight of the head"]
    logit_scale: Annotated[float, "factor on the logits"]
    cap: Annotated[float | None, "soft cap on the logits, or None"]


class VocabEmbeddingStatic(RowsStatic):
    """``vocab_embedding``."""

    start: Annotated[int, "id of the first row that this rank holds"]
    rows: Annotated[int, "how many it holds"]
    scale: Annotated[float, "factor on the rows"]
    communicator: Annotated[Communicator, "of the ranks that share the vocabulary"]


class AllReduceNormStatic(NormStatic):
    """``all_reduce_norm``."""

    communicator: Annotated[Communicator, "of the ranks whose rows are summed"]

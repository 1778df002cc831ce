"""The state contract: what a layer remembers, and who owns its layout.

A layer declares a ``StateSpec``; equal specs form a *group* with one block table a request. A ``StateProvider`` is
resolved as a unit for a group: it decides the layout of a block, writes it and attends over it. Core keeps block ids
and nothing else. Block 0 is the null block: never read for a real token, writable garbage for padding.

A block holds ``block_size`` tokens of one layer (``per="token"``), or one row of state as it stood after the block's
last computed token (``per="request"``). All groups draw blocks of equal bytes from one pool.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from evener.contracts.device import DeviceCapabilities
from evener.contracts.quant import DTYPE_BYTES

if TYPE_CHECKING:
    import torch

GraphReach = Literal["never", "uniform_decode", "any"]


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a spec: its ``shape`` for one token (or one request) in the canonical layout, and its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes for one token (or one request)."""
        return int(math.prod(self.shape) * DTYPE_BYTES[self.dtype])


@dataclass(frozen=True)
class StateSpec:
    """What one layer remembers.

    Attributes:
        kind: a registered kind: "full", "window", "latent", "index", "recurrent".
        tensors: for "full" and "window": key [kv_heads, head_dim] and value [kv_heads, value_dim].
        per: whether ``tensors`` are for a token or for a request.
        window: (kind "window") a query attends to itself and the ``window - 1`` tokens before it.
        shared_with: (optional) name of an earlier layer whose state this layer reads instead of having its own.
    """

    kind: str
    tensors: tuple[StateTensor, ...]
    per: Literal["token", "request"] = "token"
    window: int | None = None
    shared_with: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes for one token (or one request), unpadded."""
        return sum(t.nbytes for t in self.tensors)


@dataclass(frozen=True)
class AttentionSpec:
    """How a layer reads its state; a provider may refuse what it cannot do.

    Attributes:
        heads: query heads.
        head_dim: of queries and keys.
        scale: factor on the scores.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None is off.
        sinks: whether each head has a learned logit that joins the softmax without a value.
        dtype: compute type.
    """

    heads: int
    head_dim: int
    scale: float
    softcap: float | None = None
    sinks: bool = False
    dtype: str = "float32"


class StateKind(ABC):
    """The block rules of a kind: which blocks are still needed. Everything else about prefixes and dead blocks follows
    from it."""

    name: str

    @abstractmethod
    def first_live_block(self, spec: StateSpec, computed: int, block_size: int) -> int:
        """Index of the first block that the token at position ``computed`` (and any after it) can still read.

        Blocks before it may be freed. A prefix of ``n`` blocks can be reused if the blocks from ``first_live_block(n *
        block_size)`` up to ``n`` are cached. Must not decrease as ``computed`` grows.
        """


@dataclass(frozen=True)
class StateStep:
    """One step as a group sees it. Tensors live on the device and are valid during the step only.

    Attributes:
        tokens: tokens in the step (T); requests: rows (R). Padding rows have query length 0 … or write to block 0.
        max_query: longest query of a request; max_kv: an upper bound of ``kv_lens``.
        query_start: int32 [R + 1], offsets into the tokens.
        kv_lens: int32 [R], tokens of state after this step's writes.
        positions: int32 or int64 [T].
        slot_mapping: int32 or int64 [T], ``block * block_size + offset`` where each token is written.
        block_table: int32 [R, C], block ids. Entries before the first live block may be stale (they name blocks of
            others) and must not be read.
        host_query_lens, host_kv_lens: the same numbers on the host, in row order.
    """

    tokens: int
    requests: int
    max_query: int
    max_kv: int
    query_start: torch.Tensor
    kv_lens: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    host_query_lens: Sequence[int]
    host_kv_lens: Sequence[int]


class StateProvider(ABC):
    """Owns the layout of some kinds of state and computes with it.

    Attributes:
        name: unique in the run, e.g. "cpu.paged".
        layout: name of its layout; a fused kernel that writes state declares the same.
        kinds: the kinds it serves.
        priority: the highest that supports a group wins; the reference has -1000.
        graph: how far its attention can be captured.
        owns_memory: it allocates its own pool in ``bind`` and ignores ``storage``.
        batch_invariant: a request's result does not depend on its company.
    """

    name: str
    layout: str
    kinds: frozenset[str]
    priority: int = 0
    graph: GraphReach = "never"
    owns_memory: bool = False
    batch_invariant: bool = False

    @abstractmethod
    def supports(self, spec: StateSpec, attention: AttentionSpec, device: DeviceCapabilities) -> str | None:
        """None when it can serve the group; otherwise the reason."""

    @abstractmethod
    def block_sizes(self, spec: StateSpec) -> Sequence[int]:
        """Tokens a block that it offers, preferred first; each a multiple of the smallest."""

    @abstractmethod
    def bytes_per_block(self, spec: StateSpec, block_size: int) -> int:
        """Bytes of one block of one layer, its own padding included. Needs no device."""

    @abstractmethod
    def bind(self, storage: torch.Tensor, spec: StateSpec, block_size: int) -> Any:
        """Views of one layer's blocks. ``storage``: uint8 [blocks, page_bytes] on the device, page_bytes >=
        bytes_per_block."""

    @abstractmethod
    def prepare(self, step: StateStep, spec: StateSpec, attention: AttentionSpec, block_size: int) -> Any:
        """Metadata of one step, made once for a group and passed to ``write`` and ``attend`` of its layers."""

    @abstractmethod
    def write(self, views: Any, meta: Any, *values: torch.Tensor) -> None:
        """Write this step's tokens; ``values`` in the order of ``spec.tensors``, each [T, *shape]. Mutates it."""

    @abstractmethod
    def attend(self, views: Any, meta: Any, query: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Attention of query [T, heads, head_dim] over the state, this step's tokens included; returns [T, heads,
        value_dim]."""

    @abstractmethod
    def copy_blocks(self, views: Any, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy blocks ``source`` to ``target`` (int64 [n] each) in one layer."""

    @abstractmethod
    def export_blocks(self, views: Any, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Blocks (int64 [n]) in the canonical layout: for each tensor of the spec [n, block_size, *shape] (or [n,
        *shape])."""

    @abstractmethod
    def import_blocks(self, views: Any, blocks: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        """The inverse of ``export_blocks``."""

    def workspace(self, spec: StateSpec, attention: AttentionSpec, max_tokens: int, max_kv: int) -> int:
        """(optional) Bytes of scratch memory at the largest step. Default 0."""
        del spec, attention, max_tokens, max_kv
        return 0

"""The state contract: what a layer remembers, and who owns its layout.

A layer declares a ``StateSpec``; equal specs form a *group* with one block table a request. A ``StateProvider`` is
resolved as a unit for a group: it decides the layout of a block, writes it and attends over it. Core keeps block ids
and nothing else. Block 0 is the null block: never read for a real token, writable garbage for padding.

A block holds ``block_size`` tokens of one layer (``per="token"``), or one row of state as it stood after the block's
last computed token (``per="request"``). All groups draw their blocks from one pool.

Which methods of a provider a layer calls follows from the kind of its state:

========== ============================= =======================================================================
kind       tensors                       calls
========== ============================= =======================================================================
full,      key [kv_heads, head_dim],     ``write``, ``attend``
window,    value [kv_heads, value_dim]
chunk
latent     latent [rank], rope [dim]     ``write``; ``attend`` with queries in latent space; ``pieces`` where
                                         keys and values are expanded instead; ``attend_chosen`` if sparse
index      key [dim]                     ``write``, ``select``
recurrent  as the recurrence needs       ``advance``
========== ============================= =======================================================================
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
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
        kind: a registered kind: "full", "window", "chunk", "latent", "index", "recurrent".
        tensors: for "full", "window" and "chunk": key [kv_heads, head_dim] and value [kv_heads, value_dim].
        per: whether ``tensors`` are for a token or for a request.
        window: (kind "window") a query attends to itself and the ``window - 1`` tokens before it; (kind "chunk") to
            those of its own chunk up to itself: chunks of ``window`` tokens, one after another from position 0.
        every: (per request) tokens between snapshots that a prefix can go on from, a multiple of the block size; None
            keeps one at every block's end.
        shared_with: (optional) name of an earlier layer whose state this layer reads instead of having its own.
    """

    kind: str
    tensors: tuple[StateTensor, ...]
    per: Literal["token", "request"] = "token"
    window: int | None = None
    every: int | None = None
    shared_with: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes for one token (or one request), unpadded."""
        return sum(t.nbytes for t in self.tensors)

    def first_seen(self, at: Any) -> Any:
        """The first position that the query at position ``at`` attends to, a number or a tensor of them; below 0 where
        a window reaches further back than the sequence."""
        if self.window is None:
            return 0 * at
        return at - at % self.window if self.kind == "chunk" else at - self.window + 1


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
        top: (sparse latent) ``attend_chosen`` is called, with so many tokens a query; (index) so many ``select`` names.
        parts: requests that add one token get metadata of their own (``StepParts``), because they are computed in
            another way than the rest.
        algorithm: "softmax", or the recurrence that ``advance`` computes (``gated_delta``).
        slopes: (attention with linear biases, Press et al. 2022) for each of ``heads`` what a score loses per token by
            which the key lies before the query, in float32 and after the soft cap; None is off.
    """

    heads: int
    head_dim: int
    scale: float
    softcap: float | None = None
    sinks: bool = False
    dtype: str = "float32"
    top: int | None = None
    parts: bool = False
    algorithm: str = "softmax"
    slopes: tuple[float, ...] | None = None


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

    def needs(self, spec: StateSpec, column: int, last: int, block_size: int) -> bool:
        """(optional) Whether a step whose last new block is ``last`` writes block ``column``; others get none. Default:
        all are written."""
        del spec, column, last, block_size
        return True

    def reusable(self, spec: StateSpec, column: int, block_size: int) -> bool:
        """(optional) Whether a full block ``column`` holds its prefix's state wherever steps ended. Default: yes."""
        del spec, column, block_size
        return True

    def held(self, spec: StateSpec, first: int, stop: int, block_size: int) -> int:
        """(optional) Blocks that a request holds of ``first`` to ``stop`` while a step that ends there is in flight.
        Default: all."""
        del spec, block_size
        return stop - first


@dataclass(frozen=True)
class StateStep:
    """One step as a group sees it. Tensors live on the device, begin aligned (``DeviceCapabilities.alignment``; those
    of a part of a step, see ``rows``, need not), and are valid during the step only. Integers are int32 where the
    device takes no int64.

    Attributes:
        tokens: tokens in the step (T); requests: rows (R). A captured step is padded with requests of one token whose
            slots lie in block 0, which is nobody's; what ``attend`` returns for them is not read.
        max_query: longest query of a request; max_kv: an upper bound of ``kv_lens``.
        query_start: int32 [R + 1], offsets into the tokens.
        kv_lens: int32 [R], tokens of state after this step's writes.
        positions: int32 or int64 [T].
        slot_mapping: int32 or int64 [T], ``block * block_size + offset`` where each token is written.
        block_table: int32 [R, C], block ids. Entries before the first live block may be stale (they name blocks of
            others) and must not be read.
        host_query_lens, host_kv_lens: the same numbers on the host, in row order. In a capture they are those of the
            run that is captured, while sizes follow ``max_kv``; ``Replay.update`` gets those of each replay.
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

    def rows(self, first: int, stop: int) -> StateStep:
        """The step of requests ``first`` to ``stop`` alone."""
        queries, lengths = self.host_query_lens[first:stop], self.host_kv_lens[first:stop]
        start = sum(self.host_query_lens[:first])
        end = start + sum(queries)
        return StateStep(
            tokens=end - start, requests=stop - first, max_query=max(queries), max_kv=min(self.max_kv, max(lengths)),
            query_start=self.query_start[first : stop + 1] - start, kv_lens=self.kv_lens[first:stop],
            positions=self.positions[start:end], slot_mapping=self.slot_mapping[start:end],
            block_table=self.block_table[first:stop], host_query_lens=queries, host_kv_lens=lengths,
        )  # fmt: skip


@dataclass(frozen=True)
class StepParts:
    """A step's metadata in two parts: ``single`` for its first ``tokens`` tokens, whose requests add one each, and
    ``longer`` for the rest; None for a part without tokens."""

    single: Any
    longer: Any
    tokens: int


@dataclass(frozen=True)
class Piece:
    """Some tokens of one request's state, in the canonical layout.

    Attributes:
        first, stop: the request's tokens in the step.
        offset: position of the first of them, less the position of the piece's first token.
        tensors: for each tensor of the spec [tokens, *shape]; valid until the next piece.
    """

    first: int
    stop: int
    offset: int
    tensors: tuple[torch.Tensor, ...]


class StateProvider(ABC):
    """Owns the layout of some kinds of state and computes with it.

    Attributes:
        name: unique in the run, e.g. "cpu.paged".
        layout: name of its layout; a fused kernel that writes state declares the same.
        kinds: the kinds it serves.
        priority: the highest that supports a group wins; the reference has -1000.
        graph: how far its attention can be captured: "never"; "uniform_decode", steps in which every request adds as
            many tokens; "any". The engine captures steps in which each request adds one.
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
        """Metadata of one step, made once for a group and passed to ``write``, ``attend`` … of its layers."""

    def metadata(self, step: StateStep, spec: StateSpec, attention: AttentionSpec, block_size: int) -> Any:
        """What layers of a group get: ``prepare``'s result, or ``StepParts`` of two. Requests that add one token and
        come first are the first part. Not to be overridden."""
        if not attention.parts:
            return self.prepare(step, spec, attention, block_size)
        longer = (row for row, count in enumerate(step.host_query_lens) if count > 1)
        cut = step.requests if step.max_query == 1 else next(longer)
        one = self.prepare(step.rows(0, cut), spec, attention, block_size) if cut else None
        rest = step.rows(cut, step.requests) if cut < step.requests else None
        return StepParts(one, rest and self.prepare(rest, spec, attention, block_size), cut)

    @abstractmethod
    def write(self, views: Any, meta: Any, *values: torch.Tensor) -> None:
        """Write this step's tokens; ``values`` in the order of ``spec.tensors``, each [T, *shape]. Mutates it."""

    @abstractmethod
    def attend(self, views: Any, meta: Any, query: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Attention of query [T, heads, head_dim] over the state, this step's tokens included; returns [T, heads,
        value_dim].

        A latent state is one key for all heads, its tensors joined, and its first tensor is the value: query [T, heads,
        rank + dim] gives [T, heads, rank].
        """

    def attend_chosen(self, views: Any, meta: Any, query: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """(sparse latent) ``attend`` where each query reads only the positions in its row of ``chosen``, int32 [T,
        top], -1 for none; each is at most the query's own and named once."""
        raise NotImplementedError(f"{self.name} serves no sparse state")

    def pieces(self, views: Any, meta: Any, limit: int) -> Iterator[Piece]:
        """(latent) The whole state of each request of the step, this step's tokens included, in pieces of at most
        ``limit`` tokens; the pieces of a request follow one another."""
        raise NotImplementedError(f"{self.name} hands out no state")

    def select(self, views: Any, meta: Any, query: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """(index) For each token the positions of the ``top`` tokens up to itself with the highest score, int32 [T,
        top], -1 where there are fewer; the order is free.

        The score of a key is the sum over heads of ``weights * relu(query @ key)``, in float32, for query [T, heads,
        head_dim] and weights float32 [T, heads]. Ties go to the lower position.
        """
        raise NotImplementedError(f"{self.name} serves no index")

    def advance(self, views: Any, meta: Any, *inputs: torch.Tensor) -> torch.Tensor:
        """(recurrent) Run this step's tokens through the recurrence, from the row before each request's first token
        (zeros at position 0), and keep the row after its last and at every snapshot that is passed; mutates the state.

        Inputs and result are the algorithm's. ``gated_delta`` (Yang et al. 2024) has the state conv [channels, width -
        1] and delta float32 [heads, key_dim, value_dim], and takes mixed [T, channels] (queries and keys of the key
        heads, then values), filter [channels, width], decay float32 [T, heads] (logarithms), beta float32 [T, heads].
        Mixed goes through a causal depthwise convolution and silu; queries and keys are normalised to length 1, queries
        times key_dim ** -0.5; a value head uses the key head ``head * key_heads // heads``. Per token ``S = exp(decay)
        S; S += k (beta (v - k S))``; it returns q S, [T, heads, value_dim].
        """
        raise NotImplementedError(f"{self.name} serves no recurrence")

    @abstractmethod
    def copy_blocks(self, views: Any, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy blocks ``source`` to ``target`` (int32 [n] each) in one layer."""

    @abstractmethod
    def export_blocks(self, views: Any, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Blocks (int32 [n]) in the canonical layout: for each tensor of the spec [n, block_size, *shape] (or [n,
        *shape])."""

    @abstractmethod
    def import_blocks(self, views: Any, blocks: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        """The inverse of ``export_blocks``."""

    def workspace(self, spec: StateSpec, attention: AttentionSpec, max_tokens: int, max_kv: int) -> int:
        """(optional) Bytes of the device that one layer's share of a step takes at its peak, its result and what it is
        given aside: what ``prepare`` makes, and the scratch of ``write``, ``attend`` and the like. Default 0.

        Asked once for each group before weights are read. The memory plan has room for the largest of the groups and of
        all kernels (``Kernel.workspace``), because calls follow one another; what ``prepare`` makes lives until the
        step's last layer, for all groups at once, and should be small.

        Args:
            max_tokens: tokens of the largest step (``infer.step_tokens``), over any number of requests.
            max_kv: tokens of the longest request (``infer.max_seq_len``).
        """
        del spec, attention, max_tokens, max_kv
        return 0

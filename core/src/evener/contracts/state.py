"""The state contract: what a layer keeps from one step to the next (its KV cache), and who owns the memory layout.

A layer declares a ``StateSpec``. Layers with equal specs form a *group*, with one block table per request. Resolution
chooses one ``StateProvider`` for each group. The provider decides the layout of a block, writes to it and reads from
it; core knows only block ids. Block 0 is the null block: padding tokens may write to it, and no real token reads it.

A block holds ``block_size`` tokens of one layer (``per="token"``), or one row of state as it was after the block's last
computed token (``per="request"``). All groups take their blocks from one pool.

Each kind of state has an interface: the methods that its layers call. A provider implements the interface of every
built-in kind in its ``kinds``; one that does not is refused when it is registered.

========== ============================ ========================= ==================================================
kind       tensors                      interface                 methods
========== ============================ ========================= ==================================================
full,      key [kv_heads, head_dim],    ``AttentionProvider``     ``write``, ``attend``
window,    value [kv_heads, value_dim]
chunk
latent     latent [rank], rope [dim]    ``LatentProvider``        ``write``, ``attend``, and ``pieces`` where a layer
                                                                  expands latents to keys and values
latent,    the same                     ``SparseLatentProvider``  the same, and ``attend_chosen``
with top
index      key [dim]                    ``IndexProvider``         ``write``, ``select``
recurrent  as the recurrence needs      ``RecurrentProvider``     ``advance``
========== ============================ ========================= ==================================================

A package may add a kind of state. Its provider subclasses ``StoredStateProvider``, or ``StateProvider`` if the
kind keeps no tensors, and has the methods that the package's own ops call.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from evener.contracts.device import DeviceCapabilities
from evener.contracts.quant import DTYPE_BYTES

if TYPE_CHECKING:
    import torch

#: See ``StateProvider.graph``.
GraphSupport = Literal["never", "uniform_decode", "any"]


@dataclass(frozen=True)
class StateTensor:
    """One tensor of a spec.

    Attributes:
        name: of the tensor.
        shape: for one token (or one request) in the canonical layout.
        dtype: element type in which it is stored.
        wide: (quantized state) the dtype of the numbers that layers write and read. Their elements are stored divided
            by a float32 scale, one for each index of the first dimension (a head): see ``evener.contracts.quantized``.
            None: numbers are stored as they are.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    wide: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes for one token (or one request)."""
        return int(math.prod(self.shape) * DTYPE_BYTES[self.dtype])


@dataclass(frozen=True)
class StateSpec:
    """The state of one layer.

    Attributes:
        kind: a registered kind: "full", "window", "chunk", "latent", "index", "recurrent".
        tensors: see the table above, in this order.
        per: whether ``tensors`` are for one token or for one request.
        window: (kind "window") a query attends to itself and to the ``window - 1`` tokens before it; (kind "chunk") the
            sequence is cut into chunks of ``window`` tokens from position 0, and a query attends to the tokens of its
            own chunk up to itself.
        every: (per request) tokens between two snapshots from which a cached prefix can continue, a multiple of the
            block size; None keeps a snapshot at the end of every block.
        shared_with: (optional) name of an earlier layer; this layer reads that layer's state and has none of its own.
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

    def first_attended(self, at: Any) -> Any:
        """The first position that the query at position ``at`` (int or integer tensor) attends to; negative where the
        window is longer than the sequence so far."""
        whole, size = 0 * at, self.window
        return whole if size is None else at - at % size if self.kind == "chunk" else at - size + 1


@dataclass(frozen=True)
class AttentionSpec:
    """How a layer reads its state. A provider refuses what it cannot do in ``supports``.

    Attributes:
        heads: number of query heads.
        head_dim: length of a query and of a key.
        scale: factor on the scores.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None: no soft cap.
        sinks: each head has a learned logit that takes part in the softmax and has no value.
        dtype: compute dtype.
        top: (latent) attention is sparse: the layer calls ``attend_chosen`` with up to ``top`` tokens per query;
            (index) how many tokens ``select`` returns.
        split_decode: the layer computes requests that add one token differently; they get metadata of their own
            (``SplitMetadata``).
        algorithm: "softmax", or the recurrence that ``advance`` computes ("gated_delta").
        slopes: (attention with linear biases, Press et al. 2022) one number per query head: the score is reduced by
            slope * (query position - key position), in float32, after the soft cap; None: no biases.
    """

    heads: int
    head_dim: int
    scale: float
    softcap: float | None = None
    sinks: bool = False
    dtype: str = "float32"
    top: int | None = None
    split_decode: bool = False
    algorithm: str = "softmax"
    slopes: tuple[float, ...] | None = None


class StateKind(ABC):
    """Which blocks of a kind of state are still needed. Prefix reuse and the freeing of blocks follow from it.

    Kinds are hashed: one that is a dataclass must be frozen.

    Attributes:
        undivided: (optional) a token reads later tokens too, so that one step must compute all tokens of a request.
    """

    name: str
    undivided: bool = False

    @abstractmethod
    def first_live_block(self, spec: StateSpec, computed: int, block_size: int) -> int:
        """Index of the first block that the token at position ``computed``, or any token after it, can still read.

        Earlier blocks may be freed. A prefix of ``n`` blocks can be reused if the blocks from ``first_live_block(n *
        block_size)`` up to ``n`` are cached. Must not decrease as ``computed`` grows.
        """

    def needs(self, spec: StateSpec, column: int, last: int, block_size: int) -> bool:
        """(optional) Whether a step whose last new block is ``last`` writes block ``column``; a block that is not
        written is not allocated. Default: all are written."""
        del spec, column, last, block_size
        return True

    def reusable(self, spec: StateSpec, column: int, block_size: int) -> bool:
        """(optional) Whether the full block ``column`` holds the state of its prefix no matter where steps ended.
        Default: yes."""
        del spec, column, block_size
        return True

    def live_blocks(self, spec: StateSpec, first: int, stop: int, block_size: int) -> int:
        """(optional) How many of the blocks ``first`` to ``stop`` a request holds while a step that ends at ``stop`` is
        in flight. Default: all."""
        del spec, block_size
        return stop - first


@dataclass(frozen=True)
class StateStep:
    """One step of one group. Its tensors are contiguous, on the device, and valid during the step only. They start at a
    multiple of ``DeviceCapabilities.alignment``, except those of a step that ``rows`` returned. Integers are int32 on a
    device without int64.

    Attributes:
        tokens: number of tokens in the step (T).
        requests: number of requests (R). A captured step is padded with requests whose slots are in the null block, of
            one token each, or one request that has the rest of the tokens, or none; what ``attend`` returns for them is
            not read.
        max_query: the most tokens that a request adds.
        max_kv: an upper bound of ``kv_lens``.
        query_start: int32 [R + 1], offset of each request's first token, then T.
        kv_lens: int32 [R], tokens of state of each request after this step's writes.
        positions: int32 or int64 [T], of each token in its sequence.
        slot_mapping: int32 or int64 [T], where each token is written: ``block * block_size + offset``.
        block_table: int32 [R, C], block ids. Entries before the first live block may be stale: such blocks may belong
            to other requests, and must not be read.
        host_query_lens, host_kv_lens: how many tokens each request adds, and ``kv_lens``, on the host. During a
            capture they belong to the step that is being captured, while sizes follow ``max_kv``; ``Replay.update``
            gets those of each replay.
        captured: a capture is being made of this step. Its replays have other lengths.
        kept_lens, host_kept_lens: int32 [R] and on the host, ``kv_lens`` without the proposed tokens, which are the
            last of a request and may be wrong (speculative decoding). None: no token of the step is proposed.
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
    captured: bool = False
    kept_lens: torch.Tensor | None = None
    host_kept_lens: Sequence[int] | None = None

    def rows(self, first: int, stop: int) -> StateStep:
        """The part of the step with requests ``first`` to ``stop`` only."""
        own, (start, end) = slice(first, stop), (sum(self.host_query_lens[:row]) for row in (first, stop))
        queries, lengths = self.host_query_lens[own], self.host_kv_lens[own]
        # Replays of a capture have other lengths than these.
        longest = self.max_kv if self.captured else min(self.max_kv, max(lengths))
        return replace(
            self, tokens=end - start, requests=stop - first, max_query=max(queries), max_kv=longest,
            query_start=self.query_start[first : stop + 1] - start, kv_lens=self.kv_lens[own], host_kv_lens=lengths,
            slot_mapping=self.slot_mapping[start:end], positions=self.positions[start:end], host_query_lens=queries,
            block_table=self.block_table[own], kept_lens=None if self.kept_lens is None else self.kept_lens[own],
            host_kept_lens=None if self.host_kept_lens is None else self.host_kept_lens[own],
        )  # fmt: skip


@dataclass(frozen=True)
class SplitMetadata:
    """A step's metadata in two parts: ``decode`` for the first ``tokens`` tokens, from requests that add one token
    each, and ``prefill`` for the rest. A part without tokens is None."""

    decode: Any
    prefill: Any
    tokens: int


@dataclass(frozen=True)
class Piece:
    """The state of some consecutive tokens of one request, in the canonical layout.

    Attributes:
        first, stop: the range of the request's tokens in the step.
        offset: position of the request's first token in the step, minus the position of the piece's first token.
        tensors: for each tensor of the spec [tokens, *shape]; valid until the next piece.
    """

    first: int
    stop: int
    offset: int
    tensors: tuple[torch.Tensor, ...]


class StateProvider(ABC):
    """Owns the layout of some kinds of state; the base of the interfaces below. Subclass the interface of each kind
    that you serve. A kind that your package adds has ``StoredStateProvider``, or this class if it keeps no tensors.

    Attributes:
        name: unique in the run, e.g. "cpu.paged".
        layout: name of its layout; a fused kernel that writes state declares the same name.
        kinds: the kinds of state that it serves.
        priority: of the providers that support a group, the one with the highest is used; the reference has -1000.
        graph: which steps can be captured with its methods: "never"; "uniform_decode", steps in which every request
            adds the same number of tokens; "any", also steps in which they add different numbers: then a replay takes
            all lengths from the step's tensors, and a request may add none. The engine captures steps in which each
            request adds one, and steps of one short prompt.
        owns_memory: it allocates a pool of its own in ``bind`` and ignores ``storage``.
        batch_invariant: the result of a request does not depend on the other requests in the step.
        drafts: (state per request) it stores the row after ``StateStep.kept_lens`` tokens. A provider that does not
            cannot serve speculative decoding.
    """

    name: str
    layout: str
    kinds: frozenset[str]
    priority: int = 0
    graph: GraphSupport = "never"
    owns_memory: bool = False
    batch_invariant: bool = False
    drafts: bool = False

    @abstractmethod
    def supports(self, spec: StateSpec, attention: AttentionSpec, device: DeviceCapabilities) -> str | None:
        """None if it can serve the group; otherwise the reason why not."""

    @abstractmethod
    def block_sizes(self, spec: StateSpec) -> Sequence[int]:
        """The block sizes that it offers, in tokens, preferred first; each a multiple of the smallest."""

    @abstractmethod
    def bytes_per_block(self, spec: StateSpec, block_size: int) -> int:
        """Bytes of one block of one layer, with its own padding. Must not need a device."""

    @abstractmethod
    def bind(self, storage: torch.Tensor, spec: StateSpec, block_size: int) -> Any:
        """Views of one layer's blocks. ``storage``: uint8 [blocks, page_bytes] on the device, page_bytes >=
        bytes_per_block."""

    @abstractmethod
    def prepare(self, step: StateStep, spec: StateSpec, attention: AttentionSpec, block_size: int) -> Any:
        """Metadata of one step. It is made once per step and group, and is the ``meta`` of every call for a layer of
        the group."""

    def metadata(self, step: StateStep, spec: StateSpec, attention: AttentionSpec, block_size: int) -> Any:
        """What the layers of a group get: the result of ``prepare``, or ``SplitMetadata`` of two calls. The decode part
        is the requests that come first and add one token each. Do not override it."""
        if not attention.split_decode:
            return self.prepare(step, spec, attention, block_size)
        cut = step.requests if step.max_query == 1 else next(r for r, n in enumerate(step.host_query_lens) if n > 1)
        one = self.prepare(step.rows(0, cut), spec, attention, block_size) if cut else None
        rest = step.rows(cut, step.requests) if cut < step.requests else None
        return SplitMetadata(one, rest and self.prepare(rest, spec, attention, block_size), cut)

    def capture_limits(self, spec: StateSpec, attention: AttentionSpec, requests: int) -> Sequence[int]:
        """(optional) Lengths of state, in tokens, from which decode steps of ``requests`` requests, padding included,
        should have captures of their own, because it computes long state in another way. Default: none, and one capture
        serves all lengths.

        With a limit n, a step in which each request adds one token is replayed from one capture if all its requests
        have fewer than n tokens after the step (``StateStep.kv_lens``), and from another if one has n or more; in
        ``prepare``, ``StateStep.max_kv`` is n - 1 for the first. The limits of all groups count. A limit is a hint:
        devices that hold few captures (``DeviceCapabilities.max_captures``) have one capture for all lengths, and
        so have steps of one prompt or with drafts. Must not depend on anything but the arguments, the device and
        options: ranks that share layers have to choose alike.
        """
        return ()

    def workspace(self, spec: StateSpec, attention: AttentionSpec, max_tokens: int, max_kv: int) -> int:
        """(optional) Device memory, in bytes, that one layer's calls need at their peak, not counting what they return
        and what they are given: what ``prepare`` allocates, and the scratch of the other methods. Default: 0.

        Called once for each group before weights are read. The memory plan reserves the largest value of all groups
        and all kernels (``Kernel.workspace``), because calls run one after another. What ``prepare`` allocates should
        be small: it stays until the step's last layer, for all groups at once.

        Args:
            max_tokens: tokens of the largest step (``infer.step_tokens``), from any number of requests.
            max_kv: tokens of the longest request (``infer.max_seq_len``).
        """
        return 0


class StoredStateProvider(StateProvider):
    """Keeps tensors in blocks: the base of the interfaces of all kinds whose ``StateSpec.tensors`` is not empty."""

    @abstractmethod
    def copy_blocks(self, views: Any, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy the blocks ``source`` to the blocks ``target`` (int32 [n] each) of one layer. Mutates the state."""

    @abstractmethod
    def export_blocks(self, views: Any, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The blocks (int32 [n]) in the canonical layout: for each tensor of the spec [n, block_size, *shape], or [n,
        *shape] for state per request. Quantized state is dequantized, to ``StateTensor.wide``."""

    @abstractmethod
    def import_blocks(self, views: Any, blocks: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        """The inverse of ``export_blocks``: quantized state is quantized again, to the same elements. Mutates the
        state."""


class AttentionProvider(StoredStateProvider):
    """Keys and values of every token: the interface of the kinds "full", "window" and "chunk"."""

    @abstractmethod
    def write(self, views: Any, meta: Any, *values: torch.Tensor) -> None:
        """Write this step's tokens: ``values`` in the order of ``spec.tensors``, each [T, *shape]. Mutates the
        state."""

    @abstractmethod
    def attend(self, views: Any, meta: Any, query: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Attention of query [T, heads, head_dim] over the state, with the tokens that this step wrote; returns [T,
        heads, value_dim]. ``sinks``: [heads], see ``AttentionSpec.sinks``."""


class LatentProvider(AttentionProvider):
    """One latent and one rotated key of every token (multi-head latent attention, DeepSeek-V2 2024): the interface of
    the kind "latent".

    For ``attend``, a token's tensors joined are one key for all heads, and its latent is the value: query [T, heads,
    rank + dim] gives [T, heads, rank].
    """

    @abstractmethod
    def pieces(self, views: Any, meta: Any, limit: int) -> Iterator[Piece]:
        """The whole state of each request of the step, with the tokens that this step wrote, in pieces of at most
        ``limit`` tokens. The pieces of a request follow one another in order."""


class SparseLatentProvider(LatentProvider):
    """Latent state whose layers read only some of the tokens (``AttentionSpec.top``)."""

    @abstractmethod
    def attend_chosen(self, views: Any, meta: Any, query: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Like ``attend``, but each query reads only the positions in its row of ``chosen``: int32 [T, top], -1 for
        none. Each position is at most the query's own and occurs once."""


class IndexProvider(StoredStateProvider):
    """One key of every token, by which a sparse layer selects tokens: the interface of the kind "index"."""

    @abstractmethod
    def write(self, views: Any, meta: Any, *values: torch.Tensor) -> None:
        """Write this step's keys: one tensor [T, dim]. Mutates the state."""

    @abstractmethod
    def select(self, views: Any, meta: Any, query: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """For each token the positions of the ``top`` tokens with the highest score, up to and including itself: int32
        [T, top] in any order, -1 where there are fewer.

        The score of a key is the sum over heads of ``weights * relu(query @ key)``, in float32, for query [T, heads,
        head_dim] and weights float32 [T, heads]. Of equal scores the lower position is selected.
        """


class RecurrentProvider(StoredStateProvider):
    """One row of state per request: the interface of the kind "recurrent"."""

    @abstractmethod
    def advance(self, views: Any, meta: Any, *inputs: torch.Tensor) -> torch.Tensor:
        """Run this step's tokens through the recurrence. Each request starts from the row before its first token in the
        step (zeros at position 0). The row after its last token is stored, and so is the row at every snapshot on the
        way (``StateSpec.every``). With ``drafts``, only rows up to ``kept_lens`` tokens are stored, the last of them
        included: proposed tokens are computed but leave no state. Mutates the state.

        Inputs and result depend on ``AttentionSpec.algorithm``. "gated_delta" (Yang et al. 2024) has the state conv
        [channels, width - 1] and delta float32 [heads, key_dim, value_dim]. Its inputs are mixed [T, channels] (queries
        of the key heads, then keys, then values), filter [channels, width], decay float32 [T, heads] (logarithms) and
        beta float32 [T, heads]. Mixed goes through a causal depthwise convolution and silu. Queries and keys are
        normalised to length 1, then queries are multiplied by key_dim ** -0.5. Value head h uses key head ``h *
        key_heads // heads``. For each token ``S = exp(decay) S; S += k (beta (v - k S))``. Returns q S, [T, heads,
        value_dim].
        """

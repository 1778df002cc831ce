"""The builder: what a model's layers declare themselves to."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from math import gcd, lcm
from typing import TYPE_CHECKING, Any

from evener.contracts.quant import WeightPart, plain
from evener.contracts.state import AttentionSpec, StateSpec
from evener.errors import ConfigError
from evener.layers.declared import (
    CallSite,
    Declared,
    LinearWeight,
    Size,
    Slice,
    Span,
    StackedWeight,
    StateSlot,
    Table,
    Weight,
    WeightGroup,
    held,
)
from evener.layers.settings import known_activation

if TYPE_CHECKING:
    import torch

    from evener.contracts.communicator import Communicator

#: Gives the part that the checkpoint stores under a weight's name; None if it stores none.
PartSource = Callable[[str], "WeightPart | None"]
#: Names of checkpoint tensors and their out-features; pairs where one tensor is named for several of its spans.
Parts = Mapping[str, Size] | Sequence[tuple[str, Size]]


class Builder:
    """Collects what a model declares.

    Args:
        dtype: compute type of weights and activations.
        max_positions: longest sequence that will be run; sizes position tables.
        part_source: the quantization scheme's view of the checkpoint; None declares every part as unquantized.
        communicator: of this rank's tensor-parallel group; None in a world of one. Layers share what they are made of
            (``share``), declare their spans of it, and give the communicator to the ops whose results are sums.
        absorb: how latent attention folds its up-projections: "auto", "none", "absorb-without-precomp" or "absorb".
        index_top: tokens that sparse attention reads of each context; 0 reads all, None is what the config says.
        state_dtype: of latent state, by default the compute type.
        snapshot_every: tokens between snapshots of recurrent state; None: at every block's end.
        stage: which of how many pipeline stages this rank is in.
        partition: layers of each stage; by default equally many, one more in the first where it does not come out even.

    Attributes:
        weights, sites, slots, groups: everything declared so far, in order.
        ignored: regular expressions for names that a checkpoint may hold and nobody needs.
        ties: ``{name: twin}``: a checkpoint may hold ``name`` too if it equals ``twin``, which is read instead.
        staged: the model has asked for its ``layers``.
    """

    def __init__(
        self,
        dtype: str,
        max_positions: int,
        part_source: PartSource | None = None,
        communicator: Communicator | None = None,
        absorb: str = "auto",
        index_top: int | None = None,
        state_dtype: str | None = None,
        snapshot_every: int | None = None,
        stage: tuple[int, int] = (0, 1),
        partition: Sequence[int] = (),
    ) -> None:
        self.stage, self._partition, self.staged = stage, tuple(partition), False
        self.snapshot_every = snapshot_every
        self.absorb, self.index_top, self.state_dtype = absorb, index_top, state_dtype or dtype
        self.dtype, self.max_positions, self.communicator = dtype, max_positions, communicator
        self._part_source = part_source
        self._tables: dict[tuple[Any, ...], Table] = {}
        self.weights: list[Declared] = []
        self.sites: list[CallSite] = []
        self.slots: list[StateSlot] = []
        self.groups: list[WeightGroup] = []
        self.ignored: list[str] = []
        self.ties: dict[str, str] = {}

    @property
    def first_stage(self) -> bool:
        """Whether this rank's stage embeds the tokens; the others go on with ``step.stream``."""
        return self.stage[0] == 0

    @property
    def last_stage(self) -> bool:
        """Whether this rank's stage has the head."""
        return self.stage[0] == self.stage[1] - 1

    def layers(self, count: int) -> range:
        """Of ``count`` layers those of this rank's stage.

        Raises:
            ConfigError: they cannot be divided so.
        """
        self.staged = True
        stage, stages = self.stage
        sizes = self._partition or tuple(count // stages + (s < count % stages) for s in range(stages))
        if len(sizes) != stages or sum(sizes) != count or min(sizes) < 1:
            raise ConfigError(
                f"{count} layers cannot be divided into {stages} stages of {', '.join(map(str, sizes))}: set "
                "infer.pp_size to fewer, or infer.pp_layer_partition to a number for each stage"
            )
        return range(sum(sizes[:stage]), sum(sizes[: stage + 1]))

    def alone(self) -> Builder:
        """The same, for layers that every rank holds whole."""
        twin = copy(self)
        twin.communicator = None
        return twin

    @property
    def ranks(self) -> int:
        """How many ranks share each layer."""
        return 1 if self.communicator is None else self.communicator.size

    def share(self, count: int, what: str, unit: int = 1) -> Span:
        """This rank's part of ``count`` elements, in units of so many; the first ranks get one unit more if it does not
        come out even. ``what`` they are is for messages.

        Raises:
            ConfigError: there are fewer units than ranks.
        """
        rank, units = 0 if self.communicator is None else self.communicator.rank, -(-count // unit)
        if units < self.ranks:
            raise self.misfit(f"{count} {what} in units of {unit} are too few for so many ranks", range(1, units + 1))
        each, more = divmod(units, self.ranks)
        first, last = (r * each + min(r, more) for r in (rank, rank + 1))
        return Span(first * unit, min(count, last * unit), count)

    def share_inner(self, count: int, what: str, rows: Sequence[str] = (), columns: Sequence[str] = ()) -> Span:
        """``share`` of what lies between two linear weights: ``rows`` of the checkpoint's parts (by name) before and
        ``columns`` of those after, cut where their formats can be."""
        forms = [(part.format, axis) for axis, names in enumerate((rows, columns)) for part in self._stored(names)]
        unit = lcm(*(max(1, form.group if axis else form.group_out) for form, axis in forms))
        if unit == 1 and count % self.ranks and count // gcd(count, 64) >= self.ranks:
            unit = gcd(count, 64)  # kernels like round sizes
        return self.share(count, what, unit)

    def misfit(self, why: str, sizes: Sequence[int]) -> ConfigError:
        """The error for layers that so many ranks cannot share."""
        fit = ", ".join(map(str, sizes))
        return ConfigError(f"infer.tp_size={self.ranks}: {why}; sizes that fit: {fit}")

    def share_heads(self, heads: int, kv_heads: int) -> tuple[Span, Span]:
        """This rank's query heads, and the key and value heads that they read: its own, or one that it holds beside
        its neighbours where there are more ranks than those. All ranks hold as much state.

        Raises:
            ConfigError: they do not come out even.
        """
        fits = [n for n in range(1, heads + 1) if not heads % n and (not kv_heads % n or not n % kv_heads)]
        if self.ranks not in fits:
            raise self.misfit(f"{heads} query heads and {kv_heads} KV heads do not come out even", fits)
        query = self.share(heads, "query heads")
        each = heads // kv_heads
        first, last = query.start // each, -(-query.stop // each)
        return query, Span(first, last, kv_heads)

    def once(self, *names: str) -> bool:
        """Whether this rank has what is added once to a sum over the ranks: rank 0 has. The others pass over the
        checkpoint's ``names``."""
        mine = self.communicator is None or self.communicator.rank == 0
        self.ignored += () if mine else map(re.escape, names)
        return mine

    def weight(
        self, name: str, *shape: Size, dummy: str = "noise", sources: Sequence[str] = (), spans: Sequence[Span] = (),
        axis: int = 0, dtype: str | None = None,
    ) -> Weight:  # fmt: skip
        """A tensor called ``name`` in the checkpoint (or the join of ``sources`` along the first axis), held in
        ``dtype``, by default the compute type. Of a Span in ``shape`` this rank holds its part; ``spans`` are those of
        each source along ``axis``, and the parts are joined along it."""
        names = tuple(sources) or (name,)
        slices = [Slice(axis, span) for span in spans]
        slices = slices or [Slice(at, size) for at, size in enumerate(shape) if isinstance(size, Span)]
        if all(s.span.size == s.span.whole for s in slices):
            slices = []
        sizes = tuple(map(held, shape))
        weight = Weight(name, sizes, dtype or self.dtype, names, dummy, slices=tuple(slices))
        self.weights.append(weight)
        return weight

    def product(
        self, name: str, rows: int, columns: int, sources: Mapping[str, tuple[Size, ...]],
        make: Callable[[Sequence[torch.Tensor]], torch.Tensor],
    ) -> Weight:  # fmt: skip
        """A matrix [rows, columns] that ``make`` computes once from checkpoint tensors of these shapes, or from this
        rank's part of them."""
        slices = tuple(_slice(*sizes) for sizes in sources.values())
        shapes = tuple(tuple(map(_whole, sizes)) for sizes in sources.values())
        weight = Weight(name, (rows, columns), self.dtype, tuple(sources), make=make, shapes=shapes, slices=slices)
        self.weights.append(weight)
        return weight

    def linear(
        self, name: str, parts: Parts, columns: Size, out: str | None = None, unit_rows: bool = False
    ) -> LinearWeight:
        """A linear weight made of checkpoint tensors: ``parts`` maps their names to their out-features. ``out`` is the
        type of its products if that is not the compute type. Of a Span this rank holds its part. ``unit_rows``: rows
        are divided by their lengths, in the compute type whatever is stored.

        Sizes are the config's; the loader compares them with the checkpoint's and names every difference at once.
        """
        found, slices = self._parts(parts, columns)
        found = tuple(replace(p, format=plain(self.dtype)) for p in found) if unit_rows else found
        sizes = sum(p.rows for p in found), held(columns)
        weight = LinearWeight(name, found, *sizes, self.dtype, out, slices=slices, unit_rows=unit_rows)
        self.weights.append(weight)
        return weight

    def experts(
        self, name: str, experts: int, parts: Parts, columns: Size, *, stacked: Parts | None = None,
        transposed: bool = False,
    ) -> StackedWeight:  # fmt: skip
        """One matrix an expert, declared as one stack.

        Args:
            name: of the whole.
            experts: how many.
            parts: names of one matrix's tensors, ``{}`` in place of the expert's number, and their out-features.
            columns: in-features.
            stacked: what to read instead if the checkpoint has its tensors, which hold all experts.
            transposed: stacked tensors, if unquantized, are [experts, columns, rows].
        """
        if stacked is not None and any(self._stored([name for name, _ in _pairs(stacked)])):
            parts = stacked
        found, slices = self._parts(parts, columns)
        weight = StackedWeight(
            name, found, sum(p.rows for p in found), held(columns), self.dtype, experts=experts,
            transposed=transposed, slices=slices,
        )  # fmt: skip
        self.weights.append(weight)
        return weight

    def _stored(self, names: Sequence[str]) -> Iterator[WeightPart]:
        """What the checkpoint has under these names (of experts: the first's); nothing for dummy weights."""
        found = (self._part_source(name.format(0)) if self._part_source else None for name in names)
        return (part for part in found if part is not None)

    def _parts(self, parts: Parts, columns: Size) -> tuple[tuple[WeightPart, ...], tuple[Slice | None, ...]]:
        made = [self._part(name, rows, columns) for name, rows in _pairs(parts)]
        slices = tuple(cut for _, cut in made)
        return tuple(part for part, _ in made), slices if any(slices) else ()

    def _part(self, name: str, rows: Size, columns: Size) -> tuple[WeightPart, Slice | None]:
        # Without a source: dummy weights, or a missing tensor that the loader will name.
        form = next((part.format for part in self._stored([name])), plain(self.dtype))
        cut = _slice(rows, columns)
        if cut is not None:
            unit, span = max(1, form.group if cut.axis else form.group_out), cut.span
            if span.start % unit or (span.stop % unit and span.stop != span.whole):
                sizes = [n for n in range(1, span.whole + 1) if span.whole % n == 0 and not span.whole // n % unit]
                raise self.misfit(f"{name} is stored in units of {unit} and cannot be cut", sizes)
        return WeightPart(name, held(rows), held(columns), form), cut

    def ignore(self, pattern: str) -> None:
        """Let checkpoints hold tensors whose whole name matches the regular expression ``pattern``, unread."""
        self.ignored.append(pattern)

    def tie(self, name: str, twin: str) -> None:
        """``twin`` serves for ``name``; a checkpoint may store both if they are equal."""
        self.ties[name] = twin

    def biases(self, parts: Parts, name: str, summed: bool = False) -> Weight | None:
        """The biases of the linear weight with these ``parts`` (names end in ``.weight``), joined. ``summed``: its
        products are added over the ranks, so one rank has them."""
        sources = [part.removesuffix("weight") + "bias" for part, _ in _pairs(parts)]
        if summed and not self.once(*sources):
            return None
        spans = [size if isinstance(size, Span) else Span(0, size, size) for _, size in _pairs(parts)]
        return self.weight(name, sum(map(held, spans)), dummy="zeros", sources=sources, spans=spans)

    def table(self, key: tuple[Any, ...], nbytes: int, make: Callable[[torch.device], torch.Tensor]) -> Table:
        """A computed tensor; a second call with an equal ``key`` returns the first one's."""
        if key not in self._tables:
            self._tables[key] = Table(key, nbytes, make)
            self.weights.append(self._tables[key])
        return self._tables[key]

    def op(self, op: str, path: str, **static: Any) -> CallSite:
        """A call site of ``op`` with these static parameters.

        Raises:
            ArchitectureError: the activation is unknown; other parameters are the op's to judge.
        """
        if op in ("activate", "act_and_mul"):
            known_activation(static["activation"], *(() if op == "activate" else ("clamped_swiglu",)))
        site = CallSite(path, op, static)
        self.sites.append(site)
        return site

    def state(self, name: str, spec: StateSpec, attention: AttentionSpec) -> StateSlot:
        """A layer's state; with ``spec.shared_with`` the slot of that earlier layer."""
        if spec.shared_with is not None:
            return next(slot for slot in self.slots if slot.name == spec.shared_with)
        slot = StateSlot(name, spec, attention)
        self.slots.append(slot)
        return slot

    def group(self, kind: type[tuple[Any, ...]], **fields: Declared | None) -> WeightGroup:
        """Weights that an op takes together."""
        group = WeightGroup(kind, fields)
        self.groups.append(group)
        return group


def _pairs(parts: Parts) -> Sequence[tuple[str, Size]]:
    return tuple(parts.items()) if isinstance(parts, Mapping) else parts


def _whole(size: Size) -> int:
    return size if isinstance(size, int) else size.whole


def _slice(*sizes: Size) -> Slice | None:
    """The one axis along which a rank holds a part; None if it holds everything."""
    found = [Slice(a, s) for a, s in enumerate(sizes) if isinstance(s, Span) and s.size != s.whole]
    assert len(found) < 2, "a matrix is cut along one axis"
    return found[0] if found else None

"""The builder: layers declare their weights, ops and state to it, before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from math import gcd, lcm
from typing import TYPE_CHECKING, Any

from evener.contracts import declared
from evener.contracts.declared import Declared, LinearWeight, Slice, Span, Table, Weight, WeightGroup
from evener.contracts.quant import WeightPart, plain
from evener.contracts.sizes import Size, local_size
from evener.contracts.state import AttentionSpec, StateSpec
from evener.errors import ArchitectureError, ConfigError
from evener.layers.config_json import known_activation

if TYPE_CHECKING:
    import torch

    from evener.contracts.communicator import Communicator

#: Returns the part that the checkpoint stores under a weight's name; None if it stores none.
PartSource = Callable[[str], "WeightPart | None"]
#: Names of checkpoint tensors with their out-features (rows). Pairs allow one name more than once, with a span each.
Parts = Mapping[str, Size] | Sequence[tuple[str, Size]]


class Builder:
    """Collects what a model declares: weights, call sites of ops, state. Nothing is read or computed here.

    A size may be an int, or a ``Span`` of which this rank holds its part; ``shard`` makes spans.

    Args:
        dtype: compute dtype of weights and activations, e.g. "bfloat16".
        max_positions: tokens of the longest sequence that will be run; the size of position tables.
        part_source: what the checkpoint stores under a name, as its quantization scheme reads it; None declares every
            part as unquantized.
        communicator: of this rank's tensor parallel group; None for one rank. A layer shares its heads or features
            with ``shard``, declares weights with the spans, and passes the communicator to the ops that sum results.
        absorb: how latent attention applies its up-projections (``infer.mla_absorb``): "auto", "none",
            "absorb-without-precomp" or "absorb".
        index_top: tokens that sparse attention reads per query; 0: all; None: as the model's config says.
        state_dtype: dtype of latent state; default: the compute dtype.
        snapshot_every: tokens between two snapshots of recurrent state; None: one at the end of every block.
        stage: (index, count): which pipeline stage this rank computes, and how many there are.
        partition: number of layers of each stage; default: equal numbers, the first stages one more if needed.
        predicts: whether the run wants the model's layer for multi-token prediction.

    Attributes:
        rank, ranks: this rank's number among those that share a layer, and how many they are.
        weights, sites, slots, groups: everything declared so far, in order.
        ignored: regular expressions for names of checkpoint tensors that are not read.
        chosen: ascending numbers of the only layers that run (``infer.layers``); empty: all.
        head: declares another head in place of a language model's, given the builder, ``CausalLM.names`` and the static
            parameters of the last norm; None: a language model's head.
        ties: ``{name: twin}``: ``twin`` is read instead of ``name``; a checkpoint may hold both if they are equal.
        staged: whether the model has called ``layers``; held: the range from the first to the last layer of the answer.
    """

    def __init__(
        self, dtype: str, max_positions: int, part_source: PartSource | None = None,
        communicator: Communicator | None = None, absorb: str = "auto", index_top: int | None = None,
        state_dtype: str | None = None, snapshot_every: int | None = None, stage: tuple[int, int] = (0, 1),
        partition: Sequence[int] = (), predicts: bool = False,
    ) -> None:  # fmt: skip
        self.rank, self.ranks = (0, 1) if communicator is None else (communicator.rank, communicator.size)
        self.head: Callable[..., Any] | None = None
        self.held = range(0)
        self.chosen: Sequence[int] = ()
        self.stage, self._partition, self.staged, self.predicts = stage, tuple(partition), False, predicts
        self.snapshot_every = snapshot_every
        self.absorb, self.index_top, self.state_dtype = absorb, index_top, state_dtype or dtype
        self.dtype, self.max_positions, self.communicator = dtype, max_positions, communicator
        self._part_source = part_source
        self._tables: dict[tuple[Any, ...], Table] = {}
        #: For each table with a row per position, what makes its float32 rows from one position up to another.
        self.rows: dict[Table, Callable[[int, int], torch.Tensor]] = {}
        self.weights: list[Declared] = []
        self.sites: list[declared.CallSite] = []
        self.slots: list[declared.StateSlot] = []
        self.groups: list[WeightGroup] = []
        self.ignored: list[str] = []
        self.ties: dict[str, str] = {}

    @property
    def first_stage(self) -> bool:
        """Whether this rank's pipeline stage embeds the tokens; later stages continue with ``step.stream``."""
        return self.stage[0] == 0

    @property
    def last_stage(self) -> bool:
        """Whether this rank's pipeline stage has the head."""
        return self.stage[0] == self.stage[1] - 1

    def layers(self, count: int) -> Sequence[int]:
        """The numbers of this pipeline stage's layers, ascending, out of the model's ``count``; only ``chosen`` ones.

        Raises:
            ConfigError: the layers cannot be divided into these stages, or the model has no such layer.
        """
        self.staged = True
        stage, stages = self.stage
        numbers = self.chosen or range(count)
        if numbers[-1] >= count:
            raise ConfigError(f"infer.layers: there is no layer {numbers[-1]}; the model has layers 0 to {count - 1}")
        if absent := sorted({*range(count)}.difference(numbers)):
            self.ignore(rf"(.+\.)?({'|'.join(map(str, absent))})\..+")
        count = len(numbers)
        sizes = self._partition or tuple(count // stages + (s < count % stages) for s in range(stages))
        if len(sizes) != stages or sum(sizes) != count or min(sizes) < 1:
            raise ConfigError(
                f"{count} layers cannot be divided into {stages} stages of {', '.join(map(str, sizes))}: set "
                "infer.pp_size to fewer, or infer.pp_layer_partition to a number for each stage"
            )
        mine = numbers[sum(sizes[:stage]) : sum(sizes[: stage + 1])]
        self.held = range(mine[0], mine[-1] + 1)
        return mine

    def replicated(self) -> Builder:
        """A copy without a communicator, for layers that every rank holds whole. It declares into the same lists."""
        twin = copy(self)
        twin.communicator, twin.rank, twin.ranks = None, 0, 1
        return twin

    def expert_group(self, experts: int) -> Builder:
        """The builder that declares the stacks, the stacked biases and the map of a layer's ``experts``: this one,
        because all ranks share every expert. A builder that divides them among groups of ranks (``infer.ep_size``)
        returns another, whose ``shard`` and ``on_first_rank`` are about this rank's group."""
        return self

    def shard(self, count: int, what: str, unit: int = 1) -> Span:
        """This rank's part of ``count`` elements, cut at multiples of ``unit``. If the units cannot be shared equally,
        the first ranks get one more. ``what`` names the elements in messages.

        Raises:
            ConfigError: there are fewer units than ranks.
        """
        units = -(-count // unit)
        if units < self.ranks:
            raise self.tp_size_error(f"{count} {what} in units of {unit} are too few for so many ranks",
                                     range(1, units + 1))  # fmt: skip
        each, more = divmod(units, self.ranks)
        first, last = (r * each + min(r, more) for r in (self.rank, self.rank + 1))
        return Span(first * unit, min(count, last * unit), count)

    def shard_inner(self, count: int, what: str, rows: Sequence[str] = (), columns: Sequence[str] = ()) -> Span:
        """``shard`` of ``count`` features between two linear weights: the rows of one (``rows``: its names in the
        checkpoint) and the columns of the next (``columns``). They are cut where the stored formats allow it, e.g. not
        inside a quantization group.

        Raises:
            ConfigError: there are fewer units than ranks.
        """
        forms = [(part.format, axis) for axis, names in enumerate((rows, columns)) for part in self.stored(names)]
        unit = lcm(*(form.cut_unit(axis) for form, axis in forms))
        if unit == 1 and count % self.ranks and count // gcd(count, 64) >= self.ranks:
            unit = gcd(count, 64)  # kernels like round sizes
        return self.shard(count, what, unit)

    def tp_size_error(self, why: str, sizes: Sequence[int]) -> ConfigError:
        """The error for a layer that this number of ranks cannot share; ``sizes``: the numbers that can."""
        fit = ", ".join(map(str, sizes))
        return ConfigError(f"infer.tp_size={self.ranks}: {why}; sizes that fit: {fit}")

    def shard_heads(self, heads: int, kv_heads: int) -> tuple[Span, Span]:
        """This rank's query heads, and the key and value heads that they read. With more ranks than key and value
        heads, several ranks hold the same head. All ranks hold equally much state.

        Raises:
            ConfigError: the heads cannot be shared equally.
            ArchitectureError: the query heads are no multiple of the others.
        """
        if heads % kv_heads:
            raise ArchitectureError(f"{heads} query heads do not read {kv_heads} KV heads evenly; choose a divisor")
        fits = [n for n in range(1, heads + 1) if not heads % n and (not kv_heads % n or not n % kv_heads)]
        if self.ranks not in fits:
            raise self.tp_size_error(f"{heads} query heads and {kv_heads} KV heads do not come out even", fits)
        query = self.shard(heads, "query heads")
        each = heads // kv_heads
        first, last = query.start // each, -(-query.stop // each)
        return query, Span(first, last, kv_heads)

    def on_first_rank(self, *names: str) -> bool:
        """Whether this is rank 0, which alone holds what must be added once to a sum over the ranks, e.g. a bias. The
        other ranks ignore the checkpoint's ``names``."""
        self.ignored += map(re.escape, names) if self.rank else ()
        return not self.rank

    def weight(
        self, name: str, *shape: Size, dummy: str = "noise", sources: Sequence[str] = (), spans: Sequence[Span] = (),
        axis: int = 0, dtype: str | None = None,
    ) -> Weight:  # fmt: skip
        """Declare a tensor that ops take as it is: a norm, a bias, an embedding table.

        Args:
            name: its name in the checkpoint.
            shape: its shape; of a Span this rank holds its part.
            dummy: what ``load=dummy`` fills it with: "noise", "ones" or "zeros".
            sources: names of the checkpoint tensors that are joined along ``axis``, instead of the one called ``name``.
            spans: the span that is read of each source along ``axis``.
            axis: see ``sources`` and ``spans``.
            dtype: what it is held in; default: the compute dtype.
        """
        names = tuple(sources) or (name,)
        slices = [Slice(axis, span) for span in spans]
        slices = slices or [Slice(at, size) for at, size in enumerate(shape) if isinstance(size, Span)]
        if all(s.span.size == s.span.whole for s in slices):
            slices = []
        sizes = tuple(map(local_size, shape))
        weight = Weight(name, sizes, dtype or self.dtype, names, dummy, slices=tuple(slices))
        self.weights.append(weight)
        return weight

    def precomputed(
        self, name: str, rows: int, columns: int, sources: Mapping[str, tuple[Size, ...]],
        make: Callable[[Sequence[torch.Tensor]], torch.Tensor],
    ) -> Weight:  # fmt: skip
        """Declare a matrix [rows, columns] that is computed once, when the weights are loaded.

        Args:
            name: of the result.
            rows, columns: its shape on this rank.
            sources: names of the checkpoint tensors that ``make`` takes, in this order, with their shapes; of a Span it
                gets this rank's part.
            make: computes the matrix.
        """
        slices = tuple(_slice(*sizes) for sizes in sources.values())
        shapes = tuple(tuple(map(_whole, sizes)) for sizes in sources.values())
        weight = Weight(name, (rows, columns), self.dtype, tuple(sources), make=make, shapes=shapes, slices=slices)
        self.weights.append(weight)
        return weight

    def linear(
        self, name: str, parts: Parts, columns: Size, out: str | None = None, normalize_rows: bool = False,
        op: str = "linear",
    ) -> LinearWeight:  # fmt: skip
        """Declare a linear weight [rows, columns]: checkpoint tensors stacked along their rows.

        Args:
            name: of the whole, for messages and the manifest.
            parts: names of the checkpoint tensors with their out-features (rows), in order.
            columns: in-features.
            out: dtype of its products; default: the compute dtype.
            normalize_rows: divide every row by its L2 norm; the weight is then held unquantized in the compute dtype.
            op: what computes with it; see ``LinearWeight``.

        Sizes come from the config. The loader compares them with the checkpoint and names every difference at once.
        """
        found, slices = self._parts(parts, columns)
        found = tuple(replace(p, format=plain(self.dtype)) for p in found) if normalize_rows else found
        sizes = sum(p.rows for p in found), local_size(columns)
        weight = LinearWeight(name, found, *sizes, self.dtype, out, slices=slices, normalize_rows=normalize_rows, op=op)
        self.weights.append(weight)
        return weight

    def experts(
        self, name: str, experts: int, parts: Parts, columns: Size, *, stacked: Parts | None = None,
        transposed: bool = False,
    ) -> declared.StackedWeight:  # fmt: skip
        """Declare one matrix [rows, columns] per expert, as one stack [experts, rows, columns].

        Args:
            name: of the whole, for messages and the manifest.
            experts: number of experts.
            parts: names of one expert's tensors, with ``{}`` for the expert's number, and their out-features (rows).
            columns: in-features.
            stacked: tensors that each hold all experts; they are read instead of ``parts`` if the checkpoint has them.
            transposed: whether unquantized stacked tensors are stored as [experts, columns, rows].
        """
        if stacked is not None and any(self.stored([name for name, _ in _pairs(stacked)])):
            parts = stacked
        found, slices = self._parts(parts, columns)
        weight = declared.StackedWeight(
            name, found, sum(p.rows for p in found), local_size(columns), self.dtype, experts=experts,
            transposed=transposed, slices=slices,
        )  # fmt: skip
        self.weights.append(weight)
        return weight

    def stored(self, names: Sequence[str]) -> Iterator[WeightPart]:
        """The parts that the checkpoint stores under these names (the first expert's); none with dummy weights."""
        found = (self._part_source(name.format(0)) if self._part_source else None for name in names)
        return (part for part in found if part is not None)

    def _parts(self, parts: Parts, columns: Size) -> tuple[tuple[WeightPart, ...], tuple[Slice | None, ...]]:
        made = [self._part(name, rows, columns) for name, rows in _pairs(parts)]
        slices = tuple(cut for _, cut in made)
        return tuple(part for part, _ in made), slices if any(slices) else ()

    def _part(self, name: str, rows: Size, columns: Size) -> tuple[WeightPart, Slice | None]:
        # Nothing stored: dummy weights, or a missing tensor, which the loader reports.
        form = next((part.format for part in self.stored([name])), plain(self.dtype))
        cut = _slice(rows, columns)
        if cut is not None:
            unit, span = form.cut_unit(cut.axis), cut.span
            if span.start % unit or (span.stop % unit and span.stop != span.whole):
                sizes = [n for n in range(1, self.ranks) if n == 1 or not (self.ranks % n or span.whole % (n * unit))]
                raise self.tp_size_error(f"{name} is stored in units of {unit} and cannot be cut", sizes)
        return WeightPart(name, local_size(rows), local_size(columns), form), cut

    def ignore(self, pattern: str) -> None:
        """Do not read checkpoint tensors whose whole name matches the regular expression ``pattern``. A tensor that is
        neither declared nor ignored is an error."""
        self.ignored.append(pattern)

    def tie(self, name: str, twin: str) -> None:
        """Read ``twin`` in place of ``name``, as for tied embeddings; a checkpoint may store both if they are equal."""
        self.ties[name] = twin

    def biases(self, parts: Parts, name: str, summed: bool = False) -> Weight | None:
        """Declare the joined biases [rows] of a linear weight.

        Args:
            parts: as given to ``linear``; their names end in ``.weight``, the biases' in ``.bias``.
            name: of the whole.
            summed: whether the linear's results are summed over the ranks. Then only rank 0 has the bias, and the
                others get None.
        """
        sources = [part.removesuffix("weight") + "bias" for part, _ in _pairs(parts)]
        if summed and not self.on_first_rank(*sources):
            return None
        spans = [size if isinstance(size, Span) else Span(0, size, size) for _, size in _pairs(parts)]
        return self.weight(name, sum(map(local_size, spans)), dummy="zeros", sources=sources, spans=spans)

    def table(self, key: tuple[Any, ...], nbytes: int, make: Callable[[torch.device], torch.Tensor]) -> Table:
        """Declare a tensor of ``nbytes`` bytes that ``make`` computes on the device, such as rotary angles. Calls with
        an equal ``key`` share one tensor."""
        if key not in self._tables:
            self._tables[key] = Table(key, nbytes, make)
            self.weights.append(self._tables[key])
        return self._tables[key]

    def op(self, op: str, path: str, **static: Any) -> declared.CallSite:
        """Declare a call site of ``op``.

        Args:
            op: name of the op.
            path: where in the model, e.g. "model.layers.3.mlp"; shown by ``evener explain``.
            static: its static parameters; for a composite those of its record in ``evener.contracts.statics``.

        Raises:
            ArchitectureError: the activation is unknown. Other parameters are checked when the op is resolved.
        """
        if op in ("activate", "act_and_mul"):
            known_activation(static["activation"], *(() if op == "activate" else ("clamped_swiglu",)))
        site = declared.CallSite(path, op, static)
        self.sites.append(site)
        return site

    def state(self, name: str, spec: StateSpec, attention: AttentionSpec) -> declared.StateSlot:
        """Declare the state of the layer ``name``, and how attention reads it. With ``spec.shared_with`` the result is
        the slot of that earlier layer."""
        if spec.shared_with is not None:
            return next(slot for slot in self.slots if slot.name == spec.shared_with)
        slot = declared.StateSlot(name, spec, attention)
        self.slots.append(slot)
        return slot

    def group(self, kind: type[tuple[Any, ...]], **fields: Declared | None) -> WeightGroup:
        """Declare weights that an op takes together, as one named tuple.

        Args:
            kind: the tuple's class, from ``evener.contracts.weights``, e.g. ``MLPWeights``.
            fields: the declared weight of each field; None where the model has none.

        The result's ``values`` is the tuple of loaded tensors, once they are loaded.
        """
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

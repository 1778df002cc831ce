"""The builder: what a model's layers declare themselves to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from evener.contracts.quant import WeightPart, plain
from evener.contracts.state import AttentionSpec, StateSpec
from evener.layers.declared import (
    CallSite,
    Declared,
    LinearWeight,
    StackedWeight,
    StateSlot,
    Table,
    Weight,
    WeightGroup,
)

if TYPE_CHECKING:
    import torch

    from evener.contracts.communicator import Communicator

#: Gives the part that the checkpoint stores under a weight's name; None if it stores none.
PartSource = Callable[[str], "WeightPart | None"]


class Builder:
    """Collects what a model declares.

    Args:
        dtype: compute type of weights and activations.
        max_positions: longest sequence that will be run; sizes position tables.
        part_source: the quantization scheme's view of the checkpoint; None declares every part as unquantized.
        communicator: of this rank's tensor-parallel group; None in a world of one.
        absorb: how latent attention folds its up-projections: "auto", "none", "absorb-without-precomp" or "absorb".
        index_top: tokens that sparse attention reads of each context; 0 reads all, None is what the config says.
        state_dtype: of latent state, by default the compute type.
        snapshot_every: tokens between snapshots of recurrent state; None: at every block's end.

    Attributes:
        weights, sites, slots, groups: everything declared so far, in order.
        ignored: regular expressions for names that a checkpoint may hold and nobody needs.
        ties: ``{name: twin}``: a checkpoint may hold ``name`` too if it equals ``twin``, which is read instead.
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
    ) -> None:
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

    def weight(
        self, name: str, *shape: int, dummy: str = "noise", sources: Sequence[str] = (), dtype: str | None = None
    ) -> Weight:
        """A tensor called ``name`` in the checkpoint (or the join of ``sources`` along the first axis), held in
        ``dtype``, by default the compute type."""
        weight = Weight(name, shape, dtype or self.dtype, tuple(sources) or (name,), dummy)
        self.weights.append(weight)
        return weight

    def product(
        self, name: str, rows: int, columns: int, sources: Mapping[str, tuple[int, int]],
        make: Callable[[Sequence[torch.Tensor]], torch.Tensor],
    ) -> Weight:  # fmt: skip
        """A matrix [rows, columns] that ``make`` computes once from checkpoint tensors of these shapes."""
        weight = Weight(name, (rows, columns), self.dtype, tuple(sources), make=make, shapes=tuple(sources.values()))
        self.weights.append(weight)
        return weight

    def linear(self, name: str, parts: Mapping[str, int], columns: int, out: str | None = None) -> LinearWeight:
        """A linear weight made of checkpoint tensors: ``parts`` maps their names to their out-features. ``out`` is the
        type of its products if that is not the compute type.

        Sizes are the config's; the loader compares them with the checkpoint's and names every difference at once.
        """
        found = tuple(self._part(part, rows, columns) for part, rows in parts.items())
        weight = LinearWeight(name, found, sum(parts.values()), columns, self.dtype, out)
        self.weights.append(weight)
        return weight

    def experts(
        self, name: str, experts: int, parts: Mapping[str, int], columns: int, *,
        stacked: Mapping[str, int] | None = None, transposed: bool = False,
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
        if stacked is not None and self._part_source and self._part_source(next(iter(stacked))) is not None:
            parts = stacked
        found = tuple(replace(self._part(part.format(0), n, columns), name=part) for part, n in parts.items())
        weight = StackedWeight(
            name, found, sum(parts.values()), columns, self.dtype, experts=experts, transposed=transposed
        )
        self.weights.append(weight)
        return weight

    def _part(self, name: str, rows: int, columns: int) -> WeightPart:
        part = self._part_source(name) if self._part_source else None
        if part is None:  # dummy weights, or a missing tensor that the loader will name
            return WeightPart(name, rows, columns, plain(self.dtype))
        return WeightPart(name, rows, columns, part.format)

    def ignore(self, pattern: str) -> None:
        """Let checkpoints hold tensors whose whole name matches the regular expression ``pattern``, unread."""
        self.ignored.append(pattern)

    def tie(self, name: str, twin: str) -> None:
        """``twin`` serves for ``name``; a checkpoint may store both if they are equal."""
        self.ties[name] = twin

    def biases(self, parts: Mapping[str, int], name: str) -> Weight:
        """The biases of the linear weight with these ``parts`` (names end in ``.weight``), joined."""
        sources = [part.removesuffix("weight") + "bias" for part in parts]
        return self.weight(name, sum(parts.values()), dummy="zeros", sources=sources)

    def table(self, key: tuple[Any, ...], nbytes: int, make: Callable[[torch.device], torch.Tensor]) -> Table:
        """A computed tensor; a second call with an equal ``key`` returns the first one's."""
        if key not in self._tables:
            self._tables[key] = Table(key, nbytes, make)
            self.weights.append(self._tables[key])
        return self._tables[key]

    def op(self, op: str, path: str, **static: Any) -> CallSite:
        """A call site of ``op`` with these static parameters."""
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

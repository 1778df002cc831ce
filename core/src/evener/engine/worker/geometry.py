"""State groups and the geometry of the pool: which layers share a block table, and how the pool is cut into blocks.

Layers with equal state spec and attention form a group and share one block table. All groups draw blocks from one pool,
``[layer_slots, slabs, slab_bytes]``: the k-th layer of a group keeps its part of a block in layer slot k, at the same
offset. A group with more than ``layer_slots`` layers is split into several, so that every group can use every block.

A slab is as large as the largest block of all groups (one recurrent state may take megabytes). A group with smaller
blocks fits ``cut`` of them in a slab; the slab's size is chosen so that few bytes stay unused. A *page* is the largest
unit that divides the blocks of all groups. Block ids in plans count pages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from evener.contracts.declared import StateSlot
from evener.contracts.device import Device
from evener.contracts.state import AttentionSpec, StateProvider, StateSpec
from evener.distributed.agreement import ALONE, Agreement
from evener.engine.quantized.state import bind_slot
from evener.engine.wire.messages import Sampling
from evener.engine.wire.plan import Admission, Plan, TableUpdate
from evener.errors import ConfigError, ResolveError


@dataclass(frozen=True)
class Group:
    """Layers that share one block table. ``cut``: how many of its blocks fill a slab."""

    spec: StateSpec
    attention: AttentionSpec
    provider: StateProvider
    slots: tuple[StateSlot, ...]
    cut: int = 1


@dataclass(frozen=True)
class Geometry:
    """How the pool is cut. ``block_size`` is in tokens, ``slab_bytes`` are those of a slab in one layer slot."""

    groups: tuple[Group, ...]
    layer_slots: int
    block_size: int
    slab_bytes: int

    @property
    def spans(self) -> tuple[int, ...]:
        """Pages in a block of each group."""
        slab = math.lcm(*(g.cut for g in self.groups))  # pages: the largest unit that divides every group's blocks
        return tuple(slab // g.cut for g in self.groups)

    @property
    def block_bytes(self) -> int:
        """Bytes of one slab over all layer slots, including memory that providers allocate themselves for it."""
        owned = sum(len(g.slots) * g.provider.bytes_per_block(g.spec, self.block_size)
                    for g in self.groups if g.provider.owns_memory)  # fmt: skip
        return self.layer_slots * self.slab_bytes + owned

    def captured_lengths(self, requests: int, longest: int, most: int | None) -> tuple[int, ...]:
        """The lengths for which decode steps of ``requests`` requests are captured, ascending: the most tokens that the
        longest request of a step may have; ``longest`` is the last. It is the only one on a device that holds no more
        than ``most`` captures: there, captures for more numbers of requests are worth more. Groups without layers on
        this stage count too, so that all stages choose alike."""
        limits = {n - 1 for g in self.groups for n in g.provider.capture_limits(g.spec, g.attention, requests)}
        return (*sorted(n for n in limits if 0 < n < longest and most is None), longest)

    def captures_prompts(self) -> bool:
        """Whether state can be captured in steps of one prompt, with padding in a second request."""
        return all(g.provider.graph == "any" and not g.attention.split_decode for g in self.groups)

    def one_request(self, tokens: int) -> Plan:
        """A step of one request of ``tokens`` tokens, over the null block of each group."""
        updates = [TableUpdate(0, 0, [[0] * -(-tokens // self.block_size)] * len(self.groups))]
        admissions = [Admission(0, [0] * tokens, Sampling(temperature=0.0))]
        return Plan(id=-1, admissions=admissions, updates=updates, slots=[0], starts=[0], counts=[tokens], samples=[0])

    def bind(self, blocks: int, device: Device) -> torch.Tensor:
        """Allocate ``blocks`` slabs and give every state slot its views of them. Returns the storage, uint8
        [layer_slots, blocks, slab_bytes].

        It is filled with zeros: memory that was never written must not hold NaN, because an attention weight of zero
        times NaN is NaN.
        """
        shape = self.layer_slots, blocks, self.slab_bytes
        storage = device.zeros(math.prod(shape)).view(shape)
        for group in self.groups:
            for layer, slot in enumerate(group.slots):
                slabs = storage.new_empty(blocks, 0) if group.provider.owns_memory else storage[layer]
                slot.views = bind_slot(slot, group.provider, slabs, group.cut, self.block_size, device)
        return storage


def plan_geometry(
    slots: Sequence[StateSlot], alignment: int, block_size: int | None = None,
    stages: Sequence[Sequence[StateSlot]] = (), agreement: Agreement = ALONE,
) -> Geometry:  # fmt: skip
    """Form the groups of the resolved state slots, set each slot's ``group`` and choose the block size.

    Args:
        slots: those of this rank's layers.
        alignment: bytes; every block starts at a multiple of it.
        block_size: tokens; None takes the first size that every provider offers.
        stages: the resolved slots of each pipeline stage. All stages form the same groups, so that a block id means the
            same on each; the pool only has room for the layers of its own stage.
        agreement: with stages on other backends, whose providers offer other block sizes and need other bytes.

    Raises:
        ConfigError: not every provider offers ``block_size``, no size is common to all, or ``infer.snapshot_every``
            is no multiple of it.
        ResolveError: a provider offers sizes that are not multiples of its smallest.
    """
    groups, layers = _form_groups(slots, stages or [slots])
    size = _block_size(groups, block_size, agreement)
    if odd := [g.spec.every for g in groups if (g.spec.every or size) % size]:
        raise ConfigError(f"infer.snapshot_every={odd[0]} must be a multiple of the block size, {size} tokens")
    needs = [0 if g.provider.owns_memory else g.provider.bytes_per_block(g.spec, size) for g in groups]
    *needs, alignment = agreement.most([*needs, alignment])
    pooled = [index for index, g in enumerate(groups) if not g.provider.owns_memory]
    # A request has many blocks of tokens but one live block of a recurrent state, however large that is: it gets no
    # larger weight than the largest block of tokens.
    common = max((needs[index] for index in pooled if groups[index].spec.per == "token"), default=1)
    weights = [layers[index] * min(needs[index], common) for index in pooled]
    slab, cuts = _cut_slab([needs[index] for index in pooled], weights, alignment) if pooled else (0, [])
    for index, cut in zip(pooled, cuts, strict=True):
        groups[index] = replace(groups[index], cut=cut)
    return Geometry(tuple(groups), max((len(groups[index].slots) for index in pooled), default=0), size, slab)


def _form_groups(slots: Sequence[StateSlot], stages: Sequence[Sequence[StateSlot]]) -> tuple[list[Group], list[int]]:
    """The groups of all ``stages``, not yet cut, with those ``slots`` that this rank has of each, whose ``group`` is
    set. And for each group the number of its layers on the stage that has the most."""
    counts = Counter[tuple[StateSpec, AttentionSpec]]()
    for stage in stages:
        counts |= Counter((slot.spec, slot.attention) for slot in stage)  # keeps the larger count
    providers = {(slot.spec, slot.attention): slot.provider for stage in stages for slot in stage}
    layer_slots = _layer_slots(list(counts.values()))
    groups, layers = list[Group](), list[int]()
    for (spec, attention), count in counts.items():
        provider = providers[spec, attention]
        assert provider is not None, "state slots are resolved before the geometry is planned"
        members = [slot for slot in slots if (slot.spec, slot.attention) == (spec, attention)]
        for start in range(0, count, layer_slots):
            part = tuple(members[start : start + layer_slots])
            for slot in part:
                slot.group = len(groups)
            groups.append(Group(spec, attention, provider, part))
            layers.append(min(layer_slots, count - start))
    return groups, layers


def _cut_slab(needs: Sequence[int], weights: Sequence[int], alignment: int) -> tuple[int, list[int]]:
    """Choose the slab size, up to an eighth above the largest block, that wastes the fewest bytes.

    Args:
        needs: bytes of one block of each group.
        weights: how much the waste of each group counts.

    Returns the slab's bytes, and for each group how many of its blocks fill it. Slab and blocks are aligned.
    """

    def cut(slab: int, need: int) -> int:
        units = slab // alignment
        return next(n for n in range(slab // need, 0, -1) if units % n == 0)

    def taken(slab: int) -> float:
        return sum(w * slab / cut(slab, need) / need for need, w in zip(needs, weights, strict=True))

    largest = -(-max(needs) // alignment)
    step = max(1, largest // 2048)
    slab = min(range(largest * alignment, (largest + largest // 8 + 1) * alignment, step * alignment), key=taken)
    return slab, [cut(slab, need) for need in needs]


def _layer_slots(counts: Sequence[int]) -> int:
    """The number of layer slots that wastes the fewest, for groups with these ``counts`` of layers. A block table costs
    as much as a quarter of a layer slot; ties go to the fewest tables."""

    def cost(slots: int) -> tuple[float, int]:
        tables = [-(-count // slots) for count in counts]
        return (sum(tables) * slots + 0.25 * sum(tables), sum(tables))

    return min(sorted(set(counts)), key=cost, default=0)


def _block_size(groups: Sequence[Group], wanted: int | None, agreement: Agreement) -> int:
    offers = [list(g.provider.block_sizes(g.spec)) for g in groups]
    for group, offer in zip(groups, offers, strict=True):
        if math.gcd(*offer) != min(offer, default=-1):
            raise ResolveError(f"state provider {group.provider.name} offers blocks of {offer} tokens, not all of them "
                               "multiples of the smallest; set ops.attention=reference, tell its authors")  # fmt: skip
    own = [size for size in offers[0] if all(size in offer for offer in offers)] if offers else [16]
    common, names = agreement.common(own), ", ".join(sorted({g.provider.name for g in groups}))
    if wanted not in (None, *common):
        names = names if wanted not in own else f"{names} and those of the other stages (infer.stages)"
        raise ConfigError(f"infer.block_size={wanted} is not offered by {names}; they offer {sorted(common)}")
    if not common:
        said = f"{own}, but with the other stages no" if own else "no"
        raise ConfigError(f"the state providers {names} offer {said} common block size; force one with "
                          "ops.attention=<provider>")  # fmt: skip
    return common[0] if wanted is None else wanted

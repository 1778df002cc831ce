"""State groups and page geometry: which layers share a block table, and how the pool is cut.

Layers with equal spec and attention form a group. A group is cut into sub-groups of at most ``layer_slots`` layers, so
that every sub-group can use every block: the pool is ``[layer_slots, slabs, slab_bytes]``, and a block id means the
same bytes in each layer slot. A slab is as large as the largest block of a group (a recurrent row may be megabytes);
of groups with smaller blocks it holds ``cut`` blocks, and the size is chosen so that little is left over. A *page* is
what all of them divide into, and the unit of block ids in plans.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from evener.contracts.device import Device
from evener.contracts.state import AttentionSpec, StateProvider, StateSpec
from evener.errors import ConfigError, ResolveError
from evener.layers.declared import StateSlot

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Group:
    """Layers that share one block table."""

    spec: StateSpec
    attention: AttentionSpec
    provider: StateProvider
    slots: tuple[StateSlot, ...]
    cut: int = 1


@dataclass(frozen=True)
class Geometry:
    """How the pool is cut. ``slab_bytes`` is a slab of one layer slot."""

    groups: tuple[Group, ...]
    layer_slots: int
    block_size: int
    slab_bytes: int

    @property
    def spans(self) -> tuple[int, ...]:
        """Pages in a block of each group."""
        slab = math.lcm(*(g.cut for g in self.groups))
        return tuple(slab // g.cut for g in self.groups)

    @property
    def block_bytes(self) -> int:
        """Bytes of one slab over all layer slots, memory that providers own themselves included."""
        owned = max((len(g.slots) * g.provider.bytes_per_block(g.spec, self.block_size)
                     for g in self.groups if g.provider.owns_memory), default=0)  # fmt: skip
        return self.layer_slots * self.slab_bytes + owned

    def bind(self, blocks: int, device: Device) -> torch.Tensor:
        """Allocate ``blocks`` slabs and give every slot its views. Returns the storage, uint8 [layer_slots, blocks,
        slab_bytes].

        It starts as zeros: unread garbage must not be NaN, because a masked score of zero times NaN is NaN.
        """
        storage = device.zeros(self.layer_slots * blocks * self.slab_bytes).view(
            self.layer_slots, blocks, self.slab_bytes
        )
        for group in self.groups:
            for layer, slot in enumerate(group.slots):
                own = storage[layer] if not group.provider.owns_memory else storage.new_empty(blocks, 0)
                cut = own.view(blocks * group.cut, own.shape[1] // group.cut)
                slot.views = group.provider.bind(cut, group.spec, self.block_size)
        return storage


def plan_geometry(
    slots: Sequence[StateSlot], alignment: int, block_size: int | None = None,
    stages: Sequence[Sequence[StateSlot]] = (),
) -> Geometry:  # fmt: skip
    """Group the resolved slots, number their groups and pick the block size.

    Args:
        stages: the resolved slots of each pipeline stage. All get the same groups, so that block ids mean the same to
            them; a pool has room for its own stage's layers.

    Raises:
        ConfigError: ``block_size`` is not offered by every provider, or the providers offer no common size.
        ResolveError: a provider offers sizes that are not multiples of its smallest.
    """
    layers: dict[tuple[StateSpec, AttentionSpec], list[StateSlot]] = {}
    for slot in slots:
        layers.setdefault((slot.spec, slot.attention), []).append(slot)
    most = Counter[tuple[StateSpec, AttentionSpec]]()
    providers: dict[tuple[StateSpec, AttentionSpec], StateProvider | None] = {}
    for stage in stages or [slots]:
        most |= Counter((slot.spec, slot.attention) for slot in stage)  # the larger of each two
        providers.update({(slot.spec, slot.attention): slot.provider for slot in stage})
    layer_slots = _layer_slots(list(most.values()))
    groups: list[Group] = []
    sizes: dict[int, int] = {}
    for (spec, attention), count in most.items():
        provider, members = providers[spec, attention], layers.get((spec, attention), [])
        assert provider is not None, "state units are resolved before the geometry"
        for start in range(0, count, layer_slots):
            part = tuple(members[start : start + layer_slots])
            for slot in part:
                slot.group = len(groups)
            groups.append(Group(spec, attention, provider, part))
            sizes[id(groups[-1])] = min(layer_slots, count - start)
    size = _block_size(groups, block_size)
    odd = [g.spec.every for g in groups if (g.spec.every or size) % size]
    if odd:
        raise ConfigError(f"infer.snapshot_every={odd[0]} is no multiple of the {size} tokens in a block of state")
    pooled = [g for g in groups if not g.provider.owns_memory]
    needs = [g.provider.bytes_per_block(g.spec, size) for g in pooled]
    # A request has one row but many blocks: a row counts like the largest of those.
    common = max((need for g, need in zip(pooled, needs, strict=True) if g.spec.per == "token"), default=1)
    weights = [sizes[id(g)] * min(need, common) for g, need in zip(pooled, needs, strict=True)]
    slab, cuts = _cut_slab(needs, weights, alignment) if pooled else (0, [])
    by_group = dict(zip(map(id, pooled), cuts, strict=True))
    groups = [replace(g, cut=by_group.get(id(g), 1)) for g in groups]
    return Geometry(tuple(groups), max((len(g.slots) for g in pooled), default=0), size, slab)


def _cut_slab(needs: Sequence[int], weights: Sequence[int], alignment: int) -> tuple[int, list[int]]:
    """The slab size, up to an eighth above the largest block, that wastes least, and how many blocks of each group it
    holds, by the bytes that one block of each takes; all are aligned."""

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
    """The number that wastes the fewest layer slots; among equals the one with the fewest block tables."""

    def cost(slots: int) -> tuple[float, int]:
        tables = [-(-count // slots) for count in counts]
        return (sum(tables) * slots + 0.25 * sum(tables), sum(tables))

    return min(sorted(set(counts)), key=cost, default=0)


def _block_size(groups: Sequence[Group], wanted: int | None) -> int:
    offers = [list(g.provider.block_sizes(g.spec)) for g in groups]
    for group, offer in zip(groups, offers, strict=True):
        if math.gcd(*offer) != min(offer, default=-1):
            raise ResolveError(f"state provider {group.provider.name} offers blocks of {offer} tokens, which are no "
                               "multiples of the smallest; set ops.attention=reference, tell its authors")  # fmt: skip
    common = [size for size in offers[0] if all(size in offer for offer in offers)] if offers else [16]
    names = ", ".join(sorted({g.provider.name for g in groups}))
    if wanted not in (None, *common):
        raise ConfigError(f"infer.block_size={wanted} is not offered by {names}; they offer {sorted(common)}")
    if not common:
        raise ConfigError(
            f"the state providers {names} offer no common block size; force one with ops.attention=<provider>"
        )
    return common[0] if wanted is None else wanted

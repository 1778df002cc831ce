"""The loader: fills what a model declared from a checkpoint. Tensors that need no conversion stay memory-mapped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch

from evener.contracts.checkpoint import Checkpoint
from evener.contracts.declared import Declared, LinearWeight, Slice, StackedWeight, Weight
from evener.contracts.device import Device
from evener.contracts.quant import PackedWeight, Packing, QuantScheme, WeightPart
from evener.errors import CheckpointError
from evener.layers.builder import Builder
from evener.loading.match import check_match, finding, shared_names, tied_names
from evener.loading.scheme import scheme_of
from evener.loading.uploader import BUFFER_BYTES, BUFFER_COUNT, Uploader


@dataclass
class WeightBytes:
    """Bytes of loaded weights: in memory (``allocated``) and in pages of weight files (``mapped``); ``placed``: both
    together, of weights with a placement of their own, which the other two leave out."""

    allocated: int = 0
    mapped: int = 0
    placed: int = 0

    def __add__(self, other: WeightBytes) -> WeightBytes:
        """Both together."""
        return WeightBytes(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def load_weights(
    declared: Sequence[Declared], checkpoint: Checkpoint, scheme: QuantScheme, packings: Mapping[str, Packing],
    device: torch.device, builds: Sequence[Builder] = (), *, pinned_device: Device | None = None,
) -> WeightBytes:  # fmt: skip
    """Fill ``value`` of every declared weight and table. Call ``WeightGroup.bind`` afterwards.

    Args:
        declared: a builder's ``weights``; each ``LinearWeight`` has its ``layout``.
        checkpoint: the file or folder that is read.
        scheme: how the checkpoint stores linear weights.
        packings: by layout.
        device: where the weights go.
        builds: of all stages; what they declare, ignore or tie may be in the checkpoint too.
        pinned_device: copies weights through its page-locked memory while others are read; None: one after another.

    Raises:
        CheckpointError: tensors are missing, left over or of other shapes, or tied tensors differ; nothing was loaded.
    """
    check_match(declared, checkpoint.headers, scheme, builds, str(checkpoint.path))
    _check_ties(checkpoint, tied_names(builds))
    buffers = pinned_device.pinned_buffers(BUFFER_COUNT, BUFFER_BYTES) if pinned_device else ()
    with closing(Uploader(pinned_device, buffers)) if pinned_device and buffers else nullcontext() as uploader:
        return _Loader(checkpoint, scheme, packings, device, shared_names(declared), uploader).load(declared)


def _check_ties(checkpoint: Checkpoint, ties: Mapping[str, str]) -> None:
    for name, twin in ties.items():
        if name in checkpoint.headers and not torch.equal(checkpoint.tensor(name), checkpoint.tensor(twin)):
            what = f"stores both {name} and {twin}, and they differ, but its config.json says that they are one"
            raise CheckpointError(f'{checkpoint.path} {what}; set "tie_word_embeddings": false in it')


class Ledger:
    """Counts the bytes of loaded values; values that share memory count once."""

    def __init__(self) -> None:
        self.bytes = WeightBytes()
        self._mapped: set[tuple[str, int]] = set()
        self._seen: set[tuple[str, int]] = set()

    def note_mapped(self, tensor: torch.Tensor) -> torch.Tensor:
        """Remember that ``tensor`` lies in a mapped file."""
        self._mapped.update(_places(tensor))
        return tensor

    def add(self, value: Any, nbytes: int) -> None:
        """Count a value that was loaded, without its tensors that are counted already."""
        places = _places(value) or {("", id(value)): nbytes}  # data of another type counts by its identity
        new = {place: size for place, size in places.items() if place not in self._seen}
        nbytes -= sum(places.values()) - sum(new.values())
        self._seen |= new.keys()
        mapped = sum(size for place, size in new.items() if place in self._mapped)
        self.bytes += WeightBytes(mapped=mapped, allocated=nbytes - mapped)


def _places(value: Any) -> Counter[tuple[str, int]]:
    """Device and address of a packed weight's tensors, with their bytes; nothing for data of another type."""
    if isinstance(value, (tuple, list)):
        return sum(map(_places, value), Counter())
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return Counter({(str(value.device), value.untyped_storage().data_ptr()): value.nbytes})
    return Counter()


class _Loader:
    """Reads what weights are made of. A tensor passes through some of these steps, in this order: it is read
    (``_read``), cut to this rank's slice (``_cut``), moved to the device while others are read (``_moved``),
    dequantized if it has to be, and put into the form that packings get (``_arranged``)."""

    def __init__(
        self, checkpoint: Checkpoint, scheme: QuantScheme, packings: Mapping[str, Packing], device: torch.device,
        shared: frozenset[str], uploader: Uploader | None,
    ) -> None:  # fmt: skip
        self._checkpoint, self._scheme, self._packings, self._device = checkpoint, scheme, packings, device
        self._shared, self._uploader = shared, uploader
        self._converted: dict[tuple[str, str, Slice | None], torch.Tensor] = {}
        self._ledger = Ledger()
        #: The names of tensors, each with its smallest and its largest number; see ``_note_extremes``.
        self._extremes: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def load(self, declared: Sequence[Declared]) -> WeightBytes:
        # The largest first, mostly heads: while a weight is packed, the pages of its file are in memory too.
        sizes = {id(item): item.rows * item.columns for item in declared if type(item) is LinearWeight}
        most = max(sizes.values(), default=0)
        order = sorted(declared, key=lambda item: sizes.get(id(item), 0) < most)
        counted = fill(order, self._tensor, self._matrices, self._packings, self._device, self._ledger)
        wrong = dict.fromkeys(name for name, *both in self._extremes if not all(map(torch.isfinite, both)))
        if problem := finding("NaN or infinite somewhere, as stored or in the dtype of this run", list(wrong)):
            raise CheckpointError(f"in {self._checkpoint.path}, {problem}; fetch or convert the model again")
        return counted

    def _tensor(self, item: Weight) -> torch.Tensor:
        return item.join([self._convert(name, item.dtype, cut) for name, cut in item.pieces()])

    def _matrices(self, item: LinearWeight) -> Iterator[list[WeightPart]]:
        """The parts of one matrix after another, read and converted one at a time."""
        if not isinstance(item, StackedWeight):
            found = [self._part(part, cut, item.dtype) for part, cut in item.pieces()]
            yield [_normalize_rows(part) for part in found] if item.normalize_rows else found
            return
        for expert in range(item.held.start, item.held.start + item.experts):
            yield [self._expert_part(item, part, cut, expert) for part, cut in item.pieces()]

    def _part(self, part: WeightPart, cut: Slice | None, dtype: str) -> WeightPart:
        if part.format.plain:
            # Converting here, not in the packing, lets a tied head and its embedding share one converted tensor.
            return replace(part, tensors={"weight": self._convert(part.name, dtype, cut)})
        stored = part if cut is None else self._stored_part(part.name)
        return self._arranged(self._cut(self._with_tensors(stored), cut))

    def _expert_part(self, item: StackedWeight, part: WeightPart, cut: Slice | None, expert: int) -> WeightPart:
        """One expert's matrix: from tensors of its own, or from tensors of all experts, whose name has no ``{}``."""
        name, of_all = part.name.format(expert), "{}" not in part.name
        stored = self._with_tensors(self._stored_part(name))
        own = {role: tensor[expert] if of_all else tensor for role, tensor in stored.tensors.items()}
        if stored.format.plain and of_all and item.transposed:
            own["weight"] = own["weight"].T
            stored = replace(stored, rows=stored.columns, columns=stored.rows)
        found = self._cut(replace(stored, tensors=own), cut)
        if self._uploader is not None and stored.format.plain:
            moved = self._moved(name, stored.tensors["weight"], found.tensors["weight"])
            found = replace(found, tensors={"weight": moved})
        if part.format.plain and not stored.format.plain:
            found = replace(found, tensors={"weight": self._scheme.dequantize(found, item.dtype)})
        return self._arranged(replace(part, name=name, tensors=found.tensors))

    def _convert(self, name: str, dtype: str, cut: Slice | None) -> torch.Tensor:
        """A tensor or a slice of it, on the device in ``dtype``; a name that several weights read is converted once."""
        if (key := (name, dtype, cut)) in self._converted:
            return self._converted[key]
        values = self._values(name, dtype, cut).to(device=self._device, dtype=getattr(torch, dtype))
        self._note_extremes(name, values)
        if name in self._shared:
            self._converted[key] = values
        return values

    def _values(self, name: str, dtype: str, cut: Slice | None) -> torch.Tensor:
        """A tensor or a slice of it: as it is stored, or if it is quantized, dequantized to ``dtype``."""
        stored = scheme_of(name, self._scheme, self._checkpoint.headers).part(name, self._checkpoint.headers)
        if stored is not None and not stored.format.plain:
            return self._scheme.dequantize(self._cut(self._with_tensors(stored), cut), dtype)
        whole = self._read(name)
        return self._moved(name, whole, whole if cut is None else whole.narrow(cut.axis, cut.span.start, cut.span.size))

    def _stored_part(self, name: str) -> WeightPart:
        stored = self._scheme.part(name, self._checkpoint.headers)
        assert stored is not None, "check_match found it"
        return stored

    def _with_tensors(self, part: WeightPart) -> WeightPart:
        """``part`` with its tensors as they are stored."""
        roles = self._scheme.tensors(part.name, self._checkpoint.headers)
        return replace(part, tensors={role: self._read(name) for role, name in roles.items()})

    def _read(self, name: str) -> torch.Tensor:
        tensor = self._checkpoint.tensor(name)
        return tensor if name in self._checkpoint.copied else self._ledger.note_mapped(tensor)

    def _cut(self, stored: WeightPart, cut: Slice | None) -> WeightPart:
        """A rank's slice of a stored part, still quantized."""
        if cut is None:
            return stored
        piece = self._scheme.cut(stored, "in" if cut.axis else "out", cut.span.start, cut.span.stop)
        return replace(piece, tensors={role: tensor.contiguous() for role, tensor in piece.tensors.items()})

    def _moved(self, name: str, whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """``part`` of the stored tensor ``name``, contiguous; on the device if there is an uploader."""
        if self._uploader is None:
            return part.contiguous()
        extent = self._checkpoint.extent(name) if part.is_contiguous() else None
        if extent is not None:
            extent = replace(extent, offset=extent.offset + part.data_ptr() - whole.data_ptr())
        return self._uploader.move(name, part.contiguous(), extent)

    def _arranged(self, part: WeightPart) -> WeightPart:
        for numbers in self._scheme.numbers(part):
            self._note_extremes(part.name, numbers)
        return self._scheme.arrange(part)

    def _note_extremes(self, name: str, tensor: torch.Tensor) -> None:
        """Remember the smallest and the largest number of ``tensor``, which are NaN or infinite if any number is.
        ``load`` checks them at the end: reading them here would wait for the device."""
        if tensor.is_floating_point() and tensor.element_size() > 1 and tensor.numel():
            # On the host, one pass; not every device has that op.
            self._extremes.append((name, *(torch.aminmax(tensor) if tensor.is_cpu else (tensor.amin(), tensor.amax()))))


def _normalize_rows(part: WeightPart) -> WeightPart:
    rows = torch.nn.functional.normalize(part.tensors["weight"].float(), dim=1)
    return replace(part, tensors={"weight": rows.to(part.tensors["weight"].dtype)})


def fill(
    declared: Sequence[Declared], tensor: Callable[[Weight], torch.Tensor],
    matrices: Callable[[LinearWeight], Iterator[Sequence[WeightPart]]], packings: Mapping[str, Packing],
    device: torch.device, ledger: Ledger,
) -> WeightBytes:  # fmt: skip
    """Fill ``value`` of every declared weight and table, in their order; returns the bytes that ``ledger`` counted. A
    table that has a value keeps it.

    Args:
        tensor: makes the value of a weight.
        matrices: yields the parts of one matrix of a linear weight after another; each is packed before the next.
    """
    packed: dict[Any, PackedWeight] = {}
    for item in declared:
        if isinstance(item, LinearWeight):
            # A quantized table and the head that is tied to it are one weight if they have one layout.
            key = item.layout, item.dtype, item.normalize_rows, item.slices, tuple(part.name for part in item.parts)
            item.value = packed[key] = packed.get(key) or _pack(item, matrices(item), packings, device)
        elif isinstance(item, Weight) or item.value is None:
            item.value = tensor(item) if isinstance(item, Weight) else item.make(device)
        ledger.add(item.value.data, item.value.nbytes)
    return ledger.bytes


def _pack(
    item: LinearWeight, matrices: Iterable[Sequence[WeightPart]], packings: Mapping[str, Packing], device: torch.device
) -> PackedWeight:
    """Pack the parts of a linear weight, or of each matrix of a stack, in the layout that resolution chose."""
    assert item.layout in packings, f"{item.name} has layout {item.layout!r}: resolve packings before loading"
    packing = packings[item.layout]
    shape = (*([item.experts] if item.experts else []), item.rows, item.columns)
    if item.experts:
        packed = packing.pack_stack(matrices, item.experts, item.dtype, device)
    else:
        packed = packing.pack(next(iter(matrices)), item.dtype, device)
    assert packed.shape == shape, f"packing {item.layout!r} made {packed.shape} of {item.name}"
    return packed

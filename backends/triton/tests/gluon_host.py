"""Runs a Gluon kernel on the host: its partitions are threads, and its barriers are waited for.

A product reads its operands only when it is waited for, so that a place which was given back too early shows in the
result. A wait that nobody ends is an error.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
import triton.language as tl

PATIENCE_S = 20.0


class Pointer:
    """An address into a flat tensor."""

    def __init__(self, flat: torch.Tensor, at: Any = 0) -> None:
        self.flat, self.at = flat, at

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.flat, self.at + offset)

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.flat.dtype)


class Box:
    """A tensor and the boxes that are copied of it."""

    def __init__(self, rows: torch.Tensor, block_shape: Sequence[int]) -> None:
        self.rows, self.block_shape, self.dtype = rows, list(block_shape), rows.dtype


class Barrier:
    """What the hardware keeps: arrivals and bytes that are still to come, and how often both were none."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.missing = self.bytes = self.completed = 0

    def change(self, arrivals: int, size: int) -> None:
        with self.changed:
            self.missing -= arrivals
            self.bytes += size
            assert self.missing >= 0, "more arrivals than the barrier counts"
            if self.missing == 0 and self.bytes == 0:
                self.completed += 1
                self.missing = self.count
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            ended = self.changed.wait_for(lambda: (self.completed & 1) != parity, PATIENCE_S)
            assert ended, "nobody ends this wait"


class Memory:
    """Shared memory: boxes of lines, or barriers."""

    def __init__(self, data: torch.Tensor | list[Any], line: int = 0) -> None:
        self.data, self.line = data, line

    @property
    def shape(self) -> list[int]:
        assert isinstance(self.data, torch.Tensor)
        return list(self.data.shape)

    @property
    def dtype(self) -> Any:
        return self.data.dtype if isinstance(self.data, torch.Tensor) else None

    def index(self, i: Any) -> Any:
        found = self.data[int(i)]
        return Memory(found, self.line) if isinstance(found, torch.Tensor) else found

    def reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: object) -> Tiles | Memory:
        assert isinstance(self.data, torch.Tensor)
        if self.data.dim() == 2:  # its rows
            return Memory(self.data.view(*shape), self.line)
        return Tiles(self.data, tuple(shape), self.line)

    def load(self, layout: object) -> torch.Tensor:
        assert isinstance(self.data, torch.Tensor)
        return self.data.clone()

    def store(self, value: torch.Tensor) -> None:
        assert isinstance(self.data, torch.Tensor)
        self.data.copy_(value)

    def permute(self, order: tuple[int, int]) -> Memory:
        assert isinstance(self.data, torch.Tensor)
        return Memory(self.data.permute(order), self.line)

    def get(self) -> torch.Tensor:
        assert isinstance(self.data, torch.Tensor)
        return self.data


class Tiles:
    """Lines of boxes as tiles: a tile of ``columns`` numbers is as many columns of lines as it takes."""

    def __init__(
        self, lines: torch.Tensor, shape: tuple[int, ...], line: int, turned: bool = False, at: int = 0
    ) -> None:
        self.lines, self.shape, self.line, self.turned, self.at = lines, shape, line, turned, at

    def index(self, i: Any) -> Tiles:
        return Tiles(self.lines, self.shape, self.line, self.turned, int(i))

    def permute(self, order: tuple[int, int]) -> Tiles:
        assert order == (1, 0)
        return Tiles(self.lines, self.shape, self.line, True, self.at)

    def get(self) -> torch.Tensor:
        tiles, rows, columns = self.shape
        tile = (
            self.lines.view(tiles, columns // self.line, rows, self.line)[self.at]
            .transpose(0, 1)
            .reshape(rows, columns)
        )
        return tile.T if self.turned else tile


class Product:
    """A product that is under way."""

    def __init__(self, a: Any, b: Any, c: torch.Tensor, use_acc: bool) -> None:
        self.a, self.b, self.c, self.use_acc = a, b, c, use_acc
        self.result: torch.Tensor | None = None

    def finish(self) -> torch.Tensor:
        if self.result is None:
            a, b = (x if isinstance(x, torch.Tensor) else x.get() for x in (self.a, self.b))
            product = a.float() @ b.float()
            self.result = self.c + product if self.use_acc else product
        return self.result


class Host(threading.local):
    """What a thread knows of itself: its program, and its products under way."""

    program: tuple[int, ...] = (0,)
    programs: tuple[int, ...] = (1,)

    def __init__(self) -> None:
        self.products: list[Product] = []
        #: Copies that are not in a group yet, and groups that nobody waited for.
        self.copies: list[tuple[Memory, Pointer, Any]] = []
        self.groups: list[list[tuple[Memory, Pointer, Any]]] = []


def bits(value: Any, dtype: torch.dtype) -> torch.Tensor:
    """The bits of a number of 32, as another type."""
    found = tensor(value)
    return (found if found.is_floating_point() else found.to(torch.int32)).view(dtype)


def tensor(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value)


class Language:
    """Stands for the module ``gl`` and its neighbours, with lines of ``line`` numbers."""

    def __init__(self, line: int) -> None:
        self.line, self.host = line, Host()
        self.failures: list[BaseException] = []

    def namespace(self) -> dict[str, Any]:
        """The names that a kernel's module imports."""

        def layout(*words: object) -> None:
            return None

        gl = SimpleNamespace(
            constexpr=lambda value: value, static_range=range, int32=torch.int32, int64=torch.int64,
            float32=torch.float32, BlockedLayout=layout, SliceLayout=layout, NVMMASharedLayout=layout,
            NVMMADistributedLayout=layout, DotOperandLayout=layout,
            program_id=lambda axis: self.host.program[axis], num_programs=lambda axis: self.host.programs[axis],
            arange=lambda start, stop, layout=None: torch.arange(start, stop),
            full=lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype),
            where=lambda c, a, b: torch.where(tensor(c), tensor(a), tensor(b)),
            maximum=lambda a, b: torch.maximum(tensor(a), tensor(b)),
            minimum=lambda a, b: torch.minimum(tensor(a), tensor(b)),
            max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis), exp2=torch.exp2,
            SwizzledSharedLayout=layout,
            num_warps=lambda: 4, expand_dims=lambda x, axis: x.unsqueeze(axis),
            associative_scan=lambda x, axis, function: x.cumsum(axis), atomic_add=atomic_add,
            zeros=lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype), float8e4nv=torch.float8_e4m3fn,
            bfloat16=torch.bfloat16,
            join=lambda a, b: torch.stack(torch.broadcast_tensors(a, b), -1), split=lambda x: x.unbind(-1),
            reshape=lambda x, shape: x.reshape(shape), permute=lambda x, order: x.permute(order), abs=torch.abs,
            exp=torch.exp, erf=torch.erf, rsqrt=lambda x: torch.rsqrt(tensor(x)),
            cast=lambda x, dtype, bitcast=False: tensor(x).to(dtype) if not bitcast else bits(x, dtype),
            convert_layout=lambda x, layout: x, load=load, store=store, allocate_shared_memory=self.allocate,
            warp_specialize=self.warp_specialize,
        )  # fmt: skip
        barrier = SimpleNamespace(
            MBarrierLayout=layout, init=init, expect=lambda b, size: bare(b).change(1, size),
            arrive=lambda b: bare(b).change(1, 0), wait=lambda b, phase: bare(b).wait(int(phase)),
        )  # fmt: skip
        begin_copy, groups = self.copies()
        return {
            "gl": gl, "mbarrier": barrier, "async_copy": groups, "_begin_copy": begin_copy,
            "tma": SimpleNamespace(store_wait=lambda pending: None),
            "warpgroup_mma": self.product, "warpgroup_mma_wait": self.wait, "fence_async_shared": lambda: None,
            "gdc_wait": lambda: None, "gdc_launch_dependents": lambda: None, "_sync": lambda: None,
            "_copy_in": copy_in, "_copy_out": copy_out, "LINE": self.line, "RENAMED": True,
        }  # fmt: skip

    def copies(self) -> tuple[Callable[..., None], Any]:
        """Asynchronous copies. What they write is there once their group was waited for, and not before."""

        def copy(target: Memory, source: Pointer, mask: Any = True) -> None:
            self.host.copies.append((target, source, mask))

        def commit() -> None:
            self.host.groups.append(self.host.copies)
            self.host.copies = []

        def wait(pending: int) -> None:
            while len(self.host.groups) > pending:
                for target, source, mask in self.host.groups.pop(0):
                    target.store(load(source, mask))

        return copy, SimpleNamespace(commit_group=commit, wait_group=wait)

    def allocate(self, dtype: torch.dtype, shape: Sequence[int], layout: object) -> Memory:
        if dtype is torch.int64:
            return Memory([Barrier() for _ in range(shape[0])])
        if dtype is torch.int32:
            return Memory(torch.full(list(shape), -1, dtype=dtype))
        return Memory(torch.full(list(shape), torch.nan, dtype=dtype), self.line)

    def product(self, a: Any, b: Any, c: Any, use_acc: bool = True, is_async: bool = False) -> Product:
        assert is_async
        made = Product(a, b, c, use_acc)
        self.host.products.append(made)
        return made

    def wait(self, pending: int, deps: Sequence[Product]) -> Any:
        done = self.host.products[: len(self.host.products) - pending]
        self.host.products = self.host.products[len(done) :]
        for one in done:
            one.finish()
        results = tuple(one.result for one in deps)
        assert all(result is not None for result in results), "read before it is there"
        return results[0] if len(results) == 1 else results

    def warp_specialize(self, parts: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], *sizes: object) -> None:
        place = self.host.program, self.host.programs

        def run(function: Callable[..., None], values: tuple[Any, ...]) -> None:
            self.host.program, self.host.programs = place
            try:
                function(*values)
            except BaseException as error:
                self.failures.append(error)

        threads = [threading.Thread(target=run, args=part) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failures:
            raise self.failures[0]


def bare(barrier: Any) -> Barrier:
    found = barrier.data[0] if isinstance(barrier, Memory) else barrier
    assert isinstance(found, Barrier)
    return found


def init(barrier: Any, count: int) -> None:
    found = bare(barrier)
    found.count = found.missing = count


def load(pointer: Pointer, mask: Any = None, other: Any = 0, cache_modifier: str = "") -> Any:
    at = tensor(pointer.at)
    if mask is None:
        assert ((at >= 0) & (at < pointer.flat.numel())).all(), "reads elsewhere"
        return pointer.flat[at]
    mask = tensor(mask)
    assert ((at >= 0) & (at < pointer.flat.numel()) | ~mask).all(), "reads elsewhere"
    return torch.where(mask, pointer.flat[torch.where(mask, at, 0)], tensor(other).to(pointer.flat.dtype))


def atomic_add(pointer: Pointer, value: int, sem: str = "acq_rel") -> torch.Tensor:
    before = pointer.flat[pointer.at].clone()
    pointer.flat[pointer.at] += value
    return before


def store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    at, mask, value = torch.broadcast_tensors(tensor(pointer.at), tensor(mask), tensor(value))
    at, value = at[mask.bool()], value[mask.bool()].to(pointer.flat.dtype)
    assert ((at >= 0) & (at < pointer.flat.numel())).all(), "writes elsewhere"
    pointer.flat[at] = value


def copy_in(box: Box, corner: Sequence[Any], barrier: Any, target: Memory) -> None:
    """What lies beyond the tensor is zeros."""
    (rows, columns), (top, left) = box.block_shape, (int(n) for n in corner)
    copied = torch.zeros(rows, columns, dtype=box.dtype)
    found = box.rows[top : top + rows, left : left + columns]
    copied[: found.shape[0], : found.shape[1]] = found
    target.store(copied)
    bare(barrier).change(0, -copied.numel() * copied.element_size())


def copy_out(box: Box, corner: Sequence[Any], source: Memory) -> None:
    (rows, columns), (top, left) = box.block_shape, (int(n) for n in corner)
    assert top + rows <= box.rows.shape[0]
    box.rows[top : top + rows, left : left + columns] = source.get()


def on_host(module: ModuleType, name: str, line: int) -> Callable[..., None]:
    """A kernel of a module as a function of a number of programs and its values."""
    language = Language(line)
    names_given = language.namespace()
    names: dict[str, Any] = dict(vars(module)) | names_given
    for key, value in vars(module).items():
        if hasattr(value, "is_gluon"):
            names[key] = FunctionType(value.fn.__code__, names, key)
        elif isinstance(value, tl.constexpr) and key not in names_given:
            names[key] = value.value

    def run(programs: int | tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        grid = (programs,) if isinstance(programs, int) else programs
        for program in itertools.product(*map(range, grid)):
            language.host.program, language.host.programs = program, grid
            names[name](*args, **kwargs)

    return run

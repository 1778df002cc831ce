"""The simulated device without a compiler: torch wrapper tensors over CPU tensors.

It computes the same as the compiled one, and counts ops that run on the host as Python calls them. It has one device
and one stream, no captures and no memory limit; the device's name and capabilities say so.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from evener_conformance.simulated import NAME
from evener_conformance.simulated.aten import KERNELS
from evener_conformance.simulated.namespace import Namespace

_CPU = torch.device("cpu")
#: Ops that only move bytes or allocate; no chip runs them on the host.
_FREE = {"aten::_copy_from", "aten::_local_scalar_dense", "aten::copy_", "aten::resize_"}
_ROOM = ("aten::empty", "aten::new_", "aten::zeros", "aten::ones", "aten::full", "aten::scalar_tensor")
#: Registrations with torch last as long as these objects.
_LIBRARIES: list[torch.library.Library] = []


class SimulatedTensor(torch.Tensor):
    """A tensor of the simulated device; ``bytes_`` is the CPU tensor behind it."""

    bytes_: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> SimulatedTensor:
        with torch.inference_mode(False):  # torch counts versions of views of tensors that were made outside that mode
            made = torch.Tensor._make_wrapper_subclass(
                cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
                device=torch.device(NAME, 0),
            )  # fmt: skip
        assert isinstance(made, SimulatedTensor)
        made.bytes_ = inner
        return made

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.bytes_.untyped_storage()

    def data_ptr(self) -> int:
        return self.bytes_.data_ptr()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _NAMESPACE.run(func, args, kwargs or {})


class _Stream:
    """The only queue; work is done when its submission returns."""

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def synchronize(self) -> None:
        return


class _Event:
    """Always over."""

    def record(self, stream: Any = None) -> None:
        return

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return

    def wait(self, stream: Any = None) -> None:
        return


class PythonNamespace(Namespace):
    """The module that ``torch.get_device_module("simulated")`` gives if nothing was compiled; one device."""

    implementation = "in Python"
    compiled = False

    def __init__(self) -> None:
        self._missing = "none"
        self._refuse_reads = False
        self._on_host: Counter[str] = Counter()
        self._reads = 0

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, index: int) -> None:
        return

    def synchronize(self, index: int | None = None) -> None:
        return

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 1 << 32, 1 << 32

    def memory_allocated(self, index: int) -> int:
        return 0

    def Stream(self, index: int = 0) -> Any:
        return _Stream()

    def Event(self) -> Any:
        return _Event()

    def set_memory(self, index: int, nbytes: int) -> None:
        return

    def set_missing(self, missing: str) -> None:
        self._missing = missing

    def on_host(self) -> dict[str, int]:
        return dict(self._on_host)

    def reads(self) -> int:
        return self._reads

    def refuse_reads(self, refuse: bool) -> bool:
        before, self._refuse_reads = self._refuse_reads, refuse
        return before

    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.bytes_ if isinstance(tensor, SimulatedTensor) else tensor

    def run(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Run one torch op on the CPU tensors behind its arguments."""
        self._note(op, args)
        owners: dict[int, SimulatedTensor] = {}

        def down(value: Any) -> Any:
            if isinstance(value, SimulatedTensor):
                owners[id(value.bytes_)] = value
                return value.bytes_
            return _CPU if isinstance(value, torch.device) and value.type == NAME else value

        asked = kwargs.get("device")
        stays = asked is not None and torch.device(asked).type == "cpu"
        result = op(*tree_map(down, args), **tree_map(down, kwargs))
        if op._schema.name == "aten::copy_":
            return args[0]

        def up(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or stays:
                return value
            return owners[id(value)] if id(value) in owners and not op.is_view else SimulatedTensor(value)

        return tree_map(up, result)

    def _note(self, op: Any, args: Any) -> None:
        name: str = op._schema.name
        # An asynchronous copy reads no value on the host: whoever wants that waits for an event first.
        late = len(args) > 2 and args[2]
        to_host = name == "aten::copy_" and not late and not isinstance(args[0], SimulatedTensor)
        if to_host or name == "aten::_local_scalar_dense":
            if self._refuse_reads:
                raise RuntimeError(
                    f"{name}: a value of the simulated device was read on the host while a step was submitted; "
                    "simulated.host_reads=false forbids it"
                )
            self._reads += 1
        if self._missing == "none" or op.is_view or name in KERNELS or name in _FREE or name.startswith(_ROOM):
            return
        if self._missing == "refuse":
            raise NotImplementedError(
                f"the simulated chip has no kernel for {name} and simulated.missing=refuse keeps it off the host"
            )
        self._on_host[name] += 1


_NAMESPACE = PythonNamespace()


def register() -> PythonNamespace:
    """Register the namespace with torch and send its ops here."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_NAMESPACE)

    def run(op: Any, *args: Any, **kwargs: Any) -> Any:
        return _NAMESPACE.run(op, args, kwargs)

    everything = torch.library.Library("_", "IMPL")
    everything.fallback(run, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CompositeExplicitAutograd"):
        op = _factory(name)
        if op is not None:
            # Torch would expand these into other ops before it calls a fallback; their tensors have to be made here.
            aten.impl(name.removeprefix("aten::"), partial(run, op), "PrivateUse1")
    _LIBRARIES.extend((everything, aten))
    return _NAMESPACE


def _factory(name: str) -> Any:
    """The overload of that name, if it makes a tensor on a device that is an argument."""
    if not name.startswith("aten::") or name.endswith("out") or name == "aten::_to_copy":
        return None
    packet, _, overload = name.removeprefix("aten::").partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return op if any(argument.name == "device" for argument in op._schema.arguments) else None

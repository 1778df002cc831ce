"""The adapters (LoRA) that requests may name: read from folders, checked, and handed to the engine."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from evener.contracts.adapters import AdapterLimits, Adapters, AdapterTensor, HeldAdapter
from evener.engine.wire.messages import LoadAdapter, ToController, UnloadAdapter
from evener.errors import CheckpointError, RequestError, did_you_mean
from evener.plugins.discover import installed_catalog

_MAX_NAME = 256
#: Of an adapter, sent at a time.
_MESSAGE_BYTES = 4 << 20


class LoadedAdapters(Adapters):
    """The adapters of one engine, by name. Thread-safe.

    Args:
        limits: what the engine takes.
        reserved: names that no adapter may have.
        send: hands messages to the engine.
    """

    def __init__(self, limits: AdapterLimits, reserved: Sequence[str], send: Callable[[ToController], None]) -> None:
        self._limits, self._reserved, self._send = limits, reserved, send
        #: One folder is read at a time: its tensors take memory before anything is known of them.
        self._reading, self._changing = threading.Lock(), threading.Lock()
        #: Name → folder, and id in the engine, which stands for name and content.
        self._loaded: dict[str, tuple[str, str]] = {}
        #: How often each id is held, and those that have no name any more and go when it is no longer.
        self._holders, self._leaving = Counter[str](), set[str]()

    @property
    def folders(self) -> Mapping[str, str]:
        return {name: folder for name, (folder, _) in self._loaded.copy().items()}

    def load(self, name: str, folder: str | Path, replace: bool = False) -> None:
        with self._reading:
            self._check(name, replace)
            tensors, digest = _read(Path(folder), self._limits), hashlib.sha256(name.encode())
            for tensor in tensors:
                digest.update(hashlib.sha256(msgspec.msgpack.encode(tensor)).digest())
            new = HeldAdapter(digest.hexdigest())
            with self._changing:
                self._holders[new.id] += 1  # it may be about to leave
            for message in _messages(new.id, tensors):  # before a request can name it
                self._send(message)
            with self._changing:
                self._leaving.discard(new.id)
                before, self._loaded[name] = self._loaded.get(name), (str(folder), new.id)
                if before is not None and before[1] != new.id:
                    self._leave(before[1])
            self.release(new)

    def _check(self, name: str, replace: bool) -> None:
        if not 0 < len(name) <= _MAX_NAME or not name.isprintable() or name in self._reserved:
            raise RequestError(f"an adapter cannot be called {name[:_MAX_NAME]!r}; give it a name of 1 to {_MAX_NAME} "
                               "visible characters that is not the model's", "lora_name")  # fmt: skip
        if name in self._loaded and not replace:
            raise RequestError(f"an adapter {name!r} is already loaded; unload it first", "lora_name")
        before = self._loaded.get(name, ("", ""))[1]
        kept = len(self._loaded) + len(self._leaving) - (before != "" and not self._holders[before])
        if kept >= self._limits.loaded:
            raise RequestError(f"{kept} adapters are loaded, or kept for requests that run, the maximum of "
                               "infer.max_cpu_loras; unload one first, or try again later", "lora_name")  # fmt: skip

    def unload(self, name: str) -> None:
        with self._changing:
            adapter = self.find(name)
            del self._loaded[name]
            self._leave(adapter)

    def _leave(self, adapter: str) -> None:
        if self._holders[adapter]:
            self._leaving.add(adapter)
        else:
            self._send(UnloadAdapter(adapter))

    def hold(self, adapter: str | HeldAdapter | None) -> HeldAdapter | None:
        with self._changing:
            if not (found := self.find(adapter)):
                return None
            self._holders[found] += 1
            return HeldAdapter(found)

    def release(self, held: HeldAdapter | None) -> None:
        with self._changing:
            if held is None:
                return
            self._holders[held.id] -= 1
            if not self._holders[held.id]:
                del self._holders[held.id]
                if held.id in self._leaving:
                    self._leaving.remove(held.id)
                    self._send(UnloadAdapter(held.id))

    def find(self, name: str | HeldAdapter | None) -> str:
        if isinstance(name, HeldAdapter):
            return name.id
        found = ("", "") if name is None else self._loaded.get(name)
        if found is None:
            shown = str(name)[:_MAX_NAME]
            raise RequestError(f"no adapter {shown!r} is loaded{did_you_mean(shown, self.folders)}", "lora")
        return found[1]


def load_modules(adapters: Adapters, modules: Sequence[str]) -> None:
    """Load the adapters of ``infer.lora_modules``.

    Raises:
        CheckpointError: an entry is not NAME=FOLDER, or cannot be used.
    """
    for entry in modules:
        name, separator, folder = entry.partition("=")
        try:
            if not separator:
                raise RequestError("write it as NAME=FOLDER")
            adapters.load(name, folder)
        except (RequestError, CheckpointError) as error:
            raise CheckpointError(f"infer.lora_modules: {entry[:_MAX_NAME]!r}: {error}") from error


def _messages(adapter: str, tensors: Sequence[AdapterTensor]) -> Iterator[LoadAdapter]:
    """Messages of a few MiB: the engine takes steps between them."""
    start, size = 0, 0
    for end, tensor in enumerate(tensors, 1):
        size += len(tensor.down) + len(tensor.up)
        if size >= _MESSAGE_BYTES or end == len(tensors):
            yield LoadAdapter(adapter, list(tensors[start:end]), last=end == len(tensors))
            start, size = end, 0


def _read(folder: Path, limits: AdapterLimits) -> list[AdapterTensor]:
    """The tensors of the folder, by the first reader that knows its format."""
    catalog = installed_catalog()
    found: list[AdapterTensor] | None = next(catalog.answers("adapter reader", folder, limits), None)
    if found is not None:
        return found
    readers = catalog.lazy_imports("adapter reader")
    known = f"of these formats: {', '.join(readers)}" if readers else "of an installed format; install evener-formats"
    raise CheckpointError(f"{folder} is no folder with an adapter {known}")

"""A rank's half: it copies blocks between its host memory and its files, in a thread, as its controller says over a
socket in the operator's folder.

The thread touches a place only when the copies between it and the device are over: those of the plans that the
controller made before it asked, which the rank may not have begun yet.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from evener.errors import ConfigError
from evener_kv.files.block_files import BlockFiles, InUse, Key
from evener_kv.files.messages import Copied, Copy, Failed, Known, Open, Opened, Request
from evener_kv.files.private_folder import lock_within, open_private
from evener_kv.files.settings import FileSettings
from evener_kv.transfer.connection import Channel, TransferError

log = logging.getLogger("evener.kv")
#: Seconds until a rank has begun the plans that a request is about; and between two looks at copies.
PATIENCE, _PAUSE = 30.0, 0.001
#: Seconds for a request that has begun to arrive, and for its answer.
_MESSAGE_SECONDS = 60.0
_DIGEST = 32
#: Blocks in one ``Known``: so that a message stays small.
_PART = 50_000
#: Seconds between two warnings.
_QUIET = 600.0


class Places(Protocol):
    """Host memory of a rank."""

    def settled(self, places: Sequence[int], after: int, timeout: float) -> bool:
        """Wait until the first ``after`` moves were begun, and all copies from and to these places are over. Returns
        False if that takes too long."""

    def bytes_at(self, place: int, group: int) -> memoryview:
        """The bytes of a block of this group at a place."""


def address_of(folder: int, settings: FileSettings, rank: int) -> str:
    """The socket of a rank in the open ``folder``: such a path is short, wherever the folder is."""
    return f"/proc/self/fd/{folder}/{settings.run}-{rank}.sock"


class RankFiles:
    """Serves one controller.

    Args:
        sizes: bytes of one block of each group.
        layout: of what the bytes of a block depend on beside the model.
        prepare: called in the thread, before it does anything.

    Raises:
        ConfigError: the folder cannot be used.
    """

    def __init__(
        self, settings: FileSettings, rank: int, sizes: Sequence[int], layout: str, memory: Places,
        prepare: Callable[[], Any] = lambda: None,
    ) -> None:  # fmt: skip
        self._settings, self._sizes, self._memory, self._prepare = settings, list(sizes), memory, prepare
        self._layout, self._quiet_until = f"{rank} {layout}", 0.0
        name = f"{settings.run}-{rank}"
        try:
            self._folder = open_private(settings.folder)
            lock = lock_within(self._folder, f"{name}.lock")
            if lock is None:
                raise ConfigError(f"offload.kv_files={settings.folder} is used by another engine with this model and "
                                  "serve.port; give each a folder of its own")  # fmt: skip
            self._lock = lock
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{name}.sock", dir_fd=self._folder)  # of a run that was killed
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.bind(address_of(self._folder, settings, rank))
            self._socket.listen(1)
        except OSError as error:
            raise ConfigError(f"offload.kv_files={settings.folder} cannot be used: {error}; give a folder that only "
                              "you can use, on a disk of this machine") from error  # fmt: skip
        self._name = f"{name}.sock"
        self._thread = threading.Thread(target=self._serve, name="evener-kv-files", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and give the folder back, if no controller has come: its start has failed. Calling it again
        does nothing."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        """Until the controller closes its connection."""
        files: BlockFiles | None = None
        try:
            self._prepare()
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return  # close() was called
            self._socket.close()
            os.unlink(self._name, dir_fd=self._folder)
            asks = select.poll()
            asks.register(sock, select.POLLIN)
            with Channel(sock, 0.0) as channel:
                while True:
                    asks.poll()  # for as long as there is nothing to do
                    channel.deadline = time.monotonic() + _MESSAGE_SECONDS
                    request = channel.receive(Request)
                    if isinstance(request, Open):
                        files = self._opened(channel, request)
                    elif files is not None:
                        done = self._copy(files, request)
                        channel.deadline = time.monotonic() + _MESSAGE_SECONDS
                        channel.send(Copied(done))
        except TransferError as error:
            log.debug("the files for KV blocks are closed: %s", error)
        except Exception:
            log.exception("files for KV blocks cannot be used any more")
        finally:
            if files is not None:
                files.close()
            self._socket.close()
            os.close(self._lock)
            os.close(self._folder)

    def _opened(self, channel: Channel, request: Open) -> BlockFiles | None:
        form = hashlib.sha256(f"{request.fingerprint} {self._layout}".encode()).digest()
        try:
            files = BlockFiles(self._settings.folder, form, self._sizes)
            keys = files.keys()
            channel.deadline = time.monotonic() + _MESSAGE_SECONDS
        except InUse:
            channel.send(Failed("another engine with this model uses it; give each a folder of its own"))
            return None
        except OSError as error:
            channel.send(Failed(str(error)))
            return None
        parts = [keys[at : at + _PART] for at in range(0, len(keys), _PART)]
        channel.send(Opened([files.file_bytes(group) for group in range(len(self._sizes))], len(parts)))
        for part in parts:
            channel.send(Known([group for group, _ in part], b"".join(digest for _, digest in part)))
        return files

    def _copy(self, files: BlockFiles, request: Copy) -> list[bool]:
        keys = keys_of(request.groups, request.digests)
        gone = keys_of(request.gone_groups, request.gone)
        for key in gone:
            self._tried(files.remove, key)
        places = [place for place, (group, _) in zip(request.places, keys, strict=True) if self._sizes[group]]
        if not self._memory.settled(places, request.after, PATIENCE):
            return [False] * len(keys)
        return [self._copied(files, request.store, *each) for each in zip(keys, request.places, strict=True)]

    def _copied(self, files: BlockFiles, store: bool, key: Key, place: int) -> bool:
        if not self._sizes[key[0]]:
            return True  # the other ranks have its layers
        block = self._memory.bytes_at(place, key[0])
        return self._tried(files.write if store else files.read, key, block) is not False

    def _tried(self, work: Callable[..., Any], *given: Any) -> Any:
        """What ``work`` returns; False if the disk is full or broken, with a warning now and then."""
        try:
            return work(*given)
        except OSError as error:
            if time.monotonic() >= self._quiet_until:
                self._quiet_until = time.monotonic() + _QUIET
                log.warning("KV blocks in offload.kv_files=%s are lost: %s", self._settings.folder, error)
            return False


def keys_of(groups: Sequence[int], digests: bytes) -> list[Key]:
    """Parallel lists as keys."""
    parts = [digests[at : at + _DIGEST] for at in range(0, len(digests), _DIGEST)]
    return list(zip(groups, parts, strict=True))

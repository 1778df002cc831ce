"""Kernels that were compiled beforehand. Installed packages carry them; Triton's cache is asked after these.

A package names itself in the entry point group ``evener_kernels_triton.binaries``; its folder has an ``index.json``:

- ``format``: 1.
- ``triton``: ``version``, the ``parts`` of the key that Triton makes of its own files, and which of them is of the
  compiler's ``library``. Only that one may differ here: the library is another file for each version of Python.
- ``targets``: by name (``sm_90``) the ``tool`` (what Triton says of its assembler), and ``kernels``: lists of the
  function's name, the hashes that Triton makes of the source with its specialization and of the options, and the files
  of the metadata and of the binary.
- ``modules``: the host's side (launchers), by Triton's key: files by the name that Triton looks for.

A file's name is a hash of its contents. These are what Triton's own key of a compiled kernel is made of, so a kernel is
found if, and only if, Triton would compile the same source in the same way. Everything else is compiled as without such
packages: other sources, sizes, cards, options, environment variables that Triton heeds, another Triton. One change is
not seen: a library of the same version that somebody built in another way, beside the same Python files.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import importlib_metadata
import triton
from triton.runtime import cache as triton_cache

GROUP, INDEX, FORMAT = "evener_kernels_triton.binaries", "index.json", 1
#: Hexadecimal digits of a hash in a file's name.
DIGITS = 32
log = logging.getLogger("evener.triton")
#: By Triton's key, files by the name that Triton looks for.
Stored = Mapping[str, Mapping[str, Path]]


class StoredFirst(triton_cache.CacheManager):  # type: ignore[misc]
    """Triton's cache of one key: what a package carries, else what the manager in use before has. Nothing is written to
    packages. A folder of the cache is made only for what no package carries."""

    #: What to ask after the packages; None: Triton's own.
    behind: type[triton_cache.CacheManager] | None = None

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self._key, self._how, self._rest = key, {"override": override, "dump": dump}, None
        self._stored = {} if override or dump else stored().get(key, {})

    def get_file(self, filename: str) -> str | None:
        path = self._stored.get(filename)
        found: str | None = str(path) if path is not None and _whole(path) else self._others().get_file(filename)
        return found

    def get_group(self, filename: str) -> dict[str, str] | None:
        if filename in self._stored and all(map(_whole, self._stored.values())):
            return {name: str(path) for name, path in self._stored.items()}
        log.debug("no package has %s in this form", filename.removesuffix(".json"))
        found: dict[str, str] | None = self._others().get_group(filename)
        return found

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        written: str = self._others().put(data, filename, binary=binary)
        return written

    def put_group(self, filename: str, group: dict[str, str]) -> Any:
        return self._others().put_group(filename, group)

    def _others(self) -> Any:
        if self._rest is None:
            self._rest = (self.behind or triton_cache.FileCacheManager)(self._key, **self._how)
        return self._rest


def use_stored() -> None:
    """Let Triton find what installed packages carry, from now on and in this process. Nothing changes if there are
    none, or if this Triton (before 3.4) has no settings."""
    knobs = getattr(triton, "knobs", None)
    if knobs is None or not next(folders(), None):
        return
    before = knobs.cache.manager_class
    if before is not StoredFirst:
        StoredFirst.behind, knobs.cache.manager_class = before, StoredFirst


def folders() -> Iterator[tuple[str, Path]]:
    """Installed packages that carry kernels, by their name, and their folders. A package without any is left out."""
    # The core's catalog has plug-ins only; this group is of this package.
    for entry in importlib_metadata.entry_points(group=GROUP):
        try:
            spec = find_spec(entry.value)
        except (ImportError, ValueError) as error:
            log.warning("compiled kernels of %s are not used: %s", entry.value, error)
            continue
        for place in (spec and spec.submodule_search_locations) or ():
            if (Path(place) / INDEX).is_file():
                yield entry.value, Path(place)


@cache
def stored() -> Stored:
    """All that this Triton may use, by its keys. Asked first when a kernel is looked for: making the keys takes as long
    as Triton takes for its own."""
    found: dict[str, Mapping[str, Path]] = {}
    for name, folder in folders():
        try:
            read = files_of(folder)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            log.warning("compiled kernels of %s are not used: %s", name, error)
        else:
            log.info("%s has %d compiled kernels and launchers", name, len(read))
            found |= read
    return found


def files_of(folder: Path) -> Stored:
    """What the package in ``folder`` carries, by the keys of this Triton.

    Raises:
        ValueError: it is for another Triton, or anybody may write there.
        OSError, TypeError, KeyError, AttributeError: the index cannot be read, or is no index.
    """
    for path in (folder, folder / INDEX):
        if path.stat().st_mode & 0o002:
            raise ValueError(f"everybody may write {path}; take that permission away, or install the package again")
    index = json.loads((folder / INDEX).read_bytes())
    if index["format"] != FORMAT:
        raise ValueError(f"their index has format {index['format']}, this version reads {FORMAT}")
    here = own_key()
    if reason := _other_triton(index["triton"], here):
        raise ValueError(reason)
    found: dict[str, dict[str, Path]] = {
        key: {name: folder / file for name, file in files.items()} for key, files in index["modules"].items()
    }
    start = hashlib.sha256(here.encode())
    for target in index["targets"].values():
        for name, source, options, *files in target["kernels"]:
            digest = start.copy()
            digest.update(f"-{source}-{target['tool']}-{options}-[]".encode())
            key = base64.b32encode(digest.digest()).decode().rstrip("=")
            found[key] = {name + Path(file).suffix: folder / file for file in files}
    return found


def own_key() -> str:
    """What Triton makes of its version and its own files.

    Raises:
        ValueError: this Triton makes none, or elsewhere.
    """
    make = getattr(triton_cache, "triton_key", None)
    if make is None:
        raise ValueError(f"Triton {triton.__version__} does not say what its keys are made of")
    key: str = make()
    return key


def key_parts(key: str) -> list[str]:
    """The hashes of Triton's files in its key, without the version."""
    return key.removeprefix(str(triton.__version__)).split("-")


def _other_triton(made: Mapping[str, Any], key: str) -> str:
    """Why kernels that another Triton has ``made`` are not used here, or ""."""
    if made["version"] != triton.__version__:
        return f"they are of Triton {made['version']}, this is {triton.__version__}"
    ours, theirs, library = key_parts(key), made["parts"], made["library"]
    if len(ours) != len(theirs) or any(
        a != b and part != library for part, (a, b) in enumerate(zip(ours, theirs, strict=True))
    ):
        return f"they are of another build of Triton {triton.__version__}"
    return ""


@cache
def _whole(path: Path) -> bool:
    """Whether a file has the contents that it is named after, and not everybody may write it."""
    try:
        whole = hashlib.sha256(path.read_bytes()).hexdigest()[:DIGITS] == path.stem
        whole = whole and not path.stat().st_mode & 0o002
    except OSError:
        whole = False
    if not whole:
        log.warning("%s is missing or damaged, or everybody may write it: it is compiled here", path)
    return whole

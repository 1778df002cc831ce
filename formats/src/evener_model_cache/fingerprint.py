"""What a cache file must agree with: a cache made from another state of any of it is stale.

Covered: of each file of the model its name, size, time of the last change, and the first and last 256 KiB; names,
dtypes and shapes of all its tensors; the file of ``weight_map``; versions of evener, of torch and of the packages that
are in use, and the names, sizes and times of their files; options of packages that read weights; and the declared
weights of this rank with their formats and layouts. Not covered: a file that changed in its middle and kept its size
and its time.
"""

from __future__ import annotations

import hashlib
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from glob import escape
from importlib import util
from pathlib import Path

import torch

from evener.contracts.declared import Declared, LinearWeight, StackedWeight, Table, Weight
from evener.engine.worker.assembly import Assembly
from evener.plugins.discover import core_version
from evener_model_cache.cache_file import Unusable

#: Raised when the files' contents change their meaning.
LAYOUT = 1
#: Bytes of a file's beginning, which holds its description, and of its end.
_ENDS = 256 << 10
#: More files than a model has.
_MOST_FILES = 10_000
_NUMBERED = re.compile(r"(.+-)\d{5}(-of-\d{5}\.\w+)")
#: Files of a model folder that say nothing about weights.
_TEXTS = frozenset({".md", ".txt", ".jinja", ".png", ".jpg", ".pdf"})
#: What a package announces that takes part in the reading of weights.
_READS = ("checkpoints", "weight_files", "checkpoint_views", "quantizers", "formats")


def slot_name(a: Assembly, host: bool) -> str:
    """The name of the cache file of this rank: one for each model, backend, place among the ranks and way to read.

    Args:
        host: of the weights that the host computes with, beside the device.
    """
    config, world = a.config.config, a.ranks.world
    place = f"{world.pp_rank}.{world.pp_size}-{world.tp_rank}.{world.tp_size}"
    place += f"-experts.{config.infer.ep_size}" * (config.infer.ep_size > 1) + "-host" * host
    path = Path(a.checkpoint.path).resolve()
    said = repr((str(path), a.loaded.backend.name, a.config.dtype, config.quant, config.weight_map, place))
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem if path.is_file() else path.name)[:80].lstrip(".-") or "model"
    return f"{stem}-{a.loaded.backend.name}-{place}-{hashlib.sha256(said.encode()).hexdigest()[:16]}.safetensors"


def fingerprint_of(a: Assembly, declared: Sequence[Declared], folder: Path) -> dict[str, str]:
    """``{what: its state}``, see the module.

    Args:
        folder: of the cache, whose files are not the model's.

    Raises:
        Unusable: a file cannot be read, or there are too many.
    """
    config = a.config.config
    found = {
        "the layout of cache files": str(LAYOUT),
        "this machine": f"{platform.machine()} {sys.byteorder}",
        "torch": str(torch.__version__),
        "evener": f"{core_version()} {_code_state('evener')}",
        "the weights that the model declares": _digest(map(_declared_text, declared)),
        "the tensors of the checkpoint": _digest(f"{n} {d} {s}" for n, (d, s) in sorted(a.headers.items())),
        "how the checkpoint is read": f"{type(a.checkpoint).__qualname__} {a.scheme.name}",
    }
    for package in a.loaded.selection.all_packages:
        module = package.descriptor.module or next(iter(package.descriptor.architectures.values()), "")
        state = _code_state(module.split(".")[0].split(":")[0])
        key = f"{package.distribution} ({package.name})"
        found[key] = f"{package.version} {state}"
        if any(getattr(package.descriptor, field) for field in _READS):
            options = config.options.get(package.name, {})
            found[f"options of {package.name}"] = repr(sorted((k, str(v)) for k, v in options.items()))
    files = list(_model_files(Path(a.checkpoint.path), folder))
    files += [Path(config.weight_map)] if config.weight_map else []
    try:
        found.update((f"the file {path.name}", _file_state(path)) for path in files)
    except OSError as error:
        raise Unusable(f"a file of the model cannot be read: {error}") from error
    return found


def differences(stored: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs between two fingerprints, in words."""
    changed = [f"{key} changed" for key in now if key in stored and stored[key] != now[key]]
    changed += [f"{key} is new" for key in now if key not in stored]
    return changed + [f"{key} is gone" for key in stored if key not in now]


def _model_files(path: Path, cache: Path) -> Iterator[Path]:
    if path.is_file():
        numbered = _NUMBERED.fullmatch(path.name)
        # One of several files of a model, model-00001-of-00003.gguf: all of them.
        pattern = escape(path.name) if numbered is None else "?????".join(map(escape, numbered.groups()))
        yield from sorted(path.parent.glob(pattern))
        return
    count = 0
    for found in sorted(path.rglob("*")):
        inside = found.relative_to(path).parts
        if any(part.startswith(".") for part in inside) or cache in found.parents or found.suffix in _TEXTS:
            continue
        count += 1
        if count > _MOST_FILES:
            raise Unusable(f"{path} holds more than {_MOST_FILES:,} files")
        if found.is_file():
            yield found


def _file_state(path: Path) -> str:
    with path.open("rb") as file:
        size, digest = path.stat().st_size, hashlib.sha256(file.read(_ENDS))
        if size > _ENDS:
            file.seek(max(_ENDS, size - _ENDS))
            digest.update(file.read(_ENDS))
    return f"{size} {path.stat().st_mtime_ns} {digest.hexdigest()[:32]}"


def _code_state(package: str) -> str:
    """A hash of the names, sizes and times of an import package's files: in development the version stays the same."""
    spec = util.find_spec(package) if package else None
    lines = []
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).rglob("*")):
            if path.suffix in (".py", ".json", ".h", ".cpp", ".so"):
                status = path.stat()
                lines.append(f"{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns}")
    return _digest(lines)


def _declared_text(item: Declared) -> str:
    if isinstance(item, Table):
        return ""
    if isinstance(item, Weight):
        made = getattr(item.make, "__qualname__", type(item.make).__qualname__)
        return repr((item.name, item.shape, item.dtype, item.sources, item.shapes, item.slices, made))
    assert isinstance(item, LinearWeight), "the three kinds of declared weights"
    parts = [(part.name, part.rows, part.columns, part.format) for part in item.parts]
    stack = (item.transposed, item.held) if isinstance(item, StackedWeight) else ()
    return repr((item.name, parts, item.dtype, item.layout, item.experts, item.slices, item.normalize_rows, stack))


def _digest(lines: Iterator[str] | list[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()[:32]

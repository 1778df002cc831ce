"""The file with API keys: one key a line, or in YAML or JSON lines with names, priorities and limits."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from evener.errors import ConfigError
from evener.sampling_params import MAX_PRIORITY

FILE_KEY = "server.api_key_file"
#: Far more than any list of keys has.
_MAX_FILE_BYTES = 1 << 20

_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._@-]{1,64}$")]


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key that requests may have.

    Attributes:
        name: for the log and metrics; it does not show the key.
        digest: SHA-256 of the key.
        priority: waiting requests with a higher one start first.
        admin: it may change what the server serves: let it sleep, replace its weights, load adapters.
        requests_at_once: requests that may be open at a time; None: any number.
        requests_per_minute, tokens_per_minute: of prompts and answers together; None: any number.
    """

    name: str
    digest: bytes
    priority: int = 0
    admin: bool = False
    requests_at_once: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class _Entry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A key as it is written in YAML or JSON."""

    name: _Name
    key: str | None = None
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{64}$")] | None = None
    priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    admin: bool = False
    requests_at_once: _Positive | None = None
    requests_per_minute: _Positive | None = None
    tokens_per_minute: _Positive | None = None


def digest_of(key: bytes) -> bytes:
    """The digest that is kept of a key, and compared."""
    return hashlib.sha256(key).digest()


def plain_key(key: str, where: str) -> ApiKey:
    """A key without a name and limits; ``where`` it is written, for errors.

    Raises:
        ConfigError: it is empty, or cannot be sent in a header. The message does not show it.
    """
    check_key(key, where)
    digest = digest_of(key.encode())
    return ApiKey(name=f"key-{digest.hex()[:8]}", digest=digest)


def check_key(key: str, where: str) -> None:
    """Raises:
    ConfigError: as ``plain_key``.
    """
    if not key or not all("!" <= letter <= "~" for letter in key):
        problem = "is empty" if not key else "has a space, a control character or a letter outside ASCII"
        message = f"{where} {problem}; a key is 1 or more visible ASCII characters. Correct it, or leave it out"
        raise ConfigError(message)


def read_key_file(file: str) -> list[ApiKey]:
    """The keys of a file: YAML if its name ends with .yaml or .yml, JSON lines with .jsonl, else one key a line.

    Raises:
        ConfigError: it cannot be read, is too large, has no key, or one that cannot be used. No message shows a key.
    """
    text = _text(file)
    read: Callable[[str, str], list[ApiKey]] = {
        ".yaml": _from_yaml, ".yml": _from_yaml, ".jsonl": _from_json_lines,
    }.get(Path(file).suffix, _from_lines)  # fmt: skip
    found = read(text, f"{FILE_KEY}={file}")
    if not found:
        raise ConfigError(f"{FILE_KEY}={file} has no key; write one on each line, or leave {FILE_KEY} out")
    return found


def signature(file: str) -> tuple[int, int, int] | None:
    """What differs when a file was changed or replaced; None if it is not there."""
    try:
        found = os.stat(Path(file).expanduser())
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _text(file: str) -> str:
    path = Path(file).expanduser()
    try:
        if not path.is_file():
            raise ConfigError(f"{FILE_KEY}={file} is not a file; give one with an API key on each line")
        with path.open("rb") as opened:
            data = opened.read(_MAX_FILE_BYTES + 1)
        if len(data) > _MAX_FILE_BYTES:
            raise ConfigError(f"{FILE_KEY}={file} has more than {_MAX_FILE_BYTES} bytes; give one with only API keys")
        return data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        # The text of a UnicodeDecodeError would show a part of the file.
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{FILE_KEY}={file} cannot be read: {why}; write a key on each line") from None


def _from_lines(text: str, where: str) -> list[ApiKey]:
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    return [plain_key(line, f"{where}: line {n}") for n, line in lines if line and line[0] != "#"]


def _from_yaml(text: str, where: str) -> list[ApiKey]:
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        # The error's text would show a part of the file.
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f": line {mark.line + 1}"
        raise ConfigError(f"{where}{line} is not YAML; write a list of keys, each with name and key") from None
    listed = value.get("keys") if isinstance(value, dict) and value.keys() == {"keys"} else value
    if not isinstance(listed, list):
        raise ConfigError(f"{where} is no list; write a list of keys, each with name and key")
    return _checked((f"{where}: key {number}", each) for number, each in enumerate(listed, 1))


def _from_json_lines(text: str, where: str) -> list[ApiKey]:
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                entries.append((f"{where}: line {number}", msgspec.json.decode(line)))
            except msgspec.MsgspecError:
                raise ConfigError(f'{where}: line {number} is not JSON; write {{"name": …, "key": …}}') from None
    return _checked(entries)


def _checked(entries: Iterable[tuple[str, Any]]) -> list[ApiKey]:
    found: list[ApiKey] = []
    for where, value in entries:
        try:
            entry = msgspec.convert(value, _Entry)
        except msgspec.ValidationError as error:
            known = ", ".join(_Entry.__struct_fields__)
            raise ConfigError(f"{where} cannot be used: {error}; its fields are {known}") from None
        if (entry.key is None) == (entry.sha256 is None):
            raise ConfigError(f"{where} ({entry.name}) needs a key or its sha256, and not both")
        if entry.key is not None:
            check_key(entry.key, where)
        digest = digest_of(entry.key.encode()) if entry.key is not None else bytes.fromhex(entry.sha256 or "")
        if any(entry.name == each.name or digest == each.digest for each in found):
            raise ConfigError(f"{where} has the name or the key of an earlier one ({entry.name}); leave one out")
        others = {name: getattr(entry, name) for name in ApiKey.__struct_fields__[2:]}
        found.append(ApiKey(name=entry.name, digest=digest, **others))
    return found

"""Removes what identifies a person or a machine from texts. Torch-free.

Errors name files, and files name users; drivers print host names, addresses and serial numbers. A path keeps what a
reader needs: below a folder of installed packages the rest of it, elsewhere its last part.
"""

from __future__ import annotations

import contextlib
import getpass
import re
import socket
import sys
from pathlib import Path

from evener_conformance.first_contact.evidence_file import LONGEST_TEXT

#: An absolute path: at least two parts, without spaces. Not the end of a URL or of a relative path.
_PATH = re.compile(r"(?<![\w/.:<>-])/(?:[\w.+@%~=-]+/)+[\w.+@%~=-]*")
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/")
_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://\S+")
_IPV4 = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])")
_IPV6 = re.compile(r"(?<![\w:])(?:[0-9a-f]{1,4}:){4,7}(?::?[0-9a-f]{1,4})?(?![\w:])|(?<![\w:])fe80::[0-9a-f:]+", re.I)
_MAC = re.compile(r"(?<![\w:])(?:[0-9a-f]{2}:){5}[0-9a-f]{2}(?![\w:])", re.I)
_UUID = re.compile(r"(?:[A-Z]{3}-)?\b[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}\b", re.I)
_MAIL = re.compile(r"[\w.+-]+@[\w-]+\.[\w.-]+")
_SERIAL = re.compile(r"(?i)\b(serial(?: ?(?:number|no\.?))?\s*[:=]?\s*)\S+")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[^\x20-\x7e\n\u00a0-\U0010ffff]")


class Redactor:
    """Removes private data from texts of this machine.

    Args:
        names: names of users and hosts; default: those of this process.
    """

    def __init__(self, names: tuple[str, ...] | None = None) -> None:
        found = _own_names() if names is None else names
        # Two letters would be found in ordinary words.
        words = sorted({name for name in found if len(name) > 2}, key=len, reverse=True)
        self._names = re.compile("|".join(rf"\b{re.escape(word)}\b" for word in words)) if words else None

    def __call__(self, text: str, longest: int = LONGEST_TEXT) -> str:
        """The text without private data, and its end only if it is longer than ``longest`` characters."""
        text = _CONTROL.sub("?", text[-4 * longest :].replace("\r\n", "\n").replace("\t", " "))
        text = _URL.sub("<address>", text)
        text = _PATH.sub(lambda found: _short(found[0]), text)
        for pattern, word in ((_UUID, "<id>"), (_MAIL, "<address>"), (_MAC, "<address>"), (_IPV6, "<address>"),
                              (_IPV4, "<address>")):  # fmt: skip
            text = pattern.sub(word, text)
        text = _SERIAL.sub(r"\1<id>", text)
        if self._names is not None:
            text = self._names.sub("<name>", text)
        text = "".join(each if each == "\n" or each.isprintable() else "?" for each in text)
        return text if len(text) <= longest else "…" + text[1 - longest :]


def _short(path: str) -> str:
    inside = _PACKAGES.sub("", path)
    return inside if inside != path else f"<path>/{path.rstrip('/').rpartition('/')[2]}"


def _own_names() -> tuple[str, ...]:
    host = socket.gethostname()
    found = [host, host.partition(".")[0], Path.home().name]
    with contextlib.suppress(KeyError, OSError, ImportError):  # a user id without a name
        found.append(getpass.getuser())
    # The administrator's name and a stock host name tell nothing, and stand in ordinary texts.
    return tuple(set(found) - {"root", "localhost", "python", sys.platform, ""})

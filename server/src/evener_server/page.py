"""The chat page at ``/``, and the files that it is made of.

The files are part of this package. They are read once, and only they are served: a path is looked up among their names,
never in the file system.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from fastapi import FastAPI, Request, Response

from evener_server.errors import ApiError

FOLDER = Path(__file__).parent / "web"
#: Where the files are, below the server's root.
PREFIX = "/page/"
#: Files with other endings are not served.
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8", ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8",
    ".json": "application/json", ".svg": "image/svg+xml", ".woff2": "font/woff2", "": "text/plain; charset=utf-8",
}  # fmt: skip
#: The page runs its own scripts only and talks to this server only. What a model writes becomes elements in one place,
#: DOMPurify: with trusted types, a browser refuses HTML from anywhere else.
POLICY = "; ".join((
    "default-src 'none'", "script-src 'self'", "style-src 'self'", "font-src 'self'", "img-src 'self' data: blob:",
    "connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
    "require-trusted-types-for 'script'", "trusted-types dompurify",
))  # fmt: skip
HEADERS = {
    "Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Browsers ask each time whether a file has changed: after an update of the server, all of the page is new.
    "Cache-Control": "no-cache",
}  # fmt: skip


@dataclass(frozen=True)
class PageFile:
    """One file: its bytes, its media type, and the tag by which browsers ask whether it has changed."""

    content: bytes
    media_type: str
    etag: str


@functools.cache
def page_files() -> Mapping[str, PageFile]:
    """All files of the page by their paths below ``PREFIX``; ``index.html`` is the page itself."""
    found = {}
    for path in sorted(FOLDER.rglob("*")):
        if path.is_file() and path.suffix in MEDIA_TYPES:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found[path.relative_to(FOLDER).as_posix()] = PageFile(content, MEDIA_TYPES[path.suffix], etag)
    return MappingProxyType(found)


def is_page(path: str) -> bool:
    """Whether the path of a request is the page's or of one of its files: these need no API key."""
    return path == "/" or (path.startswith(PREFIX) and path[len(PREFIX) :] in page_files())


def add_page(app: FastAPI) -> None:
    """Add the routes of the page."""
    files = page_files()

    @app.head("/", include_in_schema=False)
    @app.get("/", include_in_schema=False)
    async def page(request: Request) -> Response:
        return file_response(request, files["index.html"])

    @app.head(PREFIX + "{path:path}", include_in_schema=False)
    @app.get(PREFIX + "{path:path}", include_in_schema=False)
    async def page_file(request: Request, path: str) -> Response:
        if path not in files:
            raise ApiError(404, f"the page has no file {path[:200]!r}; the page itself is at /", code="unknown_url")
        return file_response(request, files[path])


def file_response(request: Request, file: PageFile) -> Response:
    """A file with the headers of the page; empty with status 304 if the browser has it."""
    headers = {**HEADERS, "ETag": file.etag}
    known = request.headers.get("if-none-match", "")
    if any(tag.strip().removeprefix("W/") in (file.etag, "*") for tag in known.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)

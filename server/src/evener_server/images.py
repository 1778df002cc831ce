"""Images in requests: what a client sent, decoded. Nothing is fetched.

Whoever sends an image chooses what is in it, so a request's images, their bytes and, before they are decoded, their
pixels are limited, and only formats that are common on the web are tried.
"""

from __future__ import annotations

import base64
import binascii
import io
from typing import TYPE_CHECKING, Any

from evener.errors import RequestError

if TYPE_CHECKING:
    from PIL import Image

#: Of one request; its bytes are those of the body. All its images are in memory at a time.
MAX_IMAGES, MAX_PIXELS = 32, 64 << 20
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_HOW = "send the image itself, as data:image/png;base64,…"


def decoded(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Plain messages, each image in them as ``AsyncLLM.submit_chat`` takes it. May take a second.

    Raises:
        RequestError: an image cannot be used; ``param`` is its place.
    """
    taken = _Taken()
    return [{**m, "content": taken.content(m.get("content"), f"messages[{i}].content")} for i, m in enumerate(messages)]


class _Taken:
    """What was decoded of one request."""

    def __init__(self) -> None:
        self._count, self._pixels = 0, MAX_PIXELS

    def content(self, content: Any, place: str) -> Any:
        if not isinstance(content, list):
            return content
        return [self._part(part, f"{place}[{i}].image_url.url") for i, part in enumerate(content)]

    def _part(self, part: dict[str, Any], place: str) -> dict[str, Any]:
        if part["type"] != "image_url":
            return part
        self._count += 1
        if self._count > MAX_IMAGES:
            raise RequestError(f"{place} is one image too many: send at most {MAX_IMAGES}", place)
        image = open_image(data_of(part["image_url"]["url"], place), place, self._pixels)
        self._pixels -= image.width * image.height
        return {"type": "image", "image": image}


def data_of(url: str, place: str) -> bytes:
    """The bytes in a data: URL.

    Raises:
        RequestError: it is something else, or no base64.
    """
    head, comma, data = url.partition(",")
    if not head.lower().startswith("data:"):
        raise RequestError(f"{place} is an address, and this server fetches nothing: {_HOW}", place)
    if not comma or not head.lower().endswith(";base64"):
        raise RequestError(f"{place} has no base64 in it: {_HOW}", place)
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{place} is no valid base64 ({error}): {_HOW}", place) from error


def open_image(data: bytes, place: str, pixels: int = MAX_PIXELS) -> Image.Image:
    """A decoded image of at most so many pixels.

    Raises:
        RequestError: Pillow is not installed, or the bytes are no image, a broken one, or one with too many pixels.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise RequestError(
            "reading images needs Pillow, which is not installed where this server runs: pip install 'evener[images]'",
            place,
        ) from error
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        if image.width * image.height <= pixels:
            image.load()
            return image
        why = f"it has {image.width} x {image.height} pixels"
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        why = "it has far more pixels"
    except Exception as error:  # decoders raise whatever a broken file makes them
        raise RequestError(
            f"{place} is no image that can be read ({type(error).__name__}): send one of {', '.join(FORMATS)}", place
        ) from error
    raise RequestError(f"{place} is too large: {why}, and {pixels:,} of {MAX_PIXELS:,} are left to it", place)

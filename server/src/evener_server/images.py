"""Decodes the images in requests. Nothing is fetched.

Images are untrusted input: their number, their bytes and, before decoding, their pixels are limited, and only common
web formats are accepted.
"""

from __future__ import annotations

import base64
import binascii
import io
from typing import TYPE_CHECKING, Any

from evener.errors import RequestError
from evener_server.messages import replaced_parts

if TYPE_CHECKING:
    from PIL import Image

#: Limits for one request; the size of the body limits its bytes. All its images are in memory at the same time.
MAX_IMAGES, MAX_PIXELS = 32, 64 << 20
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_HOW = "send the image itself, as data:image/png;base64,…"


def decode_images(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with their images decoded, as ``AsyncLLM.submit_chat`` takes them. May take a second.

    Raises:
        RequestError: an image cannot be used; ``param`` is its path.
    """
    return replaced_parts(messages, "image_url", _ImageDecoder().part)


class _ImageDecoder:
    """Decodes the images of one request and counts them."""

    def __init__(self) -> None:
        self._count, self._pixels = 0, MAX_PIXELS

    def part(self, part: dict[str, Any], place: str) -> dict[str, Any]:
        """A part with its image in place of the image's URL."""
        place = f"{place}.image_url.url"
        self._count += 1
        if self._count > MAX_IMAGES:
            raise RequestError(f"{place} is one image too many: send at most {MAX_IMAGES} in a request", place)
        image = open_image(decode_data_url(part["image_url"]["url"], place), place, self._pixels)
        self._pixels -= image.width * image.height
        return {"type": "image", "image": image}


def decode_data_url(url: str, place: str) -> bytes:
    """The bytes in a data: URL.

    Raises:
        RequestError: it is another URL, or has no valid base64.
    """
    head, comma, data = url.partition(",")
    if not head.lower().startswith("data:"):
        raise RequestError(f"{place} is an address, but this server does not fetch images: {_HOW}", place)
    if not comma or not head.lower().endswith(";base64"):
        raise RequestError(f"{place} has no base64 data: {_HOW}", place)
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{place} is not valid base64 ({error}): {_HOW}", place) from error


def open_image(data: bytes, place: str, pixels: int = MAX_PIXELS) -> Image.Image:
    """A decoded image of at most ``pixels`` pixels.

    Raises:
        RequestError: Pillow is not installed, or the bytes are not an image, or it is broken or too large.
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
    except Exception as error:  # decoders may raise anything for a broken file
        raise RequestError(
            f"{place} cannot be read as an image ({type(error).__name__}): send one of {', '.join(FORMATS)}", place
        ) from error
    raise RequestError(f"{place} is too large: {why}, but {pixels:,} of the request's {MAX_PIXELS:,} are left", place)

"""The eyes of Qwen-VL (Bai et al. 2023): an openCLIP vision transformer, and a resampler that makes rows of patches.

An image of ``image_size`` squared pixels is cut into patches; learned queries read them by one cross attention. Both
sides know where they are by sines and cosines in two dimensions. Tensors lie under ``transformer.visual``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from evener.contracts.encoder import Encoder, ImageInput
from evener.errors import RequestError
from evener.layers import Builder
from evener.layers.declared import Span
from evener.layers.settings import count, number, refuse
from evener_models.encoder_layers import Attention, EncoderConfig, EncoderStack, Norm, Projection

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL import Image

_AT = "transformer.visual"
_EPS = 1e-6
#: Side of the grid that positions are learned for.
_LEARNED = 16
#: Width of one head of the resampler.
_HEAD = 128
#: CLIP's: mean and deviation of red, green and blue.
_MEAN, _DEVIATION = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class QwenVision(Encoder):
    """uint8 pixels [size, size, 3] to rows [queries, hidden]; ``visual`` of ``config.json``."""

    dtype = "uint8"

    def __init__(self, build: Builder, visual: Mapping[str, Any], hidden: int) -> None:
        build = build.alone()
        size, self._patch, width = (count(visual, key) for key in ("image_size", "patch_size", "width"))
        self._side, self.rows = size // self._patch, image_rows(visual)
        if size % self._patch:
            raise refuse(visual, "patch_size", f"it must divide image_size = {size}")
        if count(visual, "output_dim") != hidden or hidden % _HEAD:
            raise refuse(visual, "output_dim", f"it must be hidden_size = {hidden}, a multiple of {_HEAD}")
        heads = count(visual, "heads")
        if width % heads:
            raise refuse(visual, "heads", f"it must divide width = {width}")
        self.shape, self.tokens, self._dtype = (size, size, 3), self._side**2, build.dtype
        self._colours = build.table(("CLIP's colours",), 24, _colours)
        pixels = 3 * self._patch**2
        # Matrices that no packing knows in the form in which they are stored: torch multiplies by them.
        self._patches = build.product(
            f"{_AT}.patches", width, pixels, {f"{_AT}.conv1.weight": (width, 3, self._patch, self._patch)}, _flat
        )
        self._proj = build.product(f"{_AT}.last", hidden, hidden, {f"{_AT}.proj": (hidden, hidden)}, _turned)
        self._positions = build.product(
            f"{_AT}.positions", self.tokens, width, {f"{_AT}.positional_embedding": (_LEARNED**2, width)},
            partial(_resized, self._side),
        )
        self._before = Norm(build, f"{_AT}.ln_pre", width, _EPS)
        inner = int(width * number(visual, "mlp_ratio"))
        layers = count(visual, "layers", 1 << 12)
        self._stack = EncoderStack(build, EncoderConfig(
            layers=layers, width=width, heads=heads, inner=inner, eps=_EPS, at=f"{_AT}.transformer.resblocks",
            by_head=True,
        ))  # fmt: skip
        self._pool = _Resampler(build, f"{_AT}.attn_pool", width, hidden, self.rows, self.tokens)
        self._after = Norm(build, f"{_AT}.ln_post", hidden, _EPS)

    def encode(self, value: torch.Tensor) -> torch.Tensor:
        import torch
        from torch.nn.functional import linear

        mean, deviation = _value(self._colours)
        pixels = (value.float() / 255 - mean) / deviation
        cut = pixels.unflatten(1, (self._side, self._patch)).unflatten(0, (self._side, self._patch))
        patches = cut.permute(0, 2, 4, 1, 3).reshape(self.tokens, -1).to(getattr(torch, self._dtype))
        x = linear(patches, _value(self._patches)) + _value(self._positions)
        return linear(self._after(self._pool(self._stack(self._before(x)))), _value(self._proj))


class _Resampler:
    """One cross attention of learned queries over the patches."""

    def __init__(self, build: Builder, at: str, width: int, hidden: int, rows: int, patches: int) -> None:
        sides = math.isqrt(rows), math.isqrt(patches)
        self._enter = Projection(build, f"{at}.kv_proj", hidden, width, bias=None) if width != hidden else None
        self._norms = [Norm(build, f"{at}.{name}", hidden, _EPS) for name in ("ln_q", "ln_kv")]
        self._query = build.weight(f"{at}.query", rows, hidden)
        grid = {f"{at}.pos_embed": (rows, hidden)}
        self._places = [
            build.product(f"{at}.places.{i}", side**2, hidden, grid, partial(_resized, side))
            for i, side in enumerate(sides)
        ]
        weight, bias = (f"{at}.attn.in_proj_{part}" for part in ("weight", "bias"))
        self._qkv = [
            Projection(build, f"{at}.attn.{name}", Span(i * hidden, (i + 1) * hidden, 3 * hidden), hidden, weight, bias)
            for i, name in enumerate("qkv")
        ]
        self._attention = Attention(build, f"{at}.attn", hidden, hidden // _HEAD)
        self._out = Projection(build, f"{at}.attn.out_proj", hidden, hidden)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[patches, width] to [rows, hidden]."""
        seen = self._norms[1](x if self._enter is None else self._enter(x))
        asked = self._norms[0](_value(self._query))
        own, theirs = map(_value, self._places)
        values = (asked + own, seen + theirs, seen)
        query, key, value = (project(each) for project, each in zip(self._qkv, values, strict=True))
        return self._out(self._attention(query, key, value))


class QwenImages(ImageInput):
    """``Picture 1: <img></img>``, with placeholders in between; marks are three ids from ``image_start_id`` on."""

    encoder = "image"

    def __init__(self, visual: Mapping[str, Any]) -> None:
        self.rows, self._size = image_rows(visual), count(visual, "image_size")
        self._start = count(visual, "image_start_id")

    def text(self, number: int) -> str:
        return f"Picture {number}: <img></img>"

    def place(self, ids: list[int]) -> tuple[list[int], list[int]]:
        placed: list[int] = []
        starts: list[int] = []
        for at, token in enumerate(ids):
            placed.append(token)
            if token == self._start:
                if ids[at + 1 : at + 2] != [self._start + 1]:
                    raise RequestError("text has <img> in it, which is how this model marks images; leave it out")
                starts.append(len(placed))
                placed += [self._start + 2] * self.rows
        return placed, starts

    def prepare(self, image: Image.Image) -> np.ndarray[Any, Any]:
        import numpy as np
        from PIL import Image

        return np.asarray(image.convert("RGB").resize((self._size, self._size), Image.Resampling.BICUBIC))


def image_rows(visual: Mapping[str, Any]) -> int:
    """Rows that an image stands for.

    Raises:
        ArchitectureError: they are no square.
    """
    rows = count({"n_queries": 256, **visual}, "n_queries")
    if math.isqrt(rows) ** 2 != rows:
        raise refuse(visual, "n_queries", "it must be a square number")
    return rows


def _resized(side: int, stored: Sequence[torch.Tensor]) -> torch.Tensor:
    """Positions [n², width] of a square grid as those of one of ``side`` squared, cubically interpolated."""
    import torch.nn.functional as F

    grid = stored[0]
    learned = math.isqrt(len(grid))
    if learned == side:
        return grid
    image = grid.float().unflatten(0, (learned, learned)).permute(2, 0, 1)[None]
    image = F.interpolate(image, size=(side, side), mode="bicubic", align_corners=False)
    return image[0].permute(1, 2, 0).flatten(0, 1).to(grid.dtype)


def _colours(device: torch.device) -> torch.Tensor:
    import torch

    return torch.tensor([_MEAN, _DEVIATION], dtype=torch.float32, device=device)


def _flat(stored: Sequence[torch.Tensor]) -> torch.Tensor:
    return stored[0].flatten(1)


def _turned(stored: Sequence[torch.Tensor]) -> torch.Tensor:
    return stored[0].T.contiguous()


def _value(declared: Any) -> torch.Tensor:
    value: torch.Tensor = declared.value
    return value

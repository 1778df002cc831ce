"""The vision encoder of Qwen-VL (Bai et al. 2023): an OpenCLIP vision transformer, and a resampler.

An image of ``image_size`` x ``image_size`` pixels is cut into patches. In the resampler, learned queries read the
patches by one cross attention; queries and patches have two-dimensional sine and cosine position embeddings. The
tensors' names begin with ``transformer.visual``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from evener.contracts.declared import Span
from evener.contracts.encoder import Encoder, ImageInput
from evener.errors import RequestError
from evener.layers import Builder
from evener.layers.config_json import read_float, read_int, unsupported
from evener_models.encoder_layers import Attention, EncoderConfig, EncoderStack, Norm, Projection

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL import Image

_PREFIX = "transformer.visual"
_EPS = 1e-6
#: Patches per side of the grid for which position embeddings were learned.
_LEARNED_GRID = 16
#: Width of a head of the resampler.
_HEAD = 128
#: CLIP's mean and standard deviation of red, green and blue.
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


class QwenVision(Encoder):
    """From uint8 pixels [size, size, 3] to rows [queries, hidden]; its sizes are ``visual`` in ``config.json``."""

    dtype = "uint8"

    def __init__(self, build: Builder, visual: Mapping[str, Any], hidden: int) -> None:
        build = build.replicated()
        size, self._patch, width = (read_int(visual, key) for key in ("image_size", "patch_size", "width"))
        self._side, self.rows = size // self._patch, image_rows(visual)
        if size % self._patch:
            raise unsupported(visual, "patch_size", f"it must divide image_size = {size}")
        if read_int(visual, "output_dim") != hidden or hidden % _HEAD:
            raise unsupported(visual, "output_dim", f"it must be hidden_size = {hidden}, a multiple of {_HEAD}")
        heads = read_int(visual, "heads")
        if width % heads:
            raise unsupported(visual, "heads", f"it must divide width = {width}")
        self.shape, self.tokens, self._dtype = (size, size, 3), self._side**2, build.dtype
        self._clip_mean_std = build.table(("CLIP's colours",), 24, _clip_mean_std)
        pixels = 3 * self._patch**2
        # Convolutions and transposed matrices, which no packing takes as they are stored; torch multiplies by them.
        self._patches = build.precomputed(
            f"{_PREFIX}.patches",
            width,
            pixels,
            {f"{_PREFIX}.conv1.weight": (width, 3, self._patch, self._patch)},
            _flat,
        )
        self._proj = build.precomputed(
            f"{_PREFIX}.last", hidden, hidden, {f"{_PREFIX}.proj": (hidden, hidden)}, _transposed
        )
        self._positions = build.precomputed(
            f"{_PREFIX}.positions",
            self.tokens,
            width,
            {f"{_PREFIX}.positional_embedding": (_LEARNED_GRID**2, width)},
            partial(_resized, self._side),
        )
        self._ln_pre = Norm(build, f"{_PREFIX}.ln_pre", width, _EPS)
        inner = int(width * read_float(visual, "mlp_ratio"))
        layers = read_int(visual, "layers", 1 << 12)
        self._stack = EncoderStack(build, EncoderConfig(
            layers=layers, width=width, heads=heads, inner=inner, eps=_EPS, prefix=f"{_PREFIX}.transformer.resblocks",
            by_head=True,
        ))  # fmt: skip
        self._pool = _Resampler(build, f"{_PREFIX}.attn_pool", width, hidden, self.rows, self.tokens)
        self._ln_post = Norm(build, f"{_PREFIX}.ln_post", hidden, _EPS)

    def encode(self, value: torch.Tensor) -> torch.Tensor:
        import torch
        from torch.nn.functional import linear

        mean, deviation = _value(self._clip_mean_std)
        pixels = (value.float() / 255 - mean) / deviation
        cut = pixels.unflatten(1, (self._side, self._patch)).unflatten(0, (self._side, self._patch))
        patches = cut.permute(0, 2, 4, 1, 3).reshape(self.tokens, -1).to(getattr(torch, self._dtype))
        x = linear(patches, _value(self._patches)) + _value(self._positions)
        return linear(self._ln_post(self._pool(self._stack(self._ln_pre(x)))), _value(self._proj))


class _Resampler:
    """One cross attention in which learned queries read the patches."""

    def __init__(self, build: Builder, at: str, width: int, hidden: int, rows: int, patches: int) -> None:
        sides = math.isqrt(rows), math.isqrt(patches)
        self._kv_proj = Projection(build, f"{at}.kv_proj", hidden, width, bias=None) if width != hidden else None
        self._norms = [Norm(build, f"{at}.{name}", hidden, _EPS) for name in ("ln_q", "ln_kv")]
        self._query = build.weight(f"{at}.query", rows, hidden)
        grid = {f"{at}.pos_embed": (rows, hidden)}
        self._pos_embeds = [
            build.precomputed(f"{at}.places.{i}", side**2, hidden, grid, partial(_resized, side))
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
        """From [patches, width] to [rows, hidden]."""
        seen = self._norms[1](x if self._kv_proj is None else self._kv_proj(x))
        asked = self._norms[0](_value(self._query))
        own, theirs = map(_value, self._pos_embeds)
        values = (asked + own, seen + theirs, seen)
        query, key, value = (project(each) for project, each in zip(self._qkv, values, strict=True))
        return self._out(self._attention(query, key, value))


class QwenImages(ImageInput):
    """An image is ``Picture 1: <img></img>`` in the text, with placeholder tokens in between. The ids of start, end and
    placeholder are three in a row, from ``image_start_id`` on."""

    encoder = "image"

    def __init__(self, visual: Mapping[str, Any]) -> None:
        self.rows, self._size = image_rows(visual), read_int(visual, "image_size")
        self._start = read_int(visual, "image_start_id")

    def text(self, number: int) -> str:
        return f"Picture {number}: <img></img>"

    def expand_placeholders(self, ids: list[int]) -> tuple[list[int], list[int]]:
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
    """The number of rows (tokens) of an image, ``n_queries``.

    Raises:
        ArchitectureError: it is not a square number.
    """
    rows = read_int({"n_queries": 256, **visual}, "n_queries")
    if math.isqrt(rows) ** 2 != rows:
        raise unsupported(visual, "n_queries", "it must be a square number")
    return rows


def _resized(side: int, stored: Sequence[torch.Tensor]) -> torch.Tensor:
    """Position embeddings [n², width] of an n x n grid, interpolated (bicubic) to [side², width]."""
    import torch.nn.functional as F

    grid = stored[0]
    learned = math.isqrt(len(grid))
    if learned == side:
        return grid
    image = grid.float().unflatten(0, (learned, learned)).permute(2, 0, 1)[None]
    image = F.interpolate(image, size=(side, side), mode="bicubic", align_corners=False)
    return image[0].permute(1, 2, 0).flatten(0, 1).to(grid.dtype)


def _clip_mean_std(device: torch.device) -> torch.Tensor:
    import torch

    return torch.tensor([_MEAN, _STD], dtype=torch.float32, device=device)


def _flat(stored: Sequence[torch.Tensor]) -> torch.Tensor:
    return stored[0].flatten(1)


def _transposed(stored: Sequence[torch.Tensor]) -> torch.Tensor:
    return stored[0].T.contiguous()


def _value(declared: Any) -> torch.Tensor:
    value: torch.Tensor = declared.value
    return value

"""Plain oracle of Qwen-VL, written from the published code and paper alone, without sight of this project's model.

Meant to be read: one sequence at a time, every position computed anew, float32, one attention head after the other.
The text is ``reference_models.Qwen``; here is what the images add.  The ``state_dict`` has the published names.

Sources, by the short names used below:

* *visual*: ``visual.py`` of Qwen/Qwen-VL and Qwen/Qwen-VL-Chat.
* *qwen modeling*: ``modeling_qwen.py`` of the same repositories.
* *paper*: Bai et al., "Qwen-VL", arXiv 2308.12966, section 2.1: a ViT whose features one layer of cross-attention with
  trained queries compresses to a fixed number, with two-dimensional positions in both queries and keys.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from reference_models import Qwen
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["QwenVL"]

MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)

# The learned positions of the ViT are a table of 16 x 16 whatever the image (``torch.randn(256, width)`` in visual): it
# was trained at 224 pixels, and a finer grid reads it interpolated.
VIT_POSITIONS = 256

# ``partial(nn.LayerNorm, eps=1e-6)`` in visual: the norms of the image side, whatever ``layer_norm_epsilon`` is.
NORM_EPS = 1e-6

# ``num_heads=output_dim // 128`` in visual; the config's ``heads`` are those of the ViT alone.
POOL_HEAD_SIZE = 128


def _pixels(image: Tensor) -> Tensor:
    """The ViT's input ``[3, side, side]`` from bytes ``[side, side, 3]``: ``ToTensor`` and ``Normalize`` of visual."""
    unit = image.to(torch.float32).permute(2, 0, 1) / 255.0
    return (unit - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def _resized(table: Tensor, count: int) -> Tensor:
    """Positions for a grid of ``count`` cells, row by row, from a square table ``[cells, width]``: ``get_abs_pos``.

    Bicubic on the grid, corners not aligned and without antialiasing; a table of the right size is taken as it is.
    """
    have, want = math.isqrt(table.shape[0]), math.isqrt(count)
    if have == want:
        return table
    grid = table.reshape(have, have, -1).permute(2, 0, 1)[None]
    finer = functional.interpolate(grid, size=(want, want), mode="bicubic", align_corners=False)
    return finer[0].permute(1, 2, 0).reshape(want * want, -1)


def _sines(side: int, width: int) -> Tensor:
    """Two-dimensional sine and cosine positions ``[side * side, width]``: ``get_2d_sincos_pos_embed`` of visual.

    The first half of a row codes the **column** of its cell ("here w goes first"), the second half the line; each half
    is all sines, then all cosines, at frequencies ``10000 ** (-i / (width / 4))``.
    """
    frequencies = [10000.0 ** (-i / (width / 4)) for i in range(width // 4)]
    rows = []
    for line in range(side):
        for column in range(side):
            row: list[float] = []
            for place in (column, line):
                row += [math.sin(place * f) for f in frequencies]
                row += [math.cos(place * f) for f in frequencies]
            rows.append(row)
    return torch.tensor(rows)


class _VisualAttention(nn.Module):
    """Self-attention over all patches, nothing masked: class VisualAttention of visual.

    ``in_proj`` gives each head's query, key and value **next to each other**, head after head (the view ``heads, 3 *
    head size`` is split in its last dimension): not all queries first, as torch's own module of that parameter name.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.dim = heads, width // heads
        self.in_proj = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        packed, outputs = self.in_proj(x), []
        for head in range(self.heads):
            start = head * 3 * self.dim
            query, key, value = packed[:, start : start + 3 * self.dim].split(self.dim, dim=-1)
            outputs.append(torch.softmax(query @ key.T / math.sqrt(self.dim), dim=-1) @ value)
        out: Tensor = self.out_proj(torch.cat(outputs, dim=-1))
        return out


class _VisualBlock(nn.Module):
    """Pre-norm residual block with an exact (erf) GELU: class VisualAttentionBlock of visual."""

    def __init__(self, width: int, heads: int, mlp_ratio: float) -> None:
        super().__init__()
        inner = int(width * mlp_ratio)
        self.ln_1 = nn.LayerNorm(width, eps=NORM_EPS)
        self.ln_2 = nn.LayerNorm(width, eps=NORM_EPS)
        self.attn = _VisualAttention(width, heads)
        parts = [("c_fc", nn.Linear(width, inner)), ("gelu", nn.GELU()), ("c_proj", nn.Linear(inner, width))]
        self.mlp = nn.Sequential(OrderedDict[str, nn.Module](parts))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class _VisualBlocks(nn.Module):
    """The blocks in order, under their published name: class TransformerBlock of visual."""

    def __init__(self, width: int, layers: int, heads: int, mlp_ratio: float) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList([_VisualBlock(width, heads, mlp_ratio) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.resblocks:
            x = block(x)
        return x


class _Resampler(nn.Module):
    """Patches ``[n, width]`` to queries ``[n_queries, output_dim]`` by one cross-attention: class Resampler of visual.

    Positions are added to queries and keys after their norms, and **not** to the values.  The queries' positions are
    those of their own grid, the keys' the same table interpolated to the patches' grid.  There is no ``kv_proj`` where
    the widths are equal.  The attention is torch's own module there too.
    """

    def __init__(self, queries: int, output_dim: int, width: int) -> None:
        super().__init__()
        side = math.isqrt(queries)
        self.pos_embed = nn.Parameter(_sines(side, output_dim), requires_grad=False)
        self.query = nn.Parameter(0.02 * torch.randn(side * side, output_dim))
        same = width == output_dim
        self.kv_proj: nn.Module = nn.Identity() if same else nn.Linear(width, output_dim, bias=False)
        self.attn = nn.MultiheadAttention(output_dim, output_dim // POOL_HEAD_SIZE)
        self.ln_q = nn.LayerNorm(output_dim, eps=NORM_EPS)
        self.ln_kv = nn.LayerNorm(output_dim, eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        values = self.ln_kv(self.kv_proj(x))
        keys = values + _resized(self.pos_embed, x.shape[0])
        queries = self.ln_q(self.query) + self.pos_embed
        out: Tensor = self.attn(queries, keys, values, need_weights=False)[0]
        return out


class _VisionTransformer(nn.Module):
    """One image to ``n_queries`` embeddings of the text's width: class VisionTransformer of visual.

    No class token; a norm before the blocks and none after them, but one after the resampler; ``proj`` is multiplied
    from the right as it stands (``x @ proj``), unlike a Linear's weight.
    """

    def __init__(self, visual: Mapping[str, Any]) -> None:
        super().__init__()
        width, patch, output_dim = int(visual["width"]), int(visual["patch_size"]), int(visual["output_dim"])
        self.conv1 = nn.Conv2d(3, width, kernel_size=patch, stride=patch, bias=False)
        self.positional_embedding = nn.Parameter(width**-0.5 * torch.randn(VIT_POSITIONS, width))
        self.ln_pre = nn.LayerNorm(width, eps=NORM_EPS)
        layers, heads, ratio = int(visual["layers"]), int(visual["heads"]), float(visual["mlp_ratio"])
        self.transformer = _VisualBlocks(width, layers, heads, ratio)
        self.attn_pool = _Resampler(int(visual.get("n_queries", 256)), output_dim, width)
        self.ln_post = nn.LayerNorm(output_dim, eps=NORM_EPS)
        self.proj = nn.Parameter(output_dim**-0.5 * torch.randn(output_dim, output_dim))

    def forward(self, image: Tensor) -> Tensor:
        """Embeddings ``[n_queries, output_dim]`` of the bytes ``[side, side, 3]``; patches go line by line."""
        patches = self.conv1(_pixels(image)[None])[0].flatten(1).T
        x = self.ln_pre(patches + _resized(self.positional_embedding, patches.shape[0]))
        out: Tensor = self.ln_post(self.attn_pool(self.transformer(x))) @ self.proj
        return out


class QwenVL(Qwen):
    """Qwen-VL (QWenLMHeadModel of the qwen modeling): the text of Qwen 1, image embeddings in place of some tokens'.

    The embeddings of the tokens *between* ``image_start_id`` and ``image_start_id + 1`` are replaced (class QWenModel:
    ``hidden_states[i][a + 1 : b] = images[idx]``); the two marks keep their own.  Positions are the tokens' own.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.start = int(config["visual"]["image_start_id"])
        self.transformer.visual = _VisionTransformer(config["visual"])

    def forward(self, ids: Tensor, images: Sequence[Tensor] = ()) -> Tensor:
        """Logits ``[1, n, vocab_size]`` of the one sequence ``ids`` ``[1, n]``, whose images are bytes ``[side, side,
        3]`` in the order of their starts.

        Marks after the last image's are tokens like any other: the qwen modeling looks for images in the prompt alone
        (``past_key_values is None``), so a mark that the model itself generates stands for none.  An image without a
        start and an end is a ValueError.
        """
        if ids.dim() != 2 or ids.shape[0] != 1:
            raise ValueError(f"one sequence at a time, ids of shape [1, n]; got {tuple(ids.shape)}")
        tokens = ids[0].tolist()
        x: Tensor = self.transformer.wte(ids[0]).clone()
        end = -1
        for image in images:
            start = tokens.index(self.start, end + 1)
            end = tokens.index(self.start + 1, start)
            x[start + 1 : end] = self.transformer.visual(image)
        for block in self.transformer.h:
            x = block(x)
        out: Tensor = self.lm_head(self.transformer.ln_f(x))
        return out[None]

"""Activations as a kernel may round them before a product: the meaning of ``contracts.storage.Rounding``.

Scales from the largest magnitude of a token, or of a token's 128 columns: DeepSeek-AI 2024, "DeepSeek-V3 Technical
Report", section 3.3.2, and LLM.int8() (Dettmers et al. 2022), section 2.1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from evener.contracts.storage import Rounding

#: The largest element of each type.
LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}
#: The smallest magnitude that a scale is made from, so that a token of zeros has a scale.
LEAST = 1e-10


def rounded(x: torch.Tensor, how: Rounding, scale: torch.Tensor | None = None) -> torch.Tensor:
    """x [tokens, columns] rounded, in float32. ``scale``: float32 [], the fixed one, if ``how`` has one."""
    tokens, columns = x.shape
    largest, wide = LARGEST[how.storage], max(1, how.group if how.group > 0 else columns)
    grouped = F.pad(x.float(), (0, -columns % wide)).view(tokens, -1, wide)
    if how.group >= 0:
        scale = grouped.abs().amax(-1, keepdim=True).clamp(min=LEAST) / largest
    assert scale is not None, "a fixed scale"
    divided = (grouped / scale).clamp(-largest, largest)
    elements = divided.round() if how.storage == "int8" else divided.to(torch.float8_e4m3fn).float()
    return (elements * scale).view(tokens, -1)[:, :columns]

"""How the linear kernels want weights: turned, or as the codes and scales of q8_0 apart.

A packing says of parts without tensors whether it takes them and how many bytes it will hold; then it packs them,
stacked along the out-features. ``data`` is between a packing and its kernels, and may be anything.
"""

import torch
from evener.contracts.quant import BLOCKS, DTYPE_BYTES, PackedWeight, Packing

GROUP, BLOCK_BYTES = BLOCKS["q8_0"]  # 32 codes of a byte behind a scale in float16


class Turned(Packing):
    """One matrix [columns, rows] in the compute type."""

    layout = "worked.turned"

    def supports(self, parts, dtype):
        odd = next((part.format.storage for part in parts if not part.format.plain), None)
        return odd and f"turns plain weights, and this one is stored as {odd}"

    def nbytes(self, parts, dtype):
        return int(sum(part.rows for part in parts) * parts[0].columns * DTYPE_BYTES[dtype])

    def pack(self, parts, dtype, device):
        # Parts may come in another type than the compute type.
        rows = [part.tensors["weight"].to(device, getattr(torch, dtype)) for part in parts]
        data = torch.cat(rows).T.contiguous()
        return PackedWeight(self.layout, (data.shape[1], data.shape[0]), data, data.nbytes, _formats(parts))


class Codes(Packing):
    """Of q8_0: codes int8 [rows, columns] and scales float16 [rows, columns / 32]."""

    layout = "worked.codes"

    def supports(self, parts, dtype):
        odd = next((part.format.storage for part in parts if part.format.storage != "q8_0"), None)
        return odd and f"takes q8_0 apart, and this one is stored as {odd}"

    def nbytes(self, parts, dtype):
        return sum(part.rows * part.columns // GROUP * BLOCK_BYTES for part in parts)

    def pack(self, parts, dtype, device):
        blocks = torch.cat([part.tensors["weight"].to(device) for part in parts]).unflatten(1, (-1, BLOCK_BYTES))
        scales = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1)
        codes = blocks[..., 2:].contiguous().view(torch.int8).flatten(1)
        return PackedWeight(
            self.layout, tuple(codes.shape), (codes, scales), codes.nbytes + scales.nbytes, _formats(parts)
        )


def _formats(parts):
    return tuple(part.format for part in parts)

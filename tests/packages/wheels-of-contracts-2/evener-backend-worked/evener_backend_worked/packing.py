"""How the linear kernels want weights: transposed, or q8_0 blocks split into codes and scales.

``supports`` and ``nbytes`` get parts without tensors, because memory is planned before weights are read. ``pack``
stacks the parts along the out-features. Only a packing and its kernels look into ``data``; it may be anything.
"""

import torch
from evener.contracts.quant import BLOCKS, DTYPE_BYTES, PackedWeight, Packing

GROUP, BLOCK_BYTES = BLOCKS["q8_0"]  # 32 codes of one byte, after a scale in float16


class Transposed(Packing):
    """One matrix [columns, rows] in the compute dtype."""

    layout = "worked.transposed"

    def supports(self, parts, dtype):
        odd = next((part.format.storage for part in parts if not part.format.plain), None)
        return odd and f"takes plain weights, and this one is stored as {odd}"

    def nbytes(self, parts, dtype):
        return int(sum(part.rows for part in parts) * parts[0].columns * DTYPE_BYTES[dtype])

    def pack(self, parts, dtype, device):
        # Parts may have another dtype than the compute dtype.
        rows = [part.tensors["weight"].to(device, getattr(torch, dtype)) for part in parts]
        data = torch.cat(rows).T.contiguous()
        return PackedWeight(self.layout, (data.shape[1], data.shape[0]), data, data.nbytes, _formats(parts))


class Codes(Packing):
    """q8_0 as codes int8 [rows, columns] and scales float16 [rows, columns / 32]."""

    layout = "worked.codes"

    def supports(self, parts, dtype):
        odd = next((part.format.storage for part in parts if part.format.storage != "q8_0"), None)
        return odd and f"takes q8_0, and this one is stored as {odd}"

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

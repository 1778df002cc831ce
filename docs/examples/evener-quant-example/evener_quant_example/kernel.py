"""A packing, which says how weights lie on the device, and the linear kernel that reads it. They know no checkpoint."""

import torch
from evener.contracts.ops import Kernel
from evener.contracts.quant import PackedWeight, Packing

SLICE = 1024  # rows that are widened at a time: it bounds the workspace


class Codes(Packing):
    """``data``: codes int8 [rows, columns] and scales float32 [rows, groups], of all parts stacked."""

    layout = "int8-groups.codes"

    def supports(self, parts, dtype):
        form = parts[0].format
        if form.storage != "int8" or form.scale != "float32" or form.zero or form.order != "row":
            return f"reads int8 codes with float32 scales, and this weight is stored as {form.storage}"
        if form.group < 1 or form.group_out != 1:
            return "reads one scale for each group of a row"
        return None if all(part.format == form for part in parts) else "its parts are stored in different formats"

    def nbytes(self, parts, dtype):
        return sum(part.format.nbytes(part.rows, part.columns) for part in parts)

    def pack(self, parts, dtype, device):
        codes, scales = (torch.cat([part.tensors[role].to(device) for part in parts]) for role in ("weight", "scale"))
        formats = tuple(part.format for part in parts)
        return PackedWeight(self.layout, tuple(codes.shape), (codes, scales), codes.nbytes + scales.nbytes, formats)


class Int8Linear(Kernel):
    op, name, capturable = "linear", "int8_groups_linear", True
    packings = (Codes(),)  # it is asked only for weights that were packed in one of these

    def supports(self, call):
        return None

    def build(self, call):
        out = getattr(torch, call.static["out"])

        def run(x, weight, bias=None):
            codes, scales = weight.data
            x, pieces = x.float(), []
            for rows, scale in zip(codes.split(SLICE), scales.split(SLICE), strict=True):
                wide = rows.float().unflatten(1, (scale.shape[1], -1)) * scale[..., None]
                pieces.append(x @ wide.flatten(1).T)
            y = torch.cat(pieces, dim=-1)
            return (y if bias is None else y + bias.float()).to(out)

        return run

    def workspace(self, call):
        tokens, rows, columns = call.bucket.high, call.static["rows"], call.static["columns"]
        # In float32: a slice twice (codes widened, then scaled), x, and the sums in pieces, joined, and with a bias.
        return 4 * (2 * min(rows, SLICE) * columns + tokens * (columns + 3 * rows))

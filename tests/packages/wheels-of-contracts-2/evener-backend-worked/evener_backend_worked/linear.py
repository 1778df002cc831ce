"""A linear kernel for the two layouts of ``packing.py``."""

import torch
from evener.contracts.ops import Kernel

from evener_backend_worked.packing import GROUP, Codes, Transposed


def transposed(x, data):
    return x.float() @ data.float()


def coded(x, data):
    codes, scales = data
    weight = codes.float().unflatten(1, (-1, GROUP)) * scales.float()[..., None]
    return x.float() @ weight.flatten(1).T


#: By layout: the product, in float32, of x and the data of that packing.
PRODUCTS = {Transposed.layout: transposed, Codes.layout: coded}


class Linear(Kernel):
    op, name, capturable = "linear", "worked_linear", True
    packings = (Transposed(), Codes())  # best first; evener asks this kernel only for these layouts

    def supports(self, call):
        return None

    def build(self, call):
        # The layout was chosen for this weight before; ``weight.data`` below is what its packing made.
        product, out = PRODUCTS[call.layouts["weight"]], getattr(torch, call.static["out"])

        def run(x, weight, bias=None):
            y = product(x, weight.data)
            return (y if bias is None else y + bias.float()).to(out)

        return run

    def workspace(self, call):
        return product_bytes(call.bucket.high, call.static["rows"], call.static["columns"])


def product_bytes(tokens, rows, columns):
    """Workspace of one product: the weight and its codes in float32, x in float32, the sums with and without bias."""
    return 4 * (2 * rows * columns + tokens * (columns + 2 * rows))

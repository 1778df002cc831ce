"""A linear kernel for the two layouts of ``packing``."""

import torch
from evener.contracts.ops import Kernel

from evener_backend_worked.packing import GROUP, Codes, Turned


def turned(x, data):
    return x.float() @ data.float()


def coded(x, data):
    codes, scales = data
    weight = codes.float().unflatten(1, (-1, GROUP)) * scales.float()[..., None]
    return x.float() @ weight.flatten(1).T


#: Products in float32 of x and what a packing made, by its layout.
PRODUCTS = {Turned.layout: turned, Codes.layout: coded}


class Linear(Kernel):
    op, name, capturable = "linear", "worked_linear", True
    packings = (Turned(), Codes())  # best first; it is asked for these layouts alone

    def supports(self, call):
        return None

    def build(self, call):
        # The layout was chosen before, for this weight; ``weight.data`` below is what that packing made.
        product, out = PRODUCTS[call.layouts["weight"]], getattr(torch, call.static["out"])

        def run(x, weight, bias=None):
            y = product(x, weight.data)
            return (y if bias is None else y + bias.float()).to(out)

        return run

    def workspace(self, call):
        return product_bytes(call.bucket.high, call.static["rows"], call.static["columns"])


def product_bytes(tokens, rows, columns):
    """Scratch of one product: the weight and its codes in float32, x in float32, the sums with and without a bias."""
    return 4 * (2 * rows * columns + tokens * (columns + 2 * rows))

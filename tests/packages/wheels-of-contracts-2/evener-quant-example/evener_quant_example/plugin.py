"""The hooks: what the descriptor announces."""

from evener.contracts.hooks import hookimpl

from evener_quant_example.kernel import Int8Linear
from evener_quant_example.scheme import Int8Groups


@hookimpl
def evener_quant_schemes():
    return [Int8Groups()]


@hookimpl
def evener_kernels(device, options):
    return [Int8Linear()]

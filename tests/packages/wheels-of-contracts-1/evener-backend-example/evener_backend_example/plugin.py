"""The hooks: called at start-up, never per token."""

from evener.contracts.hooks import hookimpl
from evener_backend_example.device import Example
from evener_backend_example.kernels import Norm


@hookimpl
def evener_device(index, options):
    return Example(index)


@hookimpl
def evener_kernels(device, options):
    return [Norm()]

"""The hooks: what the descriptor announces, delivered."""

from functools import partial

from evener.backend.torch_communicator import open_torch_communicator
from evener.contracts.hooks import hookimpl

from evener_backend_worked.device import Worked
from evener_backend_worked.fused import AddNorm, GatedMLP
from evener_backend_worked.graph import Taping
from evener_backend_worked.linear import Linear
from evener_backend_worked.state import Paged


@hookimpl
def evener_device(index, options):
    return Worked(index)


@hookimpl
def evener_kernels(device, options):
    return [AddNorm(), Linear(), GatedMLP()]


@hookimpl
def evener_state_providers(device, options):
    return [Paged()]


@hookimpl
def evener_graph_capture(device, options):
    return Taping()


@hookimpl
def evener_communicator(options):
    return partial(open_torch_communicator, "gloo")

"""Kernels: each computes one op, for the calls that `supports` accepts; the reference computes the others."""

from evener.contracts.ops import Kernel
from torch.nn.functional import rms_norm


class Norm(Kernel):
    op, name = "rms_norm", "example_norm"

    def supports(self, call):
        return "has no offset" if call.static["offset"] else None

    def build(self, call):
        eps = call.static["eps"]
        return lambda x, weight: (rms_norm(x.float(), weight.shape, None, eps) * weight.float()).to(x.dtype)

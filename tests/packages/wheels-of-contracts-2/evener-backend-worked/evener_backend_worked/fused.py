"""Two fused kernels: a primitive that adds and normalises, and a composite, a whole MLP."""

import torch
from evener.contracts.ops import Kernel
from torch.nn.functional import silu

from evener_backend_worked.linear import PRODUCTS, Linear, product_bytes


def norm(wide, weight, eps, offset):
    """Root mean square norm of float32 rows, in float32."""
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (weight.float() + offset)


class AddNorm(Kernel):
    op, name, capturable = "add_rms_norm", "worked_add_norm", True

    def supports(self, call):
        return None

    def build(self, call):
        eps, offset = call.static["eps"], call.static["offset"]

        def run(x, residual, weight):
            residual += x  # donated: it may be overwritten and returned; the residual stream is float32
            return norm(residual, weight, eps, offset).to(x.dtype), residual

        return run

    def workspace(self, call):
        return 4 * 4 * call.bucket.high * call.static["hidden"]


class GatedMLP(Kernel):
    """Replaces the norm, both projections and the activation where it is accepted. Elsewhere the parts are resolved one
    by one, and ``AddNorm`` and ``Linear`` serve some of them."""

    op, name, capturable = "mlp_block", "worked_mlp", True
    packings = Linear.packings  # the layouts that it reads; one is chosen only if a kernel of ``linear`` reads it, too

    def supports(self, call):
        # ``gated``, ``pre_norm`` and ``norm`` have default values here (OpSchema.defaults): evener refuses others.
        if call.static["activation"] != "silu":
            return f"computes silu, not {call.static['activation']}"
        return "has no norm after the block" if call.static["post_norm"] else None

    def build(self, call):
        static, dtype = call.static, getattr(torch, call.static["dtype"])
        gate_up, down = (PRODUCTS[call.layouts[name]] for name in ("gate_up", "down"))

        def run(x, residual, w):  # w: MLPWeights
            residual += x
            y = gate_up(norm(residual, w.norm, static["eps"], static["offset"]).to(dtype), w.gate_up.data)
            y = y if w.gate_up_bias is None else y + w.gate_up_bias.float()
            gate, up = y.to(dtype).float().chunk(2, dim=-1)
            y = down((silu(gate) * up).to(dtype), w.down.data)
            return (y if w.down_bias is None else y + w.down_bias.float()).to(dtype), residual

        return run

    def workspace(self, call):
        tokens, hidden, inner = call.bucket.high, call.static["hidden"], call.static["inner"]
        return product_bytes(tokens, 2 * inner, hidden) + 4 * tokens * (4 * hidden + 4 * inner)

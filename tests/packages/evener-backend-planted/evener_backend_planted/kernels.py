"""Kernels for some primitives and one block."""

import torch
from evener.contracts.ops import Kernel
from evener.contracts.quant import PackedWeight, Packing
from torch.nn import functional

from evener_backend_planted.defects import planted

ACTIVATIONS = {
    "silu": functional.silu, "gelu": functional.gelu, "relu": functional.relu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}  # fmt: skip


def norm(x, weight, eps, offset):
    wide = x if planted("norm-half") else x.float()
    eps = 1e-6 if planted("eps-fixed") else eps
    squares = wide.square().sum(-1, keepdim=True)
    width = -(-x.shape[-1] // 16) * 16 if planted("norm-padded") else x.shape[-1]
    found = wide.float() * torch.rsqrt(squares.float() / width + eps) * (weight.float() + offset)
    if planted("noise"):
        found = found * (1 + 1e-4 * torch.rand(()))
    return found


class Norm(Kernel):
    op, name, capturable = "rms_norm", "planted_norm", True

    def supports(self, call):
        return None

    def workspace(self, call):
        return 16 * call.bucket.high * call.static["hidden"]

    def build(self, call):
        eps, offset, kept = call.static["eps"], call.static["offset"], {}
        limit = 64 if planted("too-much-supported") else 1 << 30
        scratch = 10 * self.workspace(call) if planted("scratch-unnamed") else 0

        def run(x, weight):
            if x.numel() // x.shape[-1] > limit:
                raise RuntimeError("a launch takes 64 rows")
            held = torch.empty(scratch, dtype=torch.uint8)
            found = norm(x, weight, eps, offset).to(x.dtype)
            if planted("norm-tall") and x.dim() == 2 and x.shape[1] % 64 == 0:
                found[64:] = norm(x[64:], torch.ones_like(weight), eps, 0.0).to(x.dtype)
            del held
            if planted("output-reused"):
                kept.setdefault("buffer", {}).setdefault(found.shape, torch.empty_like(found)).copy_(found)
                return kept["buffer"][found.shape]
            return found

        return run


class AddNorm(Kernel):
    op, name, capturable = "add_rms_norm", "planted_add_norm", True

    def supports(self, call):
        return None

    def workspace(self, call):
        return 24 * call.bucket.high * call.static["hidden"]

    def build(self, call):
        eps, offset = call.static["eps"], call.static["offset"]

        def run(x, residual, weight):
            total = x.float() + residual
            if planted("residual-rounded"):
                total = total.to(torch.bfloat16).float()
            return norm(total, weight, eps, offset).to(x.dtype), total

        return run


class Activation(Kernel):
    op, name, capturable = "act_and_mul", "planted_activation", True

    def supports(self, call):
        known = call.static["activation"] in ACTIVATIONS
        return None if known else f"does not compute {call.static['activation']}"

    def workspace(self, call):
        return 32 * call.bucket.high * call.static["inner"]

    def build(self, call):
        act, inner = ACTIVATIONS[call.static["activation"]], call.static["inner"]

        def run(x):
            if planted("activation-in-place"):
                x[..., :inner] = act(x[..., :inner]) * x[..., inner:]
                return x[..., :inner].clone()
            return (act(x[..., :inner].float()) * x[..., inner:].float()).to(x.dtype)

        return run


class Rotary(Kernel):
    op, name, capturable = "rotary", "planted_rotary", True

    def supports(self, call):
        return "turns halves only" if call.static["interleaved"] else None

    def build(self, call):
        dim = call.static["rotary_dim"]

        def turn(x, cos, sin):
            a, b = x[..., :dim].float().chunk(2, dim=-1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
            return torch.cat((turned, x[..., dim:]), dim=-1)

        def run(positions, query, key, cos_sin):
            at = positions.clamp(max=64) if planted("rotary-table") else positions
            cos, sin = cos_sin[at.long()][:, None].chunk(2, dim=-1)
            return turn(query, cos, sin), turn(key, cos, sin)

        return run


class Turned(Packing):
    """One [columns, rows] matrix."""

    layout = "planted.turned"

    def supports(self, parts, dtype):
        odd = [part.format.storage for part in parts if not part.format.plain]
        return f"holds no {odd[0]}" if odd else None

    def nbytes(self, parts, dtype):
        return sum(p.rows for p in parts) * parts[0].columns * getattr(torch, dtype).itemsize

    def pack(self, parts, dtype, device):
        rows = [part.tensors["weight"].to(getattr(torch, dtype)) for part in parts]
        data = torch.cat(rows).t().contiguous()
        formats = tuple(part.format for part in parts)
        return PackedWeight(self.layout, (data.shape[1], data.shape[0]), data, data.nbytes, formats)


class Linear(Kernel):
    op, name, capturable = "linear", "planted_linear", True
    packings = (Turned(),)

    def supports(self, call):
        return None

    def workspace(self, call):
        rows, columns = call.static["rows"], call.static["columns"]
        return 4 * rows * columns + 8 * call.bucket.high * (rows + columns)

    def build(self, call):
        out = getattr(torch, call.static["out"])

        def run(x, weight, bias=None):
            if planted("dtype-claimed") and x.dtype == torch.float16:
                raise RuntimeError("no such kernel")
            if planted("linear-strides") and not x.is_contiguous():
                x = torch.as_strided(x, x.shape, (x.shape[1], 1))
            data = weight.data[:1024] if planted("linear-deep") else weight.data
            found = x[:, : len(data)].float() @ data.float()
            if planted("linear-wide"):
                found[:, 4096:] /= 2
            if planted("float32-rounded") and call.static["out"] != call.static["dtype"]:
                found = found.to(torch.bfloat16).float()
            found = (found if bias is None else found + bias.float()).to(out)
            if planted("linear-tail") and found.shape[1] > 8:
                written = torch.empty_like(found)
                whole = found.shape[1] // 8 * 8
                written[:, :whole] = found[:, :whole]
                return written
            return found

        return run


class Block(Kernel):
    op, name, capturable = "mlp_block", "planted_mlp", True
    packings = (Turned(),)

    def supports(self, call):
        static = call.static
        if not static["gated"] or static["norm"] != "rms" or static["post_norm"]:
            return "computes a gated MLP behind an RMS norm"
        return None if static["activation"] in ACTIVATIONS else f"does not compute {static['activation']}"

    def workspace(self, call):
        hidden, inner = call.static["hidden"], call.static["inner"]
        return 8 * hidden * inner + 32 * call.bucket.high * (hidden + inner)

    def build(self, call):
        static = call.static
        act, inner, eps, offset = ACTIVATIONS[static["activation"]], static["inner"], static["eps"], static["offset"]

        def run(x, residual, w):
            total = x.float() + residual
            y = norm(x if planted("block-forgets-norm") else total, w.norm, eps, offset).to(x.dtype)
            y = y.float() @ w.gate_up.data.float()
            biased = w.gate_up_bias is not None and not (planted("block-tall") and len(x) > 40)
            y = (y + w.gate_up_bias.float() if biased else y).to(x.dtype).float()
            y = (act(y[:, :inner]) * y[:, inner:]).to(x.dtype).float() @ w.down.data.float()
            return (y if w.down_bias is None else y + w.down_bias.float()).to(x.dtype), total

        return run


class Greedy(Kernel):
    op, name, capturable = "greedy", "planted_greedy", True

    def supports(self, call):
        return None

    def workspace(self, call):
        return 16 * call.bucket.high * (1 + call.static["vocab"])

    def build(self, call):
        def run(logits):
            top = logits == logits.amax(-1, keepdim=True)
            ids = torch.arange(logits.shape[-1], dtype=torch.int32)
            if planted("greedy-last"):
                return torch.where(top, ids, -1).amax(-1).to(torch.int32)
            return torch.where(top, ids, logits.shape[-1]).amin(-1).to(torch.int32)

        return run

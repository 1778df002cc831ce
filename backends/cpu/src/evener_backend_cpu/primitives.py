"""Kernels for primitive ops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from evener.backend.native_code import Unavailable
from evener.contracts.declared import LinearWeight
from evener.contracts.ops import Kernel, OpCall, OpFunction
from evener.contracts.quant import PackedWeight, Rounding
from evener.ops.reference.basic import embedding
from evener.ops.reference.rounding import LARGEST, LEAST, rounded
from evener_backend_cpu.arguments import optional, require, require_count, require_indices, require_weight
from evener_backend_cpu.block_packing import LAYOUT
from evener_backend_cpu.device import CpuDevice
from evener_backend_cpu.int8_products import int8_product, int8_rounding, int8_workspace
from evener_backend_cpu.native_library import DTYPES, Native
from evener_backend_cpu.segments import addresses

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}


class NativeKernel(Kernel):
    """A kernel in C++. It refuses if there is no library, and compute dtypes that it has no code for."""

    priority = 100
    batch_invariant = True
    takes_weights = False
    #: Whether activations of four-bit weights are rounded as the checkpoint says.
    rounds_rows = False
    #: Whether those of eight-bit weights are kept where ``linear`` would round them.
    keeps_int8 = False

    def __init__(self, device: CpuDevice) -> None:
        self.name = f"native_{self.op}"
        self.device = device
        if self.takes_weights:
            self.packings = (device.plain, device.blocks, device.stored)

    def supports(self, call: OpCall) -> str | None:
        native = self.device.native
        if isinstance(native, Unavailable):
            return native.reason
        dtype = call.static.get("dtype")
        if dtype is not None and dtype not in DTYPES:
            return f"computes in float32 and bfloat16, not {dtype}"
        asked = [w for w in linear_weights(call.static) if rounded_as(w) is not None]
        if not self.keeps_int8:
            asked += [w for w in linear_weights(call.static) if int8_rounding(call, w) is not None]
        if asked and not self.rounds_rows:
            return f"does not round activations, as {asked[0].name} asks (infer.quant_activations=keep: nobody does)"
        return self._unsupported_reason(call)

    def rounds(self, call: OpCall, weight: str) -> bool:
        return self.rounds_rows and rounded_as(call.static.get(weight)) is not None

    def workspace(self, call: OpCall) -> int:
        if not self.rounds_rows or rounded_as(call.static.get("weight")) is None:
            return 0
        # Quotients, elements and products of rows in float32; ``linear`` also has its sums in it.
        wide = 16 * call.static["columns"] + 4 * call.static["rows"] * (self.op == "linear")
        return int(call.bucket.high * wide)

    def _unsupported_reason(self, call: OpCall) -> str | None:
        return None

    @property
    def native(self) -> Native:
        """The library; only after ``supports`` accepted the call."""
        native = self.device.native
        assert isinstance(native, Native), "build is called after supports"
        return native


def linear_weights(static: Mapping[str, Any]) -> Iterator[LinearWeight]:
    """The weights of an op, and of the ops that a composite names."""
    for value in static.values():
        if isinstance(value, LinearWeight):
            yield value
        elif isinstance(value, Mapping):
            yield from linear_weights(value)


def rounded_as(weight: LinearWeight | None) -> Rounding | None:
    """How activations are rounded before products with four-bit weights; None: not. For those of eight bits,
    ``int8_rounding`` says it."""
    if weight is None or weight.layout != LAYOUT or any(part.format.storage != "uint4" for part in weight.parts):
        return None
    how, *others = {part.format.activation for part in weight.parts}
    return how if not others and how is not None and how.group >= 0 else None


def rounded_rows(x: torch.Tensor, how: Rounding, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rows of x [tokens, columns], rounded, in ``dtype``; and a float32 factor [tokens, 1] for the sums over each
    row, or None. Elements times a power of two are exact in ``dtype``. Times a scale they would be rounded again: an
    error that all results of a token share."""
    found = rounded(x, how)
    if how.group != 0:  # several scales a token
        return found.to(dtype), None
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=LEAST) / LARGEST[how.storage]
    factor = scale / torch.exp2(torch.floor(torch.log2(scale)))
    return (found / factor).to(dtype), factor


def with_factor(y: torch.Tensor, factor: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``y``, changed: sums times the factor of their token, with the bias."""
    y *= factor
    return y if bias is None else y.add_(bias)


class NativeLinear(NativeKernel):
    """Linear layers at every token count: plain weights, which are read once and never repacked, block formats, and
    weights of one byte an element, read as stored."""

    op = "linear"
    takes_weights = rounds_rows = True

    def _unsupported_reason(self, call: OpCall) -> str | None:
        dtype, out = call.static["dtype"], call.static["out"]
        return None if out in (dtype, "float32") else f"gives {dtype} or float32, not {out}"

    def build(self, call: OpCall) -> OpFunction:
        dtype, out = getattr(torch, call.static["dtype"]), getattr(torch, call.static["out"])
        rows, columns, how = call.static["rows"], call.static["columns"], rounded_as(call.static.get("weight"))
        scaled = how is not None and how.group == 0
        given = torch.float32 if scaled else out
        name = "linear" if given is dtype else "linear_wide"
        device, function = self.device, self.native.function(name, call.static["dtype"])

        def run(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
            factor, added = None, bias
            if how is not None:
                x, factor = rounded_rows(x, how, dtype)
                added = bias if factor is None else None
            if not x.is_contiguous():
                x = x.contiguous()
            count = x.shape[0]
            y = x.new_empty(count, rows, dtype=given)
            require_weight("the weight", weight, (rows, columns), dtype)
            plain, blocks = addresses(weight)
            function(
                require("the input", x, dtype, (count, columns)),
                count,
                plain,
                blocks,
                optional("the bias", added, dtype, (rows,)),
                rows,
                columns,
                y.data_ptr(),
                device.threads,
            )
            return y if factor is None else with_factor(y, factor, bias).to(out)

        return run


class NativeInt8Linear(NativeKernel):
    """Linear layers over int8 weights in steps of many tokens, with activations in int8 as the checkpoint says. A token
    in a small step keeps its activations, so a result depends on the size of the step."""

    op = "linear"
    priority = 110
    batch_invariant = False
    takes_weights = rounds_rows = True

    def __init__(self, device: CpuDevice) -> None:
        super().__init__(device)
        self.name = "int8_linear"

    def _unsupported_reason(self, call: OpCall) -> str | None:
        dtype, out = call.static["dtype"], call.static["out"]
        if int8_rounding(call, call.static.get("weight")) is None:
            return "rounds activations of int8 weights with a scale a row: 17 or more, bfloat16, with AMX or VNNI"
        return None if out in (dtype, "float32") else f"gives {dtype} or float32, not {out}"

    def rounds(self, call: OpCall, weight: str) -> bool:
        return int8_rounding(call, call.static.get(weight)) is not None

    def workspace(self, call: OpCall) -> int:
        return int8_workspace(call)

    def build(self, call: OpCall) -> OpFunction:
        dtype, out = getattr(torch, call.static["dtype"]), getattr(torch, call.static["out"])
        rows, columns, how = call.static["rows"], call.static["columns"], int8_rounding(call, call.static["weight"])
        assert how is not None, "build is called after supports"

        def run(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
            require_weight("the weight", weight, (rows, columns), dtype)
            x = x.contiguous()
            require("the input", x, dtype, (x.shape[0], columns))
            optional("the bias", bias, dtype, (rows,))
            return int8_product(x, weight, how, bias, out)

        return run


def forbidden(op: str, /, **static: Any) -> OpFunction:
    """The ``use`` of a reference that consists of no other op."""
    raise AssertionError(f"the reference of a primitive asked for {op}")


class NativeEmbedding(NativeKernel):
    """Rows of a table that stays in blocks. Those of a plain one are copied by torch, as fast as memory is."""

    op = "embedding"

    def __init__(self, device: CpuDevice) -> None:
        super().__init__(device)
        self.packings = (device.blocks,)

    def _unsupported_reason(self, call: OpCall) -> str | None:
        weight = call.static.get("weight")
        if weight is None:
            return None
        if call.layouts.get("weight") != LAYOUT:
            return "reads quantized tables in blocks only"
        if any(part.format.plain or part.format.order == "act" for part in weight.parts):
            return "reads no plain parts and no columns in another order"
        return None

    def build(self, call: OpCall) -> OpFunction:
        if call.static.get("weight") is None:
            return embedding(call.static, forbidden)
        device, dtype, rows, columns = self.device, call.static["dtype"], call.static["vocab"], call.static["hidden"]
        function, form = self.native.function("rows_of", dtype), getattr(torch, dtype)
        # The checkpoint's model rounds the factor to its compute dtype before multiplying.
        factor = torch.tensor(call.static["scale"], dtype=form).item()

        def run(ids: torch.Tensor, table: PackedWeight) -> torch.Tensor:
            y = torch.empty(len(ids), columns, dtype=form)
            ids = ids.contiguous()  # kept until the call is over
            require_weight("the table", table, (rows, columns), form)
            blocks = addresses(table)[1]
            function(*require_indices("the ids", ids, len(ids)), len(ids), blocks, rows, columns, factor, y.data_ptr(),
                     device.threads)  # fmt: skip
            return y

        return run


class NativeRmsNorm(NativeKernel):
    """One pass over each row."""

    op = "rms_norm"

    def build(self, call: OpCall) -> OpFunction:
        device, function = self.device, self.native.function("norm", call.static["dtype"])
        eps, offset, dtype = call.static["eps"], call.static["offset"], getattr(torch, call.static["dtype"])

        def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            if x.dim() != 2 or x.stride(1) != 1:
                x = x.contiguous()
            size = x.shape[-1]
            if x.dtype is not dtype:
                raise ValueError(f"the input is {x.dtype}; the kernel was built for {dtype}")
            y = torch.empty(x.shape, dtype=dtype)
            stride = x.stride(0) if x.dim() == 2 else size
            function(
                x.data_ptr(),
                stride,
                None,
                require("the weight", weight, dtype, (size,)),
                y.data_ptr(),
                x.numel() // size,
                size,
                eps,
                offset,
                device.threads,
            )
            return y

        return run


class NativeAddRmsNorm(NativeKernel):
    """In place: the sum is written over the residual, the norm over x."""

    op = "add_rms_norm"

    def build(self, call: OpCall) -> OpFunction:
        device, function = self.device, self.native.function("norm", call.static["dtype"])
        eps, offset, dtype = call.static["eps"], call.static["offset"], getattr(torch, call.static["dtype"])

        def run(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, residual = x.contiguous(), residual.contiguous()
            rows = require("the input", x, dtype, x.shape)
            function(
                rows,
                x.shape[1],
                require("the residual", residual, torch.float32, x.shape),
                require("the weight", weight, dtype, (x.shape[1],)),
                rows,
                x.shape[0],
                x.shape[1],
                eps,
                offset,
                device.threads,
            )
            return x, residual

        return run


class NativeRotary(NativeKernel):
    """In place, queries and keys in one call; each may be a slice of a wider row."""

    op = "rotary"

    def _unsupported_reason(self, call: OpCall) -> str | None:
        dim, size = call.static["rotary_dim"], call.static["head_dim"]
        return f"rotary_dim {dim} is odd, or more than head_dim {size}" if dim % 2 or dim > size else None

    def build(self, call: OpCall) -> OpFunction:
        device, function, static = self.device, self.native.function("rotary", call.static["dtype"]), call.static
        size, dim, interleaved = static["head_dim"], static["rotary_dim"], int(static["interleaved"])
        dtype = getattr(torch, static["dtype"])

        def run(
            positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            query, key = (t if t.stride(2) == 1 and t.stride(1) == size else t.contiguous() for t in (query, key))
            for what, rows in (("the query", query), ("the key", key)):
                if rows.dtype is not dtype or rows.shape[2] != size or rows.shape[0] != query.shape[0]:
                    raise ValueError(f"{what} is {rows.dtype} {list(rows.shape)}; the kernel was built for {dtype} "
                                     f"[{query.shape[0]}, heads, {size}]")  # fmt: skip
            function(
                *require_indices("positions", positions, query.shape[0]),
                query.data_ptr(),
                query.stride(0),
                query.shape[1],
                key.data_ptr(),
                key.stride(0),
                key.shape[1],
                query.shape[0],
                size,
                dim,
                interleaved,
                require("the table of angles", cos_sin, torch.float32, (cos_sin.shape[0], dim)),
                cos_sin.shape[0],
                device.threads,
            )
            return query, key

        return run


class NativeActAndMul(NativeKernel):
    """Activation and product in one pass."""

    op = "act_and_mul"

    def _unsupported_reason(self, call: OpCall) -> str | None:
        kind = call.static["activation"]
        return None if kind in ACTIVATIONS else f"does not know activation {kind!r}"

    def build(self, call: OpCall) -> OpFunction:
        device, function = self.device, self.native.function("act", call.static["dtype"])
        inner, kind = call.static["inner"], ACTIVATIONS[call.static["activation"]]
        dtype = getattr(torch, call.static["dtype"])

        def run(x: torch.Tensor) -> torch.Tensor:
            x = x.contiguous()
            y = x.new_empty(x.shape[0], inner)
            rows = require("the input", x, dtype, (x.shape[0], 2 * inner))
            function(rows, y.data_ptr(), x.shape[0], inner, kind, device.threads)
            return y

        return run


class NativeGreedy(NativeKernel):
    """A scan of each row."""

    op = "greedy"

    def build(self, call: OpCall) -> OpFunction:
        functions: dict[torch.dtype, Any] = {
            getattr(torch, dtype): self.native.function("greedy", dtype) for dtype in DTYPES
        }

        def run(logits: torch.Tensor) -> torch.Tensor:
            if logits.dtype not in functions:
                logits = logits.float()
            logits = logits.contiguous()
            ids = torch.empty(logits.shape[0], dtype=torch.int32)
            functions[logits.dtype](logits.data_ptr(), logits.shape[0], logits.shape[1], ids.data_ptr())
            return ids

        return run


#: The inputs of ``sample`` beside the logits.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
_SAMPLING_DTYPES = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int32, torch.int32)


class NativeSample(NativeKernel):
    """Sorts only the few candidates that a filter can keep; without filters, one pass."""

    op = "sample"

    def build(self, call: OpCall) -> OpFunction:
        device = self.device
        functions: dict[torch.dtype, Any] = {
            getattr(torch, dtype): self.native.function("sample", dtype) for dtype in DTYPES
        }

        def run(
            logits: torch.Tensor,
            temperature: torch.Tensor,
            top_k: torch.Tensor,
            top_p: torch.Tensor,
            min_p: torch.Tensor,
            seed: torch.Tensor,
            position: torch.Tensor,
        ) -> torch.Tensor:
            if logits.dtype not in functions:
                logits = logits.float()
            logits = logits.contiguous()
            ids = torch.empty(logits.shape[0], dtype=torch.int32)
            given = (temperature, top_k, top_p, min_p, seed, position)
            rows = [t.contiguous() for t in given]  # kept until the call is over
            functions[logits.dtype](
                logits.data_ptr(),
                logits.shape[0],
                logits.shape[1],
                *(require_count(*named, len(ids)) for named in zip(_SAMPLING, rows, _SAMPLING_DTYPES, strict=True)),
                ids.data_ptr(),
                device.threads,
            )
            return ids

        return run


class NativeApplyMask(NativeKernel):
    """Overwrites the logits of ids that are not allowed."""

    op = "apply_mask"

    def build(self, call: OpCall) -> OpFunction:
        device, vocab = self.device, call.static["vocab"]
        functions: dict[torch.dtype, Any] = {
            getattr(torch, dtype): self.native.function("mask", dtype) for dtype in DTYPES
        }

        def run(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            rows, wanted = logits.shape[0], logits.dtype
            logits = (logits if wanted in functions else logits.float()).contiguous()
            mask = mask.contiguous()  # kept until the call is over
            functions[logits.dtype](
                require("the logits", logits, logits.dtype, (rows, vocab)),
                rows,
                vocab,
                require("the mask", mask, torch.int32, (rows, -(-vocab // 32))),
                device.threads,
            )
            return logits.to(wanted)

        return run


PRIMITIVES = (
    NativeEmbedding,
    NativeLinear,
    NativeInt8Linear,
    NativeRmsNorm,
    NativeAddRmsNorm,
    NativeRotary,
    NativeActAndMul,
    NativeGreedy,
    NativeSample,
    NativeApplyMask,
)

"""Linear layers: our kernels if the time is that of reading the weights, else the vendor's library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from evener.contracts.declared import LinearWeight
from evener.contracts.ops import OpCall, OpFunction, Variant
from evener.contracts.quant import DTYPE_BYTES, PackedWeight, Rounding
from evener.ops.reference.linear import PLAIN
from evener_kernels_triton.jit.launch import PreparedLaunch
from evener_kernels_triton.jit.linear import gemv_kernel, persistent_gemv_kernel, skinny_kernel, stored_gemv_kernel
from evener_kernels_triton.jit.stored import dequantize_kernel, stored_kernel
from evener_kernels_triton.kernel import PRECISION, TritonKernel
from evener_kernels_triton.packed import PACKED, PackedMatrix
from evener_kernels_triton.packed_linear import packed_bytes, packed_linear, unpacked, unpacked_bytes
from evener_kernels_triton.primitives import rows_of
from evener_kernels_triton.rounded import rounded_bytes, rounded_linear, rounds
from evener_kernels_triton.rounded_values import round_values, rounded_values_bytes, rounds_values
from evener_kernels_triton.stored import STORED, WORD, Form, StoredMatrix, form_of, in_words, pieces, words
from evener_kernels_triton.stored_token import reads_stored_token, stored_token
from evener_kernels_triton.tuning import MAX_COLUMNS, Product, Sizes, Tuning, memoized
from evener_kernels_triton.variants import packed_products, products, rounded_products, stored_products

#: The data of a linear weight, in one of this package's layouts.
Matrix = torch.Tensor | StoredMatrix | PackedMatrix
#: Rows and columns of a matrix that a program dequantizes.
_DEQUANTIZED_ROWS, _DEQUANTIZED_COLUMNS = 16, 256


def persistent_gemv(
    tuning: Tuning, x: torch.Tensor, weight: torch.Tensor | StoredMatrix, out: torch.dtype, *,
    bias: torch.Tensor | None = None, activation: str = "", residual: torch.Tensor | None = None,
    total: torch.Tensor | None = None, gain: torch.Tensor | None = None, eps: float = 0.0, offset: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """One token [1, columns] to [1, rows], if ``enters_gemv``; see ``persistent_gemv_kernel``."""
    wide, columns = weight.shape
    if isinstance(weight, StoredMatrix) and reads_stored_token(tuning, weight.form, wide, columns, x.dtype):
        return stored_token(
            tuning, x, weight, out, bias=bias, activation=activation, residual=residual, total=total, gain=gain,
            eps=eps, offset=offset,
        )  # fmt: skip
    elements, scales, blocks, form = words(weight)
    launch, grid, rows = _persistent_gemv(
        tuning, wide, columns, blocks, form, activation, residual is not None, gain is not None, bias is not None, eps,
        offset,
    )  # fmt: skip
    y = torch.empty(1, rows, dtype=out, device=x.device)
    launch(
        grid, x, residual if residual is not None else x, total if total is not None else y,
        gain if gain is not None else x, elements, scales, bias if bias is not None else x, y,
    )  # fmt: skip
    return y


def enters_gemv(tuning: Tuning, weight: LinearWeight, halves: int, dtype: torch.dtype) -> bool:
    """Whether ``persistent_gemv`` is for a weight that is not packed, of ``halves`` parts."""
    stored = is_stored(weight)
    if stored and reads_stored_token(tuning, form_of(weight.parts), weight.rows, weight.columns, dtype):
        return True
    return tuning.persistent_gemv(weight.rows // halves, weight.columns, halves, stored) is not None


@memoized
def _persistent_gemv(
    tuning: Tuning, wide: int, columns: int, blocks: int, form: Form, activation: str, add: bool, norm: bool,
    bias: bool, eps: float, offset: float,
) -> tuple[PreparedLaunch, tuple[int, int, int], int]:  # fmt: skip
    """(launch for a weight of ``wide`` rows, its grid, rows of the result)."""
    halves = 2 if activation else 1
    rows = wide // halves
    p = tuning.persistent_gemv(rows, columns, halves, bool(form.kind))
    assert p is not None, "the caller asked"
    launch = PreparedLaunch(
        persistent_gemv_kernel, rows=rows, columns=columns, blocks=blocks, eps=eps, offset=offset, ADD=add, NORM=norm,
        BIAS=bias, ACT=activation, BN=p.n, BK=p.k, OVERLAP=tuning.overlap, num_warps=p.warps,
        **form.word_constants(tuning.converts), **tuning.launch,
    )  # fmt: skip
    return launch, (min(-(-rows // p.n), p.m * tuning.units), 1, 1), rows


def gemv(
    tuning: Tuning, x: torch.Tensor, weight: torch.Tensor | StoredMatrix, out: torch.dtype, *,
    bias: torch.Tensor | None = None, activation: str = "",
) -> torch.Tensor:  # fmt: skip
    """One token [1, columns] to [1, rows]."""
    halves, (wide, columns) = 2 if activation else 1, weight.shape
    elements, scales, blocks, form = words(weight)
    mine = isinstance(weight, StoredMatrix) and reads_stored_token(tuning, form, wide, columns, x.dtype)
    if mine or tuning.persistent_gemv(wide // halves, columns, halves, bool(form.kind)) is not None:
        return persistent_gemv(tuning, x, weight, out, bias=bias, activation=activation)
    launch, grid, rows = _gemv(tuning, wide, columns, blocks, form, activation, bias is not None)
    y = torch.empty(1, rows, dtype=out, device=x.device)
    extra = bias if bias is not None else x
    if form.kind:
        launch(grid, x, elements, scales, extra, y)
    else:
        launch(grid, x, elements, extra, y)
    return y


@memoized
def _gemv(
    tuning: Tuning, wide: int, columns: int, blocks: int, form: Form, activation: str, bias: bool
) -> tuple[PreparedLaunch, tuple[int, int, int], int]:
    """As ``_persistent_gemv``."""
    halves = 2 if activation else 1
    rows = wide // halves
    p = tuning.gemv(rows, columns, halves, bool(form.kind))
    kernel: Any = stored_gemv_kernel if form.kind else gemv_kernel
    more: dict[str, Any] = {"TWO": columns > p.k}
    if form.kind:
        more = {"blocks": blocks, **form.word_constants(tuning.converts)}
    launch = PreparedLaunch(
        kernel, rows=rows, columns=columns, BIAS=bias, ACT=activation, BN=p.n, BK=p.k,
        EVEN=rows % p.n == 0 and columns % p.k == 0, OVERLAP=tuning.overlap, num_warps=p.warps, **more,
        **tuning.launch,
    )  # fmt: skip
    return launch, (-(-rows // p.n), 1, 1), rows


def skinny(
    tuning: Tuning, x: torch.Tensor, weight: torch.Tensor | StoredMatrix, out: torch.dtype, *,
    bias: torch.Tensor | None = None, activation: str = "",
) -> torch.Tensor:  # fmt: skip
    """A few tokens [T, columns] to [T, rows]; see ``skinny_kernel`` and ``stored_kernel``, which knows activations."""
    x_row, apart = x.stride()
    if apart != 1:
        x, x_row = x.contiguous(), x.shape[1]
    tokens, where, (rows, columns) = x.shape[0], x.device, weight.shape
    elements, scales, blocks, form = pieces(weight)
    launch, grid, sums = _skinny(tuning, tokens, rows, columns, x.dtype.itemsize, form, bias is not None, activation)
    y = torch.empty(tokens, rows // 2 if activation else rows, dtype=out, device=where)
    parts = arrived = y
    if sums is not None:
        parts = torch.empty(sums, dtype=torch.float32, device=where)
        arrived = tuning.arrivals.of(where, grid[0] * grid[1])
    extra = bias if bias is not None else x
    if form.kind:
        launch(grid, x, elements, scales, extra, y, parts, arrived, tokens, rows, columns, blocks, x_row)
    else:
        launch(grid, x, elements, extra, y, parts, arrived, tokens, rows, columns, x_row)
    return y


@memoized
def _skinny(
    tuning: Tuning, tokens: int, rows: int, columns: int, element: int, form: Form, bias: bool, activation: str
) -> tuple[PreparedLaunch, tuple[int, int, int], tuple[int, int, int] | None]:
    """(launch, its grid, shape of its partial sums or None)."""
    if form.kind:
        p = within(tuning.stored(tokens, rows, columns, element, form.wide or MAX_COLUMNS), form)
    else:
        p = tuning.skinny(tokens, rows, columns, element)
    across, down, each, splits = _grid(p, tokens, rows, columns)
    launch = _skinny_launch(tuning, p, rows, columns, each, splits, form, bias, activation)
    return launch, (across, down, splits), (across * down * splits, p.n, p.m) if splits > 1 else None


@memoized
def _skinny_launch(
    tuning: Tuning, p: Product, rows: int, columns: int, each: int, splits: int, form: Form, bias: bool, activation: str
) -> PreparedLaunch:
    """The same for all numbers of tokens that have the same sizes."""
    kernel, more = skinny_kernel, dict[str, Any]()
    if form.kind:
        kernel, more = stored_kernel, {"ACT": activation, **form.constants(tuning.ptx)}
    return PreparedLaunch(
        kernel, y_row=rows // 2 if activation else rows, each=each, BIAS=bias, SPLITS=splits, BM=p.m, BN=p.n, BK=p.k,
        EVEN=rows % p.n == 0 and columns % p.k == 0, PRECISION=PRECISION, OVERLAP=tuning.overlap,
        num_warps=p.warps, num_stages=p.stages, **more, **tuning.launch,
    )  # fmt: skip


def _grid(p: Product, tokens: int, rows: int, columns: int) -> tuple[int, int, int, int]:
    """(tiles of rows, tiles of tokens, columns of a span, number of spans)."""
    each = -(-columns // (p.splits * p.k)) * p.k
    return -(-rows // p.n), -(-tokens // p.m), each, -(-columns // each)


def partial_sums(tuning: Tuning, call: OpCall, rows: int, columns: int, stored: bool = False, wide: int = 0) -> int:
    """Bytes of the partial sums of ``few_tokens_linear``, if it serves the tokens of ``call``. ``wide``: of the form of
    stored elements."""
    tokens = call.bucket.high
    by_rows = tokens == 1 and not (stored and columns % WORD)
    if by_rows or not tuning.uses_own_product(tokens, rows, stored):
        return 0
    element = getattr(torch, call.static["dtype"]).itemsize
    if stored:
        p = tuning.stored(tokens, rows, columns, element, wide or MAX_COLUMNS)
    else:
        p = tuning.skinny(tokens, rows, columns, element)
    across, down, _, splits = _grid(p, tokens, rows, columns)
    # With fewer columns at a time than measured sizes have, there may be more spans, up to what these ask for.
    splits = p.splits if stored else splits
    return across * down * splits * p.n * p.m * 4 if splits > 1 else 0


def few_tokens_linear(
    tuning: Tuning, out: torch.dtype, x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Our own product for the weight and the number of tokens."""
    tokens = x.shape[0]
    if not tokens:
        return x.new_empty(0, weight.shape[0], dtype=out)
    if isinstance(weight, PackedMatrix):
        return packed_linear(tuning, out, x, weight, bias)
    if tokens > 1 or not in_words(weight):
        return skinny(tuning, x, weight, out, bias=bias)
    return gemv(tuning, rows_of(x), weight, out, bias=bias)


def within(p: Sizes, form: Form) -> Sizes:
    """The sizes with no more columns at a time than share a scale."""
    return replace(p, k=form.wide) if 0 < form.wide < p.k else p


def dequantized(tuning: Tuning, weight: StoredMatrix | PackedMatrix, dtype: torch.dtype) -> torch.Tensor:
    """The matrix in ``dtype``."""
    if isinstance(weight, PackedMatrix):
        return unpacked(tuning, weight, dtype)
    rows, columns = weight.shape
    elements, scales, blocks, form = pieces(weight)
    y = torch.empty(rows, columns, dtype=dtype, device=elements.device)
    wide = min(form.wide or _DEQUANTIZED_COLUMNS, _DEQUANTIZED_COLUMNS)
    dequantize_kernel[(-(-rows // _DEQUANTIZED_ROWS), -(-columns // wide))](
        elements, scales, y, rows, columns, blocks, BN=_DEQUANTIZED_ROWS, BK=wide, OVERLAP=tuning.overlap,
        **form.constants(tuning.ptx), **tuning.launch,
    )  # fmt: skip
    return y


def dequantized_linear(
    tuning: Tuning, out: torch.dtype, x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The library's product with a copy of ``weight`` in the dtype of x, for so many tokens that the copy takes little
    of the time."""
    plain = weight if isinstance(weight, torch.Tensor) else dequantized(tuning, weight, x.dtype)
    return library_linear(out, x, plain, bias)


def library_linear(
    out: torch.dtype, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The library's product, for any number of tokens; sums in ``out`` are not rounded before."""
    wide = bias is not None and x.dtype == out and _rounds_before_bias(out, *weight.shape)
    if wide and bias is not None and x.device.type != "cpu":
        return torch.mm(x, weight.t(), out_dtype=torch.float32).add_(bias).to(out)
    if x.dtype == out:
        # oneDNN on CPUs with AMX: the reference's product says why.
        return F.linear(x.contiguous() if x.device.type == "cpu" else x, weight, bias)
    y = torch.mm(x, weight.t(), out_dtype=out)
    return y if bias is None else y.add_(bias)


def _rounds_before_bias(dtype: torch.dtype, rows: int, columns: int) -> bool:
    """Whether the vendor's fused product and bias may round a sum to ``dtype`` before it adds the bias, whatever
    torch's setting for sums says. Measured on an H100: in float16 at many sizes; in bfloat16, for 5 to 65 tokens, only
    if 8 does not divide both sides of the matrix."""
    return dtype == torch.float16 or (dtype == torch.bfloat16 and (rows % 8 > 0 or columns % 8 > 0))


def library_refusal(call: OpCall) -> str | None:
    """Why ``library_linear`` cannot serve a ``linear``; None if it can."""
    out = call.static.get("out", call.static["dtype"])
    if call.device.host_memory and out != call.static["dtype"]:
        return f"torch has no product in {call.static['dtype']} with sums in {out} on the host"
    return None


def library_workspace(call: OpCall) -> int:
    """Bytes that ``library_linear`` needs for a ``linear`` besides its result."""
    rows, columns, dtype = call.static["rows"], call.static["columns"], call.static["dtype"]
    # Such sums are kept in float32 until the bias is added.
    wide = call.static.get("out", dtype) == dtype and _rounds_before_bias(getattr(torch, dtype), rows, columns)
    return 4 * call.bucket.high * rows if wide and not call.device.host_memory else 0


def dequantized_bytes(call: OpCall, rows: int, columns: int) -> int:
    """Bytes of the copy of a weight that ``dequantized_linear`` makes."""
    return rows * columns * int(DTYPE_BYTES[call.static["dtype"]])


Project = Callable[[torch.Tensor, Matrix, "torch.Tensor | None"], torch.Tensor]


def project_rows(tuning: Tuning, call: OpCall, out: torch.dtype, weight: LinearWeight) -> Project:
    """The linear function for a token bucket and a weight."""
    stored = is_stored(weight)
    if rounds(tuning, call.bucket.high, weight):
        return partial(rounded_linear, tuning, out)
    own, how = tuning.uses_own_product(call.bucket.high, weight.rows, stored), rounds_values(weight)
    if how is not None:
        return partial(_rounded_values_linear, tuning, out, how, own)
    if own:
        return partial(few_tokens_linear, tuning, out)
    return partial(dequantized_linear, tuning, out) if stored else partial(library_linear, out)


def _rounded_values_linear(
    tuning: Tuning, out: torch.dtype, how: Rounding, own: bool, x: torch.Tensor, weight: PackedMatrix,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The product of rounded activations with a packed weight, our own or the library's."""
    rows, factors = round_values(tuning, x, how)
    if own and rows.shape[0]:
        return packed_linear(tuning, out, rows, weight, bias, factors)
    y = dequantized_linear(tuning, out, rows, weight).mul_(factors[:, None])
    return y if bias is None else y.add_(bias)


def is_stored(weight: LinearWeight) -> bool:
    """Whether resolution chose a layout of elements as they are stored for ``weight``."""
    return weight.layout in (STORED.layout, PACKED.layout)


def is_packed(weight: LinearWeight) -> bool:
    """Whether resolution chose the layout of packed elements for ``weight``."""
    return weight.layout == PACKED.layout


def product_bytes(tuning: Tuning, call: OpCall, weight: LinearWeight) -> int:
    """Bytes that the product with ``weight`` needs besides its result: partial sums, or a copy of stored elements."""
    stored, element = is_stored(weight), getattr(torch, call.static["dtype"]).itemsize
    if rounds(tuning, call.bucket.high, weight):
        return rounded_bytes(tuning, call.bucket.high, weight)
    again = rounded_values_bytes(call.bucket.high, weight, element)
    if stored and not tuning.uses_own_product(call.bucket.high, weight.rows, stored):
        again += unpacked_bytes(weight.parts, element) if is_packed(weight) else 0
        return dequantized_bytes(call, weight.rows, weight.columns) + again
    if is_packed(weight):
        return packed_bytes(tuning, call.bucket.high, weight.parts, element) + again
    wide = form_of(weight.parts).wide if stored else 0
    return partial_sums(tuning, call, weight.rows, weight.columns, stored, wide)


def product_variants(tuning: Tuning, call: OpCall, weight: LinearWeight, halves: int = 1) -> Sequence[Variant]:
    """Variants of the product with ``weight``; ``halves`` as in ``products``."""
    if is_packed(weight):
        return packed_products(tuning, call, weight.parts, halves)
    if rounds(tuning, call.bucket.high, weight):
        return rounded_products(tuning, call, weight.rows, weight.columns)
    if is_stored(weight):
        most = form_of(weight.parts).wide or MAX_COLUMNS
        return stored_products(tuning, call, weight.rows, weight.columns, most, halves)
    return products(tuning, call, weight.rows, weight.columns, halves)


class TritonLinear(TritonKernel):
    """Few tokens: the weight is read once, row by row."""

    op = "linear"
    priority = 110
    packings = (PLAIN,)

    def _unsupported_reason(self, call: OpCall) -> str | None:
        few = self.tuning.uses_own_product(call.bucket.high, call.static["rows"])
        return None if few else f"is slower than the library at {call.bucket.high} tokens"

    def workspace(self, call: OpCall) -> int:
        return partial_sums(self.tuning.with_changes(call.variant), call, call.static["rows"], call.static["columns"])

    def variants(self, call: OpCall) -> Sequence[Variant]:
        return products(self.tuning, call, call.static["rows"], call.static["columns"])

    def build(self, call: OpCall) -> OpFunction:
        tuning = self.tuning.with_changes(call.variant)
        out = getattr(torch, call.static.get("out", call.static["dtype"]))

        def run(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
            return few_tokens_linear(tuning, out, x, weight.data, bias)

        return run


class LibraryLinear(TritonKernel):
    """Many tokens: torch's own product, which calls the vendor's library."""

    op = "linear"
    priority = 100
    packings = (PLAIN,)

    def __init__(self, device: Any, tuning: Tuning) -> None:
        super().__init__(device, tuning)
        self.name = "torch.linear"

    def _unsupported_reason(self, call: OpCall) -> str | None:
        return library_refusal(call)

    def workspace(self, call: OpCall) -> int:
        return library_workspace(call)

    def build(self, call: OpCall) -> OpFunction:
        out = getattr(torch, call.static.get("out", call.static["dtype"]))

        def run(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
            return library_linear(out, x, weight.data, bias)

        return run


class ProductKernel(TritonKernel):
    """A kernel whose products with stored weights are those of ``project_rows``."""

    def rounds(self, call: OpCall, weight: str) -> bool:
        given = call.static[weight]
        return rounds(self.tuning, call.bucket.high, given) or rounds_values(given) is not None


class StoredLinear(ProductKernel):
    """Weights that are no plain numbers: read as they are stored, or for many tokens from a copy in the compute
    dtype."""

    op = "linear"
    priority = 110
    packings = (STORED, PACKED)

    def __init__(self, device: Any, tuning: Tuning) -> None:
        super().__init__(device, tuning)
        self.name = "triton.stored_linear"

    def _unsupported_reason(self, call: OpCall) -> str | None:
        return None if self._is_own(call) else library_refusal(call)

    def _is_own(self, call: OpCall) -> bool:
        """Whether the library takes no part in the product."""
        return self._few(call) or rounds(self.tuning, call.bucket.high, call.static["weight"])

    def _few(self, call: OpCall) -> bool:
        tuning = self.tuning.with_changes(call.variant)
        return tuning.uses_own_product(call.bucket.high, call.static["rows"], stored=True)

    def workspace(self, call: OpCall) -> int:
        own = product_bytes(self.tuning.with_changes(call.variant), call, call.static["weight"])
        return own if self._is_own(call) else own + library_workspace(call)

    def variants(self, call: OpCall) -> Sequence[Variant]:
        return product_variants(self.tuning, call, call.static["weight"])

    def build(self, call: OpCall) -> OpFunction:
        tuning = self.tuning.with_changes(call.variant)
        out = getattr(torch, call.static.get("out", call.static["dtype"]))
        product = project_rows(tuning, call, out, call.static["weight"])

        def run(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
            return product(x, weight.data, bias)

        return run


LINEAR = (TritonLinear, StoredLinear, LibraryLinear)

"""The op contract: what an op computes, which kernels can compute it, and for which sizes.

An ``OpSchema`` defines an op by its reference: plain torch code (a *primitive* op), or other ops (a *composite* op). A
``Kernel`` computes an op for some static parameters and some numbers of tokens; its ``supports`` accepts a call or says
why not. Before the first step, resolution gives every call site one plain callable per token bucket; nothing is chosen
at run time.

Ops are functional: they do not change their inputs, except that an input which the schema marks *donated* may be
overwritten and returned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from evener.contracts.device import DeviceCapabilities

if TYPE_CHECKING:
    from evener.contracts.quant import Packing

#: A resolved op: takes the schema's inputs in order, and returns its outputs. One with a true attribute
#: ``takes_out`` also takes ``out``, a tensor for its only output, and ``rows``: it computes so many of the first rows.
OpFunction = Callable[..., Any]

#: Static parameters of an op: sizes, dtypes, formats and flags that are fixed when the model is built.
Static = Mapping[str, Any]

#: Launch settings of a kernel as plain data, for tuning: ``{"rows": 32, "warps": 4}``.
Variant = Mapping[str, int | str]


@dataclass(frozen=True, order=True)
class Bucket:
    """The numbers of tokens that one callable must serve: ``low`` to ``high``, both inclusive."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}..{self.high}"


@dataclass(frozen=True)
class OpCall:
    """One call site at one bucket: what ``Kernel.supports`` decides on.

    Attributes:
        op: the op's name.
        static: sizes, dtypes, formats and flags that are fixed when the model is built. For a weight it has the
            declaration, a ``LinearWeight`` (``evener.contracts.declared``): ``name``, ``parts`` (``WeightPart`` without
            tensors), ``rows``, ``columns``, ``dtype``, ``out``, ``layout``. Nothing is loaded yet; each call gets the
            loaded weight as the input of the same name.
        bucket: the numbers of tokens; ``supports`` must hold for all of them.
        device: the device's capabilities.
        layouts: for each weight in ``OpSchema.weights``, by its name in ``static``, the layout that was chosen for it:
            one of the kernel's own ``packings`` if it lists any. The callable gets a ``PackedWeight`` whose ``data``
            that packing made.
        state_layout: for ops that use state, the layout of the state's provider.
        variant: for ``Kernel.build``: the one of its ``variants`` that was measured as fastest; empty: the kernel
            chooses.
    """

    op: str
    static: Static
    bucket: Bucket
    device: DeviceCapabilities
    layouts: Mapping[str, str] = field(default_factory=dict)
    state_layout: str | None = None
    variant: Variant = field(default_factory=dict)


class Use(Protocol):
    """The argument ``use`` of a reference: returns the callable that resolution chose for another op, for the same
    bucket.

    ``any_rows``: the first input's number of rows is not the step's number of tokens. The callable takes any number of
    rows: it finds the bucket itself, and splits the rows if no bucket is large enough. For ops that compute each row
    independently.

    ``sizes``: sizes of dynamic dimensions here, for the memory plan: for ``T`` a factor on the step's tokens, for ``R``
    a factor on its output rows, for other dimensions the size.
    """

    def __call__(
        self, op: str, /, *, any_rows: bool = False, sizes: Mapping[str, int] | None = None, **static: Any
    ) -> OpFunction: ...


@dataclass(frozen=True)
class Tensor:
    """One input or output of an op.

    Attributes:
        name: its name in the reference.
        shape: dimension names or numbers. A name in ``static`` is a static size, ``T`` is the number of tokens, other
            names are dynamic.
        dtype: a dtype name, ``*`` for the call site's ``dtype``, ``out`` for its static parameter ``out``, or
            ``packed`` for a ``PackedWeight``.
        donated: the op may overwrite it and return it.
        optional: it may be None.
    """

    name: str
    shape: tuple[str | int, ...]
    dtype: str = "*"
    donated: bool = False
    optional: bool = False


def tensors(text: str) -> tuple[Tensor, ...]:
    """Parse inputs or outputs from ``"x T,hidden donated; bias rows float32 optional"``: name, shape (``-`` for none),
    dtype if it is not ``*``, flags."""
    found = []
    for line in text.split(";"):
        name, shape, *rest = line.split()
        dtype = [word for word in rest if word not in ("donated", "optional")] or ["*"]
        sizes = () if shape == "-" else tuple(shape.split(","))
        found.append(Tensor(name, sizes, dtype[0], "donated" in rest, "optional" in rest))
    return tuple(found)


@dataclass(frozen=True)
class OpCase:
    """One generated test case: static parameters, and inputs that match the schema."""

    static: Static
    inputs: tuple[Any, ...]


#: Values that almost every model has; see ``OpSchema.defaults``.
STATIC_DEFAULTS = {
    "norm": "rms", "qk_norm_over": "head", "gated": True, "parallel": False, "logit_scale": 1.0, "query_scale": False,
    "pre_norm": True, "qk_norm_ranks": None, "placement": None,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OpSchema:
    """The definition of an op.

    Attributes:
        name: unique, lower case.
        doc: the meaning, as a sentence or a formula.
        static: the static parameters by name, each with a description.
        inputs: in the order in which the callable takes them.
        outputs: in the order in which it returns them; a single output is returned without a tuple.
        reference: ``"module:function"``; the function takes ``(static, use)`` and returns the callable. The reference
            of a composite op calls other ops through ``use(...)``.
        composite: whether the reference consists of other ops.
        weights: names of inputs that are ``PackedWeight``.
        state: whether the op reads or writes state; then ``static`` has ``state``, the layer's ``StateSlot``.
        defaults: for static parameters that few models change, the usual value; also for keys of a static parameter
            that is a mapping. If a call has another value, core refuses every kernel that does not name the parameter
            in ``Kernel.non_default``, so a kernel never gets a variant that it does not know.
        cases: ``"module:function"``; the function takes ``(dtype, generator)`` and yields ``OpCase``. "" for ops of
            core, whose cases are in the conformance kit, and for ops whose cases need a whole model.
        tolerance: ``{dtype: (relative, absolute)}`` against the reference computed in float32.
        scratch: for the memory plan: bytes that the reference holds at its peak, per element of its first input,
            without inputs and outputs.
        deterministic: equal inputs give equal bits on one device.
        capturable: the reference may run while a graph is captured: it reads no value on the host.
    """

    name: str
    doc: str
    static: Mapping[str, str]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    reference: str
    composite: bool = False
    weights: tuple[str, ...] = ()
    state: bool = False
    defaults: Mapping[str, Any] = field(default_factory=lambda: STATIC_DEFAULTS)
    cases: str = ""
    tolerance: Mapping[str, tuple[float, float]] = field(default_factory=lambda: {
        "float32": (1e-5, 1e-5), "bfloat16": (1.6e-2, 1e-2), "float16": (2e-3, 2e-3)})  # fmt: skip
    scratch: float = 8.0
    deterministic: bool = True
    capturable: bool = True


class Kernel(ABC):
    """One implementation of one op.

    Attributes:
        op: the op it computes.
        name: unique inside the package, e.g. "fused_rms_norm".
        priority: of the kernels that support a call, the one with the highest is used; the reference has -1000. Of
            equal priorities the name that sorts first is used.
        capturable: it may run while a graph is captured.
        deterministic: equal inputs give equal bits.
        batch_invariant: the result of a token does not depend on the other tokens in the step.
        packings: for ops with weights, the packings whose ``PackedWeight`` it accepts, best first.
        state_layout: for ops that use state, the layout that it was written for; it is a candidate only if the
            provider of that layout was chosen.
        across_ranks: it computes the op of all ranks, with the communicator in ``static``. A kernel without it is not a
            candidate for a call with a communicator, but may compute the part of one rank inside such a composite.
        non_default: names in ``OpSchema.defaults`` for which its ``supports`` handles other values.
    """

    op: str
    name: str
    priority: int = 0
    capturable: bool = False
    deterministic: bool = True
    batch_invariant: bool = False
    packings: tuple[Packing, ...] = ()
    state_layout: str | None = None
    across_ranks: bool = False
    non_default: frozenset[str] = frozenset()

    @abstractmethod
    def supports(self, call: OpCall) -> str | None:
        """None if the kernel can serve the whole bucket of ``call``; otherwise the reason, in words for people."""

    @abstractmethod
    def build(self, call: OpCall) -> OpFunction:
        """The callable for this call site and bucket. Called once, after ``supports`` returned None."""

    def rounds(self, call: OpCall, weight: str) -> bool:
        """(optional) Whether activations are rounded before they are multiplied with ``call.static[weight]``, as the
        ``activation`` of its parts' formats allows. Called after ``supports`` returned None. Default: no."""
        del call, weight
        return False

    def variants(self, call: OpCall) -> Sequence[Variant]:
        """(optional) Other launch settings for ``call`` than the kernel's own choice. ``evener tune`` measures them,
        and a tuning file may pass one of them back in ``call.variant``. Called after ``supports`` returned None; all of
        them must give correct results. Default: none."""
        del call
        return ()

    def workspace(self, call: OpCall) -> int:
        """(optional) Peak device memory, in bytes, of a call with ``call.bucket.high`` tokens, without inputs and
        results: copies of inputs, intermediates, partial sums. Core counts the results. Default: 0.

        Called before ``build``, with the variant that will be built. The memory must be free again when the call has
        returned (on a device with a queue: for the work that is submitted next). Call sites run one after another, so
        the memory plan reserves only the largest ``workspace`` of all. A kernel may keep scratch memory from call to
        call only if all kernels of the package share one buffer of the largest size; memory that each built callable
        keeps for itself is not in the plan.
        """
        del call
        return 0

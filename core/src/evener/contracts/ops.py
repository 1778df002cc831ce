"""The op contract: what an op means, who can compute it, and for which sizes.

An ``OpSchema`` gives an op its meaning: a reference in plain torch (a *primitive*), or an expansion into other ops (a
*composite*). A ``Kernel`` computes an op for some static parameters and some token counts; ``supports`` says for which,
or why not. Resolution gives every call site one plain callable a token bucket, before the first step; nothing is chosen
at run time.

Ops are functional. An input that the schema marks *donated* may be overwritten and returned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from evener.contracts.device import DeviceCapabilities

if TYPE_CHECKING:
    import torch

    from evener.contracts.quant import Packing

#: A resolved op: takes the schema's inputs in order.
OpFunction = Callable[..., Any]

#: Settings of one way to run a kernel, plain data: ``{"rows": 32, "warps": 4}``.
Variant = Mapping[str, int | str]


@dataclass(frozen=True, order=True)
class Bucket:
    """A range of token counts, both ends inclusive, that one callable must serve."""

    low: int
    high: int

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}..{self.high}"


@dataclass(frozen=True)
class OpCall:
    """One call site at one bucket: what a kernel judges.

    Attributes:
        op: the op's name.
        static: sizes, dtypes, formats and flags that are fixed when the model is built. A weight among them is its
            declaration, a ``LinearWeight`` of ``evener.layers.declared``: ``name``, ``parts`` (``WeightPart`` without
            tensors), ``rows``, ``columns``, ``dtype``, ``out``, ``layout``. Nothing is loaded yet; its numbers come
            with each call, as the input of that name.
        bucket: the token counts to serve; ``supports`` must hold for all of them.
        device: the device's capabilities.
        layouts: for each weight in ``OpSchema.weights`` by its name as a static parameter, the layout that was chosen
            for it: one of the kernel's own ``packings`` if it lists any. The callable gets a ``PackedWeight`` whose
            ``data`` is what that packing made.
        state_layout: for ops that touch state, the layout of the provider that owns it.
        variant: given to ``Kernel.build``: which of its ``variants`` was measured to be fastest; empty: its own choice.
    """

    op: str
    static: Mapping[str, Any]
    bucket: Bucket
    device: DeviceCapabilities
    layouts: Mapping[str, str] = field(default_factory=dict)
    state_layout: str | None = None
    variant: Variant = field(default_factory=dict)


class Use(Protocol):
    """Given to a reference: returns the callable that resolution chose for another op at the same bucket.

    ``any_rows``: the first input's rows do not follow the step's tokens; the callable takes any number of them, finds
    its bucket itself and goes in pieces where there is none so large. For ops that take each row by itself.

    ``sizes``: for the memory plan, how large dynamic dimensions are here: a factor on the step's tokens for ``T`` or on
    its output rows for ``R``, a number for any other.
    """

    def __call__(
        self, op: str, /, *, any_rows: bool = False, sizes: Mapping[str, int] | None = None, **static: Any
    ) -> OpFunction: ...


@dataclass(frozen=True)
class Tensor:
    """One input or output of an op.

    Attributes:
        name: as the reference names it.
        shape: dimension names or numbers; a name that ``static`` holds is static, ``T`` is the token count, others are
            dynamic.
        dtype: a dtype name, ``*`` for the site's ``dtype``, ``out`` for its static of that name, or ``packed`` for a
            ``PackedWeight``.
        donated: the op may overwrite it and return it.
        optional: may be None.
    """

    name: str
    shape: tuple[str | int, ...]
    dtype: str = "*"
    donated: bool = False
    optional: bool = False


def tensors(text: str) -> tuple[Tensor, ...]:
    """Inputs or outputs written as ``"x T,hidden donated; bias rows float32 optional"``: name, shape (``-`` for none),
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
    """One generated test case: static parameters and inputs that fit the schema."""

    static: Mapping[str, Any]
    inputs: tuple[Any, ...]


#: What the blocks of almost every model are like; see ``OpSchema.usual``.
USUAL = {
    "norm": "rms", "qk_norm_over": "head", "gated": True, "parallel": False, "logit_scale": 1.0, "query_scale": False,
    "pre_norm": True, "qk_norm_ranks": None,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class OpSchema:
    """What an op means.

    Attributes:
        name: lower case, unique.
        doc: the meaning in a sentence or a formula.
        static: the static parameters by name, each with a sentence.
        inputs: in the order in which the callable takes them.
        outputs: in the order in which it returns them; one output is returned bare.
        reference: ``"module:function"``; the function takes ``(static, use)`` and returns the callable. A composite
            builds it from ``use(...)``.
        composite: whether the reference is an expansion.
        weights: names of inputs that are ``PackedWeight``.
        state: whether the op reads or writes state; its static then holds ``state``.
        usual: for static parameters that few models change, the value that a kernel may take for granted, also inside
            a static parameter that is a mapping. Another value is refused for a kernel that does not name the
            parameter in ``Kernel.unusual``, so that a kernel never meets a variant that it does not know.
        cases: ``"module:function"``; the function takes ``(dtype, generator)`` and yields ``OpCase``; "" for ops whose
            cases need a whole model.
        tolerance: ``{dtype: (relative, absolute)}`` against the reference computed in float32.
        scratch: bytes that the reference holds at its peak for each element of its first input, beside inputs and
            outputs; for the memory plan.
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
    usual: Mapping[str, Any] = field(default_factory=lambda: USUAL)
    cases: str = ""
    tolerance: Mapping[str, tuple[float, float]] = field(
        default_factory=lambda: {"float32": (1e-5, 1e-5), "bfloat16": (1.6e-2, 1e-2), "float16": (2e-3, 2e-3)}
    )
    scratch: float = 8.0
    deterministic: bool = True
    capturable: bool = True


CaseGenerator = Callable[[str, "torch.Generator"], Iterable[OpCase]]


class Kernel(ABC):
    """One implementation of one op.

    Attributes:
        op: the op it computes.
        name: unique inside the package, e.g. "fused_rms_norm".
        priority: the highest that supports a call wins; the reference has -1000. Ties: the name that sorts first.
        capturable: it may run while a graph is being captured.
        deterministic: equal inputs give equal bits.
        batch_invariant: a token's result does not depend on the other tokens of the step.
        packings: for ops with weights, the packings whose ``PackedWeight`` it accepts, best first.
        state_layout: for ops that touch state, the layout it was written for; a candidate only where that unit won.
        across_ranks: it does what ranks do together, with the communicator that its static holds. Without, it is no
            candidate where there is one, but may serve the part of one rank that such a composite is made of.
        unusual: static parameters of ``OpSchema.usual`` of which it judges other values itself.
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
    unusual: frozenset[str] = frozenset()

    @abstractmethod
    def supports(self, call: OpCall) -> str | None:
        """None when the whole bucket of ``call`` is served; otherwise the reason, in words for ``explain``."""

    @abstractmethod
    def build(self, call: OpCall) -> OpFunction:
        """The callable for this site and bucket. Called once, after ``supports`` returned None."""

    def variants(self, call: OpCall) -> Sequence[Variant]:
        """(optional) Other ways to run ``call`` than its own choice, for ``evener tune`` to time; a file of what was
        measured may bring one of them back in ``call.variant``. Asked after ``supports`` returned None; all of them are
        right. Default: none."""
        del call
        return ()

    def workspace(self, call: OpCall) -> int:
        """(optional) Bytes of the device that a call with ``call.bucket.high`` tokens takes at its peak beside its
        inputs and results: copies of inputs, wide intermediates, partial sums. A result that a donated input has no
        room for is counted by core. Default 0.

        Asked before ``build``, with the variant that is built. The scratch is the call's: it is free again when the
        call has returned (on a device with a queue: for whatever is submitted next). Call sites run one after another,
        so the memory plan has room for the largest of all ``workspace`` and no more. Scratch that a kernel keeps from
        call to call is safe only where all of the package's kernels share one buffer of the largest size; memory that
        each built callable keeps for itself is in no plan.
        """
        del call
        return 0

"""The hooks of a second package: the kernels over rows alone, for devices whose Triton compiles no more than these.

Its backend serves the tag ``triton:rows``. A chip for which they are compiled has words among its features:
``triton:rows``; ``triton:argmax`` if reductions may give an index, too; and perhaps ``row:<elements>``, the longest row
of which one program can hold copies, and ``programs:<number>``, the most programs of a launch. Kernels of the backend
itself come before these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from triton.runtime import driver

from evener.contracts.device import Device
from evener.contracts.hooks import hookimpl
from evener.contracts.ops import Kernel, OpCall, OpFunction
from evener_kernels_triton.features import number_of
from evener_kernels_triton.kernel import TritonKernel
from evener_kernels_triton.primitives import CHUNK, PRIMITIVES
from evener_kernels_triton.sampling import SAMPLING, TritonSample, sample_filtered
from evener_kernels_triton.tuning import Tuning, power_of_two

FEATURE, ARGMAX = "triton:rows", "triton:argmax"
#: More heads than any known model has; a norm's call does not say how many rows a token has.
_HEADS = 256
#: Longer vocabularies are known of no model; a soft cap's call does not say its own.
_VOCAB = 1 << 18

#: By op: programs for each token or row, from the call's static parameters.
PROGRAMS: Mapping[str, Callable[[Mapping[str, Any]], int]] = {
    "rms_norm": lambda s: _HEADS, "add_rms_norm": lambda s: 1, "rotary": lambda s: _HEADS // 4,
    "act_and_mul": lambda s: -(-s["inner"] // CHUNK), "embedding": lambda s: -(-s["hidden"] // CHUNK),
    "take_rows": lambda s: -(-s["hidden"] // CHUNK), "softcap": lambda s: -(-_VOCAB // CHUNK),
    "greedy": lambda s: -(-s["vocab"] // 4096), "sample": lambda s: -(-s["vocab"] // 4096),
    "apply_mask": lambda s: -(-s["vocab"] // 4096),
}  # fmt: skip
#: Ops that reduce to an index.
INDEXED = ("greedy", "sample")
#: Ops whose program holds a whole row.
WHOLE_ROWS = ("rms_norm", "add_rms_norm")


class RowKernel(TritonKernel):
    """One of the kernels that ``triton`` has, where the chip and the installed Triton have it too."""

    priority = 50

    def supports(self, call: OpCall) -> str | None:
        return self._missing(call) or super().supports(call)

    def _missing(self, call: OpCall) -> str | None:
        features, tokens = call.device.features, call.bucket.high
        if FEATURE not in features:
            return f"{call.device.variant or 'the device'} does not say that Triton compiles for it ({FEATURE})"
        if call.op in INDEXED and ARGMAX not in features:
            return f"{call.device.variant or 'the device'} has no reduction that gives an index ({ARGMAX})"
        longest = number_of("row", features, 1 << 20)
        if call.op in WHOLE_ROWS and power_of_two(call.static["hidden"]) > longest:
            return f"a program holds rows of {longest} elements, not of {call.static['hidden']}"
        most = number_of("programs", features, (1 << 31) - 1)
        if tokens * PROGRAMS[call.op](call.static) > most:
            return f"a launch has at most {most} programs, which {tokens} tokens need more than"
        return no_driver(self.device.torch_device.type)


class RowSample(RowKernel, TritonSample):
    """Filters in pieces of the vocabulary of which a program can hold copies."""

    def build(self, call: OpCall) -> OpFunction:
        if not call.static["filters"]:
            return super().build(call)
        block = number_of("row", call.device.features, 8192) // 4

        return partial(sample_filtered, block=block)


@cache
def no_driver(device: str) -> str | None:
    """Why the installed Triton launches nothing on a type of device; None if it does."""
    try:
        active = driver.active.get_active_torch_device().type
    except (RuntimeError, OSError, AttributeError) as error:
        return f"the installed Triton has no driver here ({error}); install the vendor's build of Triton"
    return None if active == device else f"the installed Triton launches on {active}, not on {device}"


ROWS: tuple[type[TritonKernel], ...] = tuple(
    RowSample if kind is TritonSample else type(f"Row{kind.__name__.removeprefix('Triton')}", (RowKernel, kind), {})
    for kind in (*PRIMITIVES, *SAMPLING)
)


@hookimpl
def evener_kernels(device: Device, options: Mapping[str, Any]) -> Sequence[Kernel]:
    """The kernels over rows, with launch sizes for this device."""
    tuning = Tuning.of(device.capabilities, overlap=False)
    return [kind(device, tuning) for kind in ROWS]

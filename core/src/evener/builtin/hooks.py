"""Hook implementations of core's own ops, state kinds and quantization scheme."""

from __future__ import annotations

from collections.abc import Sequence

from evener.builtin.kinds import BUILTIN_KINDS
from evener.contracts.hooks import hookimpl
from evener.contracts.ops import OpSchema
from evener.contracts.quant import QuantScheme
from evener.contracts.state import StateKind
from evener.loading.scheme import Unquantized
from evener.ops.schemas import BUILTIN


@hookimpl
def evener_op_schemas() -> Sequence[OpSchema]:
    """The primitives and composites of ``evener.ops``."""
    return BUILTIN


@hookimpl
def evener_state_kinds() -> Sequence[StateKind]:
    """full, window, chunk, latent, index, recurrent."""
    return BUILTIN_KINDS


@hookimpl
def evener_quant_schemes() -> Sequence[QuantScheme]:
    """The scheme of checkpoints that are not quantized."""
    return (Unquantized(),)

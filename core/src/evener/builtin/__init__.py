"""Core's own op schemas, state kinds and quantization scheme, registered through the hooks that packages use."""

from __future__ import annotations

from evener.builtin.kinds import BUILTIN_KINDS
from evener.contracts.descriptor import Descriptor
from evener.ops.schemas import BUILTIN

descriptor = Descriptor(
    name="core",
    summary="the built-in ops, state kinds and formats",
    contracts={"ops": 2, "state": 2, "quant": 3},
    module="evener.builtin.hooks",
    op_schemas=tuple(schema.name for schema in BUILTIN),
    state_kinds=tuple(kind.name for kind in BUILTIN_KINDS),
    formats=("unquantized",),
)

#: For ``discover``.
BUILTINS = (descriptor,)

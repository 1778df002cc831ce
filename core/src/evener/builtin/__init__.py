"""Core's own features, registered through the hooks that a stranger uses: op schemas, state kinds, the unquantized
scheme."""

from __future__ import annotations

from evener.builtin.kinds import BUILTIN_KINDS
from evener.contracts.descriptor import Descriptor
from evener.ops.schemas import BUILTIN

descriptor = Descriptor(
    name="core",
    summary="the built-in ops, state kinds and formats",
    contracts={"ops": 1, "state": 1, "quant": 1},
    module="evener.builtin.hooks",
    op_schemas=tuple(schema.name for schema in BUILTIN),
    state_kinds=tuple(kind.name for kind in BUILTIN_KINDS),
    formats=("unquantized",),
)

#: For ``discover``.
BUILTINS = (descriptor,)

"""What the package registers: a kind of state, and its provider."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evener.contracts.device import Device
from evener.contracts.hooks import hookimpl
from evener.contracts.state import StateKind, StateProvider
from evener_encoders.whole import WholeText


@hookimpl
def evener_state_kinds() -> Sequence[StateKind]:
    return [WholeText()]


@hookimpl
def evener_state_providers(device: Device, options: Mapping[str, Any]) -> Sequence[StateProvider]:
    from evener_encoders.attention import WholeTextAttention

    return [WholeTextAttention()]

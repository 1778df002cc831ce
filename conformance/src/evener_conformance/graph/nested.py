"""Tensors in the arguments and results of calls: a walk for nests of tuples, lists and dicts.

``torch.utils._pytree`` walks every kind of nest and takes longer than most calls of small tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def mapped(change: Callable[[Any], Any], nest: Any) -> Any:
    """``nest`` with ``change`` of each value that is no tuple, list or dict."""
    if isinstance(nest, tuple) and not isinstance(nest, torch.Size):
        return tuple([mapped(change, each) for each in nest])
    if isinstance(nest, list):
        return [mapped(change, each) for each in nest]
    if isinstance(nest, dict):
        return {key: mapped(change, each) for key, each in nest.items()}
    return change(nest)


def tensors(nest: Any) -> list[torch.Tensor]:
    """Every tensor in ``nest``, in order."""
    found: list[torch.Tensor] = []
    waiting = [nest]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            waiting.extend(reversed(value))
        elif isinstance(value, dict):
            waiting.extend(reversed(value.values()))
    return found

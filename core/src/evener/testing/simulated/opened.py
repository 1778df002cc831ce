"""Registering the simulated namespace with torch.

Torch knows one own namespace a process and never forgets it, so it is registered once; options of a device that is
opened later replace those of an earlier one.
"""

from __future__ import annotations

import logging

import torch
from torch.utils.backend_registration import rename_privateuse1_backend

from evener.devices.native_code import Unavailable
from evener.errors import BackendError
from evener.testing.simulated import NAME
from evener.testing.simulated.build import compiled
from evener.testing.simulated.namespace import Namespace

log = logging.getLogger("evener.simulated")


def open_namespace(python: bool) -> Namespace:
    """The one of this process: compiled or, where ``python`` asks for it or nothing can be compiled, in Python.

    Raises:
        BackendError: it is the compiled one already, and the one in Python was asked for.
    """
    there: Namespace | None = getattr(torch, NAME, None)
    namespace = _register(python) if there is None else there
    if python and namespace.compiled:
        raise BackendError(
            "simulated.python=true, but this process has the compiled device already and torch knows one only; "
            "start another process for it"
        )
    return namespace


def _register(python: bool) -> Namespace:
    found = Unavailable("simulated.python=true") if python else compiled()
    if isinstance(found, Unavailable):
        from evener.testing.simulated.python_namespace import register

        log.warning("the simulated device computes in Python: %s", found.reason)
        return register()
    rename_privateuse1_backend(NAME)
    namespace = Namespace(found)
    torch._register_device_module(NAME, namespace)
    return namespace

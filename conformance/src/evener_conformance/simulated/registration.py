"""Registering the simulated namespace with torch.

Torch allows one such namespace in a process and cannot remove it, so it is registered once. The options of a device
that is opened later replace those of an earlier one.
"""

from __future__ import annotations

import logging
import threading

import torch
from torch.utils.backend_registration import rename_privateuse1_backend

from evener.backend.native_code import Unavailable
from evener.errors import BackendError
from evener_conformance.simulated import NAME
from evener_conformance.simulated.build import compiled
from evener_conformance.simulated.namespace import Namespace

log = logging.getLogger("evener.simulated")
#: Ranks that are threads may open the first devices of a process at the same time.
_REGISTERING = threading.Lock()


def open_namespace(python: bool) -> Namespace:
    """This process's namespace: compiled, or in Python if ``python`` is set or nothing can be compiled.

    Raises:
        BackendError: the Python one was asked for, but the compiled one is registered.
    """
    with _REGISTERING:
        there: Namespace | None = getattr(torch, NAME, None)
        namespace = _register(python) if there is None else there
    if python and namespace.compiled:
        raise BackendError(
            "simulated.python=true, but this process has the compiled device already and torch allows only one; "
            "start a new process for it"
        )
    return namespace


def _register(python: bool) -> Namespace:
    found = Unavailable("simulated.python=true") if python else compiled()
    if isinstance(found, Unavailable):
        from evener_conformance.simulated.python_namespace import register

        log.warning("the simulated device is the Python one: %s", found.reason)
        return register()
    rename_privateuse1_backend(NAME)
    namespace = Namespace(found)
    torch._register_device_module(NAME, namespace)
    return namespace

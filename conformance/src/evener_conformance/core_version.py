"""The kit and its core must have the same version. Torch-free."""

from __future__ import annotations

from importlib.metadata import version

from evener.errors import PluginError


def check_core_version() -> None:
    """Check that the installed evener has this package's version.

    pip holds to the pin in pyproject.toml, but ``--no-deps`` or a later upgrade of evener alone passes it.

    Raises:
        PluginError: the versions differ.
    """
    kit, core = version("evener-conformance"), version("evener")
    if kit != core:
        raise PluginError(
            f"evener-conformance {kit} works with evener {kit} only, and evener {core} is installed; "
            f"type: pip install evener-conformance=={core}"
        )

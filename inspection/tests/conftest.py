from __future__ import annotations

from evener_conformance.package_site import site as site

"""The dashboard for Grafana: ``python -m evener_server.dashboard > evener.json`` writes it for an import there."""

from __future__ import annotations

import sys
from pathlib import Path

FILE = Path(__file__).with_name("grafana.json")


def main() -> None:
    """Write the dashboard to standard output."""
    sys.stdout.write(FILE.read_text("utf-8"))


if __name__ == "__main__":
    main()

"""The example of a systemd unit, and what systemd's own tool says of it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from source_tree import ROOT

UNIT = ROOT / "docs/examples/evener.service"
ANALYZE = shutil.which("systemd-analyze")
#: Of ten; systemd calls 9.6 unsafe and a unit below 2.5 OK.
_MOST_EXPOSED = 2.5


def values(text: str) -> dict[str, str]:
    """What the unit sets; of a name that is there twice the last."""
    lines = (line for line in text.splitlines() if line and line[0] not in "#[")
    return dict(line.split("=", 1) for line in lines)


def complaints(text: str, folder: Path) -> str:
    """What systemd finds wrong in a unit, and how exposed it says that the service is, if that is too much. The
    command of the unit need not be installed here."""
    assert ANALYZE is not None, "the caller has looked"
    unit = folder / UNIT.name
    unit.write_text(text.replace("/opt/evener/bin/evener", "/bin/true"), "utf-8")
    environ = {"PATH": "/usr/bin:/bin", "SYSTEMD_COLORS": "0", "LC_ALL": "C"}
    verify = [ANALYZE, "verify", "--man=no", str(unit)]
    done = subprocess.run(verify, capture_output=True, text=True, env=environ, timeout=120)
    found = done.stdout + done.stderr + (f"exit status {done.returncode}" if done.returncode else "")
    exposed = [ANALYZE, "security", "--offline=true", "--no-pager", f"--threshold={10 * _MOST_EXPOSED:.0f}", str(unit)]
    done = subprocess.run(exposed, capture_output=True, text=True, env=environ, timeout=120)
    return found if done.returncode == 0 else f"{found}{done.stdout.splitlines()[-1]}{done.stderr}"

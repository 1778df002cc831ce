"""Where Chromium is on this machine."""

from __future__ import annotations

import os
import shutil

#: None: it is not installed.
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")

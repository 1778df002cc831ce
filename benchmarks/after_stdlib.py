"""Importing this module moves the scripts' folder to the end of the path.

Python puts it first, where ``profile.py`` would hide the standard library's ``profile``, which cProfile, and so torch,
imports.
"""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = str(Path(__file__).resolve().parent)
sys.path[:] = [*(entry for entry in sys.path if entry != _HERE), _HERE]

"""The contents of ``torch/version.py``, read as text, for backends' probes: these must not import torch."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class TorchMarks:
    """What identifies the installed torch.

    Attributes:
        version: ``torch.__version__``, or None if torch is not installed or its version file cannot be read.
        values: all simple assignments in ``torch/version.py`` (text, number, bool or None). Builds for accelerators and
            forks of torch add names of their own there. A name may be missing: use ``values.get``.
        reason: why ``version`` is None, for messages.
    """

    version: str | None
    values: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    reason: str = ""


def read(version_file: Path | None = None) -> TorchMarks:
    """Read the version file of the torch that ``import torch`` would import.

    Args:
        version_file: a file to read instead of the installed ``torch/version.py``.
    """
    if version_file is None:
        spec = importlib.util.find_spec("torch")
        if spec is None or not spec.submodule_search_locations:
            return TorchMarks(None, reason="torch is not installed")
        version_file = Path(next(iter(spec.submodule_search_locations))) / "version.py"
    try:
        tree = ast.parse(version_file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        return TorchMarks(None, reason=f"torch's version file cannot be read: {error}")
    values: dict[str, str | int | float | bool | None] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets, value = [statement.target], statement.value
        else:
            continue
        if isinstance(value, ast.Constant) and (value.value is None or isinstance(value.value, (str, int, float))):
            values.update({target.id: value.value for target in targets if isinstance(target, ast.Name)})
    version = values.get("__version__")
    if not isinstance(version, str):
        return TorchMarks(None, values, "torch's version file has no __version__")
    return TorchMarks(version, values)

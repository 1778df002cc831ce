"""The modules of a model that sentence-transformers saved.

``modules.json`` lists them: the language model, then its pooling (``1_Pooling/config.json``) and whether vectors are
normalized, or the tokens whose logits are the score (``1_LogitScore/config.json``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from evener.contracts.checkpoint import ModelFiles
from evener.errors import CheckpointError

_LIST = "modules.json"
#: Models have three or four modules; a folder may be hostile.
_MOST = 16


def read_modules(files: ModelFiles) -> Mapping[str, object]:
    """The folder of each module, by the module's kind; empty without such a list.

    Raises:
        CheckpointError: the file is broken.
    """
    if (text := files.text(_LIST)) is None:
        return {}
    try:
        modules: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _broken(files, str(error) or "it is nested too deeply") from error
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise _broken(files, "it must be a list of objects")
    if len(modules) > _MOST:
        raise _broken(files, f"it has {len(modules)} entries, more than {_MOST}")
    return {str(module.get("type", "")).rpartition(".")[2]: module.get("path") for module in modules}


def module_file(files: ModelFiles, folder: object) -> str:
    """The name of the configuration of the module in ``folder``.

    Raises:
        CheckpointError: ``folder`` is no plain name.
    """
    if not isinstance(folder, str) or not re.fullmatch(r"\w[\w-]{0,63}", folder):
        raise CheckpointError(f"{files.where(_LIST)} names the folder {str(folder)[:80]!r}; fetch it again")
    return f"{folder}/config.json"


def _broken(files: ModelFiles, why: str) -> CheckpointError:
    return CheckpointError(f"{files.where(_LIST)} is no list of modules: {why}; fetch the file again")

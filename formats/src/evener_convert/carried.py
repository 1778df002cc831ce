"""What is beside the weights: config.json with the new quantization, tokenizer, chat template, generation config, and
code of the model's own. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evener.contracts.checkpoint import Checkpoint
from evener.errors import CheckpointError

#: Text files of a model that is no folder.
_NAMES = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json",
    "special_tokens_map.json",
)  # fmt: skip
#: Endings of the files of a folder that are copied; the weights' own indexes are not.
_ENDINGS = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken", ".py", ".md", ".yaml", ".yml"})
_NOT_COPIED = ("*.safetensors.index.json", "*.bin.index.json", "*_weight_map.json", "config.json", "evener_*.json")
_MAX_BYTES = 200_000_000


def carry(source: Path, checkpoint: Checkpoint, target: Path) -> None:
    """Write the files beside the weights to the folder ``target``.

    Args:
        source: the model's file or folder.
        checkpoint: with the ``config`` that the result gets.

    Raises:
        CheckpointError: a file cannot be read.
    """
    write_json(target / "config.json", checkpoint.config)
    if not source.is_dir():
        for name in _NAMES:
            if (text := checkpoint.text(name)) is not None:
                (target / name).write_text(text, "utf-8")
        return
    for path in sorted(source.iterdir()):
        if path.suffix not in _ENDINGS and not path.name.startswith("LICENSE"):
            continue
        if any(path.match(pattern) for pattern in _NOT_COPIED) or not path.is_file():
            continue
        try:
            if path.stat().st_size > _MAX_BYTES:
                raise CheckpointError(f"{path} has {path.stat().st_size:,} bytes, which is no text file; remove it")
            (target / path.name).write_bytes(path.read_bytes())
        except OSError as error:
            raise CheckpointError(f"cannot copy {path}: {error.strerror}") from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object as indented JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")

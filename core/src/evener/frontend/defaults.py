"""Sampling defaults and EOS ids from a model's folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from evener.contracts.checkpoint import ModelFiles
from evener.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """Default sampling values, and the token ids that end a sample (may be empty)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    eos_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, files: ModelFiles, tokenizer_eos: int | None = None) -> GenerationDefaults:
        """Read ``generation_config.json``. EOS ids are from there, else from ``config.json``, else ``tokenizer_eos``.

        Raises:
            CheckpointError: a file is not JSON, or a value has the wrong type.
        """
        generation, config = files.json("generation_config.json"), files.json("config.json")
        values: dict[str, Any] = {}
        kinds = {"temperature": float, "top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float}
        for name, kind in kinds.items():
            if (value := generation.get(name)) is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                where = files.where("generation_config.json")
                raise CheckpointError(f"{where}: {name} must be a number, not {value!r}; correct or remove it")
            values[name] = kind(value)
        text_config = config.get("text_config")
        candidates = [generation, config, text_config if isinstance(text_config, dict) else {}]
        eos = next((c["eos_token_id"] for c in candidates if c.get("eos_token_id") is not None), tokenizer_eos)
        ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise CheckpointError(f"{files.path}: eos_token_id must be an id or a list of ids, not {eos!r}")
        return cls(**values, eos_ids=tuple(ids))

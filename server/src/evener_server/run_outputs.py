"""The output folder of ``evener run``: ``outputs/<day>/<time>/`` with the run's keys, log and result."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from evener.config.schema import Config, key_specs, to_flat
from evener.errors import ConfigError


class OutputFolder:
    """One run's folder, created here.

    ``config.yaml`` has the keys that were set, for ``--config``; ``resolved.json`` every key with its value and reason;
    ``manifest.json`` the kernel that ran each op, and why the others did not; ``run.log`` the log, unless ``log.file``
    names another file; ``result.json`` the answer and its timings.

    Args:
        parent: the folder of all runs.
        now: names the folder; a number is added if that name exists.

    Raises:
        ConfigError: it cannot be created; or a file, when it is written, because the disk is full.
    """

    def __init__(self, parent: Path, now: datetime) -> None:
        day, self._parent, number = parent / f"{now:%Y-%m-%d}", parent, 0
        with self._writing():
            day.mkdir(parents=True, exist_ok=True)
            while True:
                self.folder = day / (f"{now:%H-%M-%S}" + (f"-{number}" if number else ""))
                try:
                    self.folder.mkdir()
                    return
                except FileExistsError:
                    number += 1

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(f"outputs={self._parent} cannot be written: {error.strerror}; set another folder, or "
                              "outputs=none") from error  # fmt: skip

    def save_config(self, config: Config) -> Config:
        """Write ``config`` without its secrets to ``config.yaml``; returns it with its log file in the folder."""
        # A key without a default is always written.
        specs, flat = key_specs(), to_flat(config)
        unset = [key for key, spec in specs.items() if spec.secret or flat[key] == spec.default]
        flat = {key: value for key, value in flat.items() if key not in unset}
        flat["model"] = str(Path(config.model).absolute())
        from omegaconf import OmegaConf  # a tenth of a second, which a run without a folder need not wait

        tree = OmegaConf.create({})
        for key, value in flat.items():
            OmegaConf.update(tree, key, list(value) if isinstance(value, tuple) else value)
        with self._writing():
            (self.folder / "config.yaml").write_text(OmegaConf.to_yaml(tree), "utf-8")
        if config.log.file is not None:
            return config
        return dataclasses.replace(config, log=dataclasses.replace(config.log, file=str(self.folder / "run.log")))

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Write one JSON file."""
        with self._writing():
            (self.folder / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def open_outputs(config: Config) -> OutputFolder | None:
    """The folder of this run; None if ``outputs`` asks for none.

    Raises:
        ConfigError: it cannot be created.
    """
    wanted = config.outputs
    if wanted == "auto":
        fixed = config.request.prompt_tokens_len is not None or config.request.max_new_tokens is not None
        wanted = "outputs" if fixed else None
    return None if wanted is None else OutputFolder(Path(wanted), datetime.now())

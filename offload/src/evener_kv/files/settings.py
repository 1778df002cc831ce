"""What the operator has set for files: ``offload.kv_files`` and ``offload.kv_files_bytes``. Torch-free."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from evener.config.schema import Config
from evener.errors import ConfigError
from evener_offload import descriptor


@dataclass(frozen=True)
class FileSettings:
    """Attributes:
    folder: where the files are, absolute.
    nbytes: of files, for each rank.
    run: tells the runs of one machine apart, the same on all ranks of a run.
    """

    folder: Path
    nbytes: int
    run: str

    @classmethod
    def of(cls, config: Config) -> FileSettings | None:
        """None: no folder is set.

        Raises:
            ConfigError: a value cannot be used.
        """
        options = {**{name: option.default for name, option in descriptor.options.items()},
                   **config.options.get("offload", {})}  # fmt: skip
        if not options["kv_files"]:
            return None
        if config.infer.kv_host_memory is None:
            raise ConfigError("offload.kv_files is a tier behind host memory: set infer.kv_host_memory=4GiB, or more, "
                              "too")  # fmt: skip
        if not options["kv_files_bytes"] > 0:
            raise ConfigError(f"offload.kv_files_bytes={options['kv_files_bytes']} must be more than 0")
        folder = Path(options["kv_files"]).expanduser().absolute()
        infer = config.infer
        what = repr((str(Path(config.model).absolute()), str(folder), infer.tp_size, infer.pp_size, config.serve.port))
        return cls(folder, options["kv_files_bytes"], hashlib.sha256(what.encode()).hexdigest()[:16])


def check_files(config: Config, facts: object) -> None:
    """A cache listener that hears nothing.

    Raises:
        ConfigError: as ``FileSettings.of``, also where nothing else reads the settings.
    """
    del facts
    FileSettings.of(config)

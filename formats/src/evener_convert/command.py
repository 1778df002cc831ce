"""``evener convert SRC DST``: store a model anew."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evener.cli.command import Command, build_config, print_result
from evener.config.keys import ParsedCommandLine, split_command_line
from evener.config.local_model import with_local_model
from evener.config.schema import Config
from evener.errors import ConfigError

if TYPE_CHECKING:
    from evener_convert.merged import MergedPart
    from evener_convert.source import Source
    from evener_convert.writer import WeightFile

#: Keys that say how a model is stored.
KEYS = ("quant", "weight_map", "infer.tp_size", "infer.pp_size", "infer.pp_layer_partition", "infer.ep_size")


def main(argv: list[str]) -> int:
    """Convert, and say what was written."""
    command = Command(
        "convert", "Store a model anew in the folder DST: quantized (quant=q8_0), from GGUF, in another layout "
        "(quant=gptq), or split for ranks (infer.tp_size=2 infer.pp_size=2); or, if DST ends in .gguf, as a GGUF file. "
        "Interrupted, it goes on where it was when it is started again.",
        takes_model=False, words="SRC DST [key=value ...]",
    )  # fmt: skip
    command.option("--merge", action="store_true", help="store queries, keys and values as one tensor, and gate and up")
    command.option("--json", action="store_true", help="print JSON")
    command.option("--quiet", action="store_true", help="show no progress")
    arguments, words = command.parse(argv)
    config, result = read_arguments(words)
    made = convert(config, result, quiet=arguments.quiet, merge=arguments.merge)
    print_result(arguments, made, lambda: f"{result}: {made['bytes']:,} bytes in {made['files']} weight files")
    return 0


def read_arguments(words: Sequence[str]) -> tuple[Config, Path]:
    """The configuration and the result's path.

    Raises:
        ConfigError: there are not two paths, or a key has no effect here.
    """
    typed = split_command_line(words)
    if len(typed.positionals) != 2:
        raise ConfigError("evener convert needs two paths: evener convert SRC DST, as in `evener convert MODEL NEW`")
    config = build_config(ParsedCommandLine(typed.positionals[:1], typed.overrides))
    for override in typed.overrides:
        section = override.key.partition(".")[0]
        if override.key not in KEYS and section not in config.options:
            raise ConfigError(f"{override.original} changes nothing in a conversion, which takes {', '.join(KEYS)} and "
                              "options of packages; leave it out")  # fmt: skip
    return with_local_model(config), Path(typed.positionals[1]).expanduser().absolute()


def convert(config: Config, result: Path, quiet: bool = True, merge: bool = False) -> dict[str, Any]:
    """Convert the model of ``config`` to ``result``, a folder, or a file if it ends in ``.gguf``; returns the number of
    weight files and their bytes.

    Args:
        merge: store the parts of a weight together where its format allows it.

    Raises:
        EvenerError: the model cannot be read or not be stored in this way, or the disk is too small; then there is no
            ``result``.
    """
    from evener_convert.gguf_file import gguf_file
    from evener_convert.merged import INDEX, merged_index
    from evener_convert.source import description, files, open_source
    from evener_convert.work import refuse_existing, work_folder
    from evener_convert.writer import WeightFile, forget_notes, write_file

    refuse_existing(result)
    single = result.suffix == ".gguf"
    if single and merge:
        raise ConfigError(f"{result.name}: a GGUF file stores the parts of weights apart; leave --merge out")
    source = open_source(config, merge)
    parts: list[Mapping[str, Sequence[MergedPart]]] = []
    if single:
        planned = [gguf_file(source, result.name)]
    else:
        found = list(files(source))
        planned, parts = [WeightFile.safetensors(each.name, each.pieces) for each in found], [e.parts for e in found]
    sizes = {each.name: each.nbytes for each in planned}
    key = {**description(source), "files": sizes}
    with work_folder(result, key, single) as folder:
        held = sum((folder / name).stat().st_size for name in sizes if (folder / name).is_file())
        free = shutil.disk_usage(folder).free
        if sum(sizes.values()) - held > free:
            raise ConfigError(
                f"{result.parent} has {free:,} bytes free, and the result needs {sum(sizes.values()) - held:,} more; "
                "choose another place"
            )
        with _Progress(sum(sizes.values()), quiet) as progress:
            for each in planned:
                write_file(folder, each, source.checkpoint.tensor, progress.add)
        forget_notes(folder)
        if not single:
            _write_beside(folder, source, planned, key)
            if merge:
                split = config.infer.tp_size * config.infer.pp_size > 1
                whole = [{name: each for one in parts for name, each in one.items()}]
                (folder / INDEX).write_text(merged_index(parts if split else whole), "utf-8")
    source.checkpoint.close()
    return {"path": str(result), "files": len(planned), "bytes": sum(sizes.values())}


def _write_beside(folder: Path, source: Source, planned: Sequence[WeightFile], key: Mapping[str, Any]) -> None:
    """Write the files beside the weights in a folder: config, tokenizer, indexes, and the folder's origin."""
    from evener_convert.carried import carry, write_json
    from evener_convert.split import INDEX, split_index

    config = source.config
    carry(Path(config.model).expanduser(), source.checkpoint, folder)
    if config.infer.tp_size * config.infer.pp_size > 1:
        (folder / INDEX).write_text(split_index(config), "utf-8")
    elif len(planned) > 1:
        where = {tensor: each.name for each in planned for piece in each.pieces for tensor in piece.stored}
        total = {"total_size": sum(each.nbytes for each in planned)}
        write_json(folder / "model.safetensors.index.json", {"metadata": total, "weight_map": where})
    write_json(folder / "evener_convert.json", key)


@dataclasses.dataclass
class _Progress:
    """A bar on a terminal; otherwise nothing."""

    total: int
    quiet: bool

    def __enter__(self) -> _Progress:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

        shown = not self.quiet and sys.stderr.isatty()
        columns = (BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not shown, transient=True)
        self._bar.start()
        self._task = self._bar.add_task("", total=self.total)
        return self

    def add(self, nbytes: int) -> None:
        """Count bytes."""
        self._bar.advance(self._task, nbytes)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

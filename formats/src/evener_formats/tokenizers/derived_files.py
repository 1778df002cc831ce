"""A folder's text files, some of them made from others, for families that publish code in their place. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from evener.contracts.checkpoint import ModelFiles


class DerivedFiles(ModelFiles):
    """The text files of a folder, except those that a subclass's ``text`` makes from them.

    Args:
        files: the folder's own.
        source: the file that ``tokenizer.json`` is made from; messages about ``tokenizer.json`` name it.
    """

    def __init__(self, files: ModelFiles, source: str) -> None:
        self.path, self.files, self.source = files.path, files, source

    def names(self, pattern: str) -> Sequence[str]:
        return self.files.names(pattern)

    def where(self, name: str) -> str:
        return self.files.where(self.source if name == "tokenizer.json" else name)

    def eos_token_ids(self, more: Sequence[int]) -> list[int]:
        """``eos_token_id`` of generation_config.json, or else of config.json, followed by the ids in ``more``."""
        said = self.files.json("generation_config.json").get("eos_token_id")
        said = self.files.json("config.json").get("eos_token_id") if said is None else said
        return list(dict.fromkeys([*(said if isinstance(said, list) else [] if said is None else [said]), *more]))

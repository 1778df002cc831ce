"""A folder's text files of which some are made from others, for families that publish code instead. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from evener.contracts.checkpoint import ModelFiles


class DerivedFiles(ModelFiles):
    """All of ``files`` but what a subclass's ``text`` makes of them.

    Args:
        files: of the folder.
        source: the file that ``tokenizer.json`` is made of, which messages name instead.
    """

    def __init__(self, files: ModelFiles, source: str) -> None:
        self.path, self.files, self.source = files.path, files, source

    def names(self, pattern: str) -> Sequence[str]:
        return self.files.names(pattern)

    def where(self, name: str) -> str:
        return self.files.where(self.source if name == "tokenizer.json" else name)

    def ends(self, more: Sequence[int]) -> list[int]:
        """``eos_token_id`` of generation_config.json, or of config.json where that has none, and ``more``."""
        said = self.files.json("generation_config.json").get("eos_token_id")
        said = self.files.json("config.json").get("eos_token_id") if said is None else said
        return list(dict.fromkeys([*(said if isinstance(said, list) else [] if said is None else [said]), *more]))

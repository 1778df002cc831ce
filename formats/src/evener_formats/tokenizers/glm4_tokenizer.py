"""The tokenizer of GLM-4-9B in ChatGLM's format: its ``tokenizer.model`` is a tiktoken file, not SentencePiece's."""

from __future__ import annotations

import json

from evener.errors import CheckpointError
from evener_formats.tokenizers.derived_files import DerivedFiles
from evener_formats.tokenizers.gguf_tokenizer import SPLITS
from evener_formats.tokenizers.tiktoken_file import read_ranks, tiktoken_to_json

_BEFORE = ("[gMASK]", "<sop>")


class Glm4Files(DerivedFiles):
    """A folder's text files, with a ``tokenizer.json`` that does what the folder's code does: every text begins with
    two special tokens, whose ids are in tokenizer_config.json."""

    def text(self, name: str) -> str | None:
        if name != "tokenizer.json":
            return self.files.text(name)
        ranks = read_ranks(self.files.text(self.source) or "", self.where(name))
        listed = self.files.json("tokenizer_config.json").get("added_tokens_decoder", {})
        special = {entry["content"]: int(number) for number, entry in listed.items()}
        if not special.keys() >= set(_BEFORE) or sorted(special.values())[0] < len(ranks):
            raise CheckpointError(
                f"{self.files.where('tokenizer_config.json')}: added_tokens_decoder must give {' and '.join(_BEFORE)} "
                f"ids after the {len(ranks)} tokens of {self.where(name)}; fetch both files again"
            )
        before = {text: special[text] for text in _BEFORE}
        return json.dumps(tiktoken_to_json(ranks, SPLITS["glm4"][0], special, before, compose=False))

"""The tokenizer of Qwen 1 and Qwen-VL, whose folders have ``qwen.tiktoken`` and code instead of ``tokenizer.json``.

The special tokens come after the file's vocabulary, in the published order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from evener_formats.tokenizers.derived_files import DerivedFiles
from evener_formats.tokenizers.gguf_tokenizer import SPLITS
from evener_formats.tokenizers.tiktoken_file import read_ranks, tiktoken_to_json

FILE = "qwen.tiktoken"
_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{n}|>" for n in range(205)), "<ref>", "</ref>", "<box>",
    "</box>", "<quad>", "</quad>", "<img>", "</img>", "<imgpad>",
)  # fmt: skip
#: ChatML (``chat_format`` in generation_config.json), with the default system message of the published code.
_TEMPLATE = (
    "{% if not messages or messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: Settings of a chat model that its folder leaves to code; the folder's own settings win.
_CHAT = {"chat_template": _TEMPLATE, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


class QwenFiles(DerivedFiles):
    """A folder's text files, with what its code adds: ``tokenizer.json``, the chat template, the tokens that end an
    answer."""

    def text(self, name: str) -> str | None:
        found = self.files.text(name)
        if name == "tokenizer.json" and found is None:
            ranks = self._ranks()
            return json.dumps(tiktoken_to_json(ranks, SPLITS["qwen2"][0], _special(ranks), {}, compose=True))
        if self.files.json("generation_config.json").get("chat_format") != "chatml":
            return found
        if name == "generation_config.json":
            special = _special(self._ranks())
            ends = self.eos_token_ids([special["<|im_end|>"], special["<|im_start|>"]])
            return json.dumps(self.files.json(name) | {"eos_token_id": ends})
        return json.dumps(_CHAT | self.files.json(name)) if name == "tokenizer_config.json" else found

    def _ranks(self) -> dict[bytes, int]:
        return read_ranks(self.files.text(FILE) or "", self.files.where(FILE))


def _special(ranks: Mapping[bytes, int]) -> dict[str, int]:
    return {text: len(ranks) + n for n, text in enumerate(_SPECIAL)}

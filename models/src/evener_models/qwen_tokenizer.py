"""The tokenizer of Qwen 1 and Qwen-VL, whose folders have ``qwen.tiktoken`` and code instead of ``tokenizer.json``.

Special tokens follow the file's vocabulary, in the published order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from evener_models.derived_files import DerivedFiles
from evener_models.gguf.tokenizer import SPLITS
from evener_models.tiktoken_file import read_ranks, tokenizer_of

FILE = "qwen.tiktoken"
_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{n}|>" for n in range(205)), "<ref>", "</ref>", "<box>",
    "</box>", "<quad>", "</quad>", "<img>", "</img>", "<imgpad>",
)  # fmt: skip
#: ChatML, which ``chat_format`` in generation_config.json names, with the system message of the published code.
_TEMPLATE = (
    "{% if not messages or messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: What a chat model's folder leaves to code; what it does say wins.
_CHAT = {"chat_template": _TEMPLATE, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


class QwenFiles(DerivedFiles):
    """A folder's text files with what its own code would add: ``tokenizer.json``, template and ends of a chat."""

    def text(self, name: str) -> str | None:
        found = self.files.text(name)
        if name == "tokenizer.json" and found is None:
            ranks = self._ranks()
            return json.dumps(tokenizer_of(ranks, SPLITS["qwen2"][0], _special(ranks), {}, compose=True))
        if self.files.json("generation_config.json").get("chat_format") != "chatml":
            return found
        if name == "generation_config.json":
            special = _special(self._ranks())
            ends = self.ends([special["<|im_end|>"], special["<|im_start|>"]])
            return json.dumps(self.files.json(name) | {"eos_token_id": ends})
        return json.dumps(_CHAT | self.files.json(name)) if name == "tokenizer_config.json" else found

    def _ranks(self) -> dict[bytes, int]:
        return read_ranks(self.files.text(FILE) or "", self.files.where(FILE))


def _special(ranks: Mapping[bytes, int]) -> dict[str, int]:
    return {text: len(ranks) + n for n, text in enumerate(_SPECIAL)}

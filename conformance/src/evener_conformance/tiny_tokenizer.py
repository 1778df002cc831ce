"""A small real tokenizer in a folder, for tests: byte-level BPE without merges, 256 bytes and three special tokens.

Ids 0 to 255 are the bytes themselves (``encode("A") == [65]``), 256 is ``<|endoftext|>``, 257 ``<|im_start|>``, 258
``<|im_end|>`` (EOS).
"""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

EOS_ID = 258
VOCAB_SIZE = 259
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny_tokenizer(folder: Path, chat_template: str | None = CHATML) -> Path:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json`` into ``folder``; returns
    ``folder``."""
    library = tokenizers.Tokenizer(models.BPE(_bytes_by_character(), []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS_ID]}), "utf-8")
    return folder


def _bytes_by_character() -> dict[str, int]:
    """The library's characters for bytes: printable bytes are themselves, the others come after U+00FF, in order."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = iter([character for character in alphabet if ord(character) > 0xFF])
    return {chr(byte) if chr(byte) in alphabet else next(others): byte for byte in range(256)}

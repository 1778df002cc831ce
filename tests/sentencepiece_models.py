"""Small SentencePiece models, learned by SentencePiece's own trainer."""

from __future__ import annotations

import io
from typing import Any

import sentencepiece

_LINES = (
    "the theatre of the thunder, there and then 1234 1212", "def main():\n    print('hello world')\t# greeting",
    "世界和平，世间万物。你好！你好呀，很高兴认识你", "    four spaces,  two spaces   three", "Ünder über the äther",
    "the other weather's we're then: hello, world; bananas banana ananas", "人工智能助手，欢迎问我任何问题",
)  # fmt: skip
#: What the published vocabulary of Baichuan 1 has among its symbols: digits, marks, line ends, words of HTML.
SYMBOLS = [
    "\n", "\t", "<br>", "<br/>", "```", "<!--", "-->", "---", *"0123456789", "，", "。", "！", ".", "?",
    *(f"<reserved_{n}>" for n in range(4)),
]  # fmt: skip
#: By the families that are like them.
OPTIONS: dict[str, dict[str, Any]] = {
    "Baichuan 1": {"user_defined_symbols": SYMBOLS},
    "Baichuan 2": {
        "user_defined_symbols": [*SYMBOLS, *("▁" * n for n in range(2, 6))], "add_dummy_prefix": False,
    },
    "ChatGLM": {},
    "Yi": {"control_symbols": ["<|im_start|>", "<|im_end|>"], "bos_piece": "<|startoftext|>",
           "eos_piece": "<|endoftext|>", "add_dummy_prefix": False},
    "Llama": {},
    "Gemma": {"user_defined_symbols": ["\n", "\n\n", "\t", "<table>", *("▁" * n for n in range(2, 6))],
              "control_symbols": ["<start_of_turn>", "<end_of_turn>"], "add_dummy_prefix": False, "pad_id": 0,
              "eos_id": 1, "bos_id": 2, "unk_id": 3, "pad_piece": "<pad>", "eos_piece": "<eos>", "bos_piece": "<bos>"},
    "no bytes": {"byte_fallback": False, "vocab_size": 170},
    "fewer spaces": {"remove_extra_whitespaces": True},
    "other characters": {"user_defined_symbols": SYMBOLS, "normalization_rule_name": "nmt_nfkc"},
}  # fmt: skip


def train(**options: Any) -> bytes:
    """A ``tokenizer.model``: BPE with bytes and every space of a text, unless ``options`` say otherwise."""
    made = io.BytesIO()
    usual = {
        "model_type": "bpe", "vocab_size": 420, "byte_fallback": True, "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True, "character_coverage": 0.99,
        "split_digits": True, "minloglevel": 2, "hard_vocab_limit": False, "num_threads": 1,
    }  # fmt: skip
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(_LINES * 3), model_writer=made, **(usual | options))
    return made.getvalue()


def without_prefix(model: bytes) -> bytes:
    """The same model, which puts no space before a text: a later field of a message stands for an earlier one."""
    return model + b"\x1a\x02\x18\x00"


def library(model: bytes) -> Any:
    """SentencePiece's own processor of a model."""
    return sentencepiece.SentencePieceProcessor(model_proto=model)

"""Tokenizers in SentencePiece, tiktoken or GGUF files, converted to a ``tokenizer.json``."""

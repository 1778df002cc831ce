"""Reading a ``tokenizer.json``; and tokenizers in SentencePiece, tiktoken or GGUF files, converted to one."""

"""GGUF files: header, checkpoint, families, tokenizer and the scheme of their block formats.

Core knows the block formats (``evener.contracts.quant.BLOCKS``). What a GGUF file calls a family's sizes and
tensors, which of them it permutes and what its tokenizer kinds mean are facts of families, so its reader lives here.
"""

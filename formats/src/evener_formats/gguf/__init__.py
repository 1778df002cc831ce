"""GGUF files: header, checkpoint, families, tokenizer and the scheme of their block formats.

The core knows the block formats (``evener.contracts.quant.BLOCKS``). This package knows what depends on the model
family: GGUF's names of sizes and tensors, which tensors are permuted, and the kinds of tokenizers.
"""

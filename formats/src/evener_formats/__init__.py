"""Checkpoint formats and quantization schemes, registered through the same hooks as anybody else's. Torch-free.

==============  ============================================================================
package         holds
==============  ============================================================================
``gguf``        GGUF files: header, families' tensor names, and the scheme of block formats
``mxfp4``       the scheme of MXFP4 checkpoints (gpt-oss)
``scaled``      FP8 and int8 with scales: the schemes fp8 and compressed-tensors
``tokenizers``  SentencePiece, tiktoken and GGUF tokenizers as ``tokenizer.json``
==============  ============================================================================
"""

from __future__ import annotations

from evener.contracts.descriptor import Descriptor

descriptor = Descriptor(
    name="formats",
    summary="Checkpoint formats and quantization schemes: GGUF, MXFP4, FP8, int8.",
    contracts={"descriptor": 1, "checkpoint": 1, "quant": 2},
    module="evener_formats.plugin",
    formats=("gguf", "mxfp4", "fp8", "compressed-tensors"),
    checkpoints={".gguf": "evener_formats.gguf.checkpoint:GgufCheckpoint"},
)

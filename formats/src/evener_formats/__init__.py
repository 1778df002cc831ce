"""Checkpoint formats and quantization schemes, registered through the same hooks as anybody else's. Torch-free.

===============  ============================================================================
package/module   holds
===============  ============================================================================
``gguf``         GGUF files: header, families' tensor names, and the scheme of block formats
``kv_cache``     keys and values in eight bits: element types, scales and their files
``mxfp4``        the scheme of MXFP4 checkpoints (gpt-oss)
``scaled``       FP8 and int8 with scales: the schemes fp8 and compressed-tensors
``torch_files``  PyTorch's own weight files (``pytorch_model.bin``)
``tokenizers``   SentencePiece, tiktoken and GGUF tokenizers as ``tokenizer.json``
===============  ============================================================================
"""

from __future__ import annotations

from evener.contracts.descriptor import Descriptor

descriptor = Descriptor(
    name="formats",
    summary="Checkpoint formats and quantization schemes: GGUF, PyTorch's own files, MXFP4, FP8, int8.",
    contracts={"descriptor": 1, "checkpoint": 1, "quant": 2, "state": 2},
    module="evener_formats.plugin",
    formats=("gguf", "mxfp4", "fp8", "compressed-tensors"),
    state_formats={"kv_cache": "evener_formats.kv_cache.choice:choose_state"},
    checkpoints={".gguf": "evener_formats.gguf.checkpoint:GgufCheckpoint"},
    weight_files={"pytorch_model.bin": "evener_formats.torch_files:TorchFile"},
)

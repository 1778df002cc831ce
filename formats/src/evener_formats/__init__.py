"""Formats of checkpoints, tokenizers and chats, and quantization schemes, registered through the same hooks as anybody
else's. Torch-free.

=========================  ==========================================================================================
package/module             holds
=========================  ==========================================================================================
``beside``                 what schemes share whose weights are several tensors
``bitsandbytes``           the scheme of bitsandbytes checkpoints
``chat``                   chat templates
``compressed``             the scheme compressed-tensors; ``packed``: what this and modelopt have packed
``described``              the tensors of a weight, from a ``quantization_config`` alone
``gptq``                   the scheme of GPTQ checkpoints; ``awq``: that of AWQ
``gguf``                   GGUF files: header, families' tensor names, and the scheme of block formats
``halves``                 the scheme of GPTQ and AWQ numbers in a device's file layout
``kv_cache``               which state is quantized, and the scales of keys and values
``microscaled``            floats with powers of two, as compressed-tensors has them
``modelopt``               the scheme of Model Optimizer's checkpoints
``modelslim``              the scheme of ModelSlim's checkpoints, which describe their weights in a file of their own
``modelslim_description``  that file
``modelslim_examples``     small checkpoints of this scheme, for the conformance kit
``mxfp4``                  the scheme of MXFP4 checkpoints (gpt-oss)
``peft``                   adapters (LoRA) as PEFT saves them
``plugin``                 the hooks of this package
``quantize``               quantizing plain weights while they are read
``read_ahead``             weight files, read from the disk while earlier weights are converted
``rules``                  rules by layer name, and other values of a ``quantization_config``
``safetensors_files``      weights in safetensors files
``scaled``                 FP8 and int8 with scales: the scheme fp8
``torch_files``            PyTorch's own weight files (``pytorch_model.bin``)
``torchao``                the scheme of torchao's safetensors files
``tokenizers``             ``tokenizer.json``; SentencePiece, tiktoken and GGUF tokenizers as one
``unpacked``               integers of up to eight bits that are stored one in a byte
``w4afp8``                 the scheme of experts of four bits beside FP8
``words``                  numbers of two to eight bits in words of 32
=========================  ==========================================================================================
"""

from __future__ import annotations

from evener.contracts.descriptor import Descriptor, Option

descriptor = Descriptor(
    name="formats",
    summary="Checkpoint formats, PyTorch's files, and quantization: GGUF, GPTQ, AWQ, FP8, int8, FP4, NF4, ModelSlim.",
    contracts={"descriptor": 1, "checkpoint": 1, "quant": 3, "state": 2, "generation": 1},
    module="evener_formats.plugin",
    formats=(
        "gguf",
        "mxfp4",
        "fp8",
        "compressed-tensors",
        "gptq",
        "awq",
        "halves",
        "modelopt",
        "w4afp8",
        "bitsandbytes",
        "torchao",
        "modelslim",
    ),
    state_formats={"kv_cache": "evener_formats.kv_cache.choice:choose_state"},
    checkpoints={".gguf": "evener_formats.gguf.checkpoint:GgufCheckpoint"},
    checkpoint_views={"halves": "evener_formats.halves:HalvesFolder"},
    weight_files={
        "model.safetensors": "evener_formats.safetensors_files:SafetensorsFile",
        "pytorch_model.bin": "evener_formats.torch_files:TorchFile",
    },
    weight_makers={"cache": "evener_model_cache.cached_weights:load_cached"},
    config_readers={"hydra": "evener_keys.command_line:from_command_line"},
    old_spellings={"legacy": "evener_keys.legacy_keys:LegacyKeys"},
    tokenizer_readers={"tokenizer_json": "evener_formats.tokenizers.vocabulary:read_tokenizer"},
    chat_readers={"jinja": "evener_formats.chat.templates:read_chat"},
    adapter_readers={"peft": "evener_formats.peft:read_adapter"},
    quantizers={
        **dict.fromkeys(
            ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", "q4_k_m", "q5_k_m"),
            "evener_formats.quantize.blocks:BlockQuantizer",
        ),
        **dict.fromkeys(("fp8", "int8"), "evener_formats.quantize.eight_bits:EightBitQuantizer"),
        "int4": "evener_formats.quantize.four_bits:FourBitQuantizer",
    },
    options={
        "quant_rules": Option(
            type=str,
            default="",
            help="Formats of single matrices with quant=: a JSON object, or a file with one, as "
            '{"re:.*down_proj": "q6_k", "re:lm_head": "q8_0"}; none leaves a matrix as it is.',
        ),
    },
)

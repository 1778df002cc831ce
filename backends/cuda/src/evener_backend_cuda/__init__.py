"""The descriptor of evener's backend for NVIDIA GPUs. Torch-free, like every descriptor's module."""

from __future__ import annotations

from evener.contracts.descriptor import Descriptor, Option

descriptor = Descriptor(
    name="cuda",
    summary="NVIDIA GPUs: Triton kernels and the vendor's libraries, steps as CUDA graphs, NCCL.",
    contracts={"probe": 2, "device": 2, "graph": 1, "communicator": 2, "state": 2, "ops": 2},
    module="evener_backend_cuda.plugin",
    probe="evener_backend_cuda.probe",
    probe_timeout=60.0,
    serves=frozenset({"triton", "namespace:cuda", "wave:32"}),
    tuning="evener_backend_cuda.measured",
    evidence="L5: compute capability 9.0 (H200), 2026-11; others were not run",
    # Optional libraries, and its own kernels of one token; each library says what to type if it is missing.
    ops=(
        *("linear", "grouped_linear", "decoder_layer", "attention_block", "latent_attention_block", "moe_block"),
        *("head", "vocab_greedy"),
    ),
    states=("flash_attn", "flashinfer", "flash_mla"),
    options={
        "one_launch": Option(
            type=str,
            default="all",
            choices=("small", "all"),
            help="What one token passes in one launch: all layers that can, also large ones, those in float8 and in "
            "integers of four bits, and several at once; attention before experts; and in bfloat16 experts and latent "
            "attention. Or only small layers in bfloat16, each by itself.",
        ),
        "screened_head": Option(
            type=bool,
            default=True,
            help="Find the greedy token of one request from codes of four bits for the head, and compute the logits of "
            "the ids alone that can be the largest: same token, a quarter of the head's bytes are read. The codes take "
            "a quarter of the head's memory.",
        ),
    },
    aliases={
        "infer.attn_type=flash_attn": "ops.attention=flash_attn",
        "infer.attn_type=flash_infer": "ops.attention=flashinfer",
        "infer.attn_type=flash_mla": "ops.attention=flash_mla",
        "infer.op_impl=deep_gemm": "ops.grouped_linear=deep_gemm.experts",
    },
)

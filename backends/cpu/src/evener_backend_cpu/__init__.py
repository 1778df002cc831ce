"""The descriptor of evener's CPU backend. Torch-free, like every descriptor's module."""

from __future__ import annotations

from evener.contracts.descriptor import Descriptor, Option

descriptor = Descriptor(
    name="cpu",
    summary="Any CPU: C++ kernels compiled for this machine on first use, plain torch without a compiler.",
    contracts={"probe": 2, "device": 2, "ops": 2, "state": 2},
    module="evener_backend_cpu.plugin",
    probe="evener_backend_cpu.probe",
    serves=frozenset({"namespace:cpu", "host"}),
    evidence="L5: x86-64 with AVX-512 BF16 (Zen 4 and Zen 5), 2026-11; other CPUs were not run",
    options={
        "native": Option(
            type=str,
            default="auto",
            choices=("auto", "require", "off"),
            help="C++ kernels: compile them if there is a compiler, require them, or never use them.",
        ),
        "isa": Option(
            type=str,
            default="auto",
            choices=("auto", "avx2", "avx512", "avx512_vnni", "avx512_bf16"),
            help="Instructions of the C++ kernels; auto: what EVENER_CPU_ISA says, else the best of this processor.",
        ),
        "huge_pages": Option(
            type=str,
            default="auto",
            choices=("auto", "off"),
            help="Copy weights into huge pages if the system has them, or leave them mapped from their files.",
        ),
        "screened_head": Option(
            type=bool,
            default=True,
            help="Find the greedy token of one request from codes of four bits for a head in bfloat16, and compute the "
            "logits of the ids alone that can be the largest: same token, a quarter of the head's bytes are read. The "
            "codes take a quarter of the head's memory.",
        ),
        "compiler": Option(
            type=str, default=None, help="C++ compiler; default: the first found of $CXX, g++, clang++ and c++."
        ),
    },
    ops=(
        "embedding",
        "linear",
        "grouped_linear",
        "partial_attention",
        "routed_experts",
        "add_adapters",
        "rms_norm",
        "add_rms_norm",
        "layer_norm",
        "rotary",
        "act_and_mul",
        "mix_experts",
        "greedy",
        "sample",
        "apply_mask",
        "norm_qkv_rotary_write",
        "attention_block",
        "mlp_block",
        "moe_block",
        "decoder_layer",
        "vocab_greedy",
    ),
    states=("cpu.paged", "cpu.latent"),
)

"""The descriptor of evener's portable Triton kernels. Torch-free, like every descriptor's module."""

from __future__ import annotations

from evener.contracts.descriptor import Descriptor, Option

descriptor = Descriptor(
    name="triton",
    summary="Portable Triton kernels for every device that Triton compiles for.",
    contracts={"ops": 2, "state": 2},
    module="evener_kernels_triton.plugin",
    needs=frozenset({"triton"}),
    evidence="L5: sm_90 (H200), 2026-11; L4: sm_75, sm_80, sm_100, gfx906, gfx90a, gfx942",
    options={
        "overlap": Option(
            type=str,
            default="auto",
            choices=("auto", "off"),
            help="Start a kernel while the previous one finishes, if the device can (programmatic dependent launch).",
        ),
        "even_attention": Option(
            type=int,
            default=65536,
            help="On Hopper cards: tokens of the longest context in a decode step from which captured steps divide "
            "attention into even parts. Steps with shorter contexts have captures of their own, which do not. Steps of "
            "64 key heads or more (16 with heads of 256): from an eighth of that.",
        ),
    },
    ops=(
        "embedding",
        "take_rows",
        "rms_norm",
        "add_rms_norm",
        "layer_norm",
        "rotary",
        "act_and_mul",
        "linear",
        "add_adapters",
        "route",
        "grouped_linear",
        "mix_experts",
        "softcap",
        "greedy",
        "sample",
        "apply_mask",
        "add_bias",
        "penalize",
        "logprobs",
        "norm_qkv_rotary_write",
        "attention_block",
        "mlp_block",
        "decoder_layer",
        "routed_experts",
        "moe_block",
        "head",
        "latent_attention_block",
    ),
    states=("triton.paged", "triton.latent"),
)

#: The kernels over rows alone: for backends whose Triton compiles these.
row_kernels = Descriptor(
    name="triton-rows",
    summary="The Triton kernels over rows (norms, activations, rotation, sampling), where Triton compiles no others.",
    contracts={"ops": 2},
    module="evener_kernels_triton.rows",
    needs=frozenset({"triton:rows"}),
    evidence="L4: compiled for Ascend910B2 and Ascend910_9391 to the last public stage, 2026-11; not run there",
    ops=(
        "embedding", "take_rows", "rms_norm", "add_rms_norm", "rotary", "act_and_mul", "softcap", "greedy", "sample",
        "apply_mask",
    ),
)  # fmt: skip

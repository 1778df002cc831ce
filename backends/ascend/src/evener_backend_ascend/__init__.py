"""The descriptor of evener's backend for Huawei Ascend NPUs. Torch-free, like every descriptor's module."""

from __future__ import annotations

from evener.contracts.descriptor import Descriptor, Option

descriptor = Descriptor(
    name="ascend",
    summary="Huawei Ascend NPUs: torch_npu's kernels, decode steps as NPU graphs, HCCL.",
    contracts={"probe": 2, "device": 2, "graph": 1, "communicator": 2, "state": 2, "ops": 2, "quant": 3},
    module="evener_backend_ascend.plugin",
    probe="evener_backend_ascend.probe",
    probe_timeout=120.0,
    serves=frozenset({"namespace:npu", "triton:rows"}),
    evidence="L4: the Triton kernels over rows, compiled for 910B, 910_93 and 950; L3: the engine on torch_npu 2.13 "
    "over a fake runtime, 2026-11; no hardware has run it",
    ops=(
        "rms_norm",
        "add_rms_norm",
        "act_and_mul",
        "rotary",
        "route",
        "grouped_linear",
        "linear",
        "latent_attention_block",
    ),
    states=("ascend.paged", "ascend.latent", "ascend.blocked"),
    options={
        "triton": Option(
            type=bool,
            default=False,
            help="Offer the Triton kernels over rows where this package has no kernel; needs triton-ascend.",
        ),
    },
    aliases={"infer.attn_type=npu": "ops.attention=ascend"},
)

"""The generations of chips, and what each can do. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from evener.contracts.device import DeviceCapabilities


@dataclass(frozen=True)
class Chip:
    """One generation.

    Attributes:
        name: ``DeviceCapabilities.variant`` of its devices.
        numbers: what ``torch_npu.npu.get_soc_version()`` returns for its models.
        dtypes: with native kernels.
        kernels: the vendor's kernels that it documents for this generation, of those that this package calls.
        triton: what the portable Triton kernels read of it; empty where Huawei's Triton does not compile them.
        graphs: captures of steps are documented for it.
    """

    name: str
    numbers: range
    dtypes: frozenset[str]
    kernels: frozenset[str]
    triton: frozenset[str]
    graphs: bool


_HALF = frozenset({"float32", "float16"})
_ALL = _HALF | {"bfloat16"}
#: Latent attention is a form of one kernel, and products of experts with int8 weights of another.
LATENT, INT8_EXPERTS = "npu_fused_infer_attention_score over latents", "npu_grouped_matmul over int8 weights"
_EVERYWHERE = frozenset({"npu_rms_norm", "npu_add_rms_norm", "npu_swiglu", "npu_grouped_matmul"})
#: CANN's pages on aclnnRotaryPositionEmbedding, aclnnMoeGatingTopK, aclnnScatterPaKvCache and FusedInferAttentionScore
#: name Ascend 950PR/950DT, too; those on int8 weights name other types there.
_SINCE_A2 = _EVERYWHERE | {
    "npu_rotary_mul", "npu_moe_gating_top_k", "npu_scatter_pa_kv_cache", "npu_fused_infer_attention_score",
}  # fmt: skip
_A2 = _SINCE_A2 | {
    LATENT, INT8_EXPERTS, "npu_dynamic_quant", "npu_quantize", "npu_quant_matmul", "npu_weight_quant_batchmatmul",
    "npu_mla_prolog_v3",
}  # fmt: skip
_310P = _EVERYWHERE | {"npu_weight_quant_batchmatmul", "_npu_reshape_and_cache", "_npu_paged_attention"}
#: Triton kernels over rows compile up to rows of this length, because a program's memory is checked; the runtime takes
#: this many programs. For 950 the compiler takes no reduction that gives an index.
_ROWS = frozenset({"triton:rows", "row:8192", "programs:65535"})
_ARGMAX = _ROWS | {"triton:argmax"}
CHIPS = (
    Chip("310p", range(200, 206), _HALF, _310P, frozenset(), False),
    Chip("910b", range(220, 226), _ALL, _A2, _ARGMAX, True),
    Chip("910_93", range(250, 256), _ALL, _A2, _ARGMAX, True),
    Chip("950", range(260, 261), _ALL, _SINCE_A2, _ROWS, False),
)


def chip_of(number: int) -> Chip | None:
    """The generation of a chip's number; None for one that this package does not know."""
    return next((chip for chip in CHIPS if number in chip.numbers), None)


def capabilities(chip: Chip, triton: bool = False) -> DeviceCapabilities:
    """The device capabilities of a generation.

    Args:
        triton: whether the portable Triton kernels over rows are offered.
    """
    return DeviceCapabilities(
        dtypes=chip.dtypes, alignment=512, int64=True, host_lengths=True, graphs=chip.graphs, graph_update=chip.graphs,
        variant=chip.name, features=chip.triton if triton else frozenset(),
    )  # fmt: skip


def refusal(variant: str, *kernels: str) -> str | None:
    """Why a variant has not all of some kernels of the vendor; None if it has."""
    for kernel in kernels:
        having = [chip.name for chip in CHIPS if kernel in chip.kernels]
        if variant not in having:
            return f"the vendor documents {kernel} for {' and '.join(having)}, not for {variant or 'this chip'}"
    return None

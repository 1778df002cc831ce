"""The descriptor of evener's backend for MetaX GPUs. Torch-free, like every descriptor's module."""

from __future__ import annotations

from evener.contracts.descriptor import Descriptor, Option
from evener_backend_muxi.chips import CHIPS

descriptor = Descriptor(
    name="muxi",
    summary="MetaX GPUs: portable Triton kernels, the vendor's ops and flash-attn if asked for, graphs, MCCL.",
    contracts={"probe": 2, "device": 2, "graph": 1, "communicator": 2, "state": 2, "ops": 2},
    module="evener_backend_muxi.plugin",
    probe="evener_backend_muxi.probe",
    probe_timeout=120.0,
    serves=frozenset({"triton", "namespace:cuda", "wave:64"}),
    evidence="L3: probe, engine and kernels on host memory with a C550's properties; L1: calls of mcoplib match "
    "its published schemas, 2026-11; never run on a MetaX GPU",
    ops=("rms_norm", "act_and_mul"),
    states=("muxi.flash_attn",),
    options={
        "chip": Option(
            type=str,
            default=None,
            choices=tuple(CHIPS),
            help="Take the device for this chip; default: by the name that it reports. For checks on other hardware.",
        ),
    },
)

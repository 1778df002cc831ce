"""The descriptor of evener's backend for Hygon DCU. Torch-free, like every descriptor's module."""

from __future__ import annotations

from evener.contracts.descriptor import Descriptor, Option
from evener_backend_hygon.chips import CHIPS

descriptor = Descriptor(
    name="hygon",
    summary="Hygon DCU: portable Triton kernels, the vendor's flash-attn if it is asked for, graphs, RCCL.",
    contracts={"probe": 2, "device": 2, "graph": 1, "communicator": 2, "state": 2},
    module="evener_backend_hygon.plugin",
    probe="evener_backend_hygon.probe",
    probe_timeout=120.0,
    serves=frozenset({"triton", "namespace:cuda", "wave:64"}),
    evidence="L4: kernels compiled for gfx906, gfx90a and gfx942; L3: engine on host memory with a DCU's properties, "
    "2026-11; never run on one",
    states=("hygon.flash_attn",),
    options={
        "arch": Option(
            type=str,
            default=None,
            choices=tuple(CHIPS),
            help="Take the device for this chip; default: the one that it reports. For checks on other hardware.",
        ),
    },
)

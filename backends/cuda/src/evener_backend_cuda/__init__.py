"""evener's backend for NVIDIA GPUs: the descriptor. Torch-free, as every descriptor's module."""

from __future__ import annotations

from evener.contracts.descriptor import Descriptor

descriptor = Descriptor(
    name="cuda",
    summary="NVIDIA GPUs: Triton kernels and the vendor's libraries, steps as CUDA graphs, NCCL.",
    contracts={"probe": 1, "device": 1, "graph": 1, "communicator": 1},
    module="evener_backend_cuda.plugin",
    probe="evener_backend_cuda.probe",
    probe_timeout=60.0,
    serves=frozenset({"triton", "namespace:cuda", "wave:32"}),
)

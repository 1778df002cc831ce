"""The hooks of the CUDA backend."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

import torch

from evener.contracts.communicator import CommunicatorFactory
from evener.contracts.device import Device, DeviceCapabilities
from evener.contracts.graph import GraphCapture
from evener.contracts.hooks import hookimpl
from evener.contracts.ops import Kernel
from evener.contracts.state import StateProvider
from evener_backend_cuda import nvml
from evener_backend_cuda.capability import capabilities
from evener_backend_cuda.communicator import open_communicator
from evener_backend_cuda.compiled import Driver
from evener_backend_cuda.deep_gemm import DeepGemmGroupedLinear, DeepGemmLinear
from evener_backend_cuda.flash_attention import FlashAttentionState
from evener_backend_cuda.flash_mla import FlashMLAState
from evener_backend_cuda.flashinfer_attention import FlashInferState
from evener_backend_cuda.host_calls import CallingGraphs, HostCalls, exchange
from evener_backend_cuda.host_memory import await_word, mapped
from evener_backend_cuda.many_copies import ManyCopies, Numbers
from evener_backend_cuda.one_token import OneTokenAttention, OneTokenLayer, OneTokenLayers
from evener_backend_cuda.one_token_experts import OneTokenExperts
from evener_backend_cuda.one_token_latent import OneTokenLatent
from evener_backend_cuda.scaled import allow_partial_sums, scaled_features
from evener_backend_cuda.screened_head import ScreenedGreedy, ScreenedHead, ScreenedLinear
from evener_backend_parts.gpu import GpuDevice, gpu_graphs
from evener_backend_parts.graphs import PieceGraphs


class CudaDevice(GpuDevice):
    """A GPU of this vendor.

    Attributes:
        host_calls: answers what it asks the host.
    """

    def __init__(self, namespace: str, index: int, capabilities: DeviceCapabilities) -> None:
        super().__init__(namespace, index, capabilities)
        self.host_calls = HostCalls(partial(torch.zeros, dtype=torch.int32, pin_memory=True))
        self._order: torch.Tensor | None = None
        self._many = ManyCopies(Driver(capabilities.variant))

    def exchange(
        self, inputs: Sequence[torch.Tensor], to: Sequence[torch.Tensor], work: Callable[[], None],
        found: torch.Tensor, result: torch.Tensor,
    ) -> None:  # fmt: skip
        """Copy rows [T, n], ids and weights [T, k] of 4 bytes to page-locked memory, call the host as ``host_call``
        does, and copy ``found`` to ``result``, both like the rows: on the current stream, in one launch if they are
        small. It may be captured by this device's graphs. The caller keeps ``work``, ``to`` and ``found``."""
        if self._order is None:
            self._order = torch.zeros(1, dtype=torch.int32, device=self.torch_device)
        exchange(self.host_calls, self._order, inputs, to, work, found, result)

    def piece_capture(self) -> PieceGraphs:
        """Captures in pieces, whose memory is their own."""
        return gpu_graphs(self, PieceGraphs)

    def copy_many(
        self, to: Numbers, sources: Numbers, sizes: Numbers, stream: torch.cuda.Stream | None = None
    ) -> None:  # fmt: skip
        """Submit copies of so many bytes from addresses of page-locked memory to addresses of the device, each uint64
        [n], on ``stream``, by default the current one. The caller keeps the memory."""
        on = torch.cuda.current_stream(self.torch_device) if stream is None else stream
        self._many(to, sources, sizes, on.cuda_stream)

    def mapped(self, host: torch.Tensor) -> torch.Tensor:
        """Page-locked memory as a tensor of the device, whose kernels read it where it is: not behind copies, which the
        copy engine takes one after another."""
        return mapped(host, self.torch_device)

    def await_word(self, word: torch.Tensor) -> None:
        """Work that is submitted to the current stream from here on waits until ``word``, int32 [1] in page-locked
        memory, is more than 0."""
        await_word(word, torch.cuda.current_stream(self.torch_device).cuda_stream)

    def conditions(self) -> Mapping[str, str]:
        """Versions of the driver, the kernel compiler and the matrix library."""
        return {"driver": nvml.read().driver, "cuda": str(torch.version.cuda), "triton": version("triton")}


@hookimpl
def evener_device(index: int, options: Mapping[str, Any]) -> Device:
    """The visible GPU with this index."""
    p: Any = torch.cuda.get_device_properties(index)
    can = capabilities((p.major, p.minor), p.multi_processor_count, p.shared_memory_per_block_optin)
    if "fp8" in can.features:
        allowed = allow_partial_sums(os.environ)
        can = replace(can, features=can.features | {allowed} | scaled_features(torch.device("cuda", index)))
    return CudaDevice("cuda", index, can)


@hookimpl
def evener_kernels(device: Device, options: Mapping[str, Any]) -> Sequence[Kernel]:
    """A whole layer of one token; those for large layers, for attention before experts, for experts and for latent
    attention, and the search of the largest logit, which the user may leave out; and kernels of libraries, which the
    user has to name."""
    off = "is used with cuda.one_launch=all" if options.get("one_launch") == "small" else None
    large = [
        OneTokenLayers(device, off=off), OneTokenAttention(device, off=off), OneTokenExperts(device, off=off),
        OneTokenLatent(device, off=off),
    ]  # fmt: skip
    off = None if options.get("screened_head", True) else "is used with cuda.screened_head=true"
    heads = [ScreenedGreedy(device, off=off), ScreenedHead(device, off), ScreenedLinear(device, off)]
    return [DeepGemmLinear(), DeepGemmGroupedLinear(), OneTokenLayer(device), *large, *heads]


@hookimpl
def evener_state_providers(device: Device, options: Mapping[str, Any]) -> Sequence[StateProvider]:
    """Attention of libraries, used only if the user asks for it."""
    return [FlashAttentionState(), FlashInferState(), FlashMLAState()]


@hookimpl
def evener_graph_capture(device: Device, options: Mapping[str, Any]) -> GraphCapture:
    """CUDA graphs in one memory pool."""
    return gpu_graphs(device, CallingGraphs)


@hookimpl
def evener_communicator(options: Mapping[str, Any]) -> CommunicatorFactory:
    """NCCL, with a faster all-reduce for small tensors on one machine."""
    return open_communicator

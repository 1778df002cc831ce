"""Stand-ins for Enflame's ops, and this vendor's backend on the simulated device with the switches of a GCU."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_ins import COMMON

from evener.backend.torch_device import TorchDevice
from evener_backend_gcu.vendor_library import vendor_ops
from evener_backend_parts.library import Library
from evener_backend_parts.vendor_ops import VendorOps
from evener_conformance.distributions import write_distribution


def stand_in_ops() -> VendorOps:
    """The published schemas, with an importable module in place of the compiled library."""
    return VendorOps(vendor_ops().published, Library("vllm_gcu_stand_in", ("vllm-gcu",), "0.9", ""))


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    assert query.dtype == key.dtype == cos_sin_cache.dtype and cos_sin_cache.shape[1] == head_size
    cos, sin = cos_sin_cache[positions.long()].float()[:, None].chunk(2, dim=-1)
    for rows in (query, key):
        heads = rows.view(rows.shape[0], -1, head_size)
        wide = heads.float()
        a, b = wide.chunk(2, dim=-1) if is_neox else (wide[..., 0::2], wide[..., 1::2])
        turned = (a * cos - b * sin, b * cos + a * sin)
        heads.copy_(torch.cat(turned, -1) if is_neox else torch.stack(turned, -1).flatten(-2))


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: float,
    v_scale: float,
    k_zero: float,
    v_zero: float,
) -> None:
    assert (k_scale, v_scale, k_zero, v_zero) == (1.0, 1.0, 0.0, 0.0)
    if kv_cache_dtype == "int8":  # whole numbers, whatever way the op rounds
        assert key_cache.dtype == value_cache.dtype == torch.int8 and key.dtype.is_floating_point
        assert all(bool((each == each.round()).all() and each.abs().max() <= 127) for each in (key, value))
        key, value = key.to(torch.int8), value.to(torch.int8)
    else:
        assert kv_cache_dtype == "auto"
    assert key.dtype == key_cache.dtype and key_cache.shape[3] == value_cache.shape[3]
    size, x = key_cache.shape[3], key_cache.shape[4]
    assert x * key_cache.element_size() == 16
    blocks, offsets = (slot_mapping // size).long(), (slot_mapping % size).long()
    key_cache[blocks, :, :, offsets] = key.view(*key.shape[:2], -1, x)
    value_cache[blocks, :, :, offsets] = value


def paged_attention_v1(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: torch.Tensor | None,
    kv_cache_dtype: str,
    k_scale: float,
    v_scale: float,
    tp_rank: int,
    *rest: Any,
) -> None:
    assert block_size == key_cache.shape[3] and alibi_slopes is None
    assert (k_scale, v_scale) == (1.0, 1.0)
    assert kv_cache_dtype == ("int8" if key_cache.dtype is torch.int8 else "auto")
    group = query.shape[1] // num_kv_heads
    for row, length in enumerate(seq_lens.tolist()):
        assert 0 < length <= max_seq_len
        blocks = block_tables[row, : -(-length // block_size)].long()
        keys = key_cache[blocks].permute(0, 3, 1, 2, 4).flatten(3).flatten(0, 1)[:length]
        values = value_cache[blocks].permute(0, 3, 1, 2).flatten(0, 1)[:length]
        keys, values = (t.float().repeat_interleave(group, 1) for t in (keys, values))
        weights = (torch.einsum("hd,khd->hk", query[row].float(), keys) * scale).softmax(-1)
        out[row] = torch.einsum("hk,khd->hd", weights, values).to(out.dtype)


def gptq_gemm_gcu(
    a: torch.Tensor,
    b_q_weight: torch.Tensor,
    b_gptq_qzeros: torch.Tensor,
    b_gptq_scales: torch.Tensor,
    b_g_idx: torch.Tensor,
    bit: int,
    bias: torch.Tensor | None,
    group_size: int,
) -> torch.Tensor:
    columns, rows = a.shape[1], b_q_weight.shape[1]
    assert bit == 4 and b_q_weight.dtype is torch.uint8 and b_q_weight.shape[0] * 2 == columns and columns % 128 == 0
    assert a.dtype == b_gptq_scales.dtype == b_gptq_qzeros.dtype and a.dtype in (torch.float16, torch.bfloat16)
    assert b_gptq_scales.shape == b_gptq_qzeros.shape == (columns // group_size, rows) and b_g_idx.dtype is torch.int32
    numbers = torch.empty(columns, rows)
    for column in range(columns):
        run, place = divmod(column, 128)
        byte = b_q_weight[64 * run + place % 64]
        numbers[column] = (byte >> 4 if place >= 64 else byte & 15).float()
    scales, products = (t.float().repeat_interleave(group_size, 0) for t in (b_gptq_scales, b_gptq_qzeros))
    found = a.float() @ (numbers * scales - products)
    return (found if bias is None else found + bias.float()).to(a.dtype)


def weight_only_quant(
    output: torch.Tensor,
    input: torch.Tensor,
    qweight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    group_size: int,
) -> None:
    assert qweight.dtype is torch.int8 and scale.dtype == input.dtype == output.dtype
    assert scale.dim() == (1 if group_size == -1 else 2)
    wide = scale[None] if group_size == -1 else scale.repeat_interleave(group_size, 0)
    found = input.float() @ (qweight.float().T * wide.float())
    output.copy_(found if bias is None else found + bias.float())


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **COMMON, "_C::gptq_gemm_gcu": gptq_gemm_gcu, "_C::weight_only_quant": weight_only_quant,
    "_C::rotary_embedding": rotary_embedding, "_C::paged_attention_v1": paged_attention_v1,
    "_C_cache_ops::reshape_and_cache": reshape_and_cache,
}  # fmt: skip
#: The simulated device of this process; its launches check alignment, strides, devices and dtypes.
_OPENED: dict[str, Any] = {}


def launched(name: str) -> Callable[..., Any]:
    """The stand-in as a kernel of the simulated device."""

    def run(*args: Any) -> Any:
        return _OPENED["device"].launch(name, lambda *given: FUNCTIONS[name](*given), *args)

    return run


LAUNCHED = {name: launched(name) for name in FUNCTIONS}


def launches() -> Mapping[str, int]:
    """How often each kernel ran."""
    found: Mapping[str, int] = _OPENED["device"].launch.launches
    return found


def remember(device: TorchDevice) -> TorchDevice:
    """Launch on this device from now on."""
    _OPENED["device"] = device
    return device


_MODULE = """
from dataclasses import replace

from evener.contracts.hooks import hookimpl
from evener.contracts.probe import Marks, ProbedDevice, ProbeResult
from evener_backend_gcu import descriptor as own

descriptor = replace(own, module="gcu_on_simulator", probe="gcu_on_simulator")


def marks():
    return Marks(True, ("simulated",))


def result_from_marks(marks):
    return ProbeResult(1, (ProbedDevice(0, "simulated"),), ("it is simulated",))


@hookimpl
def evener_device(index, options):
    from gcu_stand_ins import remember

    from evener_backend_gcu.device import capabilities
    from evener_conformance.simulated.constraints import Constraints
    from evener_conformance.simulated.device import SimulatedDevice

    # A GCU: no int64 in kernels, missing torch ops run on the host and are counted, no graphs; its layouts are the
    # vendor's ops' own. Sampling with filters reads on the host, which the package announces.
    device = SimulatedDevice(index, Constraints.all_on(
        block_128=False, transposed_values=False, graphs=False, graph_update=False, host_reads=True, int64=False))
    device.capabilities = replace(capabilities(13, graphs=False), alignment=device.constraints.alignment)
    return remember(device)


@hookimpl
def evener_kernels(device, options):
    from gcu_stand_ins import stand_in_ops

    from evener_backend_gcu.plugin import kernels

    return kernels(stand_in_ops())


@hookimpl
def evener_state_providers(device, options):
    from gcu_stand_ins import stand_in_ops

    from evener_backend_gcu.state import GcuPaged

    return [GcuPaged(stand_in_ops())]
"""


def install_on_simulator(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the backend over the simulated device, for this process."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gcu_on_simulator.py").write_text(_MODULE)
    write_distribution(folder, "evener-backend-gcu", {"evener.backends": {"gcu": "gcu_on_simulator:descriptor"}})
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))

"""Small ModelSlim checkpoints for the conformance kit, one for each way in which a weight may be stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from evener.contracts.checkpoint import Headers
from evener_formats.modelslim_description import BITS, FILE, FLOAT

if TYPE_CHECKING:
    import torch

#: Kind, dtype of the scales, groups of a row, whether there are offsets, the axis along which bytes hold two numbers.
_CASES: tuple[tuple[str, str, int, bool, int | None], ...] = (
    ("W8A8_DYNAMIC", "float32", 1, False, None), ("W8A16", "float32", 3, False, None),
    ("W8A16", "float16", 3, True, None), ("W8A16", "bfloat16", 1, True, None), ("W8A8_MIX", "bfloat16", 1, False, None),
    ("WFP8AFP8_DYNAMIC", "float32", 1, False, None), ("W4A8_DYNAMIC", "float32", 1, False, 0),
    ("W4A16", "float16", 3, True, 0), ("W4A16", "bfloat16", 1, False, 1), ("W4A16", "bfloat16", 3, False, None),
)  # fmt: skip


def examples(name: str, seed: int) -> Iterator[tuple[Mapping[str, Any], Headers, Mapping[str, torch.Tensor]]]:
    """As ``QuantScheme.examples``."""
    import torch

    random, stem, (rows, columns) = torch.Generator().manual_seed(seed), name.removesuffix(".weight"), (64, 192)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random)

    def scales(bits: int, *shape: int) -> torch.Tensor:
        # Weights stay below one: kernels that round activations are allowed an error for such weights.
        return (torch.rand(shape, generator=random) + 1) / (4 << bits)

    for kind, dtype, groups, shifted, half in _CASES:
        bits, size = BITS[kind], [rows, columns]
        if half is not None:
            size[half] //= 2
        numbers = integers(-128, 128, *size) if bits == 8 or half is not None else integers(-8, 8, *size)
        stored = torch.float8_e4m3fn if kind.startswith("WFP8") else torch.int8
        offsets = integers(-4, 5, rows, groups) if shifted else torch.zeros(rows, groups)
        tensors = {
            name: numbers.to(stored), f"{name}_scale": scales(bits, rows, groups).to(getattr(torch, dtype)),
            f"{name}_offset": offsets.to(getattr(torch, dtype)),
        }  # fmt: skip
        if kind == "W4A8_DYNAMIC":
            tensors[f"{stem}.scale_bias"] = torch.rand(rows, 1, generator=random)
        yield _config(name, kind, half is not None), _headers(tensors), tensors
    # The product of two scales instead of the weight's, as float32 and as its bits.
    for bits_of in (False, True):
        product = scales(8, rows) * 0.01
        tensors = {
            name: integers(-127, 128, rows, columns).to(torch.int8), f"{stem}.input_scale": torch.tensor([0.01]),
            f"{stem}.input_offset": torch.tensor([3.0]),
            f"{stem}.deq_scale": product.view(torch.int32).long() if bits_of else product,
        }  # fmt: skip
        tensors[f"{stem}.quant_bias"] = (tensors[name].sum(1) * -3).int()
        yield _config(name, "W8A8", False), _headers(tensors), tensors
    # An offset of zero: activations may be rounded with the fixed scale.
    tensors = {
        name: integers(-127, 128, rows, columns).to(torch.int8), f"{name}_scale": scales(8, rows, 1),
        f"{name}_offset": torch.zeros(rows, 1), f"{stem}.input_scale": torch.tensor([0.02]),
        f"{stem}.input_offset": torch.zeros(1), f"{stem}.quant_bias": torch.zeros(rows, dtype=torch.int32),
    }  # fmt: skip
    yield _config(name, "W8A8", False), _headers(tensors), tensors
    tensors = {
        name: integers(-8, 8, rows, columns).to(torch.int8), f"{name}_scale": scales(4, rows, 1),
        f"{name}_offset": torch.zeros(rows, 1), f"{name}_scale_second": torch.rand(rows, 3, generator=random) + 0.5,
        f"{name}_offset_second": torch.zeros(rows, 3),
    }  # fmt: skip
    yield _config(name, "W4A8_DYNAMIC", False), _headers(tensors), tensors
    plain = {name: torch.randn(6, 10, generator=random).bfloat16()}
    yield _config(name, FLOAT, False), _headers(plain), plain


def _config(name: str, kind: str, packed: bool) -> Mapping[str, Any]:
    version = {"version": "1.0.0"} if packed else {}
    return {
        "quantization_config": {"quant_method": "modelslim"}, FILE: {"model_quant_type": kind, name: kind, **version},
    }  # fmt: skip


def _headers(tensors: Mapping[str, torch.Tensor]) -> Headers:
    return {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}

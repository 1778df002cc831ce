"""What a compute capability means, as core's capabilities. Torch-free."""

from __future__ import annotations

from evener.contracts.device import DeviceCapabilities

#: Older ones have no compiler any more.
OLDEST = (7, 0)
_BF16, _FP8, _OVERLAP = (8, 0), (8, 9), (9, 0)


def capabilities(capability: tuple[int, int], units: int, shared: int) -> DeviceCapabilities:
    """For a GPU of this compute capability.

    Args:
        units: multiprocessors.
        shared: bytes of shared memory that one program may have.
    """
    native = {"float32", "float16"} | ({"bfloat16"} if capability >= _BF16 else set())
    features = {f"units:{units}", f"shared:{shared}"}
    if capability >= _FP8:
        features.add("fp8")
    if capability >= _OVERLAP:
        features.add("overlap")
    return DeviceCapabilities(
        dtypes=frozenset(native),
        alignment=512,
        int64=True,
        host_lengths=False,
        graphs=True,
        variant=f"sm_{capability[0]}{capability[1]}",
        features=frozenset(features),
    )

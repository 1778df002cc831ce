"""From a GPU's compute capability to core's device capabilities. Torch-free."""

from __future__ import annotations

from evener.contracts.device import DeviceCapabilities

#: Triton no longer compiles for older ones.
MIN_CAPABILITY = (7, 0)
_BF16, _FP8, _OVERLAP = (8, 0), (8, 9), (9, 0)
#: Products of warp groups belong to this major number alone.
_WARPGROUPS = 9
#: One request with less state has its layers computed in one launch each (``one_token``). Steps of Qwen3-0.6B on an
#: H200, in milliseconds: 0.64 instead of 0.84 behind 1,000 tokens, 0.97 instead of 1.10 behind 8,000, 1.65 instead of
#: 1.39 behind 16,000.
SHORT_TOKENS = 10_240
#: The same of latent attention (``one_token_latent``), each head of which reads the state by itself.
SHORT_LATENT_TOKENS = 4_096


def capabilities(capability: tuple[int, int], units: int, shared: int) -> DeviceCapabilities:
    """The device capabilities of a GPU with this compute capability.

    Args:
        units: multiprocessors.
        shared: bytes of shared memory that one program may have.
    """
    native = {"float32", "float16"} | ({"bfloat16"} if capability >= _BF16 else set())
    features = {f"units:{units}", f"shared:{shared}"}
    if capability >= _BF16:
        features |= {"ptx", "int8"}
    if capability >= _FP8:
        features.add("fp8")
    if capability >= _OVERLAP:
        features.add("overlap")
    if capability[0] == _WARPGROUPS:
        features |= {"warpgroups", f"short:{SHORT_TOKENS}", f"short-latent:{SHORT_LATENT_TOKENS}"}
    return DeviceCapabilities(
        dtypes=frozenset(native),
        alignment=512,
        int64=True,
        host_lengths=False,
        graphs=True,
        host_calls=True,
        variant=f"sm_{capability[0]}{capability[1]}",
        features=frozenset(features),
    )

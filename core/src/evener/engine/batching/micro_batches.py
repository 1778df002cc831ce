"""How pipeline stages divide the requests among the plans in flight."""

from __future__ import annotations

from dataclasses import dataclass

from evener.config.schema import InferConfig


@dataclass(frozen=True)
class MicroBatches:
    """How requests are divided among the plans in flight of ``stages`` pipeline stages. Each plan gets an equal share,
    so that no stage waits for a token that the last stage has yet to sample. ``prefill`` and ``decode`` set the number
    of requests in a plan instead: of those with several tokens to compute, and of those with one."""

    stages: int = 1
    prefill: int | None = None
    decode: int | None = None

    @classmethod
    def of(cls, infer: InferConfig) -> MicroBatches:
        """What the configuration asks for."""
        return cls(infer.pp_size, *(None if n == "auto" else n for n in (infer.pp_prefill_reqs, infer.pp_decode_reqs)))

    def quota(self, decoding: int, prefilling: int) -> dict[bool, int]:
        """How many requests one plan may take, by whether they decode, of ``decoding`` and ``prefilling`` ones."""
        return {True: self.decode or -(-decoding // self.stages), False: self.prefill or -(-prefilling // self.stages)}

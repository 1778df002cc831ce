"""Prints, as JSON, the PTX of the sum over ranks: {"ranks kind tile": text}. In a process of its own, for whoever has
Triton's interpreter on."""

from __future__ import annotations

import json
import sys

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from evener_backend_cuda.peer_kernel import peer_sum_kernel


def ptx(ranks: int, kind: str, tile: int) -> str:
    """What runs on rank 1 of ``ranks`` with sm_90."""
    types = {"x_ptr": f"*{kind}", "peers_ptr": "*i64", "rounds_ptr": "*i32", "count": "i32", "each": "i32"}
    sizes = {"RANK": 1, "RANKS": ranks, "BLOCKS": 128, "REGION": 16384, "DATA": 4096, "TILE": tile}
    even = {(place,): [["tt.divisibility", 16]] for place in (0, 3, 4)}
    source = ASTSource(
        fn=peer_sum_kernel, signature={**types, **dict.fromkeys(sizes, "constexpr")}, constexprs=sizes, attrs=even
    )
    return str(compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"])


if __name__ == "__main__":
    print(json.dumps({key: ptx(int(r), k, int(t)) for key in sys.argv[1:] for r, k, t in [key.split()]}))

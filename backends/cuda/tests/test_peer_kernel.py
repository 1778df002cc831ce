"""The sum over ranks compiles for its GPUs; numbers are checked on them (``benchmarks/rank_check.py``)."""

from __future__ import annotations

import re

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from evener_backend_cuda.peer_kernel import peer_sum_kernel


@pytest.mark.parametrize(("kind", "tile"), [("bf16", 1024), ("fp32", 512), ("bf16", 16384)])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_the_kernel_moves_sixteen_bytes_at_a_time_and_orders_what_it_tells_its_peers(
    kind: str, tile: int, ranks: int
) -> None:
    types = {"x_ptr": f"*{kind}", "peers_ptr": "*i64", "rounds_ptr": "*i32", "count": "i32", "each": "i32"}
    sizes = {"RANK": 1, "RANKS": ranks, "BLOCKS": 128, "REGION": 16384, "DATA": 4096, "TILE": tile}
    even = {(place,): [["tt.divisibility", 16]] for place in (0, 3, 4)}
    source = ASTSource(
        fn=peer_sum_kernel, signature={**types, **dict.fromkeys(sizes, "constexpr")}, constexprs=sizes, attrs=even
    )
    text = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]
    assert text.count("atom.global.sys.release.exch") == ranks - 1
    assert len(re.findall(r"(?:atom|ld)\S*\.acquire\S*", text)) >= ranks - 1
    assert not re.search(r"(?:ld|st)\.global(?:\.cg)?\.b16", text), "elements are moved one by one"
    assert "ld.global.cg.v4" in text and "st.global.v4" in text

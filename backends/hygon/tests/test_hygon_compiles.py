"""The kernels that this backend runs on, compiled for its architecture and its neighbours (evidence of level L4)."""

from __future__ import annotations

import pytest
from test_triton_compiles import compiled

from evener_backend_hygon.chips import CHIPS, LOCAL_MEMORY

#: gfx906 is the Z100's own. The public compiler has no other chip of this vendor; gfx90a and gfx942 are the nearest
#: with 64 lanes and a matrix unit.
COMPILED = ("gfx906", "gfx90a", "gfx942")
#: No test can be run for these: LLVM does not know them, only the compiler of the vendor's DTK does.
UNKNOWN_TO_LLVM = ("gfx926", "gfx928", "gfx936", "gfx938")


@pytest.mark.slow
@pytest.mark.parametrize("arch", COMPILED)
def test_one_launch_of_each_kernel_compiles_L4(arch: str) -> None:
    found = compiled(f"hip:{arch}", "--one")
    assert found["errors"] == {}, "too much local memory, too"
    assert found["launches"] >= 20  # type: ignore[operator]


def test_every_chip_is_compiled_or_named_as_impossible_L4() -> None:
    assert set(CHIPS) <= {*COMPILED, *UNKNOWN_TO_LLVM}
    assert LOCAL_MEMORY == 64 << 10, "what the compile test allows a launch"

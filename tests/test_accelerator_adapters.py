"""LoRA adapters of requests on an accelerator: the tokens of models into whose weights they were merged.

Marked ``gpu``; skipped with the reason if there is none.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_accelerator import accelerator
from test_lora import (
    LARGE,
    RANKS,
    assert_equal,
    loads,
    make_zoo,
    merged_answers,
    mixed_steps,
    prompt,
    request,
    start,
    written_places,
)

from evener_conformance.kit.subject import Subject
from evener_conformance.reference.engine import play

__all__ = ["accelerator"]

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("places", [3, 2], ids=["a place each", "one is evicted"])
def test_three_adapters_of_different_ranks_share_steps(
    accelerator: Subject, places: int, captured: bool, tmp_path: Path
) -> None:
    made = make_zoo(tmp_path, "Llama", LARGE, RANKS)
    keys = {"backend": accelerator.name, "infer.kv_memory": 2**26, "infer.use_cuda_graph": captured}
    controller, info = start(made.model, slots=places, **keys)
    steps, written = mixed_steps(controller), written_places(controller)
    names = [*made.names(), *made.names(), *made.adapters]
    requests = [request(f"{at}-{name}", name, prompt(at)) for at, name in enumerate(names)]
    try:
        played = play(controller, [*loads(made, info.adapters), *requests])
    finally:
        controller.close()
    assert {-1, *range(places)} in steps
    assert len(written) > 3 if places < 3 else len(written) == 3
    assert_equal(played, merged_answers(made, requests, **keys), tolerance=1e-3)

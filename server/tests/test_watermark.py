"""Watermarks: seeds of a secret key, and the mark that they leave in sampled texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evener.errors import ConfigError
from evener.frontend.frontend import sample_seed
from evener.ops.reference.sampling import gumbel
from evener_server.options import ServerOptions
from evener_server.watermark import Watermark, read_key

KEY = b"a secret of mine"


def sampled(seed: int, prompt: int, count: int) -> list[int]:
    """Tokens of a model that finds a hundred equally likely, drawn as the engine draws."""
    places = torch.arange(prompt, prompt + count, dtype=torch.int32)[:, None]
    noise = gumbel(torch.full_like(places, seed), places, torch.arange(100, dtype=torch.int32)[None])
    return noise.argmax(1).tolist()


def test_the_mark_is_found_with_the_key_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evener_server.watermark.SEEDS", 8)
    mark, other = Watermark(KEY), Watermark(KEY + b"!")
    marked = sampled(mark.seed(None), 17, 60)
    assert mark.chance(marked, longest_prompt=40) < -20
    assert other.chance(marked, longest_prompt=40) > -2
    free = np.random.default_rng(0).integers(0, 100, 60).tolist()
    assert mark.chance(free, longest_prompt=40) > -2 and mark.chance([]) == 0
    assert mark.chance(marked[5:40], longest_prompt=40) < -6, "a part of the text, without its beginning"
    second = sampled(sample_seed(mark.seed(1), 1), 17, 60)
    assert mark.chance(second, longest_prompt=40) > -2 and mark.chance(second, longest_prompt=40, samples=2) < -20


def test_requests_get_seeds_of_the_key(make_api: Any, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(KEY + b"\n")
    api = make_api(options=ServerOptions(watermark_key_file=str(path)))
    for fields in {}, {"seed": 5}, {"seed": 5}, {"seed": 6}:
        assert api.complete(**fields).status_code == 200
    assert api.chat().status_code == 200
    drawn, first, again, other, chat = (request.sampling.seed for request in api.engine.sent)
    assert {drawn, first, other, chat} <= set(Watermark(KEY).seeds) and first == again != other


@pytest.mark.parametrize(
    ("content", "words"), [(b"short", "5 bytes"), (b"x" * 5000, "bytes"), (None, "cannot be read")]
)
def test_a_key_that_cannot_be_used_stops_the_start(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_key(str(path))

"""Which adapters are kept: those with a name, and those that requests still use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from evener_adapters import loaded
from evener_adapters.loaded import LoadedAdapters

from evener.contracts.adapters import AdapterLimits, AdapterTensor
from evener.engine.wire.messages import Finished, UnloadAdapter
from evener.errors import RequestError
from evener.frontend.frontend import Frontend
from evener.sampling_params import SamplingParams

LIMITS = AdapterLimits(targets={}, rank=4, loaded=2)


class Front:
    """A front end over adapters that are read from nowhere; ``sent``: what the engine got of them."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.adapters = LoadedAdapters(LIMITS, (), self.sent.append)
        self.frontend = Frontend(max_model_len=64, vocab_size=9, adapters=self.adapters)

    def submit(self, name: str, request_id: str, n: int = 1) -> str:
        params = SamplingParams(lora=name, detokenize=False, max_tokens=4, n=n)
        return self.frontend.submit(self.frontend.prepare([1, 2], params, "completion"), request_id)[0].adapter

    @property
    def unloaded(self) -> list[str]:
        return [message.id for message in self.sent if isinstance(message, UnloadAdapter)]


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Front:
    def read(folder: Path, limits: AdapterLimits) -> list[AdapterTensor]:
        return [AdapterTensor(str(folder), 1, 1.0, "float32", b"", b"")]

    monkeypatch.setattr(loaded, "_read", read)
    return Front()


def test_an_adapter_that_requests_still_use_counts_until_the_last_has_ended(front: Front) -> None:
    front.adapters.load("a", "one")
    front.adapters.load("b", "two")
    used = front.submit("a", "r", n=2)
    front.adapters.unload("a")
    with pytest.raises(RequestError, match="no adapter 'a' is loaded"):
        front.submit("a", "late")
    assert front.unloaded == [], "a request runs with it"
    with pytest.raises(RequestError, match=r"2 adapters are loaded, or kept for requests .* infer\.max_cpu_loras"):
        front.adapters.load("c", "three")
    front.frontend.handle(Finished(id="r-0", reason="length"))
    assert front.unloaded == []
    front.frontend.handle(Finished(id="r-1", reason="length"))
    assert front.unloaded == [used]
    front.adapters.load("c", "three")


def test_an_adapter_in_use_is_replaced_only_where_there_is_room_for_both(front: Front) -> None:
    front.adapters.load("a", "one")
    front.adapters.load("b", "two")
    front.adapters.load("a", "three", replace=True)
    used = front.submit("a", "r")
    with pytest.raises(RequestError, match=r"infer\.max_cpu_loras"):
        front.adapters.load("a", "one", replace=True)
    front.frontend.handle(Finished(id="r", reason="abort"))
    front.adapters.load("a", "one", replace=True)
    assert front.unloaded[-1] == used


def test_an_adapter_that_comes_back_while_it_is_used_is_not_unloaded(front: Front) -> None:
    front.adapters.load("a", "one")
    used = front.submit("a", "r")
    front.adapters.unload("a")
    front.adapters.load("a", "one")
    front.frontend.handle(Finished(id="r", reason="length"))
    assert front.unloaded == [] and front.submit("a", "again") == used

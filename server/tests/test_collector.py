from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest

from evener_server.collector import collector_paused, objects_frozen


def test_the_collector_pauses_and_goes_on_also_after_an_error() -> None:
    assert gc.isenabled()
    with collector_paused():
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="a start that failed"), collector_paused():
        raise ValueError("a start that failed")
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_objects_of_a_start_are_collected_after_its_answers() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me = self

    before, inside = weakref.ref(Cycle()), None
    with objects_frozen():
        inside = weakref.ref(Cycle())
        gc.collect()
        assert before() is not None and inside() is None
    gc.collect()
    assert before() is None


def test_objects_that_remain_at_the_end_of_a_process_are_not_collected() -> None:
    code = (
        "from evener_server.collector import end_without_collection\n"
        "class Cycle:\n"
        "    def __init__(self): self.me = self\n"
        "    def __del__(self): print('collected', flush=True)\n"
        "gone, kept = Cycle(), Cycle()\n"
        "del gone\n"
        "import gc; gc.collect()\n"
        "{}"
    )
    said = [
        subprocess.run([sys.executable, "-c", code.format(end)], check=True, capture_output=True, text=True).stdout
        for end in ("", "end_without_collection()")
    ]
    assert said == ["collected\n" * 2, "collected\n"]

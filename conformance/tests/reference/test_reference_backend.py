"""The reference backend is found like any package, and is not chosen by default if another backend fits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evener.plugins.choose import choose
from evener.plugins.discover import discover
from evener.plugins.load import load
from evener_conformance.distributions import install_reference_backend, write_distribution
from evener_conformance.reference.device import DelayedDevice, HostDevice


def test_a_written_distribution_is_found_with_its_entry_points_and_version(tmp_path: Path) -> None:
    from importlib_metadata import distributions

    write_distribution(tmp_path, "some-thing", {"evener.plugins": {"one": "a:b", "two": "c:d"}}, "2.1")
    (found,) = distributions(path=[str(tmp_path)])
    assert (found.name, found.version) == ("some-thing", "2.1")
    assert {(e.group, e.name, e.value) for e in found.entry_points} == {
        ("evener.plugins", "one", "a:b"),
        ("evener.plugins", "two", "c:d"),
    }


@pytest.mark.parametrize(("options", "cls"), [({}, HostDevice), ({"reference": {"delay": True}}, DelayedDevice)])
def test_it_is_chosen_when_alone_and_opens_the_device_that_its_option_names(
    tmp_path: Path, options: dict[str, dict[str, bool]], cls: type[HostDevice]
) -> None:
    install_reference_backend(tmp_path)
    loaded = load(choose(discover(path=[str(tmp_path)], environ={}), None), options)
    assert loaded.backend.name == "reference" and type(loaded.open_device()) is cls


def test_its_score_is_below_any_other_backend(tmp_path: Path) -> None:
    from evener_conformance.reference.backend import marks, result_from_marks

    result = result_from_marks(marks())
    assert result.score == 1 and result.devices and result.reasons


def test_the_host_device_s_results_belong_to_the_caller() -> None:
    device = HostDevice(0)
    value = torch.arange(3)
    copy = device.readback(value)
    value.fill_(9)
    assert copy.ready() and copy.wait().tolist() == [0, 1, 2]
    threads = torch.get_num_threads()
    device.limit_threads(1)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(threads)

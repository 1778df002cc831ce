"""The chips, and the device as the plug-in opens it over a torch that reports a DCU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evener.errors import BackendError
from evener_backend_hygon import plugin
from evener_backend_hygon.chips import CHIPS, LOCAL_MEMORY, arch_fault, arch_of, capabilities
from evener_backend_hygon.probe import advice


@pytest.mark.parametrize(
    ("arch", "bfloat16", "fp8"),
    [("gfx906", False, False), ("gfx926", False, False), ("gfx928", True, False), ("gfx936", True, False),
     ("gfx938", True, True)],
)  # fmt: skip
def test_an_architecture_decides_dtypes_and_features_L3(arch: str, bfloat16: bool, fp8: bool) -> None:
    can = capabilities(arch, 64)
    assert can.variant == arch
    assert ("bfloat16" in can.dtypes) == bfloat16 and ("bfloat16" in can.emulated) != bfloat16
    assert ("fp8" in can.features) == fp8
    assert {"units:64", f"shared:{64 << 10}"} <= can.features
    assert can.graphs and not can.host_lengths and LOCAL_MEMORY == 65536


def test_every_chip_has_a_row_above_L3() -> None:
    assert list(CHIPS) == ["gfx906", "gfx926", "gfx928", "gfx936", "gfx938"]


def test_an_architecture_is_read_without_its_flags_L3() -> None:
    assert arch_of("gfx936:sramecc+:xnack-") == "gfx936"
    assert arch_fault("gfx936:sramecc+:xnack-") is None
    assert arch_fault("gfx1100") == f"its architecture is gfx1100, not one of {', '.join(CHIPS)}"
    assert "not reported" in (arch_fault("") or "")


@pytest.fixture
def dcu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """``torch.cuda`` with one device, whose properties the test may change."""
    properties = SimpleNamespace(name="K100_AI", gcnArchName="gfx928:sramecc+", multi_processor_count=120)
    changes: dict[str, Any] = {
        "is_available": lambda: True, "device_count": lambda: 1, "get_device_name": lambda index: properties.name,
        "get_device_properties": lambda index: properties,
    }  # fmt: skip
    for name, value in changes.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return properties


def opened(arch: str | None = None) -> Any:
    return plugin.evener_device(index=0, options={"arch": arch})


def test_the_device_has_the_capabilities_of_the_chip_that_it_reports_L3(dcu: SimpleNamespace) -> None:
    device = opened()
    assert (device.name, device.capabilities) == ("K100_AI", capabilities("gfx928", 120))
    assert device.torch_device == torch.device("cuda", 0)


def test_a_forced_chip_replaces_the_reported_one_L3(dcu: SimpleNamespace) -> None:
    del dcu.gcnArchName
    assert opened("gfx936").capabilities.variant == "gfx936"


def test_a_device_that_is_not_a_known_chip_is_an_error_with_the_option_L3(dcu: SimpleNamespace) -> None:
    dcu.gcnArchName = "gfx1100"
    with pytest.raises(BackendError, match=r"gfx1100, not one of gfx906.*hygon\.arch=gfx936"):
        opened()


def test_without_a_device_the_error_says_what_to_type_L3() -> None:
    with pytest.raises(BackendError, match="type `evener doctor`"):
        opened()


def test_doctor_is_given_tuning_advice_where_a_variable_is_unset_L3() -> None:
    assert "HSA_FORCE_FINE_GRAIN_PCIE=1" in advice({})[0]
    assert advice({"HSA_FORCE_FINE_GRAIN_PCIE": "1"}) == ()

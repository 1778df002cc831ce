"""``infer.stages=auto``, with made-up machines."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evener.config import from_overrides
from evener.config.schema import Config
from evener.contracts.descriptor import Descriptor
from evener.contracts.probe import Marks, ProbedDevice, ProbeResult
from evener.errors import ConfigError, EvenerError, ProbeError
from evener.plugins.catalog import Catalog, Package
from evener.plugins.probe import ProbeOutcome

GIB = 1 << 30


class Machine:
    """A machine with these backends: by name, the bytes of each device; a name in ``broken`` fails its probe."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **backends: list[int]) -> None:
        self.broken: set[str] = set()
        about: dict[str, Any] = {"summary": "A pretend backend.", "contracts": {"descriptor": 1}, "module": "x"}
        packages = [
            Package(group="evener.backends", name=name, distribution=f"evener-backend-{name}", version="1",
                    descriptor=Descriptor(name=name, serves=frozenset({"host"} if name == "cpu" else ()), **about))
            for name in backends
        ]  # fmt: skip

        def result() -> dict[str, ProbeOutcome]:
            return {
                package.name: ProbeOutcome(package, Marks(True), None, ProbeError("it hung"))
                if package.name in self.broken
                else ProbeOutcome(package, Marks(True), ProbeResult(10 if package.name == "cpu" else 100, tuple(
                    ProbedDevice(index, "chip", size) for index, size in enumerate(backends[package.name]))))
                for package in packages
            }  # fmt: skip

        run = SimpleNamespace(start=lambda *_: SimpleNamespace(result=result))
        monkeypatch.setattr("evener_stages.automatic.ProbeRun", run)
        monkeypatch.setattr("evener_stages.automatic.installed_catalog", lambda: Catalog(tuple(packages)))


def configured(model: Path, nbytes: int = 0, **keys: Any) -> Config:
    model.mkdir(exist_ok=True)
    with open(model / "model.safetensors", "wb") as file:
        file.truncate(nbytes)
    return from_overrides(str(model), {"infer.stages": "auto", **keys})


def found(config: Config) -> tuple[tuple[str, ...], int, str | None]:
    return config.infer.stages, config.infer.pp_size, config.backend


def test_all_accelerators_get_a_stage_and_the_host_none_if_their_memory_holds_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(monkeypatch, cpu=[64 * GIB], chip=[8 * GIB, 8 * GIB], other=[4 * GIB])
    assert found(configured(tmp_path / "m", 17 * GIB)) == (("chip:0", "chip:1", "other:0"), 3, None)


def test_the_host_is_the_last_stage_of_a_model_that_the_accelerators_do_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(monkeypatch, cpu=[64 * GIB], chip=[8 * GIB])
    assert found(configured(tmp_path / "m", 8 * GIB)) == (("chip:0", "cpu"), 2, None)
    assert found(configured(tmp_path / "m", 7 * GIB)) == ((), 1, "chip")


def test_without_accelerators_it_is_a_run_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, cpu=[64 * GIB])
    assert found(configured(tmp_path / "m", GIB)) == ((), 1, "cpu")


def test_a_stage_takes_as_many_devices_as_ranks_share_its_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(monkeypatch, cpu=[64 * GIB], chip=[GIB] * 5, other=[GIB])
    assert found(configured(tmp_path / "m", **{"infer.tp_size": 2}))[0] == ("chip:0", "chip:2")
    with pytest.raises(ConfigError, match=r"no backend has infer.tp_size=8 devices here; lower it"):
        configured(tmp_path / "m", **{"infer.tp_size": 8})


def test_a_number_of_stages_takes_the_first_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, cpu=[64 * GIB], chip=[GIB] * 3)
    assert found(configured(tmp_path / "m", **{"infer.pp_size": 2}))[0] == ("chip:0", "chip:1")
    with pytest.raises(ConfigError, match=r"devices for 3 stages \(chip:0,chip:1,chip:2\), but infer.pp_size=4"):
        configured(tmp_path / "m", **{"infer.pp_size": 4})


def test_a_model_that_is_not_here_has_no_size_so_its_stages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, cpu=[64 * GIB], chip=[GIB, GIB])
    with pytest.raises(ConfigError, match=r"but org/model is not on this machine.* as in infer.stages=chip:0,chip:1"):
        from_overrides("org/model", {"infer.stages": "auto"})
    assert found(from_overrides("org/model", {"infer.stages": "auto", "load": "dummy"}))[0] == ("chip:0", "chip:1")


def test_devices_of_unknown_memory_are_taken_to_hold_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(monkeypatch, cpu=[64 * GIB], chip=[0, 0])
    assert found(configured(tmp_path / "m", 99 * GIB))[0] == ("chip:0", "chip:1")


@pytest.mark.parametrize(
    ("keys", "words"),
    [({"backend": "chip"}, "infer.stages=auto takes the devices that are here: leave out backend=chip"),
     ({"infer.stages": "auto,cpu"}, "it stands alone, not in auto,cpu")],
)  # fmt: skip
def test_it_stands_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, str], words: str) -> None:
    Machine(monkeypatch, cpu=[GIB], chip=[GIB])
    with pytest.raises(ConfigError, match=words):
        configured(tmp_path / "m", **keys)


def test_a_probe_that_fails_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, cpu=[GIB], chip=[GIB], other=[GIB]).broken.add("other")
    with pytest.raises(EvenerError, match="it hung, but its hardware is here"):
        configured(tmp_path / "m")

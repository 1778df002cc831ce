"""``infer.stages``: what it takes, and where each rank runs."""

from __future__ import annotations

from typing import Any

import pytest
from evener_stages.devices import StageDevice, stage_devices

from evener.config import from_overrides
from evener.config.schema import Config
from evener.config.stages import config_of_stage, device_of_rank, has_unlike_stages
from evener.contracts.descriptor import Descriptor
from evener.errors import ConfigError


def configured(stages: str, **infer: Any) -> Config:
    return from_overrides("/model", {"infer.stages": stages, **{f"infer.{key}": value for key, value in infer.items()}})


def test_the_number_of_stages_follows_from_their_devices() -> None:
    config = configured("alpha:1, beta,beta")
    assert config.infer.pp_size == 3 and has_unlike_stages(config)
    assert stage_devices(config) == (StageDevice("alpha", 1), StageDevice("beta", None), StageDevice("beta", None))
    assert not has_unlike_stages(configured("beta:0,beta:2")) and not has_unlike_stages(configured(""))


@pytest.mark.parametrize(
    ("stages", "more", "words"),
    [
        ("alpha,beta", {"pp_size": 3}, "names 2 stages, but infer.pp_size=3; leave infer.pp_size out"),
        ("alpha", {}, "names one stage; leave it out, and set backend=alpha"),
        ("alpha,beta:x", {}, "'beta:x' is not a backend, or a backend and a device as in cpu:0"),
        ("alpha,beta:", {}, "'beta:' is not a backend"),
        ("alpha,:0", {}, "':0' is not a backend"),
        ("alpha,beta:-1", {}, "'beta:-1' is not a backend"),
        ("alpha:0,beta,alpha", {}, "give each stage of alpha the index of a device, or none of them"),
        ("alpha,betta", {}, "no backend 'betta' is installed; did you mean 'beta'"),
        ("alpha,other", {}, "no backend 'other' is installed.*alpha, beta"),
    ],
)
def test_invalid_stages_are_refused(stages: str, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"infer.stages={stages}.*{words}"):
        stage_devices(configured(stages, **more), ["alpha", "beta"])


@pytest.mark.parametrize(
    ("stages", "tp", "words"),
    [("chip:0,chip:0", 1, "gives chip:0 to two stages; name another"),
     ("chip:0,host:0,chip:1", 2, r"gives chip:1 to two stages \(a stage takes 2 devices, infer.tp_size\)")],
)  # fmt: skip
def test_a_device_of_its_own_memory_has_one_stage(
    stages: str, tp: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = {"summary": "A pretend package.", "contracts": {"descriptor": 1}}
    installed = [Descriptor(name="chip", **about), Descriptor(name="host", serves=frozenset({"host"}), **about)]  # type: ignore[arg-type]
    monkeypatch.setattr("evener_stages.devices.installed_descriptors", lambda: installed)
    with pytest.raises(ConfigError, match=f"infer.stages={stages} {words}"):
        stage_devices(configured(stages, tp_size=tp))
    assert len(stage_devices(configured("host:0,host:0,chip:2,chip:0", tp_size=tp))) == 4


def test_one_backend_for_all_and_one_for_each_stage_exclude_each_other() -> None:
    both = from_overrides("/model", {"infer.stages": "alpha,beta", "backend": "alpha"})
    with pytest.raises(ConfigError, match="names the backend of each stage, so leave out backend=alpha"):
        stage_devices(both)


def test_a_stage_has_the_options_of_its_own_backend_and_of_packages_that_it_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def descriptor(name: str, serves: str = "", needs: str = "") -> Descriptor:
        tags = {"serves": frozenset(serves), "needs": frozenset(needs)}
        return Descriptor(name=name, summary="A pretend package.", contracts={"descriptor": 1}, **tags)

    installed = [descriptor("alpha", "a"), descriptor("beta", "b"), descriptor("kernels"),
                 descriptor("only-b", needs="b"), descriptor("of-none", needs="c")]  # fmt: skip
    monkeypatch.setattr("evener_stages.devices.installed_descriptors", lambda: installed)
    options = {name: {"key": 1} for name in ("alpha", "beta", "kernels", "only-b", "of-none")}
    config = Config(**{**vars(configured("alpha,beta,alpha")), "options": options})
    first, second, third = (config_of_stage(config, stage) for stage in range(3))
    assert (first.backend, second.backend, third.backend) == ("alpha", "beta", "alpha")
    # What no stage uses stays, and is refused when packages are loaded.
    assert first.options.keys() == third.options.keys() == {"alpha", "kernels", "of-none"}
    assert second.options.keys() == {"beta", "kernels", "only-b", "of-none"}
    assert config_of_stage(first, 0) is first, "a worker's own configuration stays"


def test_ranks_take_the_next_devices_of_their_backend_on_their_machine() -> None:
    config = configured("alpha,beta,alpha", tp_size=2)
    assert [device_of_rank(config, rank, rank, 6) for rank in range(6)] == [
        (0, 4), (1, 4), (0, 2), (1, 2), (2, 4), (3, 4)
    ]  # fmt: skip
    # Three ranks on each of two machines.
    assert [device_of_rank(config, rank, rank % 3, 3) for rank in range(6)] == [
        (0, 2), (1, 2), (0, 1), (0, 1), (0, 2), (1, 2)
    ]  # fmt: skip


def test_an_index_is_that_of_a_stages_first_device() -> None:
    config = configured("alpha:4,beta", tp_size=2)
    assert [device_of_rank(config, rank, rank, 4)[0] for rank in range(4)] == [4, 5, 0, 1]
    assert device_of_rank(configured(""), 3, 1, 2) == (1, 2)

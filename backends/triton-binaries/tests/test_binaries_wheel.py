"""What the wheel carries: the files of the folder that was named, or nothing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("binaries_hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built(hook: ModuleType, version: str = "standard") -> dict[str, Any]:
    data: dict[str, Any] = {"force_include": {}}
    hook.Binaries(str(ROOT), {}, None, None, "", "wheel").initialize(version, data)
    return data


def test_a_wheel_has_no_kernels_unless_a_folder_of_them_is_named(
    hook: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EVENER_TRITON_BINARIES", raising=False)
    assert built(hook) == {"force_include": {}}
    monkeypatch.setenv("EVENER_TRITON_BINARIES", "anything")
    assert built(hook, "editable") == {"force_include": {}}


def test_the_files_of_the_folder_go_beside_the_module(
    hook: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "index.json").touch()
    (tmp_path / "12ab.cubin").touch()
    monkeypatch.setenv("EVENER_TRITON_BINARIES", str(tmp_path))
    monkeypatch.setattr(hook.sysconfig, "get_platform", lambda: "linux-x86_64")
    data = built(hook)
    assert sorted(data["force_include"].values()) == [
        "evener_kernels_triton_binaries/12ab.cubin", "evener_kernels_triton_binaries/index.json",
    ]  # fmt: skip
    assert (data["pure_python"], data["tag"]) == (False, "py3-none-linux_x86_64")


def test_another_folder_and_another_machine_are_refused(
    hook: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EVENER_TRITON_BINARIES", str(tmp_path))
    with pytest.raises(SystemExit, match=r"it has no index.json; type make triton-binaries, or leave it out"):
        built(hook)
    (tmp_path / "index.json").touch()
    monkeypatch.setattr(hook.sysconfig, "get_platform", lambda: "linux-aarch64")
    with pytest.raises(SystemExit, match="linux-aarch64: leave it out"):
        built(hook)

"""Every distribution builds, installs alone and carries what it should, no more."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import pytest
from build_wheels import build, dependencies
from packaging.requirements import Requirement
from source_tree import ROOT

SHARED = ("core", "formats", "generation", "models", "inspection", "offload", "deploy", "conformance", "server")
FOLDERS = [*(ROOT / name for name in SHARED), *(p.parent for p in ROOT.glob("backends/*/pyproject.toml"))]


#: Building all wheels takes ten seconds: the tests of them are slow.
@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return build(FOLDERS, tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="module")
def target(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the wheels were installed with no index and no dependencies."""
    folder = tmp_path_factory.mktemp("target")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", str(folder), *map(str, wheels)], check=True)
    return folder


@pytest.fixture(scope="module")
def installed(target: Path) -> dict[str, Distribution]:
    return {found.name: found for found in distributions(path=[str(target)])}


@pytest.mark.slow
def test_there_is_a_wheel_for_each_folder_with_a_project(installed: dict[str, Distribution]) -> None:
    assert len(installed) == len(FOLDERS)
    assert set(installed) >= {"evener", "evener-models", "evener-server", "evener-backend-cpu"}


@pytest.mark.slow
def test_an_installed_copy_is_imported_from_where_it_was_installed(target: Path) -> None:
    names = sorted(path.parent.name for path in target.glob("evener*/__init__.py"))
    script = (
        "import importlib, sys; sys.path.insert(0, sys.argv[1])\n"
        "print(*[importlib.import_module(name).__file__ for name in sys.argv[2:]], sep='\\n')\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", script, str(target), *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(target / name / "__init__.py") for name in names]


#: Packages beside that of the distribution's name, which know more of the core than that one may.
MORE_PACKAGES = {
    "evener_formats": {"evener_calibrate", "evener_convert", "evener_keys", "evener_model_cache", "evener_quantize"},
    "evener_generation": {
        "evener_adapters",
        "evener_beam",
        "evener_constraints",
        "evener_drafts",
        "evener_forks",
        "evener_media",
        "evener_pacing",
        "evener_pooling",
    },
    "evener_models": {"evener_encoders"},
    "evener_offload": {"evener_kv", "evener_stages", "evener_weights"},
    "evener_server": {"evener_torchrun"},
}


@pytest.mark.slow
def test_a_wheel_holds_its_typed_packages_its_licence_and_no_tests(wheels: list[Path]) -> None:
    for path in wheels:
        names = zipfile.ZipFile(path).namelist()
        packages = {name.split("/")[0] for name in names if ".dist-info/" not in name}
        own = path.name.split("-")[0]
        assert packages == {own, *MORE_PACKAGES.get(own, ())}, path.name
        assert all(f"{package}/py.typed" in names for package in packages), path.name
        assert any(name.endswith("licenses/LICENSE") for name in names), path.name
        assert not [name for name in names if "/tests/" in name or "__pycache__" in name], path.name


@pytest.mark.slow
def test_the_server_s_wheel_holds_the_whole_page_and_the_licences_of_its_libraries(target: Path) -> None:
    def files(folder: Path) -> dict[str, bytes]:
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    web = files(ROOT / "server/src/evener_server/web")
    assert files(target / "evener_server/web") == web and {"index.html", "js/main.js"} <= web.keys()
    (licences,) = target.glob("evener_server-*.dist-info/licenses/src/evener_server/web/libraries")
    assert {path.name for path in licences.iterdir()} == {"dompurify", "highlight", "katex", "marked"}


@pytest.mark.slow
def test_no_wheel_can_make_a_resolver_replace_torch(installed: dict[str, Distribution]) -> None:
    for name, found in installed.items():
        for line in found.requires or []:
            need = Requirement(line)
            assert need.name != "torch" or not (need.specifier or need.url), f"{name} pins {line}"


@pytest.mark.slow
def test_the_entry_points_of_a_wheel_name_torch_free_descriptors_of_its_own(installed: dict[str, Distribution]) -> None:
    for name, found in installed.items():
        points = [point for point in found.entry_points if point.group.startswith("evener.")]
        # Core, a library that backends share, and files for the kernels of another package.
        assert points or name in ("evener", "evener-backend-parts", "evener-kernels-triton-binaries"), name
        for point in points:
            own = name.replace("-", "_")
            modules = {own, *MORE_PACKAGES.get(own, ())}
            assert point.attr in ("descriptor", "row_kernels") and point.module.split(".")[0] in modules, point


def test_the_wheelhouse_lists_what_is_needed_and_leaves_torch_to_the_user() -> None:
    needed = dependencies(["evener", "evener-server"])
    assert {"pluggy", "msgspec", "fastapi", "omegaconf"} <= set(needed)
    assert not {"torch", "sympy", "evener"} & set(needed)


def test_libraries_for_hardware_that_is_not_here_are_not_looked_for() -> None:
    assert "flash-attn" not in dependencies(["evener-backend-cuda"])
    wanted = {Requirement(line).name for line in distribution("evener-backend-cuda").requires or []}
    assert {"flash-attn", "flashinfer-python"} <= wanted

"""Every supported Python imports the packages and passes the tests of plugins and configuration, without torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from evener_conformance.distributions import write_distribution

ROOT = Path(__file__).parent.parent
FOLDERS = ("core", "formats", "generation", "models", "inspection", "offload", "conformance", "server", "backends/cpu")
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
#: What the torch-free parts need; the ranges stand in the pyproject.toml of core and formats.
NEEDED = ("numpy", "pluggy", "importlib-metadata", "msgspec", "hydra-core", "rich", "pyzmq")
TESTING = ("pytest", "hypothesis", "pytest-timeout", "pytest-asyncio", "packaging")
MODULES = ("evener", "evener.plugins.choose", "evener.config", "evener.cli.main", "evener.engine.controller.scheduler",
           "evener.backend_search", "evener.layers", "evener.ops.schemas", "evener_models", "evener_server",
           "evener_inspection", "evener_backend_cpu")  # fmt: skip


def interpreter(version: str) -> str | None:
    """The interpreter of a version: this one, one on the path, or one that pyenv installed."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = sorted(pyenv.glob(f"{version}.*/bin/python"))
    return str(found[-1]) if found else shutil.which(f"python{version}")


def requirement(name: str) -> str:
    """A dependency with its declared range, so that the promised versions are tested."""
    text = "".join((ROOT / folder / "pyproject.toml").read_text() for folder in ("core", "formats"))
    match = re.search(rf'"({re.escape(name)}[^"]*)"', text)
    assert match, f"neither core nor formats depends on {name}"
    return match[1]


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_a_supported_python_imports_what_is_torch_free_and_passes_the_plugin_tests(
    version: str, tmp_path: Path
) -> None:
    python = interpreter(version)
    assert python, f"there is no Python {version} here; install it (pyenv install {version}) to run this test"
    # One pip for every version: to put one into each environment takes as long as the rest of it.
    subprocess.run([python, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    inside = tmp_path / "venv" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", inside, "install", "-q", "--disable-pip-version-check",
               "--no-compile"]  # fmt: skip
    subprocess.run([*install, "hatchling", "editables", *map(requirement, NEEDED), *TESTING], check=True)
    folders = (flag for folder in FOLDERS for flag in ("-e", ROOT / folder))
    subprocess.run([*install, "--no-deps", "--no-build-isolation", *folders], check=True)
    # Some tests try to import torch too early; an empty package stands for it.
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").touch()
    (site / "torch" / "version.py").write_text("__version__ = '0'\n")
    write_distribution(site, "torch", {}, version="0")
    imports = "; ".join(f"import {module}" for module in MODULES)
    subprocess.run([inside, "-c", f"import sys; {imports}; assert 'torch' not in sys.modules"], check=True)
    tests = [ROOT / "core" / "tests" / "plugins", ROOT / "core" / "tests" / "config"]
    pytest_here = [inside, "-m", "pytest", "-q", "-x", "--hypothesis-profile=few"]
    done = subprocess.run([*pytest_here, *tests], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]

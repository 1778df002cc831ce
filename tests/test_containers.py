"""The container recipes: linted, and what their install layer would do to a vendor's image, without that image."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from build_wheels import build
from source_tree import ROOT

RECIPES = sorted((ROOT / "containers").glob("*.Dockerfile"))
#: The torch of each vendor's image: versions as their builds have them.
TORCH = {
    "ascend": "2.13.0+cpu", "cuda": "2.11.0+cu130", "gcu": "2.10.0", "hygon": "2.5.1+das.opt1.dtk25041",
    "muxi": "2.10.0+metax3.8.0.7",
}  # fmt: skip
#: What else an image has that our wheels need, and that must stay.
BESIDE = {"cuda": {"triton": "3.6.0"}}
#: By default the server listens on the loopback, which nothing outside of a container reaches.
KEYS = ["serve.host=0.0.0.0", "serve.port=8000"]
#: Not torch, and not what replaces a vendor's build of it.
NEVER_INSTALLED = {"torch", "triton", "torch-npu", "pytorch-triton"}


def vendor(recipe: Path) -> str:
    return recipe.name.partition(".")[0]


def test_there_is_a_recipe_for_each_vendors_backend() -> None:
    assert {vendor(recipe) for recipe in RECIPES} == TORCH.keys()
    assert all((ROOT / "backends" / name).is_dir() for name in TORCH)


@pytest.mark.parametrize("recipe", RECIPES, ids=vendor)
def test_hadolint_finds_nothing(recipe: Path) -> None:
    program = shutil.which("hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert program, "hadolint is not installed; type: make install"
    done = subprocess.run([program, str(recipe)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("recipe", RECIPES, ids=vendor)
def test_the_run_line_publishes_the_port_where_the_server_listens(recipe: Path) -> None:
    text = recipe.read_text("utf-8")
    (run,) = re.findall(r"#   docker run ((?:.*\\\n)*.*)\n", text)
    words = run.replace("\\\n#", " ").split()
    assert words[words.index("-p") + 1] == "8000:8000"
    assert words[words.index(f"evener-{vendor(recipe)}") + 1 :] == ["serve", "/models/Qwen3-8B", *KEYS]
    assert "EXPOSE 8000" in text


def install_layer(recipe: Path) -> str:
    """The one command of a recipe."""
    (layer,) = [line for line in recipe.read_text("utf-8").replace("\\\n", " ").splitlines() if line.startswith("RUN ")]
    return layer.removeprefix("RUN ")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``make wheels`` makes."""
    folder = tmp_path_factory.mktemp("dist")
    build([path.parent for path in ROOT.glob("*/pyproject.toml")], folder)
    build([path.parent for path in ROOT.glob("backends/*/pyproject.toml")], folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=vendor)
def test_the_install_layer_installs_our_wheels_and_never_another_torch(
    recipe: Path, wheels: Path, tmp_path: Path
) -> None:
    """The layer's own command in an empty environment that says it has the vendor's torch; pip only plans."""
    image = tmp_path / "image"
    subprocess.run([sys.executable, "-m", "venv", str(image)], check=True)
    (site,) = image.glob("lib/python*/site-packages")
    for name, version in {"torch": TORCH[vendor(recipe)], **BESIDE.get(vendor(recipe), {})}.items():
        info = site / f"{name}-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").touch()
    copy = tmp_path / "wheels"
    shutil.copytree(wheels, copy)
    command = install_layer(recipe).replace("/wheels", str(copy)).replace("/constraints.txt", str(tmp_path / "c.txt"))
    pieces = command.split("pip install")
    planned = [f"pip install --dry-run --report {tmp_path}/{n}.json{piece}" for n, piece in enumerate(pieces[1:])]
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "".join([pieces[0], *planned])], capture_output=True, text=True,
        env={**clean, "PATH": f"{image / 'bin'}{os.pathsep}{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert not copy.exists(), "the layer leaves the wheels in the image"
    assert (tmp_path / "c.txt").read_text().strip() == f"torch=={TORCH[vendor(recipe)]}"
    reports = [json.loads((tmp_path / f"{n}.json").read_text())["install"] for n in range(len(planned))]
    found = {each["metadata"]["name"].lower(): each["download_info"]["url"] for report in reports for each in report}
    assert not NEVER_INSTALLED & found.keys()
    ours = {name: url for name, url in found.items() if name.startswith("evener")}
    assert {"evener", "evener-server", "evener-models", f"evener-backend-{vendor(recipe)}"} <= ours.keys()
    assert all(url.startswith(copy.as_uri()) for url in ours.values())
    assert ("evener-kernels-triton" in ours) == (vendor(recipe) in ("cuda", "hygon", "muxi"))

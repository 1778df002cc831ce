"""A package that exists nowhere, and model folders with only a ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evener.config.packages import Packages
from evener.contracts.descriptor import Descriptor, Option

WIDGET = Descriptor(
    name="wid-get",
    summary="A pretend device.",
    contracts={"descriptor": 1},
    options={
        "lanes": Option(type=int, default=4, help="Lanes in use."),
        "mode": Option(type=str, default="calm", help="How hard to pull.", choices=("calm", "wild")),
        "loud": Option(type=bool, default=False, help="Say more."),
        "ratio": Option(type=float, default=None, help="A share."),
    },
    aliases={"infer.attn_type=widget": "ops.attention=wid-get", "infer.widget_fast=true": "wid-get.mode=wild"},
    op_schemas=("spin",),
)


@pytest.fixture
def packages() -> Packages:
    """As if the pretend package were installed, and nothing else."""
    return Packages(lambda: [WIDGET])


@pytest.fixture
def nothing_installed() -> Packages:
    """As if nothing were installed."""
    return Packages(lambda: [])


@pytest.fixture
def model_folder(tmp_path: Path) -> Callable[..., Path]:
    """Makes a folder with a ``config.json`` of the fields given."""

    def make(name: str = "model", **fields: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", **fields}))
        return folder

    return make

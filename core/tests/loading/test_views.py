"""Views of checkpoints: asked in order, each over the one before; what needs one that is not installed is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from evener.contracts.checkpoint import Checkpoint
from evener.contracts.conversion.views import CheckpointView, ViewRequest
from evener.contracts.declared import Declared, Slice, Span, Weight
from evener.contracts.descriptor import Descriptor
from evener.errors import ConfigError, UnknownNameError
from evener.layers.causal_lm import CausalLM
from evener.loading.checkpoint import open_checkpoint
from evener.loading.views import view_checkpoint
from evener.plugins.catalog import Catalog, Package

Write = Callable[..., Path]
Install = Callable[..., None]


class Files(CheckpointView):
    """Its weights are spans."""

    changes = "files"

    @classmethod
    def of(cls, request: ViewRequest) -> CheckpointView | None:
        return cls(request.checkpoint)

    def reslice(self, weights: Sequence[Declared]) -> None:
        for item in weights:
            if isinstance(item, Weight):
                item.slices = ()


class Names(Files):
    changes, keys = "names", frozenset({"weight_map"})
    reslice = CheckpointView.reslice


class Numbers(Names):
    changes, keys = "numbers", frozenset({"quant"})


class Idle(Names):
    @classmethod
    def of(cls, request: ViewRequest) -> CheckpointView | None:
        return None


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """``install(name="module:Class")``: the only installed views, beside the reader of safetensors."""

    def only(**views: str) -> None:
        about = Descriptor(
            name="strange", summary="", contracts={"checkpoint": 1}, checkpoint_views=views,
            weight_files={"model.safetensors": "evener_formats.safetensors_files:SafetensorsFile"},
        )  # fmt: skip
        package = Package(group="evener.plugins", name="strange", distribution="d", version="1", descriptor=about)
        monkeypatch.setattr("evener.plugins.discover.installed_catalog", lambda: Catalog((package,)))

    return only


def request(folder: Path, **more: Any) -> ViewRequest:
    return ViewRequest(open_checkpoint(folder), CausalLM, **more)


def chain(checkpoint: Checkpoint) -> list[str]:
    """The kinds of views from the outermost to the stored checkpoint."""
    return [checkpoint.changes, *chain(checkpoint.inner)] if isinstance(checkpoint, CheckpointView) else []


def test_views_are_asked_in_the_order_of_what_they_change_and_lie_over_each_other(
    write_folder: Write, install: Install
) -> None:
    install(c=f"{__name__}:Numbers", a=f"{__name__}:Names", idle=f"{__name__}:Idle", b=f"{__name__}:Files")
    checkpoint, scheme = view_checkpoint(request(write_folder({"x": torch.ones(2)}), quant="odd", weight_map="m"))
    assert chain(checkpoint) == ["numbers", "names", "files"]
    assert scheme.name == "unquantized"  # quant=odd is carried out by a view
    assert checkpoint.tensor("x").tolist() == [1, 1] and checkpoint.architecture == "TinyForCausalLM"
    weight = Weight("x", (2,), "float32", ("x",), "noise", slices=(Slice(0, Span(0, 2, 4)),))
    assert isinstance(checkpoint, CheckpointView)
    checkpoint.reslice([weight])
    assert weight.slices == ()


def test_without_views_a_checkpoint_is_read_as_it_is_stored(write_folder: Write, install: Install) -> None:
    install()
    asked = request(write_folder({"x": torch.ones(2)}))
    assert view_checkpoint(asked)[0] is asked.checkpoint


@pytest.mark.parametrize("file", ["evener_split.json", "tiny_weight_map.json"])
def test_a_folder_that_needs_a_view_names_the_package_to_install(
    file: str, write_folder: Write, install: Install
) -> None:
    install()
    folder = write_folder({"x": torch.ones(2)})
    (folder / file).write_text("{}")
    with pytest.raises(ConfigError, match=rf"{file} needs a package that is not installed.*pip install evener-formats"):
        view_checkpoint(request(folder))


def test_a_weight_map_that_no_view_reads_names_the_package_to_install(write_folder: Write, install: Install) -> None:
    install(files=f"{__name__}:Files", weight_map=f"{__name__}:Idle")
    with pytest.raises(ConfigError, match=r"weight_map=m.json needs a package .* pip install evener-formats"):
        view_checkpoint(request(write_folder({"x": torch.ones(2)}), weight_map="m.json"))


def test_a_quantizer_without_the_view_that_calls_it_names_the_package_to_install(
    write_folder: Write, install: Install
) -> None:
    install(files=f"{__name__}:Files")
    with pytest.raises(UnknownNameError, match=r"'q8_0'.*pip install evener-formats"):
        view_checkpoint(request(write_folder({"x": torch.ones(2)}), quant="q8_0"))

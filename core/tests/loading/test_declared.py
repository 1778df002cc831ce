"""Wrong declarations of a model are errors at the place of the declaration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from evener.errors import ArchitectureError
from evener.layers import Builder, MLPConfig
from evener.layers.experts import MoEConfig

NORMS = {"hidden": 16, "dtype": "float32", "eps": 1e-6, "offset": 0.0, "norm": "rms"}


@pytest.mark.parametrize(
    "declare",
    [
        lambda build: MLPConfig(inner=8, activation="swish2").declare(build, "layer", NORMS),
        lambda build: MoEConfig(experts=4, top=2, inner=8, activation="swish2").declare(build, "layer", NORMS),
        lambda build: build.op("activate", "layer", inner=8, activation="swish2", dtype="float32"),
        lambda build: build.op("act_and_mul", "layer", inner=8, activation="swish2", dtype="float32"),
    ],
    ids=["MLP", "experts", "activate", "act_and_mul"],
)
def test_an_unknown_activation_raises_at_declaration_and_lists_the_known_ones(
    declare: Callable[[Builder], Any],
) -> None:
    known = "silu, gelu, gelu_tanh, relu, relu_squared"
    with pytest.raises(ArchitectureError, match=f"activation='swish2' is unknown; implemented are: {known}"):
        declare(Builder("float32", 8))


def test_a_custom_op_may_have_its_own_activations() -> None:
    assert Builder("float32", 8).op("snake_mlp", "layer", activation="snake").static == {"activation": "snake"}

"""One token's latent attention in one launch computes what the reference does. Its kernel's source runs on the host,
with all programs and threads of it."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from emulated import EmulatedDriver, Schedule, hopper

from evener.contracts.declared import StateSlot
from evener.contracts.ops import Bucket, OpCall
from evener.contracts.state import SplitMetadata, StateSpec, StateStep, StoredStateProvider
from evener.contracts.statics import LatentStatic
from evener.layers.builder import Builder
from evener.layers.decoder import MixerLayer, MLPConfig
from evener.layers.latent import IndexConfig, LatentConfig
from evener.layers.rotary import RotaryConfig
from evener.ops.reference.linear import PLAIN
from evener.ops.reference.state import ReferenceState
from evener.ops.schemas import BUILTIN
from evener_backend_cuda.capability import SHORT_LATENT_TOKENS, capabilities
from evener_backend_cuda.compiled import Driver
from evener_backend_cuda.one_token_latent import Latent, LatentSizes, OneTokenLatent, defines, source
from evener_backend_cuda.plugin import evener_kernels
from evener_conformance.kit import composites
from evener_conformance.kit.composites import TinyModel
from evener_conformance.kit.families import Family, families
from evener_conformance.reference.device import HostDevice
from evener_kernels_triton.features import number_of
from evener_kernels_triton.latent_state import LatentState
from evener_kernels_triton.tuning import Tuning

HOPPER = capabilities((9, 0), 132, 232_448)
TUNING = Tuning.of(HOPPER)
SHARED = next(f for f in families() if f.name == "shared")
#: Of the largest value of a result: a few roundings to bfloat16.
TOLERANCE = 2**-7
SMALL = LatentConfig(
    heads=8, nope_dim=32, rope_dim=32, value_dim=32, rank=256, q_rank=None, rotary=RotaryConfig(32)
)  # fmt: skip
LITE = LatentConfig(
    heads=16, nope_dim=128, rope_dim=64, value_dim=128, rank=512, q_rank=None,
    rotary=RotaryConfig(64, interleaved=True),
)  # fmt: skip


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


class Pages(LatentState):
    """Pages of so many tokens."""

    def __init__(self, block: int) -> None:
        super().__init__(TUNING, SHORT_LATENT_TOKENS)
        self._block = block

    def block_sizes(self, spec: StateSpec) -> Sequence[int]:
        return (self._block,)


class Models:
    """Layers with the kernel, the same with references in float32, and state of so many tokens in both.

    Attributes:
        tokens: before the next step.
        graph: a step's layers are launched in a graph, where each may start before the one ahead has ended.
        times: how often a step runs the layers, one after another.
        change: (optional) what happens to a step before the kernel gets it.
    """

    def __init__(
        self, driver: EmulatedDriver, config: LatentConfig, tokens: int = 0, block: int = 16, hidden: int = 512,
        layers: int = 1, **more: Any,
    ) -> None:  # fmt: skip
        device = hopper()
        self.driver, self.tokens, self.hidden, self.graph, self.times = driver, tokens, hidden, False, 1
        self.change: Callable[[StateStep], StateStep] | None = None
        self.kernel = OneTokenLatent(device, driver=driver)
        kind = replace(SHARED, attention=config, mlp=MLPConfig(inner=64), hidden=hidden, **more)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(composites, "MAX_POSITIONS", max(192, tokens + 8))
            patch.setattr(composites, "LAYERS", layers)
            self.tiny = TinyModel(device, "bfloat16", kind, [self.kernel], Pages(block), list(BUILTIN))
            self.reference = TinyModel(HostDevice(0), "float32", kind, [], ReferenceState(), list(BUILTIN), self.tiny)
        self._layers, self._right = self.tiny.layers, self.reference.layers
        self.tiny.layers = [self._launched]  # type: ignore[list-item]
        noise = torch.Generator().manual_seed(1)
        for slots in zip(self.tiny.build.slots, self.reference.build.slots, strict=True):
            state = [torch.randn(tokens, width, generator=noise).bfloat16() for width in (config.rank, config.rope_dim)]
            for slot, model in zip(slots, (self.tiny, self.reference), strict=True):
                write_state(slot, model, state)

    def _launched(self, x: torch.Tensor, stream: Any, step: Any) -> tuple[torch.Tensor, Any]:
        if self.change is not None:
            metas = [SplitMetadata(replace(m.decode, step=self.change(m.decode.step)), None, 1) for m in step.metas]
            step = replace(step, metas=metas)
        for layer in self._layers * self.times:
            x, stream = layer(x, stream, step)
        return x, stream

    def step(self, seed: int = 0) -> list[torch.Tensor]:
        """Hidden states and logits of the next token, after comparing them and the state with the reference's."""
        x = torch.randn(1, self.hidden, generator=torch.Generator().manual_seed(seed)).bfloat16().float()
        self.reference.layers = self._right * self.times
        with torch.inference_mode():
            got = self.tiny.step(x, (self.tokens,), (1,))
            want = self.reference.step(x, (self.tokens,), (1,))
        self.tokens += 1
        written, right = (model.written((self.tokens,)) for model in (self.tiny, self.reference))
        assert written.keys() == right.keys()
        for found, expected in zip([*got, *written.values()], [*want, *right.values()], strict=True):
            allowed = TOLERANCE * float(expected.abs().max())
            torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=allowed)
        return got


def write_state(slot: StateSlot, model: TinyModel, values: Sequence[torch.Tensor]) -> None:
    """Latents and keys [tokens, width] of the first request."""
    tokens = len(values[0])
    if tokens:
        assert isinstance(slot.provider, StoredStateProvider)
        blocks = model.table[0, : -(-tokens // model.block)].long()
        pages = slot.provider.export_blocks(slot.views, blocks)
        for page, value in zip(pages, values, strict=True):
            page.flatten(0, 1)[:tokens] = value
        slot.provider.import_blocks(slot.views, blocks, pages)


@pytest.mark.parametrize("tokens", [0, 1, 40, 300])
def test_attention_gives_what_the_reference_gives(folder: Path, tokens: int) -> None:
    models = Models(EmulatedDriver(folder), SMALL, tokens)
    models.step(0)
    models.step(1)
    assert len(models.driver.arguments) == 2, "each step is a launch"


def test_lite(folder: Path) -> None:
    models = Models(EmulatedDriver(folder), LITE, 130, 32, 2048)
    models.driver.schedule = Schedule(room=132)
    models.step(0)

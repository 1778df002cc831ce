"""The naive engine runs an outside architecture whose op and kind of state come from its own package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evener import LLM, SamplingParams
from evener.errors import ArchitectureError, UnknownNameError
from evener_conformance.distributions import write_distribution
from evener_conformance.naive.model import NaiveModel

DESCRIPTOR = """
from evener.contracts.descriptor import Descriptor

descriptor = Descriptor(
    name="tally", summary="Mixes by the mean of what came before.",
    contracts={"architecture": 2, "layers": 2, "ops": 2, "state": 2}, module="tally_parts",
    architectures={"TallyForCausalLM": "tally_model:TallyForCausalLM"},
    op_schemas=("tally_mix",), states=("tally.pages",), state_kinds=("tally",),
)
"""
MODEL = """
from evener.contracts.architecture import Architecture
from evener.contracts.state import AttentionSpec, StateSpec, StateTensor
from evener.layers import Embedding, LMHead


class Mix:
    def __init__(self, build, hidden, kind):
        self.name = f"mix.{kind}"
        tensors = (StateTensor("value", (1, hidden), build.dtype),)
        tensors += (StateTensor("other", (1, hidden), build.dtype),) * (kind == "full")
        self.slot = build.state(self.name, StateSpec(kind, tensors), AttentionSpec(1, hidden, 1.0))
        self.scale = build.weight(f"{self.name}.scale", hidden)
        self.site = build.op("tally_mix", self.name, state=self.slot)

    def __call__(self, x, step):
        meta = step.metas[self.slot.group]
        return self.site.table[step.bucket](x, self.scale.value, self.slot.views, meta)


class TallyForCausalLM(Architecture):
    def __init__(self, config, build):
        self.vocab_size, self.hidden_size, self.max_positions = 97, 24, 128
        self.embedding = Embedding(build, "embed.weight", 97, 24)
        self.mixes = [Mix(build, 24, kind) for kind in ("tally", "full")]
        common = {"hidden": 24, "dtype": build.dtype, "eps": 1e-5, "offset": 0.0, "norm": "rms"}
        self.head = LMHead(build, "head.weight", "norm", 97, common)

    def forward(self, step):
        x = self.embedding(step)
        for mix in self.mixes:
            x = x + mix(x, step)
        return x.float()

    def logits(self, hidden, step):
        return self.head(hidden, step)

    def normed(self, hidden):
        return self.head.normed(hidden)
"""
PARTS = """
import torch

from evener.contracts.hooks import hookimpl
from evener.contracts.ops import OpSchema, tensors
from evener.contracts.state import StateKind
from evener.ops.reference.state import PlainPages


def tally_mix(static, use):
    provider, spec = static["state"].provider, static["state"].spec

    def run(x, scale, views, meta):
        rows = (x * scale).unsqueeze(1)
        provider.write(views, meta, *[rows] * len(spec.tensors))
        return provider.attend(views, meta, rows).squeeze(1)

    return run


class Tally(StateKind):
    name = "tally"

    def first_live_block(self, spec, computed, block_size):
        return 0


class TallyPages(PlainPages):
    name = layout = "tally.pages"
    kinds = frozenset({"tally"})

    def supports(self, spec, attention, device):
        return None

    def prepare(self, step, spec, attention, block_size):
        return step, block_size

    def write(self, views, meta, *values):
        step, size = meta
        slots = step.slot_mapping.long()
        views[0][slots // size, slots % size] = values[0]

    def attend(self, views, meta, query, sinks=None):
        step, size = meta
        out, start = torch.empty_like(query), 0
        for row, (count, length) in enumerate(zip(step.host_query_lens, step.host_kv_lens)):
            at = torch.arange(length)
            kept = views[0][step.block_table[row, at // size].long(), at % size]
            means = kept.cumsum(0) / (at + 1).view(-1, 1, 1)
            out[start : start + count] = means[length - count :]
            start += count
        return out


@hookimpl
def evener_op_schemas():
    return [OpSchema(
        name="tally_mix", doc="The mean of all rows so far.", static={"state": "the slot"}, state=True,
        inputs=tensors("x T,H; scale H; views -; meta -"), outputs=tensors("y T,H"), reference="tally_parts:tally_mix",
    )]


@hookimpl
def evener_state_kinds():
    return [Tally()]


@hookimpl
def evener_state_providers(device, options):
    return [TallyPages()]
"""
PROMPT = [7 * i % 97 for i in range(40)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model's folder; its package's modules are on the path, but the package is not installed."""
    for name, text in (("tally_descriptor", DESCRIPTOR), ("tally_model", MODEL), ("tally_parts", PARTS)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = {"architectures": ["TallyForCausalLM"], "model_type": "tally", "vocab_size": 97, "hidden_size": 24,
              "max_position_embeddings": 128}  # fmt: skip
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    return tmp_path / "model"


@pytest.fixture
def installed(folder: Path) -> Path:
    """The same, with its package."""
    write_distribution(folder.parent, "tally", {"evener.plugins": {"tally": "tally_descriptor:descriptor"}})
    return folder


def test_a_package_s_own_op_and_kind_of_state_give_the_engine_s_tokens(installed: Path) -> None:
    naive = NaiveModel(json.loads((installed / "config.json").read_text()))
    whole, cut = naive.logits(PROMPT), naive.logits(PROMPT, chunk=7)
    assert (whole - cut).abs().max() < 1e-5
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    small = {"infer.kv_memory": "4MiB", "infer.max_reqs": 2, "infer.threads": 1}
    with LLM(installed, load="dummy", dtype="float32", backend="cpu", **small) as llm:
        assert llm.generate(PROMPT, greedy)[0].outputs[0].token_ids == naive.greedy(PROMPT, 12)


def test_uninstalled_ops_and_providers_may_be_passed_in(folder: Path) -> None:
    import tally_model  # type: ignore[import-not-found]
    import tally_parts  # type: ignore[import-not-found]

    config = json.loads((folder / "config.json").read_text())
    with pytest.raises(ArchitectureError, match=r"no state of kind 'tally' .* NaiveModel\(…, providers=\[…\]\)"):
        NaiveModel(config, architecture=tally_model.TallyForCausalLM)
    given: dict[str, Any] = {"providers": [tally_parts.TallyPages()]}
    with pytest.raises(UnknownNameError, match=r"unknown op 'tally_mix'.*Install the package that announces it"):
        NaiveModel(config, architecture=tally_model.TallyForCausalLM, **given)
    whole = NaiveModel(
        config, architecture=tally_model.TallyForCausalLM, schemas=tally_parts.evener_op_schemas(), **given
    )
    assert whole.logits(PROMPT).shape == (40, 97)

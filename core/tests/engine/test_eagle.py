"""Heads of EAGLE-3: the same tokens as without drafts, and each draft that of the method, computed plainly."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drafted_requests import always, requests
from eagle_heads import IDS, write_head
from safetensors.torch import load_file, save_file

from evener.config.schema import Config
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import LogitBias, NewRequest, Sampling
from evener.errors import ArchitectureError, CheckpointError, ConfigError
from evener_conformance.naive.model import NaiveModel, NaiveStep
from evener_conformance.reference.executor import strict_controller

LIMITS = {"reference.delay": True, "infer.max_reqs": 4, "infer.kv_memory": 2**24, "infer.step_tokens": 16}
#: Few tokens, so that random weights are right now and then.
SHAPE = {"num_hidden_layers": 7, "vocab_size": 11, "tie_word_embeddings": False}
RECURRENT = {"num_hidden_layers": 4, "num_experts": 0, "vocab_size": 11}


def with_head(config: Config, folder: Path) -> Config:
    return dataclasses.replace(config, infer=dataclasses.replace(config.infer, draft_model=str(folder)))


class PlainHead:
    """The published method over whole texts: no state, no steps. Sizes are those of ``write_head``."""

    def __init__(self, folder: Path, config: Config, layers: list[int], normed_residual: bool) -> None:
        self.w = load_file(folder / "model.safetensors")
        self.layer = next(n.removesuffix(".hidden_norm.weight") for n in self.w if n.endswith("hidden_norm.weight"))
        target = load_file(Path(config.model) / "model.safetensors")
        self.embedding = self.w.get("embed_tokens.weight", target["model.embed_tokens.weight"])
        self.naive, self.layers, self.normed_residual = NaiveModel(config.model), layers, normed_residual

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self.w[f"{name}.weight"]

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.w[f"{self.layer}.{name}_proj.weight"].T

    def streams(self, text: list[int]) -> torch.Tensor:
        """What the model's layers read, for each token, joined."""
        self.naive.reset()
        stack = self.naive.model.stack
        stack.taps.update(dict.fromkeys(self.layers))
        metas = (None,) * len(self.naive.build.slots)
        ids = torch.tensor(text, dtype=torch.int32)
        with torch.inference_mode():
            self.naive.model.forward(NaiveStep(ids, torch.arange(len(text)), metas=metas))
        return torch.cat([stack.taps[layer] for layer in self.layers], -1)

    def run(self, hidden: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        """The layer: ``hidden`` [n, width] of n tokens, and the n tokens behind them."""
        normed = self.norm(hidden, f"{self.layer}.hidden_norm")
        x = torch.cat((self.norm(self.embedding[tokens], f"{self.layer}.input_layernorm"), normed), -1)
        n = len(tokens)
        q, k, v = (self.linear(x, f"self_attn.{name}").view(n, -1, 8).transpose(0, 1) for name in "qkv")
        angles = torch.arange(n)[:, None] * 5000.0 ** -(torch.arange(4) / 4)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        q, k = (t * cos + torch.cat((-t[..., 4:], t[..., :4]), -1) * sin for t in (q, k))
        k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
        scores = (q @ k.transpose(1, 2) * 8**-0.5).masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
        attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = (normed if self.normed_residual else hidden) + self.linear(attended, "self_attn.o")
        y = self.norm(x, f"{self.layer}.post_attention_layernorm")
        return x + self.linear(F.silu(self.linear(y, "mlp.gate")) * self.linear(y, "mlp.up"), "mlp.down")

    def drafts(self, text: list[int], count: int) -> list[int]:
        """The tokens that it proposes behind a text."""
        hidden, tokens, found = self.streams(text)[:-1] @ self.w["fc.weight"].T, text[1:], list[int]()
        while True:
            last = self.run(hidden, tokens)[-1:]
            own = int((self.norm(last, "norm") @ self.w["lm_head.weight"].T).argmax())
            found.append(own + int(self.w["d2t"][own]))
            if len(found) == count:
                return found
            hidden, tokens = torch.cat((hidden, last)), [*tokens, found[-1]]


#: Family and its shape; how the head is written, and its changes; the layers that it reads.
CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], list[int]]] = {
    "published": ("Llama", SHAPE, "published", {}, [2, 3, 4]),
    "published, with the layers behind which it reads": (
        "Llama", SHAPE, "published", {"eagle_config": {IDS: [0, 3, 5]}}, [1, 4, 6]),
    "speculators": ("Qwen3", SHAPE, "speculators", {IDS: [0, 3, 6], "norm_before_residual": True}, [0, 3, 6]),
    "speculators, of another width": (
        "Llama", {**SHAPE, "num_hidden_layers": 2}, "speculators", {"hidden_size": 28, IDS: [1]}, [1]),
    "recurrent layers": ("Qwen3Next", RECURRENT, "published", {IDS: [1, 2, 3]}, [1, 2, 3]),
}  # fmt: skip


#: The others have what these show.
QUICK = ("speculators, of another width",)


@pytest.mark.parametrize("case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_tokens_are_the_same_and_each_draft_is_that_of_the_published_method(
    case: str, make_lively: Any, play: Any, tmp_path: Path
) -> None:
    family, shape, style, changes, layers = CASES[case]
    config = make_lively(family, shape, **LIMITS)
    plain, _ = strict_controller(config)
    expected = play(plain, requests())
    folder = write_head(tmp_path / "head", config.model, style, **changes)
    controller, _ = strict_controller(with_head(config, folder))
    seen = always(controller)
    found = play(controller, requests())
    assert found.tokens == expected.tokens
    stats = controller.scheduler.stats
    assert controller.scheduler.state.pool.used == 0
    head = PlainHead(folder, config, layers, changes.get("norm_before_residual", False))
    texts = {m.id: m.prompt + found.tokens[m.id] for m in requests()}
    assert len(seen) > 15 and max(map(len, seen.values())) > 2
    assert stats.drafted_tokens == sum(map(len, seen.values()))
    prompts = {m.id: len(m.prompt) for m in requests()}
    for (name, length), ids in seen.items():
        # A last token of a prompt that a step computes alone has drafts too, which are a guess.
        assert length == prompts[name] or ids == head.drafts(texts[name][:length], len(ids)), (name, length)


def test_right_drafts_save_steps_and_are_counted(make_lively: Any, play: Any, tmp_path: Path) -> None:
    config = make_lively("Llama", SHAPE, **LIMITS)
    folder = write_head(tmp_path / "head", config.model)
    tensors = load_file(folder / "model.safetensors")
    always_nine = {"d2t": 9 - torch.arange(8)}  # whatever its layer finds
    save_file({**tensors, **always_nine}, folder / "model.safetensors", {"format": "pt"})
    controller, _ = strict_controller(with_head(config, folder))
    always(controller)
    greedy = Sampling(temperature=0.0, bias=[LogitBias(9, 1e9)])
    message = NewRequest(id="r", prompt=[1, 2, 3], max_tokens=41, sampling=greedy)
    assert play(controller, [message]).tokens["r"] == [9] * 41
    stats = controller.scheduler.stats
    assert stats.steps == 9, "the prompt's token, then a step for five"
    assert stats.accepted_tokens == stats.drafted_tokens == 32


@pytest.mark.slow
def test_a_head_may_propose_tokens_for_some_of_the_models_layers(make_lively: Any, play: Any, tmp_path: Path) -> None:
    config = make_lively("Llama", SHAPE, **LIMITS)
    config = dataclasses.replace(config, infer=dataclasses.replace(config.infer, layers=("0-5",)))
    expected = play(build_controller(config)[0], requests()).tokens
    controller, _ = strict_controller(with_head(config, write_head(tmp_path / "head", config.model)))
    always(controller)
    assert play(controller, requests()).tokens == expected
    assert controller.scheduler.stats.drafted_tokens


def test_forks_preemptions_and_cached_prefixes_change_no_token(
    make_lively: Any, play: Any, shrink_pool: Any, tmp_path: Path
) -> None:
    config = make_lively("Llama", {**SHAPE, "num_hidden_layers": 2}, **LIMITS, **{"infer.block_size": 16})
    prompt, greedy = [1 + i * i % 9 for i in range(33)], Sampling(temperature=0.0)
    messages = [
        NewRequest(id=f"r{i}", prompt=[*prompt[: 33 - i], i], max_tokens=30, sampling=greedy, fork_of="r0" if i else "")
        for i in range(4)
    ]
    naive = NaiveModel(config.model)
    expected = {m.id: naive.greedy(m.prompt, 30) for m in messages}
    head = write_head(tmp_path / "head", config.model, "speculators", **{IDS: [1]})
    controller, _ = strict_controller(with_head(config, head))
    shrink_pool(controller, 9 * len(controller.scheduler.state.specs))
    always(controller)
    assert play(controller, messages).tokens == expected
    stats = controller.scheduler.stats
    assert stats.preemptions and stats.forks and stats.drafted_tokens


@pytest.mark.slow
def test_two_ranks_hold_the_whole_head_each(make_lively: Any, play: Any, tmp_path: Path) -> None:
    config = make_lively("Llama", {**SHAPE, "vocab_size": 12}, **{**LIMITS, "executor": "inline"})
    expected = play(build_controller(config)[0], requests()).tokens
    both = with_head(config, write_head(tmp_path / "head", config.model))
    both = dataclasses.replace(both, infer=dataclasses.replace(both.infer, tp_size=2))
    controller, _ = build_controller(both)
    always(controller)
    assert play(controller, requests()).tokens == expected
    assert controller.scheduler.stats.drafted_tokens > 0
    controller.executor.close()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"target_hidden_size": 32}, "a hidden size of 32 and 11 token ids, and this one has 60 and 11; take a head"),
        ({"vocab_size": 500}, "and 500 token ids"),
        ({"hidden_size": 32}, "has no embed_tokens.weight, and with a hidden size of 32"),
        ({IDS: [1, 2, 99]}, r"before layers \[1, 2, 99\], and the model has layers 0 to 6"),
        ({IDS: [-1, 2, 3]}, r"before layers \[-1, 2, 3\]"),
        ({"pp_size": 2}, "does not work with pipeline stages"),
    ],
)
def test_a_head_for_another_model_is_refused_before_weights_are_read(
    make_config: Any, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    stages = {"infer.pp_size": changes["pp_size"]} if "pp_size" in changes else {}
    config = make_config("Llama", SHAPE, **LIMITS, **stages)
    shape = {key: value for key, value in changes.items() if key not in {"pp_size", IDS}}
    folder = write_head(tmp_path / "head", config.model, **shape)
    if IDS in changes:
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**written, IDS: changes[IDS]}))
    with pytest.raises(ConfigError, match=problem):
        build_controller(with_head(config, folder))


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_hidden_layers", 2), ("attention_bias", True), ("sliding_window", 512), ("num_key_value_heads", 3),
     (IDS, "all"), (IDS, [1.5]), (IDS, []), (IDS, list(range(99))), ("norm_before_fc", True)],
)  # fmt: skip
def test_a_config_that_is_not_read_is_refused_with_its_key(
    make_config: Any, tmp_path: Path, key: str, value: Any
) -> None:
    config = make_config("Llama", SHAPE, **LIMITS)
    folder = write_head(tmp_path / "head", config.model)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, key: value}))
    with pytest.raises(ArchitectureError, match=key):
        build_controller(with_head(config, folder))


@pytest.mark.parametrize(
    ("change", "error", "problem"),
    [
        ({"d2t": torch.full((8,), 10**9)}, ConfigError, "leads to ids outside the model's 11; fetch it again"),
        ({"d2t": torch.full((8,), -9)}, ConfigError, "leads to ids outside the model's 11; fetch it again"),
        ({"d2t": torch.zeros(7, dtype=torch.int64)}, ConfigError, r"a d2t of shape \[7\] for 8 ids; fetch it again"),
        ({"d2t": None}, ConfigError, "has 8 of the model's 11 token ids, and no d2t"),
        ({"fc.weight": torch.zeros(60, 60)}, CheckpointError, "fc.weight"),
        ({"midlayer.hidden_norm.weight": None}, CheckpointError, "midlayer.hidden_norm.weight"),
        ({"more.weight": torch.zeros(1)}, CheckpointError, "more.weight"),
    ],
)
def test_broken_weights_of_a_head_are_refused_by_name(
    make_lively: Any, tmp_path: Path, change: dict[str, Any], error: type[Exception], problem: str
) -> None:
    config = make_lively("Llama", SHAPE, **LIMITS)
    folder = write_head(tmp_path / "head", config.model)
    tensors = {**load_file(folder / "model.safetensors"), **change}
    save_file({n: t for n, t in tensors.items() if t is not None}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(error, match=problem):
        build_controller(with_head(config, folder))

"""Where tiny models send each token: to transformers' experts, and to the lowest ids of equal scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from family_oracles import Logits, logits_of, make_transformers
from family_runner import check, prompt_of
from family_table import GPT_OSS, LLAMA_4, V3, Row

from evener.ops.reference import experts
from evener_conformance.naive.model import NaiveModel

CASES = {"several groups": {}, "one group": {"n_group": 1, "topk_group": 1}}


def choose(wanted: list[float], config: Mapping[str, Any]) -> list[int]:
    """The experts of one token by their wanted scores: of the groups whose two best add up to most, the best."""
    groups, size = config["n_group"], len(wanted) // config["n_group"]
    total = [sum(sorted(wanted[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    kept = sorted(range(groups), key=lambda g: (-total[g], g))[: config["topk_group"]]
    allowed = [e for e in range(len(wanted)) if e // size in kept]
    return sorted(allowed, key=lambda e: (-wanted[e], e))[: config["num_experts_per_tok"]]


@dataclass
class Tied:
    """transformers' model whose experts tie in exact arithmetic, which is told to break ties as we do.

    An expert's logit is one hidden value that it shares with others, so that no sum can round it; every second group is
    like another one. ``split``: how often equal scores were on both sides of the choice.
    """

    name: str = "transformers"
    split: int = 0
    seen: list[list[int]] = field(default_factory=list)

    def __call__(self, config: Mapping[str, Any], folder: Path) -> Logits:
        model = make_transformers(config, folder)
        for layer in model.model.layers[config["first_k_dense_replace"] :]:
            gate = layer.mlp.gate
            with torch.no_grad():
                gate.weight.zero_()
                for expert in range(gate.num_experts):
                    gate.weight[expert, expert % 6 // 2 * 5] = 2.0
                gate.e_score_correction_bias.copy_(torch.tensor([0.0, 0.0, 0.125, 0.125, 0.25, 0.25] * 2))
            gate.forward = lambda x, gate=gate: self.route(gate, config, x)
        model.save_pretrained(folder)
        return logits_of(model)

    def route(
        self, gate: Any, config: Mapping[str, Any], x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As transformers' router has it, token by token."""
        logits = torch.nn.functional.linear(x.view(-1, x.shape[-1]).float(), gate.weight.float())
        scores = logits.sigmoid()
        wanted = (scores + gate.e_score_correction_bias).tolist()
        ids = [choose(row, config) for row in wanted]
        for row, best in zip(wanted, ids, strict=True):
            self.split += bool({row[e] for e in best} & {row[e] for e in range(len(row)) if e not in best})
        self.seen += ids
        weights = scores.gather(1, torch.tensor(ids))
        weights = weights / weights.sum(-1, keepdim=True) * config["routed_scaling_factor"]
        return logits, weights, torch.tensor(ids)


def recorded(folder: Path, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], torch.Tensor]:
    """The naive engine's choices, (ids, weights) of every layer, and its logits."""
    found: list[Any] = []
    reference = experts.route

    def route(static: Mapping[str, Any], use: Any) -> Any:
        run = reference(static, use)

        def keep(*values: Any) -> Any:
            found.append(run(*values))
            return found[-1]

        return keep

    monkeypatch.setattr(experts, "route", route)
    return found, NaiveModel(folder).logits(ids)


@pytest.mark.parametrize("case", CASES)
def test_every_token_goes_to_the_experts_that_transformers_chooses(
    case: str, tiny_model: Any, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    model, folder = tiny_model(Row(V3, CASES[case]))
    theirs: list[Any] = []
    for layer in model.model.layers[1:]:
        layer.mlp.gate.register_forward_hook(lambda _, __, out: theirs.append(out))
    ids = prompt_of(model.config.vocab_size)
    logits_of(model)(ids)
    ours, _ = recorded(folder, ids, monkeypatch)
    assert len(ours) == len(theirs) == 2
    config = model.config.to_dict()
    for layer, (mine, (router, weights, chosen)) in enumerate(zip(ours, theirs, strict=True), 1):
        order = mine[0].argsort(-1), chosen.argsort(-1)
        assert torch.equal(mine[0].gather(1, order[0]).long(), chosen.gather(1, order[1]))
        torch.testing.assert_close(mine[1].gather(1, order[0]), weights.gather(1, order[1]), atol=1e-5, rtol=1e-4)
        wanted = (router.sigmoid() + model.model.layers[layer].mlp.gate.e_score_correction_bias).tolist()
        assert mine[0].tolist() == [choose(row, config) for row in wanted]
    assert len({tuple(row) for row in ours[0][0].tolist()}) > 10, "tokens go different ways"


@pytest.mark.parametrize(
    "case", [c if c == "several groups" else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_routing_ties_choose_the_lowest_expert_ids_in_every_engine(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    oracle = Tied()
    row = Row(V3, CASES[case], oracle=oracle)
    check(row, tmp_path)
    assert oracle.split > len(oracle.seen) // 2, "equal scores decide"
    oracle.seen.clear()
    ids = prompt_of(row.config["vocab_size"])
    expected = oracle(row.config, tmp_path / "again")(ids)
    ours, logits = recorded(tmp_path / "again", ids, monkeypatch)
    assert [choice for layer in ours for choice in layer[0].tolist()] == oracle.seen
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("architecture", "changes"), [
    (GPT_OSS, {}), (GPT_OSS, {"num_experts_per_tok": 1}), (LLAMA_4, {}), (LLAMA_4, {"num_experts_per_tok": 3}),
])  # fmt: skip
def test_softmax_of_the_best_and_sigmoids_of_the_best_go_to_transformers_experts(
    architecture: str, changes: dict[str, Any], tiny_model: Any, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    row = Row(architecture, changes)
    model, folder = tiny_model(row)
    theirs: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith(".router"):  # dense scores, or those of the chosen and their ids
            module.register_forward_hook(lambda _, __, out: theirs.append(
                out[0] if architecture == LLAMA_4 else out[0].new_zeros(out[0].shape).scatter(1, out[2], out[1])
            ))  # fmt: skip
    ids = prompt_of(model.config.vocab_size)
    logits_of(model)(ids)
    ours, _ = recorded(folder, ids, monkeypatch)
    assert len(ours) == len(theirs) >= 2
    for (chosen, weights), wanted in zip(ours, theirs, strict=True):
        assert (wanted > 0).sum(-1).tolist() == [row.config["num_experts_per_tok"]] * len(ids)
        found = torch.zeros_like(wanted).scatter(1, chosen.long(), weights)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
        assert len({tuple(each) for each in chosen.tolist()}) > 2, "tokens go different ways"


@pytest.mark.parametrize("scoring", ["softmax_top", "sigmoid"])
def test_router_logit_ties_choose_the_lowest_expert_ids(scoring: str) -> None:
    static = {"top": 3, "scoring": scoring, "renormalize": False, "scale": 1.0, "groups": 1, "top_groups": 1,
              "group_best": 1}  # fmt: skip
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 2.0, 1.0], [0.0] * 6, [3.0, 3.0, 4.0, 3.0, 3.0, 3.0]])
    chosen, _ = experts.route(static, lambda *_: None)(logits)
    assert chosen.tolist() == [[1, 4, 0], [0, 1, 2], [2, 0, 1]]

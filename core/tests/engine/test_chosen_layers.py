"""``infer.layers``: only some layers are planned, loaded and run, and they compute what they do in the whole model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from evener.backend_search import BackendSearch
from evener.config import from_overrides, to_flat
from evener.config.schema import Config
from evener.contracts.outputs import PromptOutputs
from evener.engine.controller.controller import Controller
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener.engine.worker.assembly import assemble
from evener.engine.worker.memory import estimate_memory_plan
from evener.errors import CheckpointError, ConfigError
from evener_conformance.rank_threads import rank_threads

#: Dense; dense layers, then experts; windows and full attention; recurrent layers and full attention.
FAMILIES: dict[str, tuple[dict[str, Any], str, list[int]]] = {
    "Llama": ({"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 5}, "0-1,4", [0, 1, 4]),
    "DeepseekV3": ({"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 3}, "0,2", [0, 2]),
    "Gemma3": ({"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}, "1-3", [1, 2, 3]),
    "Qwen3Next": (
        {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "num_hidden_layers": 4},
        "2-3", [2, 3],
    ),
}  # fmt: skip
QUICK = ("Qwen3Next",)
MESSAGES = [
    NewRequest(
        id=kind, prompt=[7 * i % 90 + 1 for i in range(40)], max_tokens=6,
        sampling=Sampling(temperature=0.0, prompt_outputs=PromptOutputs(kind, [(0, 40)])),
    )
    for kind in ("hidden", "logits")
]  # fmt: skip


def changed(config: Config, **infer: Any) -> Config:
    flat = {**to_flat(config), **{f"infer.{key}": value for key, value in infer.items()}}
    return from_overrides(flat.pop("model"), flat)


def with_layers(controller: Controller, numbers: list[int]) -> Controller:
    """The whole model's controller, whose forward pass goes through these of its loaded layers alone."""
    stack = controller.executor.worker.assembly.model.stack  # type: ignore[attr-defined]
    stack.layers = tuple(stack.layers[number] for number in numbers)
    return controller


@pytest.fixture
def ranked() -> Iterator[Callable[[Config], Controller]]:
    with ExitStack() as running:
        yield lambda config: running.enter_context(rank_threads(config))[0]


@pytest.mark.parametrize(
    "family", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_chosen_layers_compute_what_they_do_in_the_whole_model(
    family: str, make_lively: Any, play: Any, ranked: Any
) -> None:
    sizes, text, numbers = FAMILIES[family]
    config = make_lively(family, sizes)
    whole = play(build_controller(config)[0], MESSAGES)
    expected = play(with_layers(build_controller(config)[0], numbers), MESSAGES)
    assert expected.pooled != whole.pooled
    part, ready = build_controller(changed(config, layers=text))
    assert [slot.name.split(".")[2] for slot in part.executor.worker.assembly.build.slots] == list(map(str, numbers))  # type: ignore[attr-defined]
    found = play(part, MESSAGES)
    assert found.tokens == expected.tokens and found.pooled == expected.pooled
    assert ready.info.config["infer.layers"].value == text.split(",")
    # Two ranks, and two stages that share the chosen layers.
    for ranks in ({"tp_size": 2}, {"pp_size": 2}):
        several = play(ranked(changed(config, layers=text, **ranks)), MESSAGES)
        assert several.tokens == expected.tokens
        rows = [torch.frombuffer(bytearray(each.pooled["hidden"]), dtype=torch.float32) for each in (several, expected)]
        torch.testing.assert_close(*rows, rtol=1e-3, atol=1e-3)


def test_the_first_layers_give_the_hidden_states_of_the_whole_model_after_them(make_lively: Any, play: Any) -> None:
    config = make_lively("Llama", FAMILIES["Llama"][0])
    controller, _ = build_controller(config)
    after: list[torch.Tensor] = []
    model = controller.executor.worker.assembly.model  # type: ignore[attr-defined]

    class Watched:
        def __call__(self, x: Any, residual: Any, step: Any) -> Any:
            after.append(x.float() if residual is None else x + residual)
            return model.fourth(x, residual, step)

    model.fourth, layers = model.stack.layers[3], list(model.stack.layers)
    layers[3] = Watched()
    model.stack.layers = tuple(layers)
    play(controller, MESSAGES[:1])
    found = play(build_controller(changed(config, layers="0-2"))[0], MESSAGES[:1]).pooled["hidden"]
    rows = torch.cat(after)[:40]
    torch.testing.assert_close(torch.frombuffer(bytearray(found), dtype=torch.float32).view(rows.shape), rows)


def test_only_chosen_layers_are_in_the_memory_plan_and_loaded(make_lively: Any) -> None:
    config = make_lively("Llama", FAMILIES["Llama"][0])

    def plans(config: Config) -> Any:
        a = assemble(config, BackendSearch(config.backend))
        return estimate_memory_plan(a)[1], {w.name for w in a.build.weights if hasattr(w, "name")}

    whole, every = plans(config)
    part, names = plans(changed(config, layers="4"))
    layers = [name for name in every if name.startswith("model.layers.")]
    assert {name for name in names if name.startswith("model.layers.")} == {n for n in layers if ".4." in n}
    assert names - set(layers) == every - set(layers)  # embedding, norm and head stay
    each = {n: plans(changed(config, layers=str(n)))[0] for n in (0, 1)}
    two = plans(changed(config, layers="0-1"))[0]
    layer = two.weights + two.mapped - each[0].weights - each[0].mapped
    assert layer > 0 and whole.weights + whole.mapped == each[0].weights + each[0].mapped + 4 * layer
    assert part.block_bytes * 5 == whole.block_bytes
    _, ready = build_controller(changed(config, layers="4"))
    memory = ready.info.memory
    assert memory.measured_weights + memory.measured_mapped == part.weights + part.mapped


def test_a_start_with_chosen_layers_says_that_the_text_is_not_the_models(make_config: Any, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "evener.worker"):
        build_controller(make_config("Llama", FAMILIES["Llama"][0], **{"infer.layers": "0-1,4"}))
    assert "infer.layers=0-1,4: only these layers run, so the text is not the model's" in caplog.text


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("5", r"there is no layer 5; the model has layers 0 to 4"),
        ("0-99999", "there is no layer 99999; the model has layers 0 to 4"),
        ("3-1", "infer.layers=3-1: '3-1' is no layer and no range of layers; write them as in 3-20,40"),
        ("0,-1", "'-1' is no layer and no range"),
        ("0-999999999999", "'0-999999999999' is no layer and no range"),
        ("all", "'all' is no layer and no range"),
        ("٣", "'٣' is no layer"),
    ],
)
def test_wrong_layers_are_refused_with_what_to_type(layers: str, message: str, make_config: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        build_controller(make_config("Llama", FAMILIES["Llama"][0], **{"infer.layers": layers}))


def test_tensors_that_no_layer_of_the_model_has_are_still_refused(make_lively: Any) -> None:
    config = make_lively("Llama", FAMILIES["Llama"][0])
    path = f"{config.model}/model.safetensors"
    from safetensors.torch import load_file, save_file

    save_file({**load_file(path), "model.layers.1.mlp.unknown": torch.zeros(3)}, path)
    with pytest.raises(CheckpointError, match=r"not part of the model: model\.layers\.1\.mlp\.unknown"):
        build_controller(changed(config, layers="1"))

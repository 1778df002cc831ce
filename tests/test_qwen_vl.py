"""Qwen-VL with images equals its oracle: whole, cut inside of an image, from the cache, and two images in one step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from family_oracles import Logits, Plain
from family_runner import ANSWER, SMALL, Engine, prompt_of
from family_table import QWEN_VL, Row
from reference_vision import QwenVL

from evener.config import from_overrides
from evener.contracts.media import MediaPrompt, make_item
from evener.engine.wire.messages import NewRequest, Sampling
from evener_conformance.naive.model import NaiveModel, find_architecture
from evener_conformance.oracle import Comparison, compare_greedy
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.engine import play

VISUAL: dict[str, Any] = QWEN_VL["visual"]  # type: ignore[assignment]
START, SIZE, ROWS = VISUAL["image_start_id"], VISUAL["image_size"], VISUAL["n_queries"]
TOLERANCE = 2e-4
IMAGES = torch.randint(0, 256, (3, SIZE, SIZE, 3), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)


class WithImages(Plain):
    """The oracle, which keeps its module."""

    def __call__(self, config: Any, folder: Path) -> Logits:
        made: list[QwenVL] = []

        def module(shape: Any) -> QwenVL:
            made.append(QwenVL(shape))
            return made[0]

        logits = Plain(module)(config, folder)
        self.model: QwenVL
        object.__setattr__(self, "model", made[0])
        return logits

    def logits(self, ids: Sequence[int], images: Sequence[torch.Tensor]) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(torch.tensor([list(ids)]), images)[0]


@pytest.fixture
def oracle(tmp_path: Path, one_thread: None) -> WithImages:
    made = WithImages(QwenVL)
    made(Row("QWenLMHeadModel", QWEN_VL).config, tmp_path)
    return made


def prompt_with(*parts: int | list[int]) -> MediaPrompt:
    """Text, and numbers of images."""
    ids: list[int] = []
    media = []
    for part in parts:
        if isinstance(part, int):
            media.append(make_item(len(ids) + 1, IMAGES[part].numpy(), ROWS, "image"))
            part = [START, *[START + 2] * ROWS, START + 1]
        ids += part
    return MediaPrompt(ids, media)


def test_the_encoders_rows_are_the_oracles(oracle: WithImages, tmp_path: Path) -> None:
    encoder = NaiveModel(tmp_path).model.encoders["image"]
    with torch.inference_mode():
        rows = [oracle.model.transformer.visual(image) for image in IMAGES]
        assert float((rows[0] - rows[1]).abs().mean()) > 0.1, "images are told apart"
        for image, wanted in zip(IMAGES, rows, strict=True):
            torch.testing.assert_close(encoder.encode(image), wanted, atol=1e-4, rtol=1e-4)


def test_logits_and_sixty_four_greedy_tokens_are_the_oracles_with_images_wherever_steps_end(
    oracle: WithImages, tmp_path: Path
) -> None:
    text = prompt_of(200, 40)
    prompts = {
        "two": prompt_with(text[:9], 0, text[9:14], 1, text[14:19]), "swapped": prompt_with(text[:9], 1, text[9:14], 0),
        "third": prompt_with(text[:9], 2, text[9:14], 1, text[14:19]), "text": MediaPrompt(text[:30], []),
    }  # fmt: skip
    images = {"two": [0, 1], "swapped": [1, 0], "third": [2, 1], "text": []}
    engine = Engine(Row("QWenLMHeadModel", QWEN_VL), tmp_path)

    def logits(name: str, ids: Sequence[int]) -> torch.Tensor:
        return oracle.logits(ids, [IMAGES[i] for i in images[name]])

    result = Comparison()
    together = {name: (prompt, ANSWER, True) for name, prompt in prompts.items()}
    runs = [engine.run(together, step_tokens) for step_tokens in (7, 128)]
    for name, prompt in prompts.items():
        engine.run({name: (prompt, 1, False)}, 128)
        runs.append(engine.run({name: (prompt, ANSWER, False)}, 128))
        assert runs[-1].cached[name] == len(prompt.ids) // 16 * 16 > 0
    for played in runs:
        for name, tokens in played.tokens.items():
            prompt = prompts[name]
            engine.assert_logits(played, name, logits(name, [*prompt.ids, *tokens[:-1]]), TOLERANCE)

            def resume(ids: Sequence[int], length: int, media: Any = prompt.media) -> list[int]:
                return engine.run({"resumed": (MediaPrompt(list(ids), media), length, False)}, 128).tokens["resumed"]

            compare_greedy(lambda ids, name=name: logits(name, ids), [prompt.ids], [tokens], resume, result)
    result.check()
    assert not any(kept.users for kept in engine.controller.scheduler.media._cached_items.values())
    first = [logits(name, prompts[name].ids)[-1] for name in ("two", "third")]
    assert float((first[0] - first[1]).abs().max()) > 0.1, "the model sees"


@pytest.mark.parametrize(
    ("tp", "pp"), [(3, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((3, 1), (1, 2)))]
)
def test_every_rank_that_embeds_encodes_for_itself(tp: int, pp: int, oracle: WithImages, tmp_path: Path) -> None:
    text = prompt_of(200, 20)
    asked = {"a": prompt_with(text[:9], 0, text[9:14], 1), "b": prompt_with(text[:9], 2, text[9:14])}
    one = Engine(Row("QWenLMHeadModel", QWEN_VL), tmp_path)
    wanted = one.run({name: (prompt, 20, False) for name, prompt in asked.items()}, 24).tokens
    keys = {**SMALL, "infer.step_tokens": 24, "infer.tp_size": tp, "infer.pp_size": pp}
    with rank_threads(from_overrides(str(tmp_path), keys)) as (controller, executor):
        messages = [
            NewRequest(id=name, prompt=prompt.ids, max_tokens=20, sampling=Sampling(temperature=0.0),
                       media=list(prompt.media)) for name, prompt in asked.items()
        ]  # fmt: skip
        assert play(controller, messages).tokens == wanted
        encoders = [bool(worker.assembly.model.encoders) for worker in executor.workers]
        assert encoders == [rank < tp for rank in range(tp * pp)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"patch_size": 5}, "must divide image_size = 42"),
        ({"output_dim": 256}, "must be hidden_size = 384"),
        ({"n_queries": 10}, "must be a square number"),
        ({"heads": 7}, "must divide width = 60"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused_with_the_key(changes: dict[str, Any], words: str) -> None:
    from evener.errors import ArchitectureError
    from evener.layers import Builder

    shape = Row("QWenLMHeadModel", {**QWEN_VL, "visual": {**VISUAL, **changes}}).config
    with pytest.raises(ArchitectureError, match=words):
        find_architecture("QWenLMHeadModel")(shape, Builder("float32", 128))

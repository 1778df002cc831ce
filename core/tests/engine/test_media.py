"""Media rows: each request reads its own, also when prompts are chunked, cached, forked or preempted."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evener_media.planner import MediaPlanner
from hypothesis import given
from hypothesis import strategies as st

from evener.config.schema import Config
from evener.contracts.media import MediaItem, MediaPrompt, make_item
from evener.contracts.request_plugin import RequestPlugin
from evener.engine.controller.state import StateManager
from evener.engine.processes.start import build_controller, start_engine
from evener.engine.wire.media import shared_prefix_length
from evener.engine.wire.messages import NewRequest, Sampling
from evener.errors import EngineError, RequestError
from evener.frontend.plugins import RequestPlugins
from evener.llm import LLM
from evener.plugins.catalog import Catalog
from evener.sampling_params import SamplingParams
from evener_conformance.naive.model import NaiveModel
from evener_conformance.reference.executor import strict_controller

from .traffic import CUTS, STEP_TOKENS, Pick, check_tokens, patient, picks

GREEDY = Sampling(temperature=0.0)
HIDDEN = 60
PAD = 7
NOISE = torch.Generator().manual_seed(5)
#: Three pictures of 37 rows and one of 3.
PICTURES = [2 * torch.randn(rows, HIDDEN, generator=NOISE) for rows in (37, 37, 37, 3)]
TEXT = torch.randint(0, 150, (60,), generator=NOISE).tolist()

#: What stands in a prompt: the number of a picture, or text.
Part = int | list[int]


def prompt_of(*parts: Part) -> tuple[list[int], list[tuple[int, torch.Tensor]]]:
    """Ids, and where which picture stands; all pictures have the same ids."""
    ids: list[int] = []
    given: list[tuple[int, torch.Tensor]] = []
    for part in parts:
        if isinstance(part, int):
            given.append((len(ids), PICTURES[part]))
            part = [PAD] * len(PICTURES[part])
        ids += part
    return ids, given


def request(name: str, count: int, *parts: Part, **fields: Any) -> NewRequest:
    ids, given = prompt_of(*parts)
    media = [make_item(start, rows.numpy()) for start, rows in given]
    return NewRequest(id=name, prompt=ids, max_tokens=count, sampling=GREEDY, media=media, **fields)


def expected(naive: NaiveModel, message: NewRequest) -> list[int]:
    naive.given = [(item.start, torch.from_numpy(item.array())) for item in message.media]
    return naive.greedy(message.prompt, message.max_tokens)


@pytest.fixture
def config(make_lively: Any, one_thread: None) -> Config:
    made: Config = make_lively("Llama", **{"infer.step_tokens": 128})
    return made


@pytest.fixture
def naive(config: Config) -> NaiveModel:
    model = NaiveModel(config.model, max_positions=128)
    assert model.model.hidden_size == HIDDEN
    return model


def test_images_with_equal_token_ids_are_kept_apart_in_batches_chunks_and_cache(
    config: Config, naive: NaiveModel, play: Any
) -> None:
    messages = [
        request("one", 9, TEXT[:11], 0, TEXT[11:20]), request("other", 9, TEXT[:11], 1, TEXT[11:20]),
        request("text", 9, TEXT[:11], [PAD] * 37, TEXT[11:20]), request("both", 9, [3], 2, TEXT[:5], 0, 3, [4]),
        request("last", 9, TEXT[:9], 3),
    ]  # fmt: skip
    wanted = {m.id: expected(naive, m) for m in messages}
    assert len({tuple(tokens[:5]) for tokens in wanted.values()}) == len(messages)
    for step_tokens in (128, 24, 5):
        controller, _ = build_controller(config)
        controller.scheduler.step_tokens = step_tokens
        assert play(controller, messages).tokens == wanted
        again = play(controller, messages)
        assert again.tokens == wanted
        # Blocks of 16: a prefix ends inside of the picture, behind it, or before it.
        assert again.cached == {"one": 48, "other": 48, "text": 48, "both": 80, "last": 0}
        assert not any(kept.users for kept in controller.scheduler.media._cached_items.values())
        assert controller.scheduler.state.pool.used == 0


@pytest.mark.parametrize("depth", [1, 3])
def test_media_upload_does_not_synchronize_with_the_device(
    depth: int, make_lively: Any, naive: NaiveModel, play: Any
) -> None:
    config = make_lively("Llama", **{"reference.delay": True, "infer.depth": depth, "infer.step_tokens": 40})
    controller, _ = strict_controller(config)
    messages = [request(f"r{i}", 7, TEXT[:11], i % 3, TEXT[11 : 13 + i]) for i in range(4)]
    played = play(controller, messages, arrivals={f"r{i}": 2 * i for i in range(4)})
    assert played.tokens == {message.id: expected(naive, message) for message in messages}


def test_block_hash_includes_overlapping_images_and_their_positions(config: Config) -> None:
    controller, _ = build_controller(config)
    state: StateManager = controller.scheduler.state

    def digests(*parts: Part) -> list[bytes]:
        message = request("any", 1, *parts, [1])
        table, _ = state.open(message.prompt, "", media=message.media)
        assert state.grow(table, 64) is not None
        state.commit(table, message.prompt, 64)
        state.close(table)
        return table.digests

    one, other = digests(TEXT[:20], 0, TEXT[:20]), digests(TEXT[:20], 1, TEXT[:20])
    assert one[0] == other[0] and not set(one[1:]) & set(other[1:])
    assert digests([PAD] * 20, 0, [PAD] * 20)[1:] != digests([PAD] * 19, 0, [PAD] * 21)[1:]
    first = make_item(5, PICTURES[0].numpy())
    assert (
        shared_prefix_length([first], [first], 60) == 60
        and shared_prefix_length([first], [], 60) == 5
        and shared_prefix_length([], [], 3) == 3
    )
    assert shared_prefix_length([first], [make_item(5, PICTURES[1].numpy())], 60) == 5


PROMPTS: list[tuple[Part, ...]] = [
    (TEXT[:11], 0, TEXT[11:20]), (TEXT[:11], 1, TEXT[11:20]), (TEXT[:11], 0, TEXT[11:31]), ([PAD] * 11, 3, 0, [1]),
    (2, [9]), (TEXT[:40],), (3, 3, 1, 3, [5]), (TEXT[:11], [PAD] * 37, [4]),
]  # fmt: skip


@pytest.mark.parametrize("examples", [4, pytest.param(80, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_random_traffic_with_media_matches_the_naive_engine(
    examples: int, config: Config, naive: NaiveModel, play: Any, shrink_pool: Any
) -> None:
    seen = {"preemptions": 0, "prefix_hits": 0, "forks": 0, "evicted": 0}

    @cache
    def wanted(prompt: int, count: int) -> list[int]:
        return expected(naive, request("any", count, *PROMPTS[prompt]))

    @patient(examples)
    @given(
        picked=picks(len(PROMPTS), least=4),
        forked=st.sets(st.integers(1, 6)),
        cuts=CUTS,
        depth=st.integers(1, 3),
        step_tokens=STEP_TOKENS,
        room=st.sampled_from([37, 60, 128]),
        blocks=st.integers(6, 9),
    )
    def traffic(
        picked: list[Pick], forked: set[int], cuts: dict[int, int], depth: int, step_tokens: int, room: int,
        blocks: int,
    ) -> None:  # fmt: skip
        for child in sorted(forked & set(range(1, len(picked)))):  # another sample of a prompt, sent with it
            picked[child] = (picked[child - 1][0], picked[child][1], picked[child - 1][2])
        controller, _ = build_controller(replace(config, infer=replace(config.infer, depth=depth)))
        shrink_pool(controller, blocks)
        scheduler = controller.scheduler
        scheduler.step_tokens, scheduler.media = step_tokens, MediaPlanner(room, step_tokens)
        plans: list[Any] = []
        submit = controller.executor.submit
        controller.executor.submit = lambda plan: (plans.append(plan), submit(plan))[1]  # type: ignore[method-assign]
        messages = [
            request(f"r{i}", count, *PROMPTS[prompt], fork_of=f"r{i - 1}" if i in forked else "")
            for i, (prompt, count, _) in enumerate(picked)
        ]
        aborts = {f"r{i}": after for i, after in cuts.items() if i < len(picked)}
        played = play(controller, messages, aborts=aborts, arrivals={f"r{i}": p[2] for i, p in enumerate(picked)})
        check_tokens(played, picked, aborts, wanted)
        assert scheduler.state.pool.used == 0
        assert not any(kept.users for kept in scheduler.media._cached_items.values())
        assert_kept(plans, room, step_tokens)
        seen["preemptions"] += scheduler.stats.preemptions
        seen["prefix_hits"] += scheduler.stats.prefix_hits
        seen["forks"] += scheduler.stats.forks
        seen["evicted"] += sum(len(plan.media.drops) for plan in plans if plan.media)

    traffic()
    assert all(seen.values()), seen


def assert_kept(plans: list[Any], room: int, step_rows: int) -> None:
    """The worker never keeps more rows than it may, nor encodes more in a step, unless it is one item."""
    kept: dict[bytes, int] = {}
    for media in (plan.media for plan in plans if plan.media):
        for digest in media.drops:
            del kept[digest]
        assert not {item.digest for item in media.items} & set(kept)
        kept |= {item.digest: item.rows for item in media.items}
        assert sum(kept.values()) <= room
        assert len(media.items) < 2 or sum(item.rows for item in media.items) <= step_rows


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([(0, 5), (4, 3)], "without overlap"),
        ([(8, 5)], "inside the prompt"),
        ([(0, 0)], "at least one row"),
        ([(0, 9)], "has 9 rows, but the engine keeps 8"),
    ],
)
def test_a_request_whose_media_can_never_run_is_refused_with_the_reason(
    items: list[tuple[int, int]], words: str, config: Config, play: Any
) -> None:
    controller, _ = build_controller(config)
    controller.scheduler.media = MediaPlanner(8, 8)
    media = [make_item(start, np.zeros((rows, HIDDEN), dtype=np.float32)) for start, rows in items]
    message = NewRequest(id="bad", prompt=[1] * 10, max_tokens=3, sampling=GREEDY, media=media)
    (end,) = play(controller, [message]).ends["bad"]
    assert end.reason == "error" and words in str(end.error) and end.status == 400


def test_an_engine_without_the_package_for_media_refuses_them_and_says_what_to_install(
    config: Config, play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced = Catalog.lazy_imports
    monkeypatch.setattr(
        Catalog, "lazy_imports", lambda self, kind: {} if kind == "part of media" else announced(self, kind)
    )
    controller, _ = build_controller(config)
    text = request("text", 4, TEXT[:11])
    played = play(controller, [request("media", 4, TEXT[:11], 0), text])
    (end,) = played.ends["media"]
    assert end.reason == "error" and end.status == 400 and "pip install evener-generation" in str(end.error)
    assert len(played.tokens["text"]) == 4
    with LLM.from_client(start_engine(config, "inline"), Path(config.model)) as llm:
        given = MediaPrompt([1, 2, 3], [make_item(1, PICTURES[3].numpy())])
        with pytest.raises(EngineError, match="pip install evener-generation"):
            llm.generate(given, SamplingParams(max_tokens=2, detokenize=False))


def test_a_media_item_survives_serialization() -> None:
    import msgspec

    item = make_item(3, PICTURES[3].numpy())
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(item), type=MediaItem)
    assert back == item and back.end == 6 and np.array_equal(back.array(), PICTURES[3].numpy())
    assert make_item(0, PICTURES[3].numpy(), encoder="image").digest != item.digest


class Pictures(RequestPlugin):
    """Puts a picture where a prompt has ``PAD``; the first is the one whose number the prompt begins with."""

    def prepare(self, model_dir: str, options: Any) -> None: ...

    def preprocess(self, request: dict[str, Any]) -> dict[str, Any]:
        number, *ids = request["prompt"]
        at, rows = ids.index(PAD), PICTURES[number].numpy()
        ids[at : at + 1] = [PAD] * len(rows)
        return {**request, "prompt": ids, "media": [*request["media"], make_item(at, rows)]}


def test_a_request_plugin_inserts_embedding_rows_into_a_prompt(
    make_lively: Any, naive: NaiveModel, one_thread: None
) -> None:
    config = make_lively("Llama", **{"infer.step_tokens": 24})
    with LLM.from_client(start_engine(config, "inline"), Path(config.model)) as llm:
        llm._frontend.plugins = RequestPlugins([("pictures", Pictures())])
        greedy = SamplingParams(temperature=0.0, max_tokens=6, detokenize=False, n=2)
        outputs = llm.generate([[number, *TEXT[:11], PAD, *TEXT[11:20]] for number in (0, 1)], greedy)
    for number, output in enumerate(outputs):
        wanted = expected(naive, request("any", 6, TEXT[:11], number, TEXT[11:20]))
        assert [list(each.token_ids) for each in output.outputs] == [wanted] * 2
        assert len(output.prompt_token_ids) == 57


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([make_item(0, np.zeros((2, HIDDEN - 1), dtype=np.float32))], r"takes \[n, 60\] float32"),
        ([make_item(0, np.zeros((2, HIDDEN)))], "float64; this model takes"),
        ([make_item(3, np.zeros((2, HIDDEN), dtype=np.float32))], "inside the prompt"),
        ([make_item(-1, np.zeros((2, HIDDEN), dtype=np.float32))], "inside the prompt"),
        ([make_item(1, np.zeros((2, HIDDEN), dtype=np.float32))] * 2, "without overlap"),
        ([make_item(1, np.zeros((0, HIDDEN), dtype=np.float32))], "at least one row"),
    ],
)
def test_rows_that_do_not_fit_the_prompt_or_the_model_are_refused(
    items: list[MediaItem], words: str, make_config: Any
) -> None:
    config = make_config("Llama")
    llm = LLM.from_client(start_engine(config, "inline"), Path(config.model))
    with llm, pytest.raises((RequestError, EngineError), match=words):
        llm.generate(MediaPrompt([1, 2, 3, 4], items), SamplingParams(max_tokens=2, detokenize=False))

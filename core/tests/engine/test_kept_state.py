"""Host memory for what leaves the prefix cache: the tokens are those of the naive engine, and nothing that the host has
is computed again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from evener.config.schema import Config
from evener.contracts.connector import BlockMove, BlockMoves, BlockTransfer
from evener.engine.controller.controller import Controller
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import Abort, NewRequest, Sampling
from evener.errors import ConfigError
from evener.plugins.catalog import Catalog
from evener_conformance.naive.model import NaiveModel
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.device import HostDevice
from evener_conformance.reference.executor import strict_controller
from evener_kv import host_memory
from evener_kv.block_bytes import ExportedBlocks, PooledBlocks
from evener_kv.host_blocks import HostBlocks
from evener_kv.host_memory import HostMemory

from .counted import counters

GREEDY = Sampling(temperature=0.0)
HOST = {"infer.kv_host_memory": "8MiB"}
CHATS = 5


def chats() -> list[list[int]]:
    """The first turns: prompts of different lengths, two of which begin alike."""
    noise = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, 90, (length,), generator=noise).tolist() for length in (44, 37, 51, 40, 33)]
    prompts[4] = prompts[0][:20] + prompts[4]
    return prompts


def talk(controller: Controller, play: Any, turns: int = 3, together: bool = True) -> list[list[int]]:
    """Hold all chats, turn by turn, all at the same time or one after another. Returns what was said in each: prompt,
    answer, two more tokens, answer."""
    said = chats()
    for turn in range(turns):
        messages = [
            NewRequest(id=f"chat{i} turn{turn}", prompt=list(tokens), max_tokens=7, sampling=GREEDY)
            for i, tokens in enumerate(said)
        ]
        played = [play(controller, messages)] if together else [play(controller, [one]) for one in messages]
        answers = {name: tokens for each in played for name, tokens in each.tokens.items()}
        assert all(set(each.reasons().values()) == {"length"} for each in played)
        for message, tokens in zip(messages, said, strict=True):
            tokens += [*answers[message.id], 5 + turn, 9]
    return said


def expected(config: Config, **choices: Any) -> list[list[int]]:
    """What is said with the naive engine; ``choices`` are those of its builder."""
    files = [Path(config.model) / name for name in ("config.json", "model.safetensors")]
    weights = sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    if (key := (weights, *choices.items())) not in EXPECTED:
        EXPECTED[key] = chats()
        alone = NaiveModel(config.model, max_positions=128, **choices)
        for turn in range(3):
            for tokens in EXPECTED[key]:
                tokens += [*alone.greedy(list(tokens), 7), 5 + turn, 9]
    return EXPECTED[key]


#: Of each model once: most tests have the same.
EXPECTED: dict[tuple[Any, ...], list[list[int]]] = {}


def least_blocks(controller: Controller) -> int:
    """So few blocks that two chats do not fit together."""
    return controller.scheduler.state.slabs_for(92, controller.scheduler.step_tokens) + 2


#: Family, options, and what the naive engine's builder has to be told.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "full": ("Llama", {}, {}),
    "full, one plan in flight": ("Llama", {"infer.depth": 1}, {}),
    "full, three plans in flight": ("Llama", {"infer.depth": 3, "infer.step_tokens": 9}, {}),
    "window": ("Gemma3", {}, {}),
    "latent": ("DeepseekV3", {}, {}),
    "latent in 8 bits": ("DeepseekV3", {"infer.kv_dtype": "fp8_e4m3"}, {"state_dtype": "float8_e4m3fn"}),
    "sparse": ("DeepseekV32", {"infer.step_tokens": 7}, {}),
    "recurrent": ("Qwen3Next", {"infer.snapshot_every": 16}, {}),
    "recurrent, snapshots apart": ("Qwen3Next", {"infer.snapshot_every": 32, "infer.step_tokens": 9}, {}),
}


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


#: What other cases have too, each with something else beside it; an index is kept in blocks as latent state is.
ALONE = (
    "full", "full, one plan in flight", "full, three plans in flight", "latent", "latent in 8 bits", "recurrent",
    "sparse", "window",
)  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c in ALONE else c for c in CASES])
def test_chats_whose_blocks_had_left_go_on_with_the_tokens_of_the_naive_engine(
    case: str, make_lively: Any, play: Any, shrink_pool: Any
) -> None:
    family, options, choices = CASES[case]
    config = make_lively(family, **options, **HOST)
    want = expected(config, **choices)
    for together in (True, False):
        controller, _ = build_controller(config)
        shrink_pool(controller, least_blocks(controller))
        assert talk(controller, play, together=together) == want
        found = counters(controller)
        assert found["kv_host_hits"] >= CHATS and found["kv_host_hit_tokens"] >= CHATS * 32
        assert found["kv_host_loaded_bytes"] > 0 and found["kv_host_stored_bytes"] > 0
        assert controller.scheduler.state.pool.used == 0


def test_nothing_that_the_host_has_is_computed_again(make_lively: Any, play: Any, shrink_pool: Any) -> None:
    computed = {}
    for name, more in (("host", HOST), ("without", {}), ("roomy", {})):
        controller, _ = build_controller(make_lively("Llama", **more))
        if name != "roomy":
            shrink_pool(controller, least_blocks(controller))
        talk(controller, play, together=False)
        computed[name] = controller.scheduler.stats.computed_tokens
    assert computed["host"] == computed["roomy"] < 0.6 * computed["without"]


def test_state_in_eight_bits_comes_back_with_its_bits(make_lively: Any, play: Any, shrink_pool: Any) -> None:
    said = []
    for more in (HOST, {}):
        controller, _ = build_controller(make_lively("Llama", **{"infer.kv_dtype": "fp8_e5m2"}, **more))
        if more:
            shrink_pool(controller, least_blocks(controller))
        said.append(talk(controller, play))
    assert said[0] == said[1]


def test_on_a_device_that_delays_its_results_nothing_is_read_early(
    make_lively: Any, play: Any, shrink_pool: Any
) -> None:
    config = make_lively("Llama", **HOST, **{"reference.delay": True})
    controller, _ = strict_controller(config)
    shrink_pool(controller, least_blocks(controller))
    assert talk(controller, play) == expected(config)
    assert counters(controller)["kv_host_hits"] >= CHATS


def test_a_provider_with_memory_of_its_own_exports_and_imports_its_blocks(
    make_lively: Any, play: Any, shrink_pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exported(geometry: Any, storage: torch.Tensor, device: Any) -> list[ExportedBlocks]:
        pairs = zip(geometry.groups, geometry.spans, strict=True)
        return [ExportedBlocks(device, span, group, geometry.block_size) for group, span in pairs]

    monkeypatch.setattr(host_memory, "block_bytes", exported)
    for family, more in (("Llama", {}), ("Qwen3Next", {"infer.snapshot_every": 16})):
        config = make_lively(family, **more, **HOST)
        controller, _ = build_controller(config)
        shrink_pool(controller, least_blocks(controller))
        assert talk(controller, play) == expected(config)
        assert counters(controller)["kv_host_hits"] >= CHATS


@pytest.mark.parametrize("sizes", [(2, 1), pytest.param((1, 2), marks=pytest.mark.slow)])
def test_each_rank_keeps_its_part(sizes: tuple[int, int], make_lively: Any, play: Any, shrink_pool: Any) -> None:
    config = make_lively("Llama", **HOST, **{"infer.tp_size": sizes[0], "infer.pp_size": sizes[1]})
    with rank_threads(config) as (controller, ranks):
        shrink_pool(controller, least_blocks(controller))
        assert talk(controller, play) == expected(config)
        assert counters(controller)["kv_host_hits"] >= CHATS
        assert len({id(worker.mover) for worker in ranks.workers}) == 2


def test_workers_in_processes_of_their_own_do_as_plans_say(
    make_lively: Any, play: Any, shrink_pool: Any, warm_children: None
) -> None:
    config = make_lively("Llama", executor="process", **HOST)
    controller, _ = build_controller(config)
    try:
        shrink_pool(controller, least_blocks(controller))
        assert talk(controller, play) == expected(config)
        assert counters(controller)["kv_host_hits"] >= CHATS
    finally:
        controller.executor.close()


@pytest.mark.parametrize(
    ("family", "together", "blocks"),
    [("Gemma3", True, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("Gemma3", False, 100), ("Gemma3", True, 100), ("Gemma3", False, 1), ("Llama", True, 1), ("Llama", True, 100),
        ("Llama", False, 1), ("Llama", False, 100),
    ))],
)  # fmt: skip
def test_copies_on_streams_may_take_their_time(
    family: str, together: bool, blocks: int, late: None, make_lively: Any, play: Any, shrink_pool: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(host_memory, "_BUFFER", blocks * 10_000)
    config = make_lively(family, **HOST)
    controller, _ = build_controller(config)
    shrink_pool(controller, least_blocks(controller))
    assert talk(controller, play, together=together) == expected(config)
    assert counters(controller)["kv_host_hits"] >= CHATS


def test_a_place_is_written_only_after_an_earlier_copy_has_read_it(late: None, make_config: Any) -> None:
    controller, _ = build_controller(make_config("Llama", **HOST))
    worker = controller.executor.worker  # type: ignore[attr-defined]
    mover, pages = worker.mover, worker.mover._groups[0]._blocks
    for block in (1, 2, 3):
        pages[block] = block
    mover.begin(BlockMoves(out=[BlockMove(0, 1, 1)]))
    mover.begin(BlockMoves(back=[BlockTransfer(0, [BlockMove(0, 3, 1)])]))
    mover.begin(BlockMoves(out=[BlockMove(0, 2, 1)]))  # the same place, for another block
    mover._streams[0].run(len(mover._streams[0].work))  # as fast as this direction may be
    mover.begin(BlockMoves(waits=[0]))
    assert pages[3].unique().tolist() == [1]


def skip_waits(self: HostMemory, moves: BlockMoves) -> None:
    with torch.inference_mode():
        self._store(moves.out)
        for transfer in moves.back:
            self._load(transfer, self._mark())


def skip_buffer_waits(self: HostMemory, moves: BlockMoves) -> None:
    self._copied = [None, None]
    BEGIN(self, moves)


BEGIN = HostMemory.begin


@pytest.mark.parametrize("begin", [pytest.param(skip_waits, marks=pytest.mark.slow), skip_buffer_waits])
def test_a_copy_that_nobody_waits_for_shows_in_the_tokens(
    begin: Any, late: None, make_lively: Any, play: Any, shrink_pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted faults."""
    monkeypatch.setattr(HostMemory, "begin", begin)
    config = make_lively("Llama", **HOST)
    controller, _ = build_controller(config)
    shrink_pool(controller, least_blocks(controller))
    assert talk(controller, play) != expected(config)


@pytest.mark.parametrize("owner", [PooledBlocks, pytest.param(ExportedBlocks, marks=pytest.mark.slow)])
def test_a_block_that_is_written_back_to_the_wrong_place_shows_in_the_tokens(
    owner: Any, make_lively: Any, play: Any, shrink_pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault."""
    if owner is ExportedBlocks:
        monkeypatch.setattr(
            host_memory, "block_bytes",
            lambda geometry, _, device: [ExportedBlocks(device, 1, group, 16) for group in geometry.groups],
        )  # fmt: skip
    right = owner.write
    monkeypatch.setattr(owner, "write", lambda self, blocks, rows: right(self, [b ^ 1 for b in blocks], rows))
    config = make_lively("Llama", **HOST)
    controller, _ = build_controller(config)
    shrink_pool(controller, least_blocks(controller) // 2 * 2 + 1)
    assert talk(controller, play) != expected(config)


@contextmanager
def waiting_chat(controller: Controller, play: Any) -> Iterator[str]:
    """A chat waits for its blocks, beside a request that runs."""
    said = talk(controller, play, 1, together=False)
    controller.handle([NewRequest(id="long", prompt=[4], max_tokens=60, sampling=GREEDY)])
    controller.step()
    controller.handle([NewRequest(id="chat", prompt=list(said[0]), max_tokens=7, sampling=GREEDY)])
    controller.step()
    scheduler = controller.scheduler
    assert [r.id for r in scheduler.waiting] == ["chat"] and [r.id for r in scheduler.running] == ["long"]
    held = scheduler.state.pool.used
    assert held > len(scheduler.running[0].table.blocks[0])  # type: ignore[union-attr]
    yield "chat"


def test_a_request_that_waits_for_blocks_starts_when_they_are_there(
    late: None, make_lively: Any, play: Any, shrink_pool: Any
) -> None:
    controller, _ = build_controller(make_lively("Llama", **HOST))
    shrink_pool(controller, least_blocks(controller))
    with waiting_chat(controller, play):
        steps = 0
        while controller.scheduler.waiting:
            controller.step()
            steps += 1
        assert 1 < steps < 8 and [r.id for r in controller.scheduler.running] == ["long", "chat"]
        assert controller.scheduler.running[1].cached >= 48
        while not controller.idle:
            controller.step()


def test_a_request_that_is_aborted_while_it_waits_gives_its_blocks_back(
    late: None, make_lively: Any, play: Any, shrink_pool: Any
) -> None:
    config = make_lively("Llama", **HOST)
    controller, _ = build_controller(config)
    shrink_pool(controller, least_blocks(controller))
    with waiting_chat(controller, play) as name:
        (end,) = controller.handle([Abort(name)])
        pool, long = controller.scheduler.state.pool, controller.scheduler.running[0]
        assert end.reason == "abort" and long.table is not None  # type: ignore[union-attr]
        assert pool.used == len(long.table.blocks[0])
        # Whoever gets its blocks now must not find the late copies in them.
        prompt = [3 + 5 * i % 71 for i in range(61)]
        played = play(controller, [NewRequest(id="next", prompt=prompt, max_tokens=9, sampling=GREEDY)])
        alone = NaiveModel(config.model, max_positions=128)
        assert played.tokens["next"] == alone.greedy(prompt, 9)
        assert played.tokens["long"][-30:] == alone.greedy([4], 60)[-30:]


def test_prefixes_of_different_salts_and_adapters_are_not_mixed(make_lively: Any, play: Any, shrink_pool: Any) -> None:
    controller, _ = build_controller(make_lively("Llama", **HOST))
    shrink_pool(controller, least_blocks(controller))
    prompt = chats()[0]
    talk(controller, play, 1, together=False)
    before = counters(controller)["kv_host_hits"]
    stranger = NewRequest(id="s", prompt=prompt, max_tokens=2, sampling=GREEDY, cache_salt="another adapter")
    assert play(controller, [stranger]).cached["s"] == 0 and counters(controller)["kv_host_hits"] == before
    again = NewRequest(id="a", prompt=prompt, max_tokens=2, sampling=GREEDY)
    assert play(controller, [again]).cached["a"] == 32 and counters(controller)["kv_host_hits"] == before + 1


def test_a_host_that_is_too_small_for_all_chats_changes_no_token(make_lively: Any, play: Any, shrink_pool: Any) -> None:
    config = make_lively("Llama", **HOST)
    controller, ready = build_controller(config)
    assert any("blocks that leave the prefix cache go to host memory" in note for note in ready.info.manifest.notes)
    shrink_pool(controller, least_blocks(controller))
    small = controller.scheduler.connector = HostBlocks(controller.scheduler.state, 6)
    assert talk(controller, play) == expected(config)
    assert small.places.used == 0 and 0 < sum(key is not None for key in small.places._keys) <= 6


def test_settings_that_cannot_work_are_refused_with_the_fix(make_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"set infer\.prefix_cache=true too"):
        build_controller(make_config(**HOST, **{"infer.prefix_cache": False}))
    with pytest.raises(ConfigError, match=r"infer\.kv_host_memory=\d+ is more than the host has free, \d+ bytes"):
        build_controller(make_config(**{"infer.kv_host_memory": 2**60}))
    with pytest.raises(ConfigError, match="does not hold one block of all layers, which takes"):
        build_controller(make_config(**{"infer.kv_host_memory": 1e-9}))

    def refuse(self: HostDevice, count: int, nbytes: int) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(HostDevice, "pinned_buffers", refuse)
        with pytest.raises(ConfigError, match=r"no \d+ more bytes of page-locked memory \(out of memory\); set infer"):
            build_controller(make_config(**HOST))
    found = Catalog.lazy_imports
    monkeypatch.setattr(Catalog, "lazy_imports", lambda self, kind: {} if kind == "connector" else found(self, kind))
    with pytest.raises(ConfigError, match="pip install evener-offload"):
        build_controller(make_config(**HOST))


def test_blocks_whose_places_lie_one_after_another_are_one_copy(
    make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "_PIECE", 5 * 12288)
    controller, _ = build_controller(make_config("Llama", **HOST))
    mover = controller.executor.worker.mover  # type: ignore[attr-defined]
    (group,) = mover._groups
    assert mover._each == 5 * 12288 // mover.slab_bytes and group.nbytes == mover.slab_bytes
    last = mover._each  # of the first piece of memory
    part = [BlockMove(0, 1 + n, place) for n, place in enumerate((1, 2, 3, last - 1, last, last + 1, last + 3))]
    runs = list(mover._runs(group, part))
    assert [(run.start, run.stop) for run, _ in runs] == [(0, 3), (3, 5), (5, 6), (6, 7)]
    for run, memory in runs:
        memory.copy_(torch.arange(run.start, run.stop, dtype=torch.uint8).repeat_interleave(group.nbytes))
    assert [int(mover._place(move.place, group.nbytes).unique()) for move in part] == list(range(7))

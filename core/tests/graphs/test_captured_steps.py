"""Captured steps give the tokens of eager ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import IDS, write_head
from evener_constraints.compiler import GrammarCompiler
from evener_constraints.masks import GrammarMasks
from knowing_drafter import KnowingDrafter
from msgspec import structs
from step_grammar import STEPS, VOCAB, Steps, follows

from evener.config import from_overrides, to_flat
from evener.contracts.media import make_item
from evener.engine.wire.messages import Abort, LogitBias, NewRequest, Sampling
from evener.engine.worker import graphs
from evener_conformance.graph.state import MaskedState
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.device import HostDevice
from evener_conformance.reference.engine import play
from evener_generation.drafting.model_drafter import ModelDrafter
from evener_generation.drafting.speculation import Speculation

ONE_LAYER = {"num_hidden_layers": 1}
EAGER = {"infer.use_cuda_graph": False}
GREEDY = Sampling(temperature=0.0)
WARM = Sampling(temperature=1.0, top_p=0.9, top_k=50, seed=5)

PENALIZED = Sampling(temperature=0.0, repetition_penalty=0.6, frequency_penalty=0.5, presence_penalty=-1.5)
BIASED = Sampling(temperature=0.9, seed=3, bias=[LogitBias(5, 3.0), LogitBias(6, 50.0, 4), LogitBias(7, -100.0)])


def requests(count: int, *kinds: Sampling) -> list[NewRequest]:
    """Prompts and answers of different lengths."""
    return [
        NewRequest(
            id=f"r{i}", prompt=list(range(1 + 7 * i, 6 + 9 * i)), max_tokens=24 - i if i % 2 else 14 + i,
            sampling=kinds[i % len(kinds)],
        )
        for i in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "kinds",
    [*(pytest.param(k, marks=pytest.mark.slow) for k in ((GREEDY,), (WARM,), (GREEDY, WARM), (PENALIZED,))),
     (GREEDY, PENALIZED, BIASED)],
    ids=["greedy", "random", "mixed", "penalized", "all"],
)  # fmt: skip
def test_captured_and_eager_tokens_are_equal_at_every_batch_size(start: Any, kinds: tuple[Sampling, ...]) -> None:
    captured, eager = start("Llama", ONE_LAYER), start("Llama", ONE_LAYER, **EAGER)
    assert captured.play(requests(9, *kinds), every=1) == eager.play(requests(9, *kinds), every=1)
    assert set(range(1, 10)) <= set(captured.sizes)
    assert sum(r.runs for r in captured.replays) > 20
    assert eager.replays == []


def test_a_plan_has_the_block_tables_of_captured_steps(start: Any) -> None:
    captured, eager = start("Llama", ONE_LAYER), start("Llama", ONE_LAYER, **EAGER)
    captured.play(requests(3, GREEDY))
    own = captured.worker.runner.tables.__dict__["captured_blocks"].nbytes
    planned = [run.worker.facts.info.memory.tables for run in (captured, eager)]
    assert planned[0] - planned[1] == own > 0


@pytest.mark.parametrize("kinds", [(GREEDY,), (WARM, GREEDY)], ids=["all", "some"])
def test_steps_with_masks_are_captured_too(start: Any, kinds: tuple[Sampling, ...]) -> None:
    settings = {**ONE_LAYER, "vocab_size": VOCAB}
    captured, eager = start("Llama", settings), start("Llama", settings, **EAGER)
    for run in (captured, eager):
        run.controller.scheduler.grammars = GrammarMasks(GrammarCompiler(Steps))
    masked = [structs.replace(kinds[0], grammar=STEPS), *kinds[1:]]
    assert captured.play(requests(9, *masked), every=1) == eager.play(requests(9, *masked), every=1)
    assert all(follows(captured.tokens[f"r{i}"]) for i in range(0, 9, len(masked)))
    assert any(key.masked for key in captured.worker.graphs._captured) and sum(r.runs for r in captured.replays) > 20


class _Passed:
    """An event of a device that computes at once."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...


def test_steps_with_masks_are_equal_where_the_host_writes_into_page_locked_memory(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def pinned(device: HostDevice, count: int, nbytes: int) -> list[torch.Tensor]:
        asked.append(nbytes)
        return [torch.full((nbytes,), 113, dtype=torch.uint8) for _ in range(count)]

    settings = {**ONE_LAYER, "vocab_size": VOCAB}
    monkeypatch.setattr(HostDevice, "pinned_buffers", pinned)
    monkeypatch.setattr(HostDevice, "new_event", lambda device: _Passed())
    captured, eager = start("Llama", settings), start("Llama", settings, **EAGER)
    for run in (captured, eager):
        run.controller.scheduler.grammars = GrammarMasks(GrammarCompiler(Steps))
    kinds = (structs.replace(WARM, grammar=STEPS), GREEDY)
    assert captured.play(requests(9, *kinds), every=1) == eager.play(requests(9, *kinds), every=1)
    assert len(asked) > 3 and any(key.masked for key in captured.worker.graphs._captured)


#: One request after another, so that each prompt is a step of its own. Of 40 tokens, a step before computes 32.
LENGTHS = (2, 15, 16, 17, 24, 31, 32, 40)


def prompt_replays(run: Any) -> int:
    """How often a prompt was replayed."""
    captured = {} if run.worker.graphs is None else run.worker.graphs._captured
    return sum(step.replays[0].runs for key, step in captured.items() if key.samples and step)


@pytest.mark.parametrize(
    "kind", [*(pytest.param(k, marks=pytest.mark.slow) for k in (GREEDY, WARM, PENALIZED)), BIASED],
    ids=["greedy", "random", "penalized", "biased"],
)  # fmt: skip
@pytest.mark.parametrize("family", ["Llama", pytest.param("Gemma3", marks=pytest.mark.slow)])
def test_short_prompts_that_come_alone_are_captured_and_their_tokens_are_equal(
    start: Any, family: str, kind: Sampling
) -> None:
    played = [start(family, **options) for options in ({}, EAGER)]
    for run in played:
        for n in LENGTHS:
            run.play([NewRequest(id=f"r{n}", prompt=list(range(3, 3 + n)), max_tokens=3, sampling=kind)])
    captured, eager = played
    assert captured.tokens == eager.tokens
    # Blocks of earlier prompts are found again, so that prompts of different lengths have few tokens left.
    # The one of two tokens has one left, and is a decode step.
    assert prompt_replays(captured) >= len(LENGTHS) - 1 and prompt_replays(eager) == 0


def test_a_prompt_with_a_mask_is_captured(start: Any) -> None:
    settings = {**ONE_LAYER, "vocab_size": VOCAB}
    captured, eager = start("Llama", settings), start("Llama", settings, **EAGER)
    for run in (captured, eager):
        run.controller.scheduler.grammars = GrammarMasks(GrammarCompiler(Steps))
        for n in (5, 21):
            masked = structs.replace(WARM, grammar=STEPS)
            run.play([NewRequest(id=f"r{n}", prompt=list(range(n)), max_tokens=5, sampling=masked)])
    assert captured.tokens == eager.tokens and all(map(follows, captured.tokens.values()))
    assert prompt_replays(captured) == 2


@pytest.mark.parametrize(
    "kind", [*(pytest.param(k, marks=pytest.mark.slow) for k in (GREEDY, WARM)), PENALIZED],
    ids=["greedy", "random", "penalized"],
)  # fmt: skip
def test_steps_of_one_request_with_drafts_are_captured(start: Any, kind: Sampling) -> None:
    messages = [NewRequest(id=f"r{n}", prompt=list(range(3, 3 + n)), max_tokens=16, sampling=kind) for n in (5, 20)]
    plain = start("Llama", **EAGER)
    for message in messages:
        plain.play([message])
    KnowingDrafter.answers = [[*m.prompt, *plain.tokens[m.id]] for m in messages]
    drafted = start("Llama")
    drafted.controller.scheduler.drafts = Speculation(KnowingDrafter, 4, max_samples=9, vocabulary=10**9)
    for message in messages:
        drafted.play([message])
    assert drafted.tokens == plain.tokens
    steps = sum(step.replays[0].runs for key, step in drafted.worker.graphs._captured.items() if key.samples > 1)
    assert 6 <= steps < 24, "several steps with drafts, and fewer than tokens"


@pytest.mark.parametrize("head", [False, True], ids=["mtp", "eagle"])
def test_steps_are_captured_while_the_layer_that_follows_the_others_rests(
    start: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, head: bool
) -> None:
    shape = {"num_hidden_layers": 2, "first_k_dense_replace": 9, "num_nextn_predict_layers": 1, "vocab_size": 11,
             "attention_bias": False}  # fmt: skip
    family, drafter = ("Glm4Moe", {"infer.drafter": "mtp"})
    if head:
        family, shape = "Llama", {"num_hidden_layers": 2, "vocab_size": 11, "tie_word_embeddings": False}
    messages = [NewRequest(id=f"r{i}", prompt=[1 + i, 2, 3], max_tokens=40, sampling=GREEDY) for i in range(3)]
    plain = start(family, shape)
    if head:
        folder = write_head(tmp_path / "head", plain.worker.assembly.config.config.model, "speculators", **{IDS: [1]})
        drafter = {"infer.draft_model": str(folder)}
    drafted = start(family, shape, **drafter)
    chain = drafted.worker.drafter
    monkeypatch.setattr((chain._drafter if head else chain)._rest, "_patience", 2)
    drafts = drafted.controller.scheduler.drafts = Speculation(ModelDrafter, 4, max_samples=18, vocabulary=10**9)
    begin = drafts.begin
    monkeypatch.setattr(drafts, "begin", lambda *given: (
        begin(*given), setattr(drafts, "on", drafted.controller.scheduler.stats.steps < 10))[1])  # fmt: skip
    assert drafted.play(messages) == plain.play(messages)
    stats = drafted.controller.scheduler.stats
    assert stats.drafted_tokens > 6 and 12 < sum(r.runs for r in drafted.replays) < stats.steps * 2


@pytest.mark.parametrize(
    "kinds", [pytest.param((GREEDY,), marks=pytest.mark.slow), (GREEDY, WARM)], ids=["all", "some"]
)
def test_steps_of_a_draft_model_are_captured(start: Any, kinds: tuple[Sampling, ...]) -> None:
    settings = {**ONE_LAYER, "vocab_size": VOCAB}
    plain = start("Llama", settings, **EAGER)
    drafted = start("Llama", settings, **{"infer.draft_model": plain.worker.assembly.config.config.model})
    for run in (plain, drafted):
        run.controller.scheduler.grammars = GrammarMasks(GrammarCompiler(Steps))
    drafted.controller.scheduler.drafts = Speculation(ModelDrafter, 4, max_samples=18, vocabulary=10**9)
    messages = requests(6, *kinds)
    messages[4] = structs.replace(messages[4], sampling=structs.replace(kinds[0], grammar=STEPS))
    assert drafted.play(messages, every=1) == plain.play(messages, every=1)
    assert drafted.controller.scheduler.stats.accepted_tokens > 0
    captured = drafted.worker.drafter.graphs._captured
    assert sum(step.replays[0].runs for step in captured.values()) > 20


def test_a_bounded_number_of_kinds_of_prompts_is_captured(
    start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(graphs, "MAX_PROMPT_CAPTURES", 1)
    run, eager = start("Llama", ONE_LAYER), start("Llama", ONE_LAYER, **EAGER)
    for each in (run, eager):
        for n in (5, 20, 31):
            each.play([NewRequest(id=f"r{n}", prompt=list(range(n, 2 * n)), max_tokens=3, sampling=GREEDY)])
    assert run.tokens == eager.tokens
    made = [key for key, step in run.worker.graphs._captured.items() if key.samples and step]
    assert len(made) == 1 and "1 kinds of such steps are captured already" in caplog.text


def test_prompts_run_eagerly_where_a_state_provider_captures_decode_steps_only(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MaskedState, "graph", "uniform_decode")
    run = start("Llama", ONE_LAYER)
    run.play(requests(1, GREEDY))
    assert run.replays and prompt_replays(run) == 0
    assert "decode steps of up to 9 rows are captured by graphs" in run.notes


def test_a_replayed_prompt_writes_only_to_its_own_blocks_and_to_the_null_block(start: Any) -> None:
    run = start("Llama", ONE_LAYER)
    run.play([NewRequest(id="first", prompt=list(range(20)), max_tokens=1, sampling=GREEDY)])
    runs, pool = prompt_replays(run), run.worker.pool
    run.controller.handle([NewRequest(id="a", prompt=[7] * 20, max_tokens=9, sampling=GREEDY)])
    before = pool.clone()
    run.controller.step()
    [request] = run.controller.scheduler.running
    changed = {int(b) for b in (pool != before).any(-1).any(0).nonzero()}
    assert prompt_replays(run) > runs and changed <= {0, *(b for blocks in request.table.blocks for b in blocks)}
    assert len(changed) > 1


def test_windows_and_several_groups_are_captured_too(start: Any) -> None:
    captured, eager = start("Gemma3"), start("Gemma3", **EAGER)
    messages = [NewRequest(id=f"r{i}", prompt=[3 + i] * 20, max_tokens=20 + i, sampling=GREEDY) for i in range(3)]
    assert captured.play(messages, every=2) == eager.play(messages, every=2)
    assert captured.replays and len(captured.worker.assembly.geometry.groups) > 1


def test_replays_are_correct_across_arrivals_finishes_and_aborts(start: Any) -> None:
    messages = requests(12, GREEDY, WARM)
    played = [start("Llama", ONE_LAYER, **options) for options in ({}, EAGER)]
    for run in played:
        run.play(messages, every=2, aborts={"r3": 2, "r8": 4})
        assert run.ends["r3"] == run.ends["r8"] == "abort"
        assert run.controller.scheduler.state.pool.used == 0
    captured, eager = played
    assert captured.tokens == eager.tokens


def test_several_groups_are_replayed_across_forks_arrivals_and_aborts_in_the_middle_of_blocks(start: Any) -> None:
    prompt = [3 + 5 * i for i in range(19)]
    forks = [NewRequest(id=f"f{i}", prompt=prompt, max_tokens=40 - 5 * i, sampling=structs.replace(WARM, seed=i),
                        fork_of="f0" if i else "") for i in range(3)]  # fmt: skip
    later = [structs.replace(m, max_tokens=25 + i) for i, m in enumerate(requests(4, GREEDY, WARM))]
    captured, eager = start("Gemma3"), start("Gemma3", **EAGER)
    for run in (captured, eager):
        run.controller.handle(forks)
        run.play(later, every=3, aborts={"f1": 9, "r0": 6})
        assert run.ends["f1"] == run.ends["r0"] == "abort" and run.controller.scheduler.stats.forks == 2
        del run.tokens["f1"], run.tokens["r0"]  # what an abort cuts off depends on the time
    assert captured.tokens == eager.tokens and sum(r.runs for r in captured.replays) > 20


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_a_request_that_goes_on_at_another_ones_place_reads_its_own_blocks(start: Any, family: str) -> None:
    captured, eager = start(family), start(family, **EAGER)
    captured.controller.handle([NewRequest(id="a", prompt=[5, 6, 7], max_tokens=50, sampling=GREEDY)])
    for _ in range(8):
        captured.controller.step()
    captured.controller.handle([Abort("a")])
    while not captured.controller.idle:
        captured.controller.step()
    # Its first token is computed in the slot and at the place where the other one would have gone on.
    _, slots, [place] = captured.worker.runner.tables.expected
    message = NewRequest(id="b", prompt=list(range(40, 40 + place)), max_tokens=9, sampling=GREEDY)
    assert captured.play([message]) == eager.play([message])
    assert slots == [0] and place % captured.worker.assembly.geometry.block_size


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_captures_serve_any_number_of_plans_in_flight(start: Any, depth: int) -> None:
    runs = [start("Llama", ONE_LAYER, **{"infer.depth": depth}, **options) for options in ({}, EAGER)]
    a, b = (run.play(requests(5, GREEDY, WARM), every=1) for run in runs)
    assert a == b and runs[0].replays


def test_log_probabilities_run_eagerly(start: Any) -> None:
    run = start("Llama", ONE_LAYER)
    before = sum(r.runs for r in run.replays)
    run.play([NewRequest(id="a", prompt=[5, 6], max_tokens=4, sampling=Sampling(temperature=0.0, logprobs=2))])
    assert sum(r.runs for r in run.replays) == before


def test_plain_requests_replay_the_plain_capture_after_penalized_ones(start: Any) -> None:
    run = start("Llama", ONE_LAYER)
    run.play(requests(3, GREEDY))
    run.play([NewRequest(id="alone", prompt=[5, 6], max_tokens=6, sampling=GREEDY)])
    made = list(run.replays)
    run.play([NewRequest(id="p", prompt=[5, 6], max_tokens=6, sampling=PENALIZED)])
    assert len(run.replays) > len(made)
    before = {id(replay): replay.runs for replay in run.replays}
    run.play([NewRequest(id="q", prompt=[5, 6], max_tokens=6, sampling=GREEDY)])
    grown = [replay for replay in run.replays if replay.runs > before.get(id(replay), 0)]
    assert grown and all(replay in made for replay in grown)


def test_a_device_that_needs_updates_gets_one_before_each_run(start: Any) -> None:
    run = start("Llama", ONE_LAYER, **{"graphs.update": True})
    eager = start("Llama", ONE_LAYER, **EAGER)
    assert run.play(requests(3, GREEDY)) == eager.play(requests(3, GREEDY))
    assert run.replays and all(r.updates == r.runs > 0 for r in run.replays)


def test_no_more_is_captured_than_the_device_holds_and_the_rest_runs_eagerly_and_the_log_says_so(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run, eager = start("Llama", ONE_LAYER, **{"graphs.max_captures": 3}), start("Llama", ONE_LAYER, **EAGER)
    assert run.play(requests(9, GREEDY, WARM), every=1) == eager.play(requests(9, GREEDY, WARM), every=1)
    assert len(run.replays) == 3
    notes = [record.getMessage() for record in caplog.records if "eagerly" in record.getMessage()]
    why = "recording host holds 3 captures at once, and such a step takes 1"
    assert f"greedy decode of 2 rows cannot be captured and runs eagerly, which is slower: {why}" in notes
    assert len(notes) == len(set(notes))


def test_padding_writes_only_to_the_null_block_and_the_spare_row(start: Any) -> None:
    run = start("Llama", ONE_LAYER)
    tables, pool = run.worker.runner.tables, run.worker.pool
    held = run.controller.scheduler.state.pool.count
    # Nobody has these: each step may change blocks and rows of its own requests only.
    run.controller.handle(requests(3, GREEDY))
    run.controller.step()
    used = {b for r in run.controller.scheduler.running for blocks in r.table.blocks for b in blocks}
    free = [b for b in range(1, held) if b not in used]
    slots = [s for s in range(9) if s not in {r.slot for r in run.controller.scheduler.running}]
    pool[:, free] = 0x5A
    tables.tokens[slots] = 77
    for _ in range(4):
        run.controller.step()
    later = {b for r in run.controller.scheduler.running for blocks in r.table.blocks for b in blocks}
    untouched = [b for b in free if b not in later]
    assert run.replays and torch.all(pool[:, untouched] == 0x5A) and torch.all(tables.tokens[slots] == 77)
    assert not tables.blocks[9].any(), "the spare row has the null block only"


def test_the_manifest_says_that_steps_are_captured(start: Any) -> None:
    run = start("Llama", ONE_LAYER)
    assert [n for n in run.notes if "captured" in n] == [
        "decode steps of up to 9 rows and single prompts of up to 32 tokens are captured by graphs"
    ]


def test_the_manifest_says_why_steps_run_eagerly(start: Any) -> None:
    run = start("Llama", ONE_LAYER, **{"infer.attn_type": "ref"})
    assert "steps run eagerly: reference cannot be captured" in run.notes
    run.play(requests(2, GREEDY))
    assert run.replays == []


def test_without_the_option_nothing_is_captured_or_logged(start: Any) -> None:
    run = start("Llama", ONE_LAYER, **EAGER)
    assert not any("captured" in n for n in run.notes)


def test_a_decode_step_with_media_rows_runs_eagerly(start: Any) -> None:
    captured, eager = start("Llama", ONE_LAYER), start("Llama", ONE_LAYER, **EAGER)
    rows = torch.randn(2, 3, captured.worker.assembly.model.hidden_size, generator=torch.Generator().manual_seed(0))
    # Of a prompt that is cached but for its last token, that one is computed alone, and a picture ends with it.
    messages = [
        NewRequest(id=name, prompt=[*range(14), 9, 9, 9], max_tokens=6, sampling=GREEDY, media=[make_item(14, each)])
        for name, each in (("a", rows[0].numpy()), ("b", rows[1].numpy()), ("again", rows[0].numpy()))
    ]
    plans = []
    submit = captured.controller.executor.submit
    captured.controller.executor.submit = lambda plan: (plans.append(plan), submit(plan))[1]
    for message in messages:
        captured.play([message])
        eager.play([message])
    assert captured.tokens == eager.tokens and captured.tokens["a"] == captured.tokens["again"]
    assert any(plan.counts == [1] and plan.media for plan in plans) and captured.replays


@pytest.mark.parametrize(
    "kinds", [pytest.param((GREEDY,), marks=pytest.mark.slow), (GREEDY, WARM)], ids=["greedy", "mixed"]
)
def test_every_stage_of_a_pipeline_replays_its_part(start: Any, kinds: tuple[Sampling, ...]) -> None:
    alone = start("Llama", **EAGER)
    flat = to_flat(alone.worker.assembly.config.config)
    flat |= {"infer.use_cuda_graph": True, "infer.pp_size": 2, "infer.depth": 3}
    with rank_threads(from_overrides(flat.pop("model"), flat)) as (controller, stages):
        messages = requests(9, *kinds)
        played = play(controller, messages, arrivals={message.id: i for i, message in enumerate(messages)})
        assert played.tokens == alone.play(messages, every=1)
        for worker in stages.workers:
            assert sum(replay.runs for replay in worker.assembly.device.capture.replays) > 20
        # Prompts that come alone.
        after = [structs.replace(message, id=f"after-{message.id}", max_tokens=2) for message in messages[:3]]
        played = play(controller, after, arrivals={message.id: 9 * i for i, message in enumerate(after)})
        alone.play(after, every=9)
        assert played.tokens == {message.id: alone.tokens[message.id] for message in after}
        assert all(any(key.samples for key in worker.graphs._captured) for worker in stages.workers)

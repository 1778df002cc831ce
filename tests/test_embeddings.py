"""Vectors of texts equal transformers' last hidden states, pooled, however a text is chunked and cached."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from evener_pooling.settings import choose_pooling
from family_oracles import make_transformers
from safetensors.torch import load_file, save_file
from served import Served

from evener import LLM, SamplingParams
from evener.async_llm import AsyncLLM
from evener.config import from_overrides
from evener.contracts.architecture import Architecture
from evener.contracts.pooling import PoolingRequest
from evener.engine.processes.start import build_controller
from evener.engine.wire import pooling
from evener.engine.wire.messages import NewRequest, Sampling, Tokens
from evener.errors import ArchitectureError, CheckpointError, ConfigError, ContextLengthError, RequestError
from evener.loading.checkpoint import open_checkpoint
from evener.plugins.catalog import Catalog, LazyImport
from evener_conformance.naive.model import find_architecture
from evener_conformance.tiny_tokenizer import write_tiny_tokenizer

SMALL = {"dtype": "float32", "infer.max_reqs": 4, "infer.max_seq_len": 128, "infer.step_tokens": 24,
         "infer.threads": 1, "infer.kv_memory": 2**22}  # fmt: skip
EMBED = {"infer.task": "embed", **SMALL}
#: One of one token, one that fills the context, two that fill one step between them.
PROMPTS = [[5], [7 * i % 190 + 1 for i in range(128)], [3, 1, 4, 1, 5, 9], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9]]
POOLED: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "last": lambda rows: rows[-1], "mean": lambda rows: rows.mean(0), "cls": lambda rows: rows[0],
}  # fmt: skip

Oracle = Callable[[Sequence[int]], torch.Tensor]


def save(folder: Path, family: str) -> Oracle:
    """A random model of transformers in ``folder``, and what its last norm gives for ids [n]: float32 [n, hidden]."""
    model = make_transformers(find_architecture(f"{family}ForCausalLM").tiny_config(), folder)

    def rows(ids: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            last: torch.Tensor = model.model(torch.tensor([list(ids)])).last_hidden_state[0]
        return last

    return rows


@pytest.fixture(
    scope="module", params=["Qwen3", "Gemma2", *(pytest.param(f, marks=pytest.mark.slow) for f in ("Llama", "Phi"))]
)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Oracle]:
    folder = tmp_path_factory.mktemp("model") / request.param
    return folder, save(folder, request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Oracle]:
    folder = tmp_path_factory.mktemp("model") / "qwen"
    return folder, save(folder, "Qwen3")


@pytest.fixture
def copy(qwen: tuple[Path, Oracle], tmp_path: Path) -> Path:
    """A folder to change."""
    return Path(shutil.copytree(qwen[0], tmp_path / "copy"))


def unit(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(rows, dim=-1)


def as_sentence_transformers(folder: Path, modules: Sequence[str], **pooling: Any) -> None:
    """The files with which sentence-transformers saves a model."""
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    listed = [
        {"idx": i, "path": paths.get(kind, f"{i}_{kind}"), "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))


@pytest.mark.parametrize("pooling", POOLED)
def test_vectors_are_transformers_hidden_states_pooled(saved: tuple[Path, Oracle], pooling: str) -> None:
    folder, rows = saved
    with LLM(folder, **EMBED, **{"infer.pooling": pooling}) as llm:
        found = llm.embed(PROMPTS)
    assert [each.prompt_token_ids for each in found] == PROMPTS
    for each, prompt in zip(found, PROMPTS, strict=True):
        wanted = unit(POOLED[pooling](rows(prompt)))
        torch.testing.assert_close(torch.tensor(each.vector), wanted, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("ranks", [{"infer.tp_size": 2}, {"infer.pp_size": 2}])
def test_ranks_that_share_a_model_make_the_same_vectors(tmp_path: Path, ranks: dict[str, int]) -> None:
    rows = save(tmp_path, "Llama")
    with LLM(tmp_path, **EMBED, **ranks, **{"infer.pooling": "mean", "executor": "inline"}) as llm:
        found = llm.embed(PROMPTS)
    for each, prompt in zip(found, PROMPTS, strict=True):
        torch.testing.assert_close(torch.tensor(each.vector), unit(rows(prompt).mean(0)), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("pooling", POOLED)
def test_texts_with_a_cached_beginning_have_the_same_vectors(
    qwen: tuple[Path, Oracle], pooling: str, depth: int
) -> None:
    folder, rows = qwen
    prompt = PROMPTS[1][:100]
    with LLM(folder, **EMBED, **{"infer.pooling": pooling, "infer.depth": depth}) as llm:
        first, again = (llm.embed(prompt)[0] for _ in range(2))
        (longer,) = llm.embed([*prompt, 9, 9])
    # All but the last token's state may come from the cache only if no other token's row is wanted.
    assert (again.num_cached_tokens > 0) == (longer.num_cached_tokens > 0) == (pooling == "last")
    assert first.num_cached_tokens == 0
    for each in (first, again, longer):
        wanted = unit(POOLED[pooling](rows(each.prompt_token_ids)))
        torch.testing.assert_close(torch.tensor(each.vector), wanted, atol=2e-6, rtol=1e-5)


def test_vectors_in_bfloat16_point_where_those_in_float32_do(qwen: tuple[Path, Oracle]) -> None:
    with LLM(qwen[0], **{**EMBED, "dtype": "bfloat16"}) as llm:
        (found,) = llm.embed(PROMPTS[2])
    assert found.vector.dtype == "float32"
    assert float(torch.tensor(found.vector) @ unit(qwen[1](PROMPTS[2])[-1])) > 0.995


def test_shorter_vectors_are_the_first_numbers_normalized(qwen: tuple[Path, Oracle], copy: Path) -> None:
    with LLM(qwen[0], **EMBED) as llm:
        (whole,), (cut,) = llm.embed(PROMPTS[2]), llm.embed(PROMPTS[2], dimensions=7)
        torch.testing.assert_close(torch.tensor(cut.vector), unit(torch.tensor(whole.vector[:7])))
        for wrong in (0, 51, -1):
            with pytest.raises(RequestError, match=f"dimensions is {wrong}, .* from 1 to 50"):
                llm.embed(PROMPTS[2], dimensions=wrong)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "matryoshka_dimensions": [16, 32]}))
    with LLM(copy, **EMBED) as llm:
        assert llm.embed(PROMPTS[2], dimensions=16)[0].vector.shape == (16,)
        with pytest.raises(RequestError, match=r"dimensions is 17, .* one of \[16, 32\]"):
            llm.embed(PROMPTS[2], dimensions=17)


def test_a_model_of_sentence_transformers_is_recognized_and_pooled_as_it_says(
    qwen: tuple[Path, Oracle], copy: Path
) -> None:
    modes = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    as_sentence_transformers(copy, ["Transformer", "Pooling"], **modes)
    with LLM(copy, **SMALL) as llm:
        (found,) = llm.embed(PROMPTS[2])
    torch.testing.assert_close(torch.tensor(found.vector), qwen[1](PROMPTS[2]).mean(0), atol=2e-6, rtol=1e-5)


def test_a_model_saved_without_its_head_and_its_prefix_loads_and_embeds(qwen: tuple[Path, Oracle], copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    assert all(name.startswith("model.") for name in tensors)
    save_file({name.removeprefix("model."): each for name, each in tensors.items()}, copy / "model.safetensors")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3Model"]}))
    with LLM(copy, **SMALL) as llm:
        (found,) = llm.embed(PROMPTS[2])
    torch.testing.assert_close(torch.tensor(found.vector), unit(qwen[1](PROMPTS[2])[-1]), atol=2e-6, rtol=1e-5)


def test_unsupported_tasks_of_a_model_are_refused_with_the_fix(qwen: tuple[Path, Oracle]) -> None:
    with LLM(qwen[0], **EMBED) as llm, pytest.raises(RequestError, match=r"embeds texts .* infer\.task=generate"):
        llm.generate([PROMPTS[2]], SamplingParams(detokenize=False))
    with LLM(qwen[0], **SMALL) as llm, pytest.raises(RequestError, match=r"generates text; .* infer\.task=embed"):
        llm.embed(PROMPTS[2])


def test_a_way_to_pool_is_refused_for_a_model_that_does_not_embed(qwen: tuple[Path, Oracle]) -> None:
    with pytest.raises(ConfigError, match=r"infer\.pooling=mean is for a model that embeds: set infer\.task=embed"):
        LLM(qwen[0], **SMALL, **{"infer.pooling": "mean"})


def test_a_text_longer_than_the_context_is_refused_before_any_runs(qwen: tuple[Path, Oracle]) -> None:
    with LLM(qwen[0], **EMBED) as llm:
        with pytest.raises(ContextLengthError, match="the prompt has 129 tokens, which do not fit the context of 128"):
            llm.embed([PROMPTS[2], [1] * 129])
        assert len(llm.embed(PROMPTS)) == len(PROMPTS)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"modules": ["Transformer", "Pooling", "Dense"], "pooling_mode": "mean"}, CheckpointError, "'Dense'"),
        ({"modules": ["Transformer", "Pooling"], "pooling_mode_max_tokens": True}, CheckpointError, "max_tokens"),
        ({"modules": ["Transformer", "Pooling"]}, CheckpointError, r"pools by \[\]"),
        ({"modules": ["Transformer", "Pooling"], "pooling_mode": ["mean", "cls"]}, CheckpointError, "pools by"),
        ({"text": "[" * 100_000}, CheckpointError, "is no list of modules"),
        ({"text": json.dumps([{}] * 17)}, CheckpointError, "is no list of modules"),
        ({"text": '[{"type": "x.Pooling", "path": "../x"}]'}, CheckpointError, r"names the folder '\.\./x'"),
        ({"config": {"use_bidirectional_attention": True}}, ArchitectureError, "attention to later tokens"),
        ({"config": {"is_causal": False}}, ArchitectureError, "attention to later tokens"),
    ],
)
def test_a_folder_that_wants_what_we_do_not_compute_or_is_broken_is_refused(
    copy: Path, change: dict[str, Any], error: type[Exception], match: str
) -> None:
    if "modules" in change:
        as_sentence_transformers(copy, change.pop("modules"), **change)
    elif "text" in change:
        (copy / "modules.json").write_text(change["text"])
    else:
        config = json.loads((copy / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps({**config, **change["config"]}))
    with pytest.raises(error, match=match):
        LLM(copy, **EMBED)


@pytest.mark.parametrize(
    ("task", "registered", "listed", "refused"),
    [
        ("embed", True, False, True), ("score", True, False, True), ("auto", False, False, True),
        ("auto", True, True, True), ("auto", True, False, False), ("generate", False, True, False),
    ],
)  # fmt: skip
def test_without_a_package_that_reads_such_folders_a_model_generates_or_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: Any, registered: bool, listed: bool, refused: bool
) -> None:
    monkeypatch.setattr("evener_pooling.settings.installed_catalog", Catalog)
    (tmp_path / "config.json").write_text('{"architectures": ["MyForCausalLM"]}')
    if listed:
        (tmp_path / "modules.json").write_text("[]")
    asked = PoolingRequest(open_checkpoint(str(tmp_path)), task, "auto", registered), Architecture
    if refused:
        with pytest.raises(ConfigError, match=r"pip install evener-models, or set infer\.task=generate"):
            choose_pooling(*asked)
    else:
        assert choose_pooling(*asked) is None
    # The same models without the package that asks the readers.
    monkeypatch.setattr("evener.engine.wire.pooling.installed_catalog", Catalog)
    if refused:
        with pytest.raises(ConfigError, match=r"pip install evener-generation, or set infer\.task=generate"):
            pooling.choose_pooling(*asked)
    else:
        assert pooling.choose_pooling(*asked) is None


def test_without_the_package_that_pools_texts_a_generating_model_says_that_it_embeds_none(
    qwen: tuple[Path, Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    announced = Catalog.lazy_imports
    monkeypatch.setattr(
        Catalog, "lazy_imports", lambda self, kind: {} if kind == "part of pooling" else announced(self, kind)
    )
    with LLM(qwen[0], **SMALL) as llm:
        assert llm.generate([[1, 2]], SamplingParams(max_tokens=1, detokenize=False))[0].finished
        with pytest.raises(RequestError, match=r"generates text; to have one that embeds texts .* infer\.task=embed"):
            llm.embed([1, 2])
    with pytest.raises(ConfigError, match="pip install evener-generation"):
        LLM(qwen[0], **SMALL, **{"infer.pooling": "mean"})
    with pytest.raises(ConfigError, match=r"pip install evener-generation, or set infer\.task=generate"):
        LLM(qwen[0], **EMBED)


def test_a_task_that_no_reader_knows_for_a_folder_is_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = LazyImport(
        kind="pooling reader", name="silent", path="builtins:_", package="silent", distribution="silent"
    )
    monkeypatch.setattr(LazyImport, "load", lambda self: lambda request: None)
    monkeypatch.setattr(Catalog, "lazy_imports", lambda self, kind: {"silent": reader})
    files = open_checkpoint(str(copy))
    assert choose_pooling(PoolingRequest(files, "auto", "auto", True), Architecture) is None
    with pytest.raises(ConfigError, match=r"infer\.task=score asks for \(silent\); set infer\.task=generate"):
        choose_pooling(PoolingRequest(files, "score", "auto", True), Architecture)


def test_a_class_that_cannot_take_another_head_is_refused(copy: Path) -> None:
    with pytest.raises(ArchitectureError, match=r"Architecture can only generate text; set infer\.task=generate"):
        choose_pooling(PoolingRequest(open_checkpoint(str(copy)), "embed", "auto", False), Architecture)


def test_a_preempted_text_is_pooled_from_its_beginning(qwen: tuple[Path, Oracle]) -> None:
    folder, rows = qwen
    keys = {"infer.pooling": "mean", "infer.depth": 1}
    controller = build_controller(from_overrides(str(folder), {**EMBED, **keys}))[0]
    texts = {str(n): [n, *PROMPTS[1][n : n + 90]] for n in range(1, 5)}
    events = controller.handle(
        NewRequest(id=name, prompt=ids, max_tokens=1, sampling=Sampling(), whole_prompt=True)
        for name, ids in texts.items()
    )
    for _ in range(2):
        events += controller.step()
    (begun,) = controller.scheduler.running
    assert begun.id not in {event.id for event in events} and begun.computed == 48
    controller.scheduler._preempt(begun)
    while not controller.idle:
        events += controller.step()
    found = {event.id: event.pooled for event in events if isinstance(event, Tokens)}
    for name, ids in texts.items():
        vector = torch.frombuffer(bytearray(found[name]), dtype=torch.float32)
        torch.testing.assert_close(vector, rows(ids).mean(0), atol=1e-5, rtol=1e-5)


def test_many_tasks_embed_over_one_asynchronous_engine(qwen: tuple[Path, Oracle]) -> None:
    folder, rows = qwen

    async def run() -> None:
        llm = await AsyncLLM.start(from_overrides(str(folder), EMBED), "thread")
        try:
            found = await asyncio.gather(*(llm.embed(prompt, dimensions=9) for prompt in PROMPTS * 3))
            with pytest.raises(RequestError, match="dimensions is 99"):
                await llm.embed(PROMPTS[0], dimensions=99)
        finally:
            await llm.close()
        for each, prompt in zip(found, PROMPTS * 3, strict=True):
            torch.testing.assert_close(torch.tensor(each.vector), unit(rows(prompt)[-1, :9]), atol=2e-6, rtol=1e-5)

    asyncio.run(run())


def test_openais_client_gets_the_vectors_of_a_served_model(qwen: tuple[Path, Oracle], copy: Path) -> None:
    write_tiny_tokenizer(copy)
    as_sentence_transformers(copy, ["Transformer", "Pooling", "Normalize"], pooling_mode="lasttoken")
    with Served.warm(copy, *(f"{key}={value}" for key, value in SMALL.items())) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        by_default = client.embeddings.create(model=server.name, input=PROMPTS)
        as_floats = client.embeddings.create(model=server.name, input=PROMPTS, encoding_format="float", dimensions=20)
        texts = client.embeddings.create(model=server.name, input=["a", "a b"])
        with pytest.raises(openai.BadRequestError, match="this model embeds texts"):
            client.chat.completions.create(model=server.name, messages=[{"role": "user", "content": "hi"}])
        with pytest.raises(openai.BadRequestError, match="which do not fit the context of 128"):
            client.embeddings.create(model=server.name, input=[1] * 129)
    assert by_default.usage.prompt_tokens == by_default.usage.total_tokens == sum(map(len, PROMPTS))
    assert [len(each.embedding) for each in texts.data] == [50, 50]
    for prompt, whole, cut in zip(PROMPTS, by_default.data, as_floats.data, strict=True):
        row = qwen[1](prompt)[-1]
        torch.testing.assert_close(torch.tensor(whole.embedding), unit(row), atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(torch.tensor(cut.embedding), unit(row[:20]), atol=2e-6, rtol=1e-5)


@pytest.fixture(scope="module")
def smollm2(smollm2_dir: Path) -> Iterator[LLM]:
    with LLM(smollm2_dir, **{**EMBED, "infer.kv_memory": 2**26, "infer.max_seq_len": 256}) as llm:
        yield llm


@pytest.mark.slow
def test_a_real_model_embeds_as_transformers_does(smollm2: LLM, smollm2_dir: Path) -> None:
    from transformers import AutoModel

    texts = ["The capital of France is Paris.", "Der Hund bellt laut.", "word " * 100]
    found = smollm2.embed(texts)
    model = AutoModel.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    for each in found:
        with torch.inference_mode():
            last = model(torch.tensor([each.prompt_token_ids])).last_hidden_state[0, -1]
        torch.testing.assert_close(torch.tensor(each.vector), unit(last), atol=1e-5, rtol=1e-4)

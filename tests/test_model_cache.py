"""``model_cache=FOLDER``: the second start gives the first one's tokens and packs nothing; a file that was made from
anything else is not loaded, and the log says why."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from evener_model_cache.cache_file import write_cache
from evener_model_cache.cached_weights import _restore
from evener_model_cache.chosen import numbered, tensors_of
from family_oracles import make_transformers
from family_runner import SMALL
from gguf_files import write_gguf
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stored_models import SIZES, greedy, prompt
from test_gguf_end_to_end import KEYS, LAYERS, SHAPES, VOCAB, WIDTH
from test_integers_end_to_end import checkpoint as integer_checkpoint

from evener.config import from_overrides
from evener.contracts.declared import LinearWeight, Table, Weight
from evener.contracts.quant import PackedWeight, WeightPart, plain
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener.errors import ConfigError
from evener.loading.loader import load_weights
from evener.ops.reference.linear import PLAIN
from evener_conformance.naive.model import find_architecture
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.engine import play
from evener_conformance.reference.pinned_buffer_device import PinnedBufferDevice

COUNT = 8


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "evener.model_cache")
    return caplog


def random_model(folder: Path, family: str = "Qwen3") -> Path:
    config = {**find_architecture(f"{family}ForCausalLM").tiny_config(), **SIZES[family], "num_hidden_layers": 2}
    make_transformers(config, folder)
    return folder


def messages(said: pytest.LogCaptureFixture) -> str:
    found = "\n".join(each.getMessage() for each in said.records if each.name == "evener.model_cache")
    said.clear()
    return found


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("a weight was packed")


@pytest.mark.parametrize("huge", ["auto", pytest.param("off", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("family", "quant"),
    [("Qwen3", "int4"), ("Qwen3", "fp8"), ("Qwen3Moe", "q8_0"),
     *(pytest.param(*case, marks=pytest.mark.slow) for case in (("Qwen3", "q8_0"), ("Qwen3Moe", "int8")))],
)  # fmt: skip
def test_the_second_start_gives_the_same_tokens_and_packs_nothing(
    family: str, quant: str, huge: str, tmp_path: Path, said: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch, one_thread: None,
) -> None:  # fmt: skip
    folder, ids = random_model(tmp_path / "model", family), prompt(family)
    keys = {"quant": quant, "cpu.huge_pages": huge}
    wanted = greedy(folder, ids, COUNT, **keys)
    keys["model_cache"] = str(tmp_path / "cache")
    assert greedy(folder, ids, COUNT, **keys) == wanted
    assert "is not loaded: there is none yet" in (text := messages(said)) and "wrote" in text
    (file,) = (tmp_path / "cache").iterdir()
    written = file.stat().st_mtime_ns
    monkeypatch.setattr("evener_backend_cpu.segments.SegmentPacking.pack", refuse)
    assert greedy(folder, ids, COUNT, **keys) == wanted
    assert f"weights from {file.name}" in messages(said)
    assert file.stat().st_mtime_ns == written and file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("huge", ["auto", pytest.param("off", marks=pytest.mark.slow)])
def test_every_value_is_restored_bit_for_bit_and_counted_once(huge: str, tmp_path: Path, one_thread: None) -> None:
    folder = random_model(tmp_path / "model")
    keys = {**SMALL, "quant": "q4_0", "dtype": "bfloat16", "cpu.huge_pages": huge, "infer.tp_size": 2}
    keys["model_cache"] = str(tmp_path / "cache")
    held: list[dict[str, list[torch.Tensor]]] = []
    sums = []
    for _ in range(2):
        with rank_threads(from_overrides(str(folder), keys)) as (_, executor):
            a = executor.workers[1].assembly
            layouts = a.resolver.packings_by_layout
            held.append({
                each.name: [t.clone() for t in layouts[each.layout].saved(each.value) or ()]
                if isinstance(each, LinearWeight) else [each.value.clone()]
                for each in a.build.weights if not isinstance(each, Table) and each.value is not None
            })  # fmt: skip
            memory = executor.workers[1].facts.info.memory
            sums.append(memory.measured_weights + memory.measured_mapped)
    assert held[0].keys() == held[1].keys() and len(held[0]) > 10 and sums[0] == sums[1]
    for name, tensors in held[0].items():
        assert tensors and all(map(torch.equal, tensors, held[1][name])), name


def test_ranks_with_their_own_experts_have_caches_of_their_own(
    tmp_path: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    folder, ids = random_model(tmp_path / "model", "Qwen3Moe"), prompt("Qwen3Moe")
    keys = {**SMALL, "quant": "q8_0", "infer.tp_size": 2, "model_cache": str(tmp_path / "cache")}
    asked = [NewRequest(id="a", prompt=ids, max_tokens=2, sampling=Sampling(temperature=0.0))]

    def tokens(groups: int) -> list[int]:
        with rank_threads(from_overrides(str(folder), {**keys, "infer.ep_size": groups})) as (controller, _):
            return play(controller, asked).tokens["a"]

    wanted = tokens(1)
    assert tokens(2) == wanted and len(list((tmp_path / "cache").iterdir())) == 4
    messages(said)
    monkeypatch.setattr("evener_backend_cpu.segments.SegmentPacking.pack", refuse)
    assert tokens(2) == wanted
    assert messages(said).count("weights from") == 2


@pytest.mark.parametrize("kind", ["gptq 4 act", pytest.param("awq", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", [pytest.param("Qwen3", marks=pytest.mark.slow), "Qwen3Moe"])
def test_integers_of_a_checkpoint_are_kept_as_they_were_arranged(
    family: str, kind: str, tmp_path: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    one_thread: None,
) -> None:  # fmt: skip
    _, folder = integer_checkpoint(tmp_path, family, kind)
    ids, keys = prompt(family), {"model_cache": str(tmp_path / "cache")}
    wanted = greedy(folder, ids, COUNT)
    assert greedy(folder, ids, COUNT, **keys) == wanted
    monkeypatch.setattr("evener_backend_cpu.segments.SegmentPacking.pack", refuse)
    messages(said)
    assert greedy(folder, ids, COUNT, **keys) == wanted and "weights from" in messages(said)


def test_a_gguf_file_is_cached_and_its_dequantized_embedding_too(
    tmp_path: Path, said: pytest.LogCaptureFixture, one_thread: None
) -> None:
    draw = torch.Generator().manual_seed(3)
    shapes = {"token_embd": (VOCAB, WIDTH), "output_norm": (WIDTH,)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in SHAPES.items()}
    tensors = {f"{name}.weight": torch.randn(shape, generator=draw) * 0.3 for name, shape in shapes.items()}
    path = write_gguf(tmp_path / "tiny-00001-of-00001.gguf", "llama", KEYS, tensors, "Q8_0")
    ids, short = list(range(3, 20)), {"infer.max_seq_len": 64}
    keys = {"model_cache": str(tmp_path / "cache"), **short}
    wanted = greedy(path, ids, COUNT, **short)
    assert greedy(path, ids, COUNT, **keys) == wanted
    messages(said)
    assert greedy(path, ids, COUNT, **keys) == wanted
    # Embedding and head are one tensor; of each layer QKV, output, gate and up, down.
    assert f"{2 + 4 * LAYERS} weights from tiny-" in messages(said)
    os.utime(path, ns=(0, 0))
    greedy(path, ids, COUNT, **keys)
    assert f"the file {path.name} changed" in messages(said)


def test_a_device_gets_a_shared_tensor_once_through_its_page_locked_memory(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(1)
    table = torch.randn(40, 24, generator=draw)
    embedding = Weight("embedding", (40, 24), "float32", ("table",))
    part = WeightPart("table", 40, 24, plain("float32"))
    head = LinearWeight("embedding", (part,), 40, 24, "float32", layout="plain")
    other = Weight("other", (7, 3), "bfloat16", ("other",))
    embedding.value, other.value = table, torch.randn(7, 3, generator=draw).bfloat16()
    head.value = PackedWeight("plain", (40, 24), table, table.nbytes, (plain("float32"),))
    wanted = numbered([embedding, head, other])
    chosen = tensors_of(wanted, {"plain": PLAIN})
    assert len(chosen.tensors) == 2
    write_cache(tmp_path / "a", {}, chosen.tensors, chosen.weights)
    device = PinnedBufferDevice()
    made, counted = _restore(tmp_path / "a", {}, wanted, {"plain": PLAIN}, torch.device("cpu"), device)
    first, packed, last = (made[id(item)] for item in wanted.values())
    assert isinstance(packed, PackedWeight) and packed.data is first and torch.equal(packed.data, table)
    assert torch.equal(last, other.value) and device.copies == -(-table.nbytes // 64) + 1
    assert (counted.allocated, counted.mapped) == (table.nbytes + 7 * 3 * 2, 0)


def test_each_rank_has_a_file(tmp_path: Path, said: pytest.LogCaptureFixture, one_thread: None) -> None:
    folder, ids = random_model(tmp_path / "model"), prompt("Qwen3")
    keys = {**SMALL, "quant": "int4", "infer.tp_size": 2, "infer.pp_size": 2, "model_cache": str(tmp_path / "cache")}
    wanted = greedy(folder, ids, COUNT, quant="int4")
    request = NewRequest(id="a", prompt=ids, max_tokens=COUNT, sampling=Sampling(temperature=0.0))
    for number in range(2):
        with rank_threads(from_overrides(str(folder), keys)) as (controller, _):
            assert play(controller, [request]).tokens["a"] == wanted
        assert messages(said).count("weights from" if number else "wrote") == 4
    assert len(list((tmp_path / "cache").iterdir())) == 4


def test_weights_that_are_read_as_they_are_need_no_cache(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    folder = random_model(tmp_path / "model")
    greedy(folder, prompt("Qwen3"), 2, model_cache=str(tmp_path / "cache"))
    assert "nothing to keep" in messages(said) and list((tmp_path / "cache").iterdir()) == []
    # In another dtype they are converted.
    greedy(folder, prompt("Qwen3"), 2, dtype="bfloat16", model_cache=str(tmp_path / "cache"))
    assert "wrote" in messages(said)


def change_numbers(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(9)
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            tensors[name] = tensor[torch.randperm(tensor.shape[0], generator=draw)].contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def touch(folder: Path) -> None:
    os.utime(folder / "model.safetensors", ns=(0, 0))


def change_config(folder: Path) -> None:
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(saved | {"note": 1}))


def add_file(folder: Path) -> None:
    (folder / "more.json").write_text("{}")


STALE = {
    "numbers": (change_numbers, "the file model.safetensors changed"),
    "time": (touch, "the file model.safetensors changed"),
    "config": (change_config, "the file config.json changed"),
    "file": (add_file, "the file more.json is new"),
}


@pytest.mark.parametrize("case", STALE)
def test_a_stale_cache_is_not_loaded_and_says_what_changed(
    case: str, tmp_path: Path, said: pytest.LogCaptureFixture, one_thread: None
) -> None:
    folder, ids = random_model(tmp_path / "model"), prompt("Qwen3")
    keys = {"quant": "q8_0", "model_cache": str(tmp_path / "cache")}
    before = greedy(folder, ids, COUNT, **keys)
    messages(said)
    change, reason = STALE[case]
    change(folder)
    wanted = greedy(folder, ids, COUNT, quant="q8_0")
    assert (wanted != before) == (case == "numbers")
    assert greedy(folder, ids, COUNT, **keys) == wanted
    assert reason in (text := messages(said)) and "wrote" in text
    assert greedy(folder, ids, COUNT, **keys) == wanted
    assert "weights from" in messages(said) and len(list((tmp_path / "cache").iterdir())) == 1


def test_other_versions_of_packages_make_a_cache_stale(
    tmp_path: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = random_model(tmp_path / "model")
    keys: dict[str, Any] = {"quant": "q8_0", "model_cache": str(tmp_path / "cache")}
    greedy(folder, [3, 4], 1, **keys)
    messages(said)
    for target, reason in (
        ("evener_model_cache.fingerprint.core_version", "evener changed"),
        ("torch.__version__", "torch changed"),
        ("evener_model_cache.fingerprint.LAYOUT", "the layout of cache files changed"),
        ("evener_model_cache.fingerprint._code_state", "evener-backend-cpu (cpu) changed"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(target, "2.99.0" if target.endswith(("LAYOUT", "__")) else (lambda *_: "2.99.0"))
            greedy(folder, [3, 4], 1, **keys)
        assert reason in messages(said)
        greedy(folder, [3, 4], 1, **keys)
        messages(said)
    greedy(folder, [3, 4], 1, **keys, **{"formats.quant_rules": '{"re:.*down_proj": "q4_0"}'})
    assert "options of formats changed" in messages(said)


def test_other_keys_have_other_files(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    folder = random_model(tmp_path / "model")
    for more in ({"quant": "q8_0"}, {"quant": "q4_0"}, {"quant": "q8_0", "dtype": "bfloat16"}):
        greedy(folder, [3, 4], 1, model_cache=str(tmp_path / "cache"), **more)
    shutil.copytree(folder, tmp_path / "copy" / "model")
    greedy(tmp_path / "copy/model", [3, 4], 1, model_cache=str(tmp_path / "cache"), quant="q8_0")
    assert messages(said).count("there is none yet") == 4 == len(list((tmp_path / "cache").iterdir()))


def test_a_damaged_or_linked_file_is_replaced(tmp_path: Path, said: pytest.LogCaptureFixture, one_thread: None) -> None:
    folder, ids = random_model(tmp_path / "model"), prompt("Qwen3")
    keys = {"quant": "q8_0", "model_cache": str(tmp_path / "cache")}
    wanted = greedy(folder, ids, COUNT, **keys)
    (file,) = (tmp_path / "cache").iterdir()
    good = file.read_bytes()

    def cut() -> None:
        file.write_bytes(good[: len(good) // 2])

    def link() -> None:
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")

    def open_to_all() -> None:
        file.chmod(0o666)

    def rename_weight() -> None:
        with safe_open(file, framework="pt") as opened:
            name = min(json.loads(opened.metadata()["evener_model_cache"])["weights"])
        file.write_bytes(good.replace(name.encode(), b"x" * len(name)))

    def other_tensor() -> None:
        with safe_open(file, framework="pt") as opened:
            weights = json.loads(opened.metadata()["evener_model_cache"])["weights"]
        name, (number,) = next((n, w) for n, w in weights.items() if n.endswith("down_proj"))
        (other,) = next(w for n, w in weights.items() if n.endswith("o_proj"))
        before, after = (f'\\"{name}\\":[{each}]'.encode() for each in (number, other))
        assert good.count(before) == 1 and len(before) == len(after)
        file.write_bytes(good.replace(before, after))

    damages = {cut: "damaged", link: "a link", open_to_all: "others may", rename_weight: "other weights",
               other_tensor: "damaged"}  # fmt: skip
    for damage, reason in damages.items():
        messages(said)
        damage()
        assert greedy(folder, ids, COUNT, **keys) == wanted
        assert reason in (text := messages(said)) and "wrote" in text
        assert greedy(folder, ids, COUNT, **keys) == wanted and "weights from" in messages(said)
        assert file.read_bytes() == good and not file.is_symlink()


def test_a_damaged_file_is_released_before_the_checkpoint_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    folder, ids = random_model(tmp_path / "model"), prompt("Qwen3")
    keys = {"quant": "q8_0", "model_cache": str(tmp_path / "cache")}
    wanted = greedy(folder, ids, COUNT, **keys)
    (file,) = (tmp_path / "cache").iterdir()
    with safe_open(file, framework="pt") as opened:
        weights = json.loads(opened.metadata()["evener_model_cache"])["weights"]
    # The last weight names a tensor that is not there: all others are restored before that is noticed.
    name, last = max(weights.items(), key=lambda item: item[1])
    text = json.dumps(json.dumps({name: last}, separators=(",", ":"))[1:-1])[1:-1].encode()
    good = file.read_bytes()
    assert text in good
    file.write_bytes(good.replace(text, text.replace(str(last[-1]).encode() + b"]", b"9" * len(str(last[-1])) + b"]")))
    mapped: list[bool] = []

    def watched(*given: Any, **named: Any) -> Any:
        mapped.append(str(file) in Path("/proc/self/maps").read_text())
        return load_weights(*given, **named)

    monkeypatch.setattr("evener.engine.worker.weights.load_weights", watched)
    assert greedy(folder, ids, COUNT, **keys) == wanted and mapped == [False]


def test_a_cache_that_cannot_be_written_does_not_stop_a_start(
    tmp_path: Path, said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = random_model(tmp_path / "model")
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 5}))
    greedy(folder, [3, 4], 1, quant="q8_0", model_cache=str(tmp_path / "cache"))
    assert "is not written" in messages(said) and list((tmp_path / "cache").iterdir()) == []


def test_a_folder_that_is_not_ones_own_is_an_error_before_weights_are_read(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model")
    (tmp_path / "real").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="is a link or no folder"):
        build_controller(from_overrides(str(folder), {**SMALL, "model_cache": str(tmp_path / "cache")}))


def test_random_weights_are_not_kept(tmp_path: Path) -> None:
    folder = random_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"model_cache=.* load=dummy reads none: leave out one"):
        greedy(folder, [3, 4], 1, load="dummy", model_cache=str(tmp_path / "cache"))


def test_auto_is_the_users_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # XDG_CACHE_HOME would also move the compiled kernels.
    monkeypatch.setattr("evener_model_cache.cached_weights.cache_folder", lambda part: tmp_path / "user" / part)
    folder = random_model(tmp_path / "model")
    greedy(folder, [3, 4], 1, quant="q8_0", model_cache="auto")
    assert len(list((tmp_path / "user/weights").iterdir())) == 1

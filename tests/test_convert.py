"""``evener convert``: what it writes gives the tokens of the model with the same options, on any number of ranks; what
is interrupted goes on or begins again, and a result is there as a whole or not at all."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from evener_convert.command import convert, read_arguments
from evener_convert.quantized import QuantizedCheckpoint
from evener_convert.work import work_folder
from family_oracles import make_transformers
from family_runner import SMALL, prompt_of
from gguf_files import write_gguf
from safetensors import safe_open

from evener.cli.main import main
from evener.config import from_overrides
from evener.config.resolve import ResolvedValue
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener.errors import ConfigError, EvenerError
from evener.loading.checkpoint import open_checkpoint
from evener_conformance.naive.model import find_architecture
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.engine import play
from evener_inspection.explanation import explain

SIZES: dict[str, dict[str, Any]] = {
    "Qwen3": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
              "head_dim": 16, "num_hidden_layers": 2},
    "Qwen3Moe": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
                 "moe_intermediate_size": 64, "num_hidden_layers": 2},
    "DeepseekV3": {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4,
                   "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
                   "v_head_dim": 16, "moe_intermediate_size": 32},
    "GptOss": {"num_attention_heads": 4, "intermediate_size": 64},
}  # fmt: skip


def model(folder: Path, family: str = "Qwen3") -> Path:
    config = {**find_architecture(f"{family}ForCausalLM").tiny_config(), **SIZES[family]}
    make_transformers(config, folder)
    return folder


def converted(source: Path, result: Path, **keys: Any) -> Path:
    convert(from_overrides(str(source), keys), result)
    return result


def greedy(folder: Path, **keys: Any) -> list[int]:
    """Tokens after a prompt; on several ranks if ``keys`` say so."""
    prompt = prompt_of(open_checkpoint(folder).config["vocab_size"])
    request = NewRequest(id="a", prompt=prompt, max_tokens=10, sampling=Sampling(temperature=0.0))
    config = from_overrides(str(folder), {**SMALL, **keys})
    if config.infer.tp_size * config.infer.pp_size > 1:
        with rank_threads(config) as (controller, _):
            return play(controller, [request]).tokens["a"]
    return play(build_controller(config)[0], [request]).tokens["a"]


@pytest.mark.parametrize(
    ("family", "quant"),
    [("Qwen3Moe", "int8"), ("GptOss", "q4_0"),
     *(pytest.param("Qwen3", quant, marks=pytest.mark.slow) for quant in ("fp8", "q8_0", "q4_k", "auto"))],
)  # fmt: skip
def test_a_converted_model_gives_the_tokens_of_the_same_quantization_while_loading(
    family: str, quant: str, tmp_path: Path, one_thread: None
) -> None:
    source = model(tmp_path / "source", family)
    made = converted(source, tmp_path / "made", quant=quant)
    assert greedy(made) == greedy(source, quant=quant)
    assert (
        explain(from_overrides(str(made), SMALL))["packings"]
        == explain(from_overrides(str(source), {**SMALL, "quant": quant}))["packings"]
    )


@pytest.mark.parametrize(
    ("family", "tp", "pp", "quant"),
    [("Qwen3", 2, 2, "q8_0"),
     *(pytest.param(*case, marks=pytest.mark.slow) for case in (
         ("GptOss", 2, 1, "q4_0"),
         ("DeepseekV3", 2, 1, "auto"),
         ("Qwen3", 2, 1, "auto"), ("Qwen3Moe", 2, 1, "fp8"), ("GptOss", 2, 1, "auto"), ("Qwen3", 1, 2, "int8")))],
)  # fmt: skip
def test_a_split_model_gives_the_tokens_of_the_whole_one_and_each_file_has_one_ranks_part(
    family: str, tp: int, pp: int, quant: str, tmp_path: Path, one_thread: None
) -> None:
    source = model(tmp_path / "source", family)
    ranks = {"infer.tp_size": tp, "infer.pp_size": pp}
    made = converted(source, tmp_path / "made", quant=quant, **ranks)
    assert greedy(made, **ranks) == greedy(source, quant=quant, **ranks)
    sizes = [path.stat().st_size for path in sorted(made.glob("rank-*.safetensors"))]
    assert len(sizes) == tp * pp
    whole = converted(source, tmp_path / "whole", quant=quant) / "model.safetensors"
    assert max(sizes) < 0.8 * whole.stat().st_size


@pytest.mark.slow
@pytest.mark.parametrize(("family", "quant"), [("GptOss", "auto"), ("Qwen3Moe", "fp8"), ("GptOss", "q4_0")])
def test_a_split_model_whose_ranks_hold_their_own_experts(
    family: str, quant: str, tmp_path: Path, one_thread: None
) -> None:
    source, ranks = model(tmp_path / "source", family), {"infer.tp_size": 2, "infer.ep_size": 2}
    made = converted(source, tmp_path / "made", quant=quant, **ranks)
    assert greedy(made, **ranks) == greedy(source, quant=quant, **ranks)
    with pytest.raises(ConfigError, match=r"was split for infer.tp_size=2 infer.pp_size=1 infer.ep_size=2; set these"):
        greedy(made, **{"infer.tp_size": 2})
    with pytest.raises(ConfigError, match=r"infer.ep_size=2 divides experts among the infer.tp_size ranks"):
        converted(source, tmp_path / "whole", **{"infer.ep_size": 2})


def test_stages_of_a_split_model_have_the_layers_that_it_was_split_for(tmp_path: Path, one_thread: None) -> None:
    source = tmp_path / "source"
    config = {**find_architecture("Qwen3ForCausalLM").tiny_config(), **SIZES["Qwen3"], "num_hidden_layers": 3}
    make_transformers(config, source)
    stages = {"infer.pp_size": 2}
    made = converted(source, tmp_path / "made", **stages, **{"infer.pp_layer_partition": "1,2"})
    assert greedy(made, **stages) == greedy(source)
    with rank_threads(from_overrides(str(made), {**SMALL, **stages})) as (_, executor):
        info = executor.facts.info
        assert [rank.layers for rank in info.ranks] == [(0, 1), (1, 3)]
        assert info.config["infer.pp_layer_partition"] == ResolvedValue(["1", "2"], "as the checkpoint was split")
    with pytest.raises(ConfigError, match=r"was split with infer.pp_layer_partition=1,2"):
        greedy(made, **stages, **{"infer.pp_layer_partition": "2,1"})


def test_a_split_model_is_refused_for_another_number_of_ranks_and_not_converted_again(tmp_path: Path) -> None:
    made = converted(model(tmp_path / "source"), tmp_path / "made", **{"infer.tp_size": 2})
    with pytest.raises(ConfigError, match=r"was split for infer.tp_size=2 infer.pp_size=1"):
        greedy(made)
    with pytest.raises(ConfigError, match=r"was split for ranks already"):
        converted(made, tmp_path / "again")


def test_a_gguf_file_becomes_a_folder_with_its_blocks_config_and_tokenizer(tmp_path: Path, one_thread: None) -> None:
    from test_gguf_end_to_end import KEYS, LAYERS, SHAPES, VOCAB, WIDTH

    generator = torch.Generator().manual_seed(3)
    shapes = {"token_embd": (VOCAB, WIDTH), "output_norm": (WIDTH,)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(LAYERS) for name, shape in SHAPES.items()}
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    path = write_gguf(tmp_path / "tiny.gguf", "llama", KEYS, tensors, "Q8_0")
    made = converted(path, tmp_path / "made")
    keys = {"infer.max_seq_len": 64}
    assert greedy(made, **keys) == greedy(path, **keys)
    assert (made / "tokenizer.json").is_file() and (made / "tokenizer_config.json").is_file()
    # The blocks are those of the file, not quantized again.
    old = open_checkpoint(path)
    with safe_open(made / "model.safetensors", "pt") as file:
        name = "model.layers.1.mlp.down_proj.weight"
        assert torch.equal(file.get_tensor(f"{name}.q8_0"), old.tensor(name))


def test_the_files_beside_the_weights_come_along_and_the_result_says_where_it_is_from(tmp_path: Path) -> None:
    source = model(tmp_path / "source")
    beside = {"tokenizer.json": "{}", "chat_template.jinja": "hello", "generation_config.json": '{"eos_token_id": 3}',
              "tokenizer.model": "x", "modeling_own.py": "1", "LICENSE": "free", "notes.bin": "no"}  # fmt: skip
    for name, text in beside.items():
        (source / name).write_text(text)
    made = converted(source, tmp_path / "made", quant="int8")
    assert {name for name in beside if (made / name).is_file()} == beside.keys() - {"notes.bin"}
    config = json.loads((made / "config.json").read_text())
    assert config["quantization_config"]["format"] == "int-quantized" and config["vocab_size"]
    said = json.loads((made / "evener_convert.json").read_text())
    assert said["source"] == str(source) and len(said["fingerprint"]) == 64 and said["options"]["quant"] == "int8"
    assert {path.name for path in made.iterdir() if path.suffix not in (".json", ".safetensors")} == {
        "chat_template.jinja", "tokenizer.model", "modeling_own.py", "LICENSE",
    }  # fmt: skip
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["MODEL"], r"needs two paths"), (["MODEL", "THERE"], r"THERE exists; choose another name"),
        (["MODEL", "MODEL"], r"MODEL exists; choose another name: nothing is overwritten$"),
        (["MODEL", "new", "infer.max_reqs=3"], r"infer.max_reqs=3 changes nothing in a conversion"),
        (["MODEL", "new.gguf"], r"has no tokenizer.json, and a GGUF"), (["MODEL", "no/folder/new"], r"cannot write to"),
        (["MODEL", "new", "quant=q9"], r"quantization scheme 'q9'"),
        (["MODEL", "new", "infer.tp_size=3"], r"sizes that fit"), (["missing", "new"], r"does not exist"),
    ],
)  # fmt: skip
def test_an_impossible_conversion_is_refused_and_leaves_nothing(
    words: Sequence[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model(tmp_path / "MODEL")
    (tmp_path / "THERE").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EvenerError, match=message):
        convert(*read_arguments(words))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["MODEL", "THERE"]


def test_a_tensor_that_is_not_finite_ends_the_conversion_without_a_result(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = model(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = torch.inf
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(EvenerError, match=r"NaN or infinite somewhere: model.layers.1.mlp.down_proj"):
        converted(source, tmp_path / "made", quant="q8_0")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_two_processes_do_not_convert_to_one_place(tmp_path: Path) -> None:
    source = model(tmp_path / "source")
    with work_folder(tmp_path / "made", {}) as folder, pytest.raises(ConfigError, match=r"another process"):
        converted(source, tmp_path / "made")
    assert folder.name == ".made.converting" and (tmp_path / "made").is_dir()


def test_written_tensors_are_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = model(tmp_path / "source")
    expected = (converted(source, tmp_path / "whole", quant="q8_0") / "model.safetensors").read_bytes()
    monkeypatch.setattr("evener_convert.writer._DURABLE", 1)
    read, real = [], QuantizedCheckpoint.tensor

    def tensor(self: QuantizedCheckpoint, name: str) -> torch.Tensor:
        read.append(name)
        if len(read) == 9:
            raise KeyboardInterrupt
        return real(self, name)

    monkeypatch.setattr(QuantizedCheckpoint, "tensor", tensor)
    with pytest.raises(KeyboardInterrupt, match=r"kept in .*\.made\.converting: the same command goes on there"):
        converted(source, tmp_path / "made", quant="q8_0")
    assert not (tmp_path / "made").exists()
    begun = list(read)
    made = converted(source, tmp_path / "made", quant="q8_0")
    assert read[len(begun)] == begun[-1] and len(set(read)) == len(read) - 1
    assert (made / "model.safetensors").read_bytes() == expected


def test_files_that_another_conversion_left_are_not_used(tmp_path: Path, one_thread: None) -> None:
    source = model(tmp_path / "source")
    work = tmp_path / ".made.converting"
    work.mkdir()
    (work / "conversion.key").write_text("{}")
    (work / "model.safetensors").write_bytes(b"something else")
    (work / "left.json").write_text("{}")
    made = converted(source, tmp_path / "made", quant="q8_0")
    assert not (made / "left.json").exists() and greedy(made) == greedy(source, quant="q8_0")


def test_the_command_prints_what_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = model(tmp_path / "source")
    assert main(["convert", str(source), str(tmp_path / "made"), "quant=q8_0", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["files"] == 1 and said["bytes"] == (tmp_path / "made/model.safetensors").stat().st_size


@pytest.mark.slow
def test_killed_at_20_moments_it_goes_on_or_begins_again_and_the_result_is_the_same(
    smollm2_dir: Path, tmp_path: Path
) -> None:
    words = [sys.executable, "-m", "evener", "convert", str(smollm2_dir)]
    began = time.monotonic()
    subprocess.run([*words, str(tmp_path / "whole"), "quant=q8_0"], check=True, env=os.environ)
    seconds = time.monotonic() - began
    expected = (tmp_path / "whole/model.safetensors").read_bytes()
    drawn, went_on, made = random.Random(4), 0, tmp_path / "made"
    begun = tmp_path / ".made.converting"
    for moment in range(20):
        child = subprocess.Popen([*words, str(made), "quant=q8_0"])
        if moment % 4:
            time.sleep(drawn.uniform(0.2, 1) * seconds)
        else:  # however slow the machine is now: once something is written
            while child.poll() is None and not any(begun.glob("*.written")):
                time.sleep(0.01)
            time.sleep(drawn.uniform(0, 0.1) * seconds)
        child.send_signal(signal.SIGKILL)
        killed = child.wait() != 0
        assert made.exists() != killed or (made / "config.json").is_file()
        went_on += any(begun.glob("*.written"))
        if not killed:
            assert (made / "model.safetensors").read_bytes() == expected
            shutil.rmtree(made)
    if not made.exists():
        subprocess.run([*words, str(made), "quant=q8_0"], check=True)
    assert (made / "model.safetensors").read_bytes() == expected and went_on

"""What moves weights and activations on a device, with a tiny random model in float32: adapters (LoRA), sleep and new
weights with captured steps, pipeline stages on the device and on the CPU. Greedy tokens must equal the CPU's.

    python benchmarks/device_moves.py --backend cuda

Prints a line of JSON for each part, and exits with 1 if one failed or gave other tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import after_stdlib  # noqa: F401
import torch
from safetensors.torch import save_file

from evener import LLM, SamplingParams
from evener.errors import EvenerError

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
}  # fmt: skip
#: Linear weights of a layer: rows and columns.
LINEAR = {
    "self_attn.q_proj": (256, 256), "self_attn.k_proj": (128, 256), "self_attn.v_proj": (128, 256),
    "self_attn.o_proj": (256, 256), "mlp.gate_proj": (512, 256), "mlp.up_proj": (512, 256), "mlp.down_proj": (256, 512),
}  # fmt: skip
NORMS = ("input_layernorm", "post_attention_layernorm")
ADAPTED = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
PROMPTS = [[5, 6, 7, 8] * repeats for repeats in (1, 5, 20)]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
Ids = list[list[int]]


class Noise:
    """Random matrices of one seed, with rows of length about 1."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=self._generator)
        return values.mul_(scale * columns**-0.5)


def write_model(folder: Path, seed: int) -> Path:
    """A model of random weights."""
    noise, hidden, vocab = Noise(seed), CONFIG["hidden_size"], CONFIG["vocab_size"]
    tensors = {"model.norm.weight": torch.ones(hidden), "lm_head.weight": noise(vocab, hidden)}
    tensors["model.embed_tokens.weight"] = noise(vocab, hidden, 16.0)
    for layer in (f"model.layers.{number}." for number in range(CONFIG["num_hidden_layers"])):
        tensors |= {f"{layer}{norm}.weight": torch.ones(hidden) for norm in NORMS}
        tensors |= {f"{layer}{name}.weight": noise(*shape) for name, shape in LINEAR.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_adapter(folder: Path, rank: int = 8) -> Path:
    """A LoRA adapter of random weights, large enough to change tokens."""
    noise = Noise(3)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(CONFIG["num_hidden_layers"]):
        for name in ADAPTED:
            rows, columns = LINEAR[name]
            prefix = f"base_model.model.model.layers.{layer}.{name}."
            tensors |= {f"{prefix}lora_A.weight": noise(rank, columns), f"{prefix}lora_B.weight": noise(rows, rank)}
    folder.mkdir()
    modules = [name.rpartition(".")[2] for name in ADAPTED]
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 8 * rank, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def answers(llm: LLM, lora: str | None = None) -> Ids:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS, lora=lora)]


def with_adapter(model: Path, adapter: Path, backend: str) -> list[Ids]:
    """Tokens without an adapter, with one, and without again."""
    with LLM(model, backend=backend, dtype="float32", **{"infer.max_loras": 1, "infer.kv_memory": "64MiB"}) as llm:
        llm.adapters.load("one", adapter)
        return [answers(llm), answers(llm, "one"), answers(llm)]


def with_new_weights(model: Path, other: Path, backend: str) -> list[Ids]:
    """Tokens at the start, after sleep, with other weights, and with the first ones again."""
    with LLM(model, backend=backend, dtype="float32", executor="inline", **{"infer.kv_memory": "64MiB"}) as llm:
        found = [answers(llm)]
        llm.sleep()
        llm.wake_up()
        found.append(answers(llm))
        for folder in (other, model):
            llm.update_weights(folder)
            found.append(answers(llm))
        return found


def with_stages(model: Path, stages: str) -> list[Ids]:
    keys = {"infer.stages": stages, "infer.pp_size": 2, "infer.kv_memory": "64MiB", "executor": "process"}
    with LLM(model, dtype="float32", **keys) as llm:
        return [answers(llm)]


def parts(folder: Path, backend: str, stages: str) -> Iterator[tuple[str, Callable[[], list[Ids]], list[Ids]]]:
    """Each part: its name, what it does, and the tokens that it must give."""
    first, second = write_model(folder / "first", 1), write_model(folder / "second", 2)
    adapter = write_adapter(folder / "adapter")
    plain, adapted, _ = want = with_adapter(first, adapter, "cpu")
    (other,) = with_stages(second, "cpu,cpu")
    if adapted == plain or other == plain:
        raise SystemExit("adapter and weights do not change the tokens: nothing would be shown")
    yield "adapters", lambda: with_adapter(first, adapter, backend), want
    yield "new weights", lambda: with_new_weights(first, second, backend), [plain, plain, other, plain]
    yield f"stages {stages}", lambda: with_stages(first, stages), [plain]


def main(argv: Sequence[str]) -> int:
    """0 if every part gave the CPU's tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--stages", help="infer.stages of the last part; default: BACKEND,cpu")
    args = parser.parse_args(argv)
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for name, run, want in parts(Path(folder), args.backend, args.stages or f"{args.backend},cpu"):
            began, error = time.monotonic(), ""
            try:
                equal = run() == want
            except EvenerError as raised:
                equal, error = False, f"{type(raised).__name__}: {raised}"
            seconds = round(time.monotonic() - began, 1)
            print(json.dumps({"part": name, "equal": equal, "seconds": seconds, "error": error}), flush=True)
            failed = failed or not equal
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

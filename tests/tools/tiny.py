"""A small random model for a quantization tool, and what the tool says of it. Runs in the tool's own environment."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

VOCAB = 256


def tiny_model(folder: Path, kind: str = "qwen3", dtype: torch.dtype = torch.float16) -> Path:
    """A folder with a random model whose sizes all groups divide, and a tokenizer of single words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    sizes: dict[str, Any] = {
        "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 2, "vocab_size": VOCAB, "tie_word_embeddings": False, "max_position_embeddings": 512,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    if kind == "qwen3":
        sizes["head_dim"] = 64
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            # Large enough that a wrong weight changes the tokens.
            tensor.copy_(torch.randn(tensor.shape) * (0.1 if tensor.dim() == 2 else 0.05) + ("norm" in name))
    model.to(dtype).save_pretrained(folder)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCAB)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return folder


def texts(count: int = 8, length: int = 96) -> list[list[int]]:
    """Random ids to calibrate with."""
    draw = torch.Generator().manual_seed(11)
    return [torch.randint(3, VOCAB, (length,), generator=draw).tolist() for _ in range(count)]


def keep_values(folder: Path, values: Mapping[str, torch.Tensor]) -> None:
    """Save the model of ``folder``/original in float32 to ``folder``/plain, with what the tool made of it: dequantized
    weights, and weights that its checkpoint has unquantized, some of which it changes (AWQ: norms).

    Args:
        values: the tool's own dequantized weights, by name.
    """
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "original", dtype=torch.float32)
    stored: dict[str, torch.Tensor] = {}
    for file in (folder / "checkpoint").glob("*.safetensors"):
        stored |= load_file(file)
    assert values, "the tool has quantized no layer"
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(values[name] if name in values else stored[name])
    model.save_pretrained(folder / "plain")
    (folder / "plain/quantized.json").write_text(json.dumps(sorted(values)))


def write_all(version: str, cases: Mapping[str, Callable[[Path], None]]) -> None:
    """Run the cases that the command line names, or all, each with a folder of its own in the folder that it names
    first; ``written.json`` there has the tool's version, and the error of each case that failed."""
    root, wanted = Path(sys.argv[1]), sys.argv[2:]
    outcomes: dict[str, str] = {}
    for name, case in cases.items():
        if wanted and name not in wanted:
            continue
        folder = root / name
        folder.mkdir(parents=True)
        try:
            case(folder)
        except Exception as error:  # reported, and the test of the case fails
            traceback.print_exc()
            outcomes[name] = f"{type(error).__name__}: {error}"
        else:
            outcomes[name] = ""
    (root / "written.json").write_text(json.dumps({"version": version, "cases": outcomes}))

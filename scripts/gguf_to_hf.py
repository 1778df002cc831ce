"""Convert one GGUF file to a usual model folder: config, tokenizer and bf16 safetensors.

transformers reads the file (it un-permutes Llama's q and k and subtracts Gemma's 1 from the norms). This script adds
what a GGUF file lacks, and corrects what transformers 5 writes in a way that older readers misread.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from model_sources import Source
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(source: Source, gguf: Path, out: Path) -> None:
    """Write the model folder ``out`` from the file ``gguf``.

    Raises:
        ValueError: the result does not hold what ``source`` promises.
    """
    out.mkdir(parents=True, exist_ok=True)
    AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(out)
    _save_model(source, gguf, out)
    _fix_config(out)
    _fix_tokenizer(source, out)
    _write_generation_config(source, out)
    _check(source, out)


def _save_model(source: Source, gguf: Path, out: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    if source.output_is_embedding:
        _tie_to_output(model)
    model = model.to(torch.bfloat16)
    # save_pretrained refuses a model that is marked as loaded from a quantized file.
    for owner in (model, model.config):
        for name in ("hf_quantizer", "quantization_config"):
            if hasattr(owner, name):
                delattr(owner, name)
    model.config.dtype = "bfloat16"
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # it was written through a temporary file that only its owner may read


def _tie_to_output(model: Any) -> None:
    """Make the embedding a copy of the output head, which the file stores at a higher precision, and tie the two."""
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(model.get_output_embeddings().weight)
    model.config.tie_word_embeddings = True
    model.tie_weights()


def _fix_config(out: Path) -> None:
    """Write the rope base at the top level too: readers older than ``rope_parameters`` would use 10000."""
    path = out / "config.json"
    config = json.loads(path.read_text())
    rope = config["rope_parameters"]
    if "sliding_attention" in rope:
        config["rope_theta"] = rope["full_attention"]["rope_theta"]
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    else:
        config["rope_theta"] = rope["rope_theta"]
    config.pop("_model_name_or_path", None)  # the uploader's title, not a path
    _dump(path, config)


def _fix_tokenizer(source: Source, out: Path) -> None:
    path = out / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # "TokenizersBackend" is known to transformers 5 only
    config["model_max_length"] = source.max_length
    for only_here in ("backend", "is_local", "local_files_only"):
        config.pop(only_here, None)
    template = out / "chat_template.jinja"
    if template.is_file():
        config["chat_template"] = template.read_text()
    _dump(path, config)
    path = out / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    if source.nfc:
        tokenizer["normalizer"] = {"type": "NFC"}
    if source.digits:
        digits = {"type": "Digits", "individual_digits": True}
        tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, tokenizer["pre_tokenizer"]]}
    path.write_text(json.dumps(tokenizer, ensure_ascii=False))


def _write_generation_config(source: Source, out: Path) -> None:
    """Write ids only: the file has no sampling defaults, and those of the upstream repository are not known here."""
    model = json.loads((out / "config.json").read_text())
    ids: dict[str, Any] = {"bos_token_id": model.get("bos_token_id"), "eos_token_id": list(source.eos)}
    if model.get("pad_token_id") is not None:
        ids["pad_token_id"] = model["pad_token_id"]
    _dump(out / "generation_config.json", ids)


def _check(source: Source, out: Path) -> None:
    with safe_open(out / "model.safetensors", framework="pt") as weights:
        names = list(weights.keys())
        dtypes = {weights.get_slice(name).get_dtype() for name in names}
    if len(names) != source.tensors or dtypes != {"BF16"}:
        raise ValueError(
            f"{source.name}: the converted file holds {len(names)} tensors of {sorted(dtypes)}, expected "
            f"{source.tensors} of ['BF16']; install the pinned transformers with 'make install' and try again"
        )


def _dump(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")

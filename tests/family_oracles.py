"""What the families are compared with: somebody else's way to compute the same, with the same random weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors.torch import save_file

#: Token ids [n] to logits [n, vocab], float32.
Logits = Callable[[Sequence[int]], torch.Tensor]


class Oracle(Protocol):
    """Another implementation of a family.

    Attributes:
        name: what ``docs/supported-models.md`` calls it; a class of ours says the same in ``oracle``.
    """

    name: str

    def __call__(self, config: Mapping[str, Any], folder: Path) -> Logits:
        """Make a model with random weights, save it to ``folder`` as a checkpoint, and return what it computes."""


#: How the names of norms end.
NORMS = tuple(f"{name}.weight" for name in ("norm", "ln_1", "ln_2", "ln_f", "norm_1", "norm_2", "norm_f"))


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    """Weights large enough that norms, biases, windows and caps all show in the logits. Norms stay around what they
    start as: 1, or 0 where a family adds 1. A text's sums over hundreds of features get smaller ones: with attention
    scores of hundreds, rounding alone moves logits by 1e-3."""
    noise = torch.Generator().manual_seed(7)
    for name, tensor in model.named_parameters():
        random = torch.randn(tensor.shape, generator=noise)
        if name.endswith(NORMS):
            tensor.add_(0.2 * random)
        elif tensor.dim() == 1:
            tensor.copy_(0.1 * random)
        else:
            wide = tensor.shape[-1] >= 256 and "visual" not in name
            tensor.copy_((2 * tensor.shape[-1] ** -0.5 if wide else 0.25) * random)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=noise))


def make_transformers(config: Mapping[str, Any], folder: Path, **options: Any) -> Any:
    """transformers' model of a config in float32, random and saved."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    made = AutoConfig.for_model(**config)
    auto = cast("Any", AutoModelForImageTextToText if "text_config" in config else AutoModelForCausalLM)
    made._experts_implementation = "eager"  # the grouped one wants sizes that are multiples of 16 bytes
    model = auto.from_config(made, attn_implementation="eager", dtype=torch.float32).eval()
    randomise(model)
    model.save_pretrained(folder, **options)
    return model


def logits_of(model: torch.nn.Module) -> Logits:
    """What a model like transformers' gives for a sequence."""

    def run(ids: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            rows = model(torch.tensor([list(ids)]))
        logits: torch.Tensor = rows if isinstance(rows, torch.Tensor) else rows.logits
        return logits[0].float()

    return run


@dataclass(frozen=True)
class Transformers:
    """transformers' own model of the config; with ``model_type`` that of another name, for a family that shares its
    numbers."""

    model_type: str | None = None
    name = "transformers"

    def __call__(self, config: Mapping[str, Any], folder: Path) -> Logits:
        asked = {**config, "model_type": self.model_type or config["model_type"]}
        model = make_transformers(asked, folder)
        if self.model_type is not None:
            saved = json.loads((folder / "config.json").read_text())
            saved |= {key: config[key] for key in ("architectures", "model_type")}
            (folder / "config.json").write_text(json.dumps(saved))
        return logits_of(model)


TRANSFORMERS = Transformers()


@dataclass(frozen=True)
class Plain:
    """A module in plain torch, written from published facts: ``module(config)`` takes ids [1, n] and returns logits
    [1, n, vocab]; its parameters have the checkpoint's names."""

    module: Callable[[Mapping[str, Any]], torch.nn.Module]
    name = "own"

    def __call__(self, config: Mapping[str, Any], folder: Path) -> Logits:
        model = self.module(config).float().eval()
        randomise(model)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(dict(config)))
        save_file({k: v.contiguous() for k, v in model.state_dict().items()}, folder / "model.safetensors")
        return logits_of(model)

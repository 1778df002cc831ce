"""Time decode steps and prompts of a model of 8-bit weights on a GPU, with activations rounded and as they are, in one
run. Its weights are random numbers, made on the device.

    python benchmarks/rounded_steps.py MODEL FORM [--cases 1x128,64x512] [--only rounded|kept] [--experts N]
        [--weights normal|uniform] [--profile]

Forms: those of ``rounded_products.py``, for all linear layers but the head and routers. ``--experts``: the model has so
many, for comparing with an engine whose random weights choose no more; each row is followed by the experts of a layer
that a step is expected to read if its tokens choose evenly, and the bytes of weights that it reads. ``--weights
uniform`` draws weights as vLLM's ``load_format="dummy"`` does before it quantizes them: numbers decide how much power
products take, and a card at its limit of power lowers its clocks. ``--profile``: kernels of decode steps, in place of
their times.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import vllm_dummy_weights
from gpu_check import CASES, cases_of, measure, profile, say, start
from model_configs import CONFIGS
from model_configs import write as write_config
from rounded_products import FIXED, FORMS, part_of

from evener.contracts.declared import LinearWeight
from evener.contracts.quant import WeightPart
from evener.resolution.resolver import Resolver
from evener_inspection import dummy_weights


def quantize(form: str, kept: bool, uniform: bool) -> None:
    """From here on weights are declared in ``form``, and random weights have random elements."""
    if uniform:
        vllm_dummy_weights.use()
    packings, noise = _PACKINGS, dummy_weights._Noise
    plain = _PARTS.setdefault(noise, noise.part)
    how = replace(FORMS[form], activation=None) if kept else FORMS[form]

    def declared(self: Resolver, weights: Sequence[LinearWeight]) -> None:
        for weight in weights:
            weight.parts = tuple(
                replace(part, format=how) if "proj" in part.name or weight.experts else part for part in weight.parts
            )
        packings(self, weights)

    def random(self: Any, part: WeightPart, cut: Any, dtype: str, device: torch.device) -> WeightPart:
        if part.format.plain:
            return plain(self, part, cut, dtype, device)
        assert cut is None, "on one device"
        seed = zlib.crc32(part.name.encode()) % 997
        if uniform:
            return replace(part, tensors=_uniform(part, seed, device))
        return replace(part, tensors=part_of(form, part.rows, part.columns, seed, device).tensors)

    Resolver.packings = declared  # type: ignore[method-assign]
    noise.part = random  # type: ignore[method-assign]


def _uniform(part: WeightPart, seed: int, device: torch.device) -> Mapping[str, torch.Tensor]:
    """Elements as those of vLLM's random weights with one scale a tensor, here written for each row or block."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    # Only experts differ from each other: every other parameter of a size has the same numbers in vLLM.
    seed = seed if part.name.rpartition(" ")[2].isdigit() else vllm_dummy_weights.SEED
    drawn = torch.empty(part.rows, part.columns, device=device)
    drawn.uniform_(-largest, largest, generator=torch.Generator(device).manual_seed(seed))
    how = part.format
    whole = how.group < 0
    shape = (1, 1) if whole else (-(-part.rows // how.group_out), -(-part.columns // (how.group or part.columns)))
    scale = torch.full(shape, vllm_dummy_weights.RANGE / largest, device=device)
    fixed = {"activation_scale": torch.full((1,), FIXED, device=device)} if whole else {}
    return {"weight": drawn.to(torch.float8_e4m3fn), "scale": scale, **fixed}


_PACKINGS = Resolver.packings
_PARTS: dict[type, Callable[..., WeightPart]] = {}


def weights_read(config: Mapping[str, Any], tokens: int) -> tuple[float, float]:
    """(experts of a layer that are read if ``tokens`` tokens choose evenly, bytes of weights of a step): linear layers
    at one byte, head and routers at two. Embedding, norms and scales are left out."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    attention = hidden * config["head_dim"] * (heads + config["num_attention_heads"])
    experts, inner, router = 1.0, config["intermediate_size"], 0
    if count := config.get("num_experts", 0):
        experts = count * (1 - (1 - min(1.0, config["num_experts_per_tok"] / count)) ** tokens)
        inner, router = config["moe_intermediate_size"], 2 * count * hidden
    layer = attention + experts * 3 * hidden * inner + router
    return experts, config["num_hidden_layers"] * layer + 2 * config["vocab_size"] * hidden


def main(
    model: str, form: str, cases: Sequence[tuple[int, int]], ways: Sequence[str], out: Path, experts: int,
    uniform: bool = False, does: Callable[[Any, str, str, int, int, Path], None] = measure,
) -> None:  # fmt: skip
    """Print a row for each case, first with activations rounded."""
    if experts:
        CONFIGS[model] = {**CONFIGS[model], "num_experts": experts}
    say(torch.cuda.get_device_name())
    with tempfile.TemporaryDirectory() as folder:
        path = write_config(model, Path(folder) / model)
        for way in ways:
            quantize(form, way == "kept", uniform)
            llm = start(path, True, ["infer.max_seq_len=2048"])
            say(f"{model} {form} {way}: {llm.info.manifest.activations}, ready after {llm.info.start_seconds} s")
            for batch, prompt in cases:
                try:
                    does(llm, f"{model} {form} {way}" + " uniform" * uniform, "graphs", batch, prompt, out)
                    read, nbytes = weights_read(CONFIGS[model], batch)
                    say(f"{batch}x{prompt}: {read:.1f} experts a layer, {nbytes / 1e9:.2f} GB of weights a step")
                except Exception as error:  # the other rows are still useful
                    say(f"{model} {form} {way} {batch}x{prompt}: FAILED: {type(error).__name__}: {str(error)[:400]}")
            llm.close()
            del llm
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("form", choices=FORMS)
    parser.add_argument("--cases", default=",".join(f"{batch}x{prompt}" for batch, prompt in CASES))
    parser.add_argument("--only", choices=("rounded", "kept"))
    parser.add_argument("--experts", type=int, default=0, metavar="N")
    parser.add_argument("--weights", choices=("normal", "uniform"), default="normal")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    ways = (given.only,) if given.only else ("rounded", "kept")
    if given.experts and CONFIGS[given.model].get("num_experts_per_tok", 1 << 30) > given.experts:
        parser.error(f"--experts: {given.model} has no experts, or a token chooses more than {given.experts}")
    folder = Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="rounded-"))
    if given.weights == "uniform" and not given.form.startswith("fp8"):
        parser.error("--weights uniform: give fp8 or fp8-block")
    does = profile if given.profile else measure
    main(given.model, given.form, cases_of(given.cases), ways, folder, given.experts, given.weights == "uniform", does)

"""Time decode steps of a model of packed weights on a GPU. Its weights are random bits, made on the device.

    python benchmarks/packed_steps.py MODEL [--best BEST] [--cases 1x128,64x512] [--beside KEY=VALUE] FORM [FORM ...]

Forms: those of ``packed_products.py``, for all linear layers but the head and routers; and ``q4_k_m``, the mix of
types that llama.cpp's files of this name have: Q6_K for the head, and in half of the layers for the values and for
``down``. BEST: the fastest sizes that ``packed_products.py`` found are used where it has any. ``--beside``: everything
once more with this setting, such as cuda.one_launch=small.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from gpu_check import CASES, cases_of, measure, say, start
from model_configs import CONFIGS
from model_configs import write as write_config
from packed_products import FORMS, part_of, read_speed

from evener.contracts.declared import LinearWeight
from evener.contracts.quant import WeightPart
from evener.resolution.resolver import Resolver
from evener_inspection import dummy_weights
from evener_kernels_triton.tuning import Product, Tuning


def form_of(part: WeightPart, weight: LinearWeight, form: str, layers: int) -> str:
    """The form of a part; "" if it stays plain."""
    words = part.name.split(".")
    if "layers" not in words:
        return "q6_k" if form == "q4_k_m" and "lm_head" in words else ""
    if "proj" not in part.name and not weight.experts:
        return ""
    if form != "q4_k_m":
        return form
    layer = int(words[words.index("layers") + 1])
    more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    return "q6_k" if more and ("v_proj" in part.name or "down" in part.name) else "q4_k"


def quantize(form: str, layers: int) -> None:
    """From here on weights are declared in ``form``, and random weights have random bits."""
    packings, plain = _ORIGINAL

    def declared(self: Resolver, weights: Sequence[LinearWeight]) -> None:
        for weight in weights:
            asked = [form_of(part, weight, form, layers) for part in weight.parts]
            weight.parts = tuple(
                replace(part, format=FORMS[how]) if how else part for part, how in zip(weight.parts, asked, strict=True)
            )
        packings(self, weights)

    def random(self: Any, part: WeightPart, cut: Any, dtype: str, device: torch.device) -> WeightPart:
        if part.format.plain:
            return plain(self, part, cut, dtype, device)
        assert cut is None, "on one device"
        how = next(name for name, each in FORMS.items() if each == part.format)
        return replace(part, tensors=part_of(how, part.rows, part.columns, hash(part.name) % 997, device).tensors)

    Resolver.packings = declared  # type: ignore[method-assign]
    dummy_weights._Noise.part = random  # type: ignore[method-assign]


_ORIGINAL = Resolver.packings, dummy_weights._Noise.part


def use(best: Mapping[str, Mapping[str, int]], form: str) -> None:
    """Take these sizes instead of the rule's, for the next larger number of tokens that has any."""
    rule = Tuning.packed

    @wraps(rule)
    def found(self: Tuning, tokens: int, rows: int, columns: int, wide: int, element: int) -> Product:
        own = rule(self, tokens, rows, columns, wide, element)
        for least, known in ((0, 1), (8, 16), (16, 64), (64, 256)):
            change = best.get(f"{form} {known} {rows} {columns}")
            if change and least < tokens <= max(8, known):
                return replace(own, **change)
        return own

    Tuning.packed = found  # type: ignore[method-assign]


def part_launches() -> None:
    """From here on norms and activations of one token are in launches of their own, to compare with."""
    Tuning.packed_token = lambda *_: None  # type: ignore[method-assign]


def main(
    model: str, forms: Sequence[str], out: Path, best: Mapping[str, Mapping[str, int]],
    cases: Sequence[tuple[int, int]], beside: str,
) -> None:  # fmt: skip
    """Print a row for each case."""
    say(f"reads {read_speed():.2f} TB/s, {torch.cuda.get_device_name()}")
    with tempfile.TemporaryDirectory() as folder:
        path = write_config(model, Path(folder) / model)
        for form in forms:
            if form != "plain":
                quantize(form, CONFIGS[model]["num_hidden_layers"])
                use(best, form)
            for settings in ([], [beside]) if beside else ([],):
                step(path, " ".join([model, form, *settings]), settings, cases, out)


def step(path: Path, name: str, settings: Sequence[str], cases: Sequence[tuple[int, int]], out: Path) -> None:
    """The rows of one start."""
    most = max(batch for batch, _ in cases)
    llm = start(path, True, ["infer.max_seq_len=2048", f"infer.max_reqs={most}", *settings])
    manifest = llm.info.manifest
    layouts = sorted({str(layout) for layout in manifest.packings.values()})
    layers = sorted({row.provider for row in manifest.ops if row.op == "decoder_layer" and "1" in row.tokens})
    say(f"{name}: memory {llm.info.memory}, layouts {layouts}, one token's layers {layers}")
    for batch, prompt in cases:
        try:
            measure(llm, name, "graphs", batch, prompt, out)
        except Exception as error:  # the other rows are still useful
            say(f"{name} {batch}x{prompt}: FAILED: {type(error).__name__}: {str(error)[:400]}")
    llm.close()
    del llm
    torch.cuda.empty_cache()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("forms", nargs="+")
    parser.add_argument("--best", type=Path)
    parser.add_argument("--apart", action="store_true", help="one token's norms and activations in other launches")
    parser.add_argument("--beside", default="", metavar="KEY=VALUE")
    parser.add_argument("--cases", default=",".join(f"{batch}x{prompt}" for batch, prompt in CASES))
    given = parser.parse_args()
    known = json.loads(given.best.read_text()) if given.best and given.best.exists() else {}
    if given.apart:
        part_launches()
    main(given.model, given.forms, Path(tempfile.mkdtemp(prefix="packed-")), known, cases_of(given.cases), given.beside)

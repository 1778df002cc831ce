"""Whole layers with norms on both sides of attention: the numbers of the blocks, bit for bit, in one launch less."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.runtime.interpreter as interpreter
from interpreted import LargeDevice, host_kernels, host_states, schemas
from test_triton_engine import answers
from test_triton_rounded import able_device, able_kernels

from evener.contracts.ops import Bucket, Kernel, OpCall
from evener.layers.decoder import AttentionConfig, MLPConfig
from evener.layers.rotary import RotaryConfig, TemperatureConfig
from evener.ops.reference.linear import PLAIN
from evener.ops.reference.state import ReferenceState
from evener.resolution.candidates import kernel_refusal, op_call
from evener_conformance.kit.composites import TinyModel
from evener_conformance.kit.families import Family, families
from evener_conformance.naive.model import find_architecture
from evener_conformance.reference.device import HostDevice
from evener_kernels_triton.composites import norms_apart
from evener_kernels_triton.primitives import norm_rows
from evener_kernels_triton.tuning import Tuning

TUNING = Tuning(132, 227 << 10, False)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

WINDOWED = next(family for family in families() if family.name == "windowed")
#: As in GLM-4: biases, and a part of each head rotated in pairs.
PAIRED = Family(
    "paired",
    AttentionConfig(
        heads=4, kv_heads=2, head_dim=16, rotary=RotaryConfig(8, interleaved=True), qkv_bias=True, o_bias=True,
        post_norm="post", temperature=TemperatureConfig(5, 0.7),
    ),
    MLPConfig(inner=40, bias=True, post_norm="post_mlp"), eps=1e-5,
)  # fmt: skip
#: No norm after the MLP.
HALF = replace(PAIRED, name="half", mlp=replace(PAIRED.mlp, post_norm=None, bias=False))


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 96), (5, 128), (2, 2560)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_one_launch_gives_what_two_give(rows: int, size: int, offset: float, dtype: torch.dtype) -> None:
    wide = random(rows, size + 8, seed=1, dtype=dtype)
    x, residual = wide[:, :size], random(rows, size, seed=2)
    post, gain = (random(size, seed=seed, dtype=dtype) for seed in (3, 4))
    kept = wide.clone()
    between, _ = norm_rows(TUNING, x, None, post, 1e-6, offset, dtype)
    want, total = norm_rows(TUNING, between, residual.clone(), gain, 1e-6, offset, dtype)
    stream = residual.clone()
    got, after = norm_rows(TUNING, x, stream, gain, 1e-6, offset, dtype, post)
    assert total is not None and after is not None and after.data_ptr() == stream.data_ptr()
    assert torch.equal(got, want) and torch.equal(after, total) and got.dtype == dtype
    assert torch.equal(wide, kept), "x is only read"


def test_no_rows_are_no_launch() -> None:
    x, residual, gain = torch.zeros(0, 96), torch.zeros(0, 96), torch.ones(96)
    got, total = norm_rows(TUNING, x, residual, gain, 1e-6, 0.0, torch.float32, gain)
    assert got.shape == x.shape and total is not None


def two_models(
    family: Family, dtype: str, kernels: Sequence[Kernel], state: Any, device: HostDevice
) -> tuple[TinyModel, TinyModel]:
    """The same layers with the kernel of whole layers, and with those of the blocks."""
    every, others = list(schemas().values()), [k for k in kernels if k.op != "decoder_layer"]
    whole, blocks = (TinyModel(device, dtype, family, given, state, every) for given in (kernels, others))
    return whole, blocks


def providers(model: TinyModel, tokens: int) -> set[str]:
    """What serves layers at so many tokens."""
    choices = model.resolver.manifest.choices
    return {
        c.provider.rpartition("/")[2] for c in choices
        if c.op == "decoder_layer" and c.bucket is not None and c.bucket.low <= tokens <= c.bucket.high
    }  # fmt: skip


def kernels_of(device: type[HostDevice] = HostDevice) -> list[Kernel]:
    linears = [k for k in host_kernels(False, device) if k.op == "linear"]
    return [*host_kernels(True, device), *linears]


#: Tokens of two requests before a step, and in it.
FEW = (((0, 0), (3, 2)), ((3, 2), (1, 1)), ((4,), (1,)))
MANY = (((0, 0), (17, 5)), ((17, 5), (1, 20)), ((18, 25), (1, 1)), ((19,), (131,)))


def compare(whole: TinyModel, blocks: TinyModel, family: Family, steps: Sequence[Any]) -> None:
    for number, (before, counts) in enumerate(steps):
        x = random(sum(counts), family.hidden, seed=number)
        with torch.inference_mode():
            got, want = (m.step(x, before, counts) for m in (whole, blocks))
        assert all(map(torch.equal, got, want)), f"step {number}"
    tokens = tuple(a + b for a, b in zip(*steps[0], strict=True))
    have, need = (m.written(tokens) for m in (whole, blocks))
    assert all(torch.equal(have[name], need[name]) for name in need)


@pytest.mark.parametrize(
    ("family", "dtype", "steps"),
    [
        (WINDOWED, "bfloat16", FEW),
        (PAIRED, "float32", FEW),
        *(pytest.param(family, dtype, MANY, marks=pytest.mark.slow)
          for family in (WINDOWED, PAIRED, HALF) for dtype in ("float32", "bfloat16", "float16")),
    ],
    ids=lambda value: value.name if isinstance(value, Family) else value if isinstance(value, str) else len(value),
)  # fmt: skip
def test_a_layer_gives_the_numbers_of_its_blocks(family: Family, dtype: str, steps: Sequence[Any]) -> None:
    """The first layer has no residual yet."""
    whole, blocks = two_models(family, dtype, kernels_of(), host_states()[0], HostDevice(0))
    compare(whole, blocks, family, steps)
    assert providers(whole, 2) == providers(whole, 128) == {"triton.decoder_layer"}
    assert providers(blocks, 2) == providers(whole, 1) == {"expanded"}


@pytest.mark.parametrize("family", [WINDOWED, pytest.param(PAIRED, marks=pytest.mark.slow)], ids=lambda f: f.name)
def test_a_layer_agrees_with_its_expansion(family: Family) -> None:
    every, kernels = list(schemas().values()), kernels_of()
    whole = TinyModel(HostDevice(0), "float32", family, kernels, host_states()[0], every)
    reference = TinyModel(HostDevice(0), "float32", family, (), ReferenceState(), every, whole)
    for number, (before, counts) in enumerate(FEW):
        x = random(sum(counts), family.hidden, seed=number)
        with torch.inference_mode():
            got, want = (m.step(x, before, counts)[0] for m in (whole, reference))
        assert (got - want).abs().max() <= 1e-4 * want.abs().max()


@pytest.mark.parametrize("storage", ["uint4 by 128", pytest.param("e4m3 by block", marks=pytest.mark.slow), "q8_0"])
def test_weights_may_be_stored_in_any_way_without_rounding(storage: str) -> None:
    family = replace(
        WINDOWED, name=storage, storage=storage, hidden=128, mlp=replace(WINDOWED.mlp, inner=128),
        attention=replace(WINDOWED.attention, heads=4, head_dim=32),
    )  # fmt: skip
    whole, blocks = two_models(family, "bfloat16", kernels_of(), host_states()[0], HostDevice(0))
    compare(whole, blocks, family, FEW[:2])
    assert providers(whole, 2) == {"triton.decoder_layer"}


def launches(model: TinyModel, family: Family, tokens: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a step of so many requests launches each kernel."""
    found, run = Counter[str](), interpreter.GridExecutor.__call__

    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        found[self.fn.__name__] += 1
        return run(self, *args, **kwargs)

    before, counts = ((3, 2), (1, 1)) if tokens == 2 else ((0, 0), (tokens - 2, 2))
    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(interpreter.GridExecutor, "__call__", count)
        model.step(random(tokens, family.hidden, seed=1), before, counts)
    return found


@pytest.mark.parametrize("tokens", [2, pytest.param(70, marks=pytest.mark.slow)])
def test_each_layer_takes_one_launch_less(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    models = two_models(WINDOWED, "float32", kernels_of(), host_states()[0], HostDevice(0))
    whole, blocks = (launches(model, WINDOWED, tokens, monkeypatch) for model in models)
    layers = len(models[0].layers)
    assert blocks - whole == Counter({"rms_norm_kernel": layers}) and not whole - blocks
    assert whole["rms_norm_kernel"] == 3 * layers, "before attention, between the blocks, after the MLP"


def layer_call(family: Family, tokens: int, device: HostDevice, kernels: Sequence[Kernel] = ()) -> OpCall:
    """The call of the first layer."""
    model = TinyModel(device, "bfloat16", family, kernels, host_states()[0], list(schemas().values()))
    site = model.build.sites[0]
    return op_call(model.resolver.available, schemas()["decoder_layer"], site.static, Bucket(tokens, tokens))


def whole_layer(device: type[HostDevice] = HostDevice) -> Any:
    (kernel,) = (k for k in host_kernels(True, device) if k.op == "decoder_layer")
    return kernel


@pytest.mark.parametrize(
    ("changes", "tokens", "why"),
    [
        ({}, 2, None), ({"attention": {"post_norm": None}}, 2, "is for layers with a norm after attention"),
        ({}, 1, "saves no launch where the norm before the MLP is part"),
        ({"mlp": {"parallel": True}}, 2, "does not know parallel=True"),
        ({"attention": {"norm": None}}, 2, "does not know pre_norm=False"),
        ({"norm": "bare_layer"}, 2, "does not know norm=bare_layer"),
        ({"mlp": {"activation": "relu"}}, 2, "does not know activation 'relu'"),
    ],
)  # fmt: skip
def test_other_layers_are_left_to_the_blocks(changes: dict[str, Any], tokens: int, why: str | None) -> None:
    parts = {n: replace(getattr(WINDOWED, n), **v) if isinstance(v, dict) else v for n, v in changes.items()}
    call = layer_call(replace(WINDOWED, **parts), tokens, HostDevice(0), kernels_of())
    said = kernel_refusal(schemas()["decoder_layer"], whole_layer(), call)
    assert said == why if why is None or said is None else said.startswith(why)


def test_norms_that_differ_are_left_to_the_blocks() -> None:
    call = layer_call(WINDOWED, 2, HostDevice(0), kernels_of())
    for name, value in (("eps", 1e-5), ("offset", 0.0)):
        static = {**call.static, "mlp": {**call.static["mlp"], name: value}}
        assert whole_layer().supports(replace(call, static=static)) == "computes norms with one eps and one offset"


def test_rounded_activations_are_left_to_the_blocks_which_report_them() -> None:
    device = able_device()
    kernels = able_kernels(device, "linear", "attention_block", "mlp_block", "decoder_layer")
    plain = next(family for family in families() if family.name == "float8 rounding quantized")
    family = replace(plain, attention=replace(plain.attention, post_norm="post"))  # type: ignore[type-var, arg-type]
    model = TinyModel(device, "bfloat16", family, kernels, host_states()[0], list(schemas().values()))
    (row,) = (c for c in model.resolver.manifest.choices if c.op == "decoder_layer" and str(c.bucket) == "33..64"
              and c.path.endswith("0"))  # fmt: skip
    assert row.provider == "expanded" and "activations be rounded" in row.refused[0][1]
    assert "tokens" in " ".join(model.resolver.manifest.rounding_lines())


def test_one_token_of_rows_that_are_too_long_for_a_tile_is_served_too() -> None:
    long = replace(WINDOWED, hidden=4352, mlp=replace(WINDOWED.mlp, inner=16))
    call = layer_call(long, 1, HostDevice(0), kernels_of())
    assert whole_layer().supports(call) is None
    gate_up = call.static["mlp"]["gate_up"]
    assert norms_apart(TUNING, replace(call, op="mlp_block", static=call.static["mlp"]), gate_up, "gelu_tanh")


def test_variants_change_one_product_of_one_block() -> None:
    device = LargeDevice(0)
    kernel = whole_layer(LargeDevice)
    call = layer_call(replace(WINDOWED, hidden=1024), 16, device, kernels_of(LargeDevice))
    offered = kernel.variants(call)
    products = Counter(frozenset(key.rpartition(".")[0] for key in variant) for variant in offered)
    names = ("attention.enter", "attention.project", "mlp.enter", "mlp.project")
    assert products.keys() == {frozenset([name]) for name in names} and len(offered) <= 32
    assert kernel.workspace(replace(call, variant=offered[0])) > 0
    assert kernel.supports(replace(call, variant=offered[-1])) is None
    assert kernel.packings[0] is PLAIN and offered == kernel.variants(replace(call, variant=offered[0]))


@pytest.mark.slow
def test_a_variant_of_each_product_gives_the_same_layer() -> None:
    """Sums in another order are the only difference."""
    model = TinyModel(HostDevice(0), "float32", WINDOWED, kernels_of(), host_states()[0], list(schemas().values()))
    kernel, site = whole_layer(), model.build.sites[0]
    call = op_call(model.resolver.available, schemas()["decoder_layer"], site.static, Bucket(2, 2))
    by_product = {next(iter(v)).rpartition(".")[0]: v for v in kernel.variants(call)}
    assert len(by_product) == 4
    plain, found = site.table, []
    for variant in ({}, *by_product.values()):
        run = kernel.build(replace(call, variant=variant))
        site.table = (*plain[:1], run, *plain[2:])
        with torch.inference_mode():
            found.append(model.step(random(2, WINDOWED.hidden, seed=3), (0, 0), (1, 1))[0])
    for each in found[1:]:
        assert (each - found[0]).abs().max() <= 1e-4 * found[0].abs().max()


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("Gemma3ForCausalLM", "bfloat16"),
        *(pytest.param(family, dtype, marks=pytest.mark.slow) for family, dtype in (
            ("Gemma3ForCausalLM", "float32"), ("Gemma2ForCausalLM", "bfloat16"), ("Glm4ForCausalLM", "bfloat16"))),
    ],
)  # fmt: skip
def test_models_give_the_tokens_that_they_gave(
    family: str, dtype: str, tmp_path: Path, interpreted_backend: None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(find_architecture(family).tiny_config()))
    got, manifest = answers(tmp_path, backend="interpreted", dtype=dtype)
    want, other = answers(tmp_path, backend="interpreted", dtype=dtype, **{"ops.decoder_layer": "reference"})
    assert got == want and len(got) == 2
    assert "triton/triton.decoder_layer" in {row.provider for row in manifest.ops if row.op == "decoder_layer"}
    assert {row.provider for row in other.ops if row.op == "decoder_layer"} == {"expanded"}

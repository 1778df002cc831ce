"""Numbers to GGUF's blocks: the legacy types as ggml makes them, the k-types with as little error, and which matrix
gets which."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from evener.contracts.conversion.quantizer import Matrix
from evener.contracts.quant import BLOCKS, WeightPart, block_format
from evener.errors import ConfigError
from evener_formats.gguf.scheme import GgufScheme
from evener_formats.quantize.block_types import BLOCK_TYPES
from evener_formats.quantize.blocks import BlockQuantizer, to_blocks
from evener_formats.quantize.k_types import K_TYPES


def numbers(kind: str, rows: int = 64) -> torch.Tensor:
    """Rows of 512 numbers of one kind."""
    random = torch.Generator().manual_seed(11)
    normal = torch.randn(rows, 512, generator=random)
    rare = torch.rand(rows, 512, generator=random) < 0.01
    kinds = {
        "normal": normal, "positive": normal.abs() + 1, "negative": -normal.abs() - 1, "outliers": normal + 30 * rare,
        "tiny": normal * 1e-6, "large": normal * 1e4, "constant": torch.full_like(normal, 0.37),
        "zero": torch.zeros_like(normal), "integers": normal.mul(3).round(), "tails": normal**3,
    }  # fmt: skip
    return kinds[kind]


KINDS = ("normal", "positive", "negative", "outliers", "tiny", "large", "constant", "zero", "integers", "tails")


@pytest.mark.parametrize("form", BLOCK_TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_32_have_the_same_bits_as_ggmls(form: str, kind: str) -> None:
    values = numbers(kind)
    assert np.array_equal(to_blocks(form, values).numpy(), quantize(values.numpy(), GGMLQuantizationType[form.upper()]))


def error(form: str, blocks: np.ndarray, values: torch.Tensor) -> float:
    """The root mean square error of what ``blocks`` say."""
    read = dequantize(blocks.reshape(values.shape[0], -1), GGMLQuantizationType[form.upper()])
    return float(np.sqrt(np.mean((read - values.numpy()) ** 2)))


#: The root mean square error of ggml's own quantizer on these numbers (llama-cpp-python 0.3.36); the slow test below
#: computes it anew.
GGML_ERROR = {
    ("q4_k", "normal"): 0.071502, ("q4_k", "positive"): 0.0582681, ("q4_k", "negative"): 0.040851,
    ("q4_k", "outliers"): 0.293117, ("q4_k", "tiny"): 3.01015e-06, ("q4_k", "large"): 714.986,
    ("q4_k", "zero"): 0, ("q4_k", "integers"): 0.176799,
    ("q4_k", "tails"): 0.344246, ("q5_k", "normal"): 0.0361556, ("q5_k", "positive"): 0.0289659,
    ("q5_k", "negative"): 0.021406, ("q5_k", "outliers"): 0.145562, ("q5_k", "tiny"): 3.01795e-06,
    ("q5_k", "large"): 361.767, ("q5_k", "zero"): 0,
    ("q5_k", "integers"): 0.0978227, ("q5_k", "tails"): 0.189549, ("q6_k", "normal"): 0.0176645,
    ("q6_k", "positive"): 0.0248697, ("q6_k", "negative"): 0.0248697, ("q6_k", "outliers"): 0.101692,
    ("q6_k", "tiny"): 1.00019e-06, ("q6_k", "large"): 176.638, ("q6_k", "zero"): 0,
    ("q6_k", "integers"): 0.0486697, ("q6_k", "tails"): 0.0924583,
}  # fmt: skip


@pytest.mark.parametrize(("form", "kind"), GGML_ERROR)
def test_k_types_have_an_error_as_small_as_ggmls(form: str, kind: str) -> None:
    values = numbers(kind)
    assert error(form, to_blocks(form, values).numpy(), values) <= 1.05 * GGML_ERROR[form, kind] + 1e-12


@pytest.mark.slow
def test_the_errors_of_ggml_are_those_that_its_library_gives(smollm2_dir: Path, ggml: ctypes.CDLL) -> None:
    for (form, kind), expected in GGML_ERROR.items():
        values = numbers(kind)
        assert error(form, by_ggml(ggml, form, values), values) == pytest.approx(expected, rel=1e-3, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("form", K_TYPES)
def test_a_real_matrix_has_an_error_as_small_as_ggmls(smollm2_dir: Path, ggml: ctypes.CDLL, form: str) -> None:
    from safetensors import safe_open

    with safe_open(smollm2_dir / "model.safetensors", framework="pt") as file:
        for layer in (0, 7, 29):
            values = file.get_tensor(f"model.layers.{layer}.mlp.down_proj.weight").float()
            ours = error(form, to_blocks(form, values).numpy(), values)
            assert ours <= 1.05 * error(form, by_ggml(ggml, form, values), values)


def by_ggml(library: ctypes.CDLL, form: str, values: torch.Tensor) -> np.ndarray:
    elements, nbytes = BLOCKS[form]
    values, out = values.contiguous(), np.zeros(values.numel() // elements * nbytes, np.uint8)
    row: Callable[..., None] = getattr(library, f"quantize_row_{form.replace('k', 'K')}_ref")
    row(ctypes.c_void_p(values.data_ptr()), out.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(values.numel()))
    return out


@pytest.mark.parametrize("form", [*BLOCK_TYPES, *K_TYPES])
def test_the_scheme_reads_written_blocks(form: str) -> None:
    values = numbers("normal", 8)
    part = WeightPart("w", 8, 512, block_format(form), {"weight": to_blocks(form, values)})
    read = GgufScheme().dequantize(part, "float32")
    assert (read - values).abs().max() < {"4": 0.5, "5": 0.25, "6": 0.1, "8": 0.02}[form[1]]
    assert all(torch.isfinite(each).all() for each in GgufScheme().numbers(part))


@pytest.mark.parametrize("form", [*BLOCK_TYPES, *K_TYPES])
def test_equal_numbers_are_as_exact_as_the_float16_scale(form: str) -> None:
    values = numbers("constant", 8)
    part = WeightPart("w", 8, 512, block_format(form), {"weight": to_blocks(form, values)})
    assert torch.allclose(GgufScheme().dequantize(part, "float32"), values, rtol=2**-10)


def test_slices_and_dtypes_change_nothing() -> None:
    values = torch.randn(700, 1024, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = to_blocks("q6_k", values)
    assert whole.shape == (700, 4 * 210)
    assert torch.equal(whole[650:], to_blocks("q6_k", values[650:].float()))
    stack = to_blocks("q4_0", values.view(7, 100, 1024).mT.contiguous().mT)
    assert torch.equal(stack.view(700, -1), to_blocks("q4_0", values))


def model(layers: int = 24, columns: int = 512) -> list[Matrix]:
    found = [Matrix("lm_head.weight", (1000, columns), "head"), Matrix("model.embed.weight", (9, columns), "shared")]
    for i in range(layers):
        at = f"model.layers.{i}"
        found += [Matrix(f"{at}.self_attn.{n}_proj.weight", (columns, columns)) for n in "qkvo"]
        found += [Matrix(f"{at}.mlp.gate.weight", (8, columns), "router")]
        found += [Matrix(f"{at}.mlp.experts.{e}.down_proj.weight", (columns, columns), "expert") for e in range(2)]
    return found


def formats(name: str, rules: str = "", **sizes: int) -> dict[str, str | None]:
    matrices = model(**sizes)
    made = BlockQuantizer(name, {"quant_rules": rules}, matrices)
    return {m.name: made.format(m) for m in matrices}


def test_linear_layers_and_experts_are_quantized_and_heads_routers_and_embeddings_are_not() -> None:
    found = formats("q8_0")
    kept = {name for name, form in found.items() if form is None}
    assert kept == {name for name in found if "gate" in name or "lm_head" in name or "embed" in name}
    assert {found[name] for name in found.keys() - kept} == {"q8_0"}


def test_a_mixture_gives_more_bits_to_the_head_and_to_values_and_down_projections_of_half_the_layers() -> None:
    found = formats("q4_k_m")
    assert found["lm_head.weight"] == "q6_k" and found["model.embed.weight"] is None
    better = [i for i in range(24) if found[f"model.layers.{i}.self_attn.v_proj.weight"] == "q6_k"]
    assert better == [0, 1, 2, 5, 8, 11, 14, 17, 20, 21, 22, 23]
    assert better == [i for i in range(24) if found[f"model.layers.{i}.mlp.experts.1.down_proj.weight"] == "q6_k"]
    assert found["model.layers.0.self_attn.q_proj.weight"] == found["model.layers.3.self_attn.v_proj.weight"] == "q4_k"


@pytest.mark.parametrize(("name", "columns", "form"), [("q4_k", 96, "q5_0"), ("q6_k", 96, "q8_0"), ("q4_k", 90, None)])
def test_blocks_that_do_not_divide_the_columns_are_replaced_by_smaller_ones(
    name: str, columns: int, form: str | None
) -> None:
    assert formats(name, columns=columns)["model.layers.0.self_attn.q_proj.weight"] == form


def test_rules_choose_the_format_of_single_matrices_and_the_first_that_matches_counts(tmp_path: Path) -> None:
    rules = '{"model.layers.1.self_attn.q_proj": "none", "re:.*q_proj": "q6_k", "re:lm_head": "q8_0"}'
    found = formats("q4_k", rules)
    assert found["model.layers.0.self_attn.q_proj.weight"] == "q6_k"
    assert found["model.layers.1.self_attn.q_proj.weight"] is None and found["lm_head.weight"] == "q8_0"
    (tmp_path / "rules.json").write_text(rules)
    assert formats("q4_k", str(tmp_path / "rules.json")) == found


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ('{"re:.*q_proj": "q6k"}', r"did you mean 'q6_k'"), ('{"re:.*qproj": "q6_k"}', r"matches no matrix"),
        ('{"re:(": "q6_k"}', r"no regular expression"), ("[1]", r"cannot read"), ('{"a": 1}', r"must be a JSON object"),
        ("{", r"not valid JSON"), ('{"re:.*q_proj": "fp8"}', r"one of: q4_0"), ("/dev/zero", r"no small file"),
    ],
)  # fmt: skip
def test_wrong_rules_are_refused_with_what_is_wrong(rules: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        formats("q4_k", rules)


def test_a_rule_for_a_format_that_a_matrix_cannot_have_names_those_that_fit() -> None:
    with pytest.raises(ConfigError, match=r"q_proj.weight has 96 columns.*q6_k.*256; what fits: q4_0, .*q8_0, none"):
        formats("q8_0", '{"re:.*q_proj": "q6_k"}', columns=96)

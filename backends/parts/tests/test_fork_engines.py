"""The whole engine with the packages for forked GPUs, on host memory that reports their properties: no real chip."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import interpreted  # noqa: F401  (repairs the interpreter)
import pytest
from fork_hosts import install_on_host

from evener import LLM, SamplingParams
from evener.config import from_overrides
from evener_conformance.distributions import write_distribution
from evener_conformance.fake_torch import FakeTorch
from evener_conformance.naive.model import find_architecture
from evener_inspection.explanation import explain


def answers(folder: Path, **overrides: Any) -> tuple[list[list[int]], str]:
    """Greedy and sampled tokens, and the manifest as text."""
    common = {
        "load": "dummy", "dtype": "float32", "infer.max_seq_len": 64, "infer.max_reqs": 2, "infer.step_tokens": 16,
        "infer.kv_memory": 1 << 20,
    }  # fmt: skip
    params = [
        SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False),
        SamplingParams(temperature=1.0, seed=5, max_tokens=3, ignore_eos=True, detokenize=False),
    ]
    with LLM(folder, **{**common, **overrides}) as llm:
        outputs = llm.generate([list(range(3, 21)), [7, 8]], params)
        return [list(o.outputs[0].token_ids) for o in outputs], str(llm.info.manifest)


@pytest.mark.slow
@pytest.mark.parametrize("vendor", ["hygon", "muxi"])
@pytest.mark.parametrize("family", ["Llama", "Gemma3", "Qwen3Moe", "DeepseekV2"])
def test_tokens_are_the_cpus_L3(
    vendor: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    install_on_host(vendor, tmp_path / "site", monkeypatch)
    (tmp_path / "config.json").write_text(json.dumps(find_architecture(f"{family}ForCausalLM").tiny_config()))
    got, manifest = answers(tmp_path, backend=vendor)
    want, _ = answers(tmp_path, backend="cpu")
    assert got == want
    attention = "triton.latent" if family == "DeepseekV2" else "triton.paged"
    assert attention in manifest and "triton.head" in manifest, "the portable kernels ran, not the references"


@pytest.mark.slow
@pytest.mark.parametrize(("vendor", "static"), [("hygon", True), ("hygon", False), ("muxi", True)])
def test_w8a8_stays_packed_and_gives_the_cpus_tokens_L3(
    vendor: str, static: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """Activations are kept: nobody ran Triton's integer products on these chips, so their devices do not offer them."""
    install_on_host(vendor, tmp_path / "site", monkeypatch)
    common = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"], "weights": {**common, "strategy": "channel", "dynamic": False},
        "input_activations": {**common, "strategy": "tensor" if static else "token", "dynamic": not static},
    }  # fmt: skip
    settings = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }  # fmt: skip
    tiny = find_architecture("Qwen3ForCausalLM").tiny_config()
    (tmp_path / "config.json").write_text(json.dumps({**tiny, "quantization_config": settings}))
    keys = {"load": "dummy", "dtype": "float32", "infer.max_seq_len": 64, "backend": vendor}
    found = explain(from_overrides(str(tmp_path), keys))
    assert found["packings"]["triton.stored"] == 4 * tiny["num_hidden_layers"] and not found["dequantized"]
    got, manifest = answers(tmp_path, backend=vendor)
    want, _ = answers(tmp_path, backend="cpu", **{"infer.quant_activations": "keep"})
    assert got == want and "weights int8 by row, activations as they are" in manifest


FORKS = {
    "hygon": FakeTorch(
        namespace="cuda", version="2.5.1+das.opt1.dtk25041", marks={"cuda": None, "hip": "6.1"},
        devices=(("BW1000", 64 << 30), ("an AMD card", 16 << 30)), properties={"gcnArchName": "gfx936:sramecc+"},
    ),
    "muxi": FakeTorch(
        namespace="cuda", version="2.10.0+metax3.8.0.7", marks={"cuda": "11.6", "hip": None, "maca": "3.8.1.0"},
        devices=(("MetaX C550", 64 << 30),),
    ),
}  # fmt: skip
_PROBE = """
import json
from evener_backend_{0} import probe
found = probe.probe()
print(json.dumps([found.score, [d.name for d in found.devices], list(found.reasons)]))
"""


def probed(vendor: str, fork: FakeTorch, folder: Path) -> list[Any]:
    """What the vendor's probe says in a process whose torch is the fake build."""
    fork.write(folder)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", _PROBE.format(vendor)], env={**os.environ, "PYTHONPATH": path}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer: list[Any] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize("vendor", FORKS)
def test_a_probe_lists_the_devices_of_its_build_L3(vendor: str, tmp_path: Path) -> None:
    score, names, reasons = probed(vendor, FORKS[vendor], tmp_path)
    assert score == 100 and names == [name for name, _ in FORKS[vendor].devices]
    assert FORKS[vendor].version in reasons[0]


def test_a_probe_leaves_out_a_device_of_another_architecture_L3(tmp_path: Path) -> None:
    fork = FakeTorch(namespace="cuda", version="2.9+rocm", marks={"hip": "6"}, properties={"gcnArchName": "gfx1100"})
    score, names, reasons = probed("hygon", fork, tmp_path)
    assert (score, names) == (0, []) and "its architecture is gfx1100" in reasons[1]


def test_a_build_that_sees_no_device_is_refused_with_what_to_type_L3(tmp_path: Path) -> None:
    fork = FakeTorch(namespace="cuda", version="2.10.0+metax3", marks={"maca": "3.8"}, devices=())
    score, names, reasons = probed("muxi", fork, tmp_path)
    assert (score, names) == (0, []) and "--device=/dev/mxcd" in reasons[0]


def test_the_packages_share_no_module_of_another_vendors_backend_L0() -> None:
    import importlib

    for vendor, others in (("hygon", ("cuda", "muxi", "gcu")), ("muxi", ("cuda", "hygon", "gcu"))):
        folder = Path(importlib.import_module(f"evener_backend_{vendor}").__file__ or "").parent
        text = "".join(path.read_text("utf-8") for path in folder.glob("*.py")).lower()
        assert "nvidia" not in text and not any(f"evener_backend_{other}" in text for other in others)


def test_without_the_portable_kernels_doctor_says_how_to_install_them_L3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from evener_backend_parts import forks

    write_distribution(tmp_path, forks.KERNELS, {}, "9")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert forks.missing_kernels() == ()
    monkeypatch.setattr(forks, "KERNELS", "evener-kernels-nobody-wrote")
    assert forks.missing_kernels() == (
        "advice: ops run on the slow reference; type pip install --no-deps evener-kernels-nobody-wrote",
    )

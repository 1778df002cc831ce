"""``evener why-not``: each way in which something that is installed is not what runs, and the reason in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evener.cli.main import main
from evener_conformance.distributions import install_reference_backend
from evener_conformance.package_site import Site, score_of

KERNEL = """
from evener.contracts.hooks import hookimpl
from evener.contracts.ops import Kernel

class SmallNorm(Kernel):
    op, name = "rms_norm", "small_norm"

    def supports(self, call):
        return "it holds 16 tokens" if call.bucket.high > 16 else None

    def build(self, call):
        from evener.ops.reference.norm import rms_norm
        return rms_norm(call.static, None)

@hookimpl
def evener_kernels(device, options):
    return [SmallNorm()]
"""

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 99, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture
def ask(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """``ask(name, …)``: the answers, with the reference backend named unless the words say otherwise."""
    del site
    install_reference_backend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("EVENER_BACKEND", "reference")

    def run(*words: str) -> list[dict[str, Any]]:
        assert main(["why-not", *words, "--json"]) == 0
        found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["answers"]
        return found

    return run


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return str(folder)


def test_unchosen_backend_names_the_winner_and_its_probe_result(
    site: Site, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.add("backend", "slow", probe=score_of(20, "it crawls"))
    site.add("backend", "quick", probe=score_of(300, "it flies"))
    monkeypatch.delenv("EVENER_BACKEND")
    [answer] = ask("slow")
    assert (answer["what"], answer["verdict"]) == ("backend", "refused")
    assert answer["reasons"][0] == "backend 'quick' was chosen"
    assert any("score 20" in reason and "it crawls" in reason for reason in answer["reasons"])


def test_a_package_is_found_by_its_distribution_in_any_spelling(site: Site, ask: Any) -> None:
    site.add("kernels", "swift", 'needs=frozenset({"beads"})', module="", distribution="evener-kernels-swift")
    for name in ("swift", "evener-kernels-swift", "evener_kernels.swift"):
        [answer] = ask(name)
        assert answer["verdict"] == "refused"
        assert answer["reasons"][0] == "needs beads, which backend 'reference' does not serve"


@pytest.mark.parametrize(
    ("kind", "noun"),
    [("backend", "backend"), ("kernels", "kernel package"), ("graphs", "graph package"),
     ("collectives", "collective package"), ("plugin", "plugin")],
)  # fmt: skip
def test_a_package_in_each_group_of_entry_points_is_answered_for(kind: str, noun: str, site: Site, ask: Any) -> None:
    if kind == "backend":
        site.add("backend", "other")
    else:
        site.add(kind, "other", 'needs=frozenset({"beads"})', module="")
    [answer] = ask("other")
    assert (answer["what"], answer["verdict"]) == (noun, "refused") and answer["reasons"][0]


def test_a_broken_package_says_what_its_descriptor_raised_and_what_to_type(site: Site, ask: Any) -> None:
    site.add("backend", "torn", init="raise OSError('half a file')")
    [answer] = ask("torn")
    assert answer["verdict"] == "broken"
    assert "half a file" in answer["reasons"][0] and "reinstall" in answer["reasons"][0]


def test_a_package_that_was_switched_off_names_the_switch(
    site: Site, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.add("backend", "off")
    monkeypatch.setenv("EVENER_DISABLE_PLUGINS", "off")
    [answer] = ask("off")
    assert answer["verdict"] == "disabled" and "EVENER_DISABLE_PLUGINS" in answer["reasons"][0]


@pytest.mark.parametrize(
    ("kind", "field", "name", "what"),
    [
        ("kernels", 'ops=("knot",)', "knot", "kernels for op"),
        ("plugin", 'formats=("pulp",)', "pulp", "quantization scheme"),
        ("plugin", 'architectures={"OdeForCausalLM": "ode:Ode"}', "OdeForCausalLM", "architecture"),
        ("plugin", 'request_plugins={"shout": "loud:Shout"}', "shout", "request plugin"),
        ("plugin", 'commands={"whistle": "tune:main"}', "whistle", "command"),
        ("plugin", 'checkpoints={".bead": "bead:Reader"}', ".bead", "checkpoint reader"),
        ("plugin", 'aliases={"infer.attn_type=bead": "ops.attention=bead"}', "bead", "spelling"),
    ],
)
def test_contributions_of_a_refused_package_are_refused(
    kind: str, field: str, name: str, what: str, site: Site, ask: Any
) -> None:
    needed = '"ops": 2, "quant": 2, "architecture": 2, "request_plugin": 1, "checkpoint": 1'
    site.add(kind, "owner", f'needs=frozenset({{"beads"}}), {field}', contracts=needed, module="")
    [answer] = ask(name)
    assert (answer["what"], answer["package"], answer["verdict"]) == (what, "dist-owner 1.0", "refused")
    assert any("needs beads" in reason for reason in answer["reasons"])


def test_a_kernel_is_known_by_name_and_sends_to_a_model_for_its_sizes(site: Site, ask: Any) -> None:
    site.add("kernels", "swift", 'ops=("rms_norm",)', module=KERNEL)
    [answer] = ask("small_norm")
    assert (answer["what"], answer["verdict"]) == ("kernel for rms_norm", "offered")
    assert "evener why-not small_norm MODEL" in answer["reasons"][-1]


def test_kernel_is_used_for_some_sizes_and_skipped_for_others(site: Site, ask: Any, tiny: str) -> None:
    site.add("kernels", "swift", 'ops=("rms_norm",)', module=KERNEL)
    found = ask("small_norm", tiny)
    by_verdict = {each["verdict"]: each for each in found}
    assert set(by_verdict) == {"used", "passed over"}, found
    assert "at 1..16 tokens" in by_verdict["used"]["what"]
    assert "at 17.." in by_verdict["passed over"]["what"] and by_verdict["passed over"]["package"] == "reference serves"
    assert by_verdict["passed over"]["reasons"] == ["it holds 16 tokens"]


def test_an_op_in_a_model_lists_who_serves_it_and_why_the_others_do_not(site: Site, ask: Any, tiny: str) -> None:
    site.add("kernels", "swift", 'ops=("rms_norm",)', module=KERNEL)
    used = [each for each in ask("rms_norm", tiny, "ops.rms_norm=reference") if each["verdict"] == "used"]
    assert used and {each["name"] for each in used} == {"reference"}
    assert all(each["reasons"] == ["not swift/small_norm: ops.rms_norm=reference"] for each in used)
    nobody = [each for each in ask("embedding", tiny) if each["verdict"] == "used"]
    assert [each["reasons"] for each in nobody] == [["no chosen package has a kernel for it"]]


def test_an_op_that_nobody_accelerates_is_served_by_the_reference_where_a_model_calls_it(
    site: Site, ask: Any, tiny: str
) -> None:
    site.add("kernels", "swift", 'ops=("rms_norm",)', module=KERNEL)
    nobody, op = ask("activate")
    assert (nobody["what"], nobody["name"], nobody["verdict"]) == ("kernels for op", "activate", "none")
    assert "the reference" in nobody["reasons"][0] and "evener why-not activate MODEL" in nobody["reasons"][0]
    assert op["what"] == "op"
    of_norm = [(each["what"], each["verdict"]) for each in ask("rms_norm")]
    assert ("kernels for op", "chosen") in of_norm and ("kernels for op", "none") not in of_norm
    uncalled, op = ask("activate", tiny)
    assert (uncalled["what"], uncalled["package"], uncalled["verdict"]) == ("op", tiny, "not called")
    assert op["what"] == "op"


def test_a_model_that_cannot_run_is_part_of_the_answer(site: Site, ask: Any, tmp_path: Path) -> None:
    del site
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/config.json").write_text(json.dumps(TINY | {"architectures": ["OddForCausalLM"]}))
    answer = ask("rms_norm", str(tmp_path / "odd"))[0]
    assert (answer["what"], answer["verdict"]) == ("model", "refused") and "OddForCausalLM" in answer["reasons"][0]


def test_an_architecture_whose_package_is_switched_off_names_the_package_and_the_switch(
    site: Site, ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.add("plugin", "odd", 'architectures={"OddForCausalLM": "odd:Odd"}')
    monkeypatch.setenv("EVENER_DISABLE_PLUGINS", "dist-odd")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/config.json").write_text(json.dumps(TINY | {"architectures": ["OddForCausalLM"]}))
    (answer,) = ask("rms_norm", str(tmp_path / "odd"))[:1]
    assert "dist-odd may have it, but is disabled: EVENER_DISABLE_PLUGINS lists" in answer["reasons"][0]


def test_a_name_that_nothing_has_is_an_error_with_the_nearest_one_and_what_to_install(
    site: Site, ask: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    del ask
    site.add("kernels", "swift", 'ops=("rms_norm",)', module=KERNEL)
    assert main(["why-not", "small_nor"]) == 2
    said = capsys.readouterr().err
    assert "did you mean 'small_norm'?" in said and "pip install" not in said
    assert main(["why-not", "zither"]) == 2
    assert "pip install evener-backend-zither" in capsys.readouterr().err
    assert main(["why-not"]) == 2
    assert "evener why-not NAME [MODEL]" in capsys.readouterr().err


def test_text_output_has_one_line_per_answer_with_reasons_below(
    site: Site, ask: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    del ask
    site.add("kernels", "swift", 'needs=frozenset({"beads"})', module="")
    assert main(["why-not", "swift"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "kernel package swift (dist-swift 1.0): refused"
    assert second == "  needs beads, which backend 'reference' does not serve"

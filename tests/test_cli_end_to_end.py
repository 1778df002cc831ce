"""The commands as processes, as somebody types them: what they print where, and their exit codes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from served import EVENER, PATIENCE, Served, tiny_model
from warm import CHILDREN, warm

REAL = ("infer.kv_memory=268435456", "infer.max_seq_len=512", "infer.threads=1")
SMALL = ("infer.kv_memory=4194304", "infer.max_seq_len=512", "infer.threads=1")


def run(
    *words: str | Path, environ: dict[str, str] | None = None, cwd: Path | None = None, program: Path | None = None
) -> Any:
    """``evener WORDS``; the finished process. ``program`` is started instead of an ``evener`` that is warm."""
    return subprocess.run(
        [str(word) for word in (program or warm() / "evener", *words)], capture_output=True, text=True,
        timeout=2 * PATIENCE, check=False, stdin=subprocess.DEVNULL, cwd=cwd,
        env={**os.environ, CHILDREN: str(warm() / "python"), **(environ or {})},
    )  # fmt: skip


def warm_python() -> tuple[str | Path, ...]:
    """Python that is warm, as the processes are that it starts."""
    program = warm() / "python"
    return "env", f"{CHILDREN}={program}", program


def ask(served: Served, **fields: Any) -> Any:
    body = {"model": served.name, "prompt": "hello", "max_tokens": 3, "ignore_eos": True, **fields}
    return served.http.post("/v1/completions", json=body).raise_for_status().json()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def test_run_streams_the_answer_and_says_the_figures_beside_it(smollm2_dir: Path) -> None:
    done = run("run", smollm2_dir, "--prompt", "What is the capital of France?", "--temperature", "0", *REAL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n") and "Paris" in done.stdout
    figures = done.stderr.splitlines()[-1]
    assert figures.startswith("cpu (") and "tokens/s" in figures and figures.endswith("finish reason: stop")


def test_run_json_is_one_document_for_programs(tiny: Path) -> None:
    done = run("run", tiny, "--json", "--prompt", "- a list", "--max-tokens", "4", "--ignore-eos", "load=dummy", *SMALL)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["completion_tokens"] == 4 and answer["finish_reason"] == "length" and answer["backend"] == "cpu"
    assert answer["seconds_to_first_token"] > 0 and answer["backend_reason"] and isinstance(answer["text"], str)


def test_legacy_benchmark_command_writes_log_and_result(tiny: Path, tmp_path: Path) -> None:
    words = (f"models.ckpt_dir={tiny}", "infer.do_load=false", "request.prompt_tokens_len=20",
             "request.max_new_tokens=9", "infer.max_seq_len=64", "infer.max_reqs=8", "executor=process")  # fmt: skip
    done = subprocess.run(
        [*warm_python(), "-m", "evener", "run", *words, "infer.kv_memory=4MiB"],
        capture_output=True, text=True, timeout=2 * PATIENCE, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "outputs").glob("*/*")
    result = json.loads((folder / "result.json").read_text())
    assert (result["prompt_tokens"], result["completion_tokens"], result["finish_reason"]) == (20, 9, "length")
    log = (folder / "run.log").read_text()
    assert "evener.worker: memory: " in log and "evener.run: cpu (" in log
    assert "evener.worker" not in done.stderr
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {"decoder_layer", "head"} <= {row["op"] for row in manifest["ops"]}
    assert json.loads((folder / "resolved.json").read_text())["infer.max_reqs"]["value"] == 8


def test_config_shows_every_key_resolved_with_its_reason(tiny: Path) -> None:
    done = run("config", tiny, "--json", "--infer.max_reqs", "3")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["infer.max_reqs"]["value"] == 3 and found["infer.max_reqs"]["reason"] == "as asked"
    assert found["backend"]["value"] == "cpu" and all(row["reason"] for row in found.values())
    assert "infer.max_reqs" in run("config", tiny).stdout
    keys = {row["key"] for row in json.loads(run("config", "--keys", "--json").stdout)}
    assert keys >= {"dtype", "load", "infer.tp_size", "serve.port", "infer.cache_type", "backend"}


def test_help_says_what_each_command_of_this_project_does() -> None:
    lines = run("--help").stdout.splitlines()
    assert any(line.startswith("  convert ") for line in lines)
    assert [line for line in lines if "from evener-" in line or "pip install" in line] == []


def test_plugins_and_models_list_what_is_installed() -> None:
    found = {row["name"]: row for row in json.loads(run("plugins", "--json").stdout)["candidates"]}
    assert found["cpu"]["distribution"] == "evener-backend-cpu" and {"models", "server"} <= set(found)
    names = {row["name"]: row["distribution"] for row in json.loads(run("models", "--json").stdout)}
    assert names["LlamaForCausalLM"] == "evener-models" and "Gemma3ForCausalLM" in names
    assert "evener-models" in run("models").stdout and "evener-server" in run("plugins").stdout


def test_doctor_says_0_with_a_backend_and_1_without() -> None:
    good = run("doctor", "--json", program=EVENER)
    assert good.returncode == 0 and json.loads(good.stdout)["candidates"]
    missing = run("doctor", "--backend", "abacus")
    assert missing.returncode == 1 and "no backend 'abacus' is installed" in missing.stdout
    none = run("doctor", environ={"EVENER_PLUGINS": ""})
    assert none.returncode == 1 and "EVENER_PLUGINS" in none.stdout


def test_legacy_command_style_serves_with_one_warning_per_legacy_key(tiny: Path, tmp_path: Path) -> None:
    command = (
        *warm_python(), "-m", "evener", "models=tiny", f"models.ckpt_dir={tiny}", "serve.port=0", "infer.max_reqs=2",
        "infer.do_load=false", *SMALL,
    )  # fmt: skip
    with Served(*command) as served:
        assert served.name == "tiny"
        assert ask(served)["usage"]["completion_tokens"] == 3
        for old in ("models.ckpt_dir", "infer.do_load"):
            assert f"warning: {old}" in served.log
        assert served.stop() == 0


def test_a_whole_file_is_read_from_config_name_and_the_command_line_wins(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    lines = (
        f"model: {tiny}", "load: dummy", "infer:", "  max_seq_len: 64", "  kv_memory: 4194304", "serve:",
        "  port: 1", "  served_model_name: from-the-file",
    )  # fmt: skip
    (tmp_path / "config/mine.yaml").write_text("\n".join(lines), "utf-8")
    shown = run("config", "--json", environ={"CONFIG_NAME": "mine"}, cwd=tmp_path)
    assert json.loads(shown.stdout)["infer.max_seq_len"]["value"] == 64, shown.stderr
    with Served("env", "CONFIG_NAME=" + str(tmp_path / "config/mine.yaml"), *warm_python(), "-m", "evener",
                "serve.port=0") as served:  # fmt: skip
        assert served.name == "from-the-file"
        refused = served.http.post("/v1/completions", json={"model": served.name, "prompt": "a" * 80})
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert served.stop() == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "{model}", "--prompt", "x", "infer.max_req=3"), "did you mean 'infer.max_reqs'"),
        (("serve", "{model}", "serve.prot=80"), "did you mean 'serve.port'"),
        (("config", "{model}", "dtype=flaot32"), "did you mean 'float32'"),
        (("config", "{model}", "infer.attn_type=lpu"), "attn_type"),
        (("run", "{model}"), "--prompt"),
        (("serve",), "no model is given"),
        (("srve", "{model}"), "did you mean 'serve'"),
        (("models", "extra"), "unexpected argument 'extra'"),
    ],
)
def test_usage_errors_are_one_line_with_a_hint(tiny: Path, words: tuple[str, ...], said: str) -> None:
    done = run(*(word.format(model=tiny) for word in words))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and said in done.stderr and done.stderr.count("\n") == 1


def test_runtime_errors_are_one_line(tmp_path: Path, tiny: Path) -> None:
    for words, said in (
        (("run", tmp_path / "none", "--prompt", "x"), "does not exist"),
        (("run", tiny, "--prompt", "x", *SMALL), "safetensors"),
        (("run", tiny, "--prompt", "x", "--backend", "cpuu", "load=dummy"), "did you mean 'cpu'"),
    ):
        done = run(*words)
        assert done.returncode == 1 and done.stderr.startswith("error: ") and said in done.stderr
        assert "Traceback" not in done.stderr

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from evener.cli.main import main
from evener.config.schema import key_specs


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def complete(text: str, line: str) -> list[str]:
    """What bash offers after ``line``."""
    words = line.split()
    if line.endswith(" "):
        words.append("")
    program = (
        f"{text}\ncompopt() {{ :; }}\nCOMP_LINE={line!r}; COMP_POINT=${{#COMP_LINE}}\n"
        f"COMP_WORDS=({' '.join(repr(word) for word in words)}); COMP_CWORD={len(words) - 1}\n"
        '_evener; printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False, cwd="/")
    assert done.stderr == "", done.stderr
    return [word for word in done.stdout.splitlines() if word]


def test_bash_completes_commands_options_keys_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    text = script("bash", capsys)
    assert complete(text, "evener expl") == ["explain"]
    assert complete(text, "evener run --max-t") == ["--max-tokens"]
    assert complete(text, "evener run infer.max_r") == ["infer.max_reqs="]
    assert complete(text, "evener run /m dtype=b") == ["bfloat16"]
    assert complete(text, "evener explain ops.rms_norm=") == ["reference"]
    assert complete(text, "evener config infer.prefix_cache=") == ["true", "false"]
    assert complete(text, "evener doctor infer.max_r") == []


def test_the_words_are_all_keys_and_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(key_specs()) <= set(found["keys"]) and "ops.rms_norm" in found["keys"]
    assert {"run", "explain", "completion", "doctor"} <= set(found["commands"])
    assert "--json" in found["commands"]["explain"] and "--prompt" in found["commands"]["run"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_every_command_and_key(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    for word in ("explain", "max-tokens", "infer.max_reqs", "ops.rms_norm"):
        assert word in text
    if program := shutil.which(shell):
        done = subprocess.run([program, "-n", "-c", text], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_another_shell_is_an_error_that_names_these(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bsh"]) == 2
    assert "not 'bsh'; did you mean 'bash'" in capsys.readouterr().err
    assert main(["completion"]) == 2

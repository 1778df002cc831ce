from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable

import pytest

import evener.__main__ as module
from evener.cli import main as cli
from evener.cli import version
from evener.errors import DescriptorError, EngineError
from evener.plugins.catalog import LazyImport
from evener.plugins.discover import installed_catalog

Calls = list[list[str]]


def target(name: str, path: str) -> LazyImport:
    return LazyImport(kind="command", name=name, path=path, package="pack", distribution="evener-pack")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, LazyImport]:
    """The commands that packages bring: none, until a test adds some."""
    commands: dict[str, LazyImport] = {}
    others = installed_catalog()

    class Catalog:
        packages = problems = ()
        disabled: tuple[object, ...] = ()

        def commands(self) -> dict[str, LazyImport]:
            return commands

        def lazy_imports(self, kind: str) -> dict[str, LazyImport]:
            return others.lazy_imports(kind)

    monkeypatch.setattr("evener.plugins.discover.installed_catalog", Catalog)
    return commands


@pytest.fixture
def brought(installed: dict[str, LazyImport], monkeypatch: pytest.MonkeyPatch) -> Calls:
    """A package's ``serve`` that records what it was given."""
    calls: Calls = []

    def serve(argv: list[str]) -> int:
        calls.append(argv)
        return 7

    monkeypatch.setattr(cli, "evener_test_serve", serve, raising=False)
    installed["serve"] = target("serve", "evener.cli.main:evener_test_serve")
    return calls


def test_help_lists_every_command_and_how_to_get_those_that_are_missing(
    installed: dict[str, LazyImport], capsys: pytest.CaptureFixture[str]
) -> None:
    installed["graze"] = target("graze", "a:b")
    assert cli.main(["--help"]) == cli.main([]) == 0
    out = capsys.readouterr().out
    for name in ("run", "serve", "config", "plugins", "doctor", "models", "version", "graze"):
        assert f"\n  {name} " in out
    assert 'serve a model over HTTP (pip install "evener[serve]")' in out and "from evener-pack" in out
    for name in ("conformance", "new", "first-contact", "evidence"):
        assert re.search(rf"\n  {name} +.* \(pip install evener-conformance\)\n", out)
    for name in ("convert", "quantize", "calibrate", "bench-engine"):
        assert re.search(rf'\n  {name} +.* \(pip install "evener\[serve\]"\)\n', out)


def test_an_unknown_command_is_an_error_with_the_nearest_one(
    installed: dict[str, LazyImport], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["confg"]) == 2
    assert (
        capsys.readouterr().err
        == "error: unknown command 'confg'; did you mean 'config'? `evener --help` lists them.\n"
    )


@pytest.mark.parametrize(
    ("name", "install"),
    [
        ("serve", 'pip install "evener[serve]"'),
        ("run", 'pip install "evener[serve]"'),
        ("plugins", 'pip install "evener[serve]"'),
        ("conformance", "pip install evener-conformance"),
        ("new", "pip install evener-conformance"),
    ],
)
def test_a_command_whose_package_is_missing_says_what_to_install(
    name: str, install: str, installed: dict[str, LazyImport], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([name, "/m"]) == 2
    assert capsys.readouterr().err == f"error: `evener {name}` needs a package that is not installed; type: {install}\n"


def test_help_shows_the_commands_of_evener_conformance_where_it_is_installed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for name in ("conformance", "new", "first-contact", "evidence"):
        assert re.search(rf"\n  {name} ", out)
    assert "evener-conformance" not in out
    assert {"conformance", "new"} <= cli.installed_commands().keys()


def test_a_missing_command_names_packages_that_are_installed_and_cannot_be_used(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENER_DISABLE_PLUGINS", "evener-server")
    assert cli.main(["serve", "/m"]) == 2
    err = capsys.readouterr().err
    assert "(evener-server " in err and "EVENER_DISABLE_PLUGINS" in err


def test_a_package_brings_commands_and_their_exit_codes(brought: Calls) -> None:
    assert cli.main(["serve", "/m", "infer.depth=1"]) == 7
    assert brought == [["/m", "infer.depth=1"]]


def test_a_package_cannot_take_a_built_in_command(installed: dict[str, LazyImport]) -> None:
    installed["doctor"] = target("doctor", "a:b")
    with pytest.raises(DescriptorError, match="evener-pack declares a command 'doctor', which is a built-in command"):
        cli.installed_commands()


@pytest.mark.parametrize(
    ("argv", "passed_on"),
    [
        (["models=X", "models.ckpt_dir=/m", "serve.port=1"], ["models=X", "models.ckpt_dir=/m", "serve.port=1"]),
        (["--model", "/m"], ["--model", "/m"]),
        (["+cpu_layer_num=58"], ["+cpu_layer_num=58"]),
        (["serve", "/m"], ["/m"]),
    ],
)
def test_python_m_evener_serves_when_keys_come_without_a_command(
    argv: list[str], passed_on: list[str], brought: Calls
) -> None:
    assert module.run(argv) == 7
    assert brought == [passed_on]


def test_python_m_evener_serves_a_whole_file(brought: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONFIG_NAME", "serve.yaml")
    assert module.run([]) == 7
    assert brought == [[]]


def test_python_m_evener_with_a_command_is_evener(
    installed: dict[str, LazyImport], capsys: pytest.CaptureFixture[str]
) -> None:
    assert module.run([]) == module.run(["--help"]) == 0
    assert capsys.readouterr().out.count("usage: evener COMMAND") == 2
    assert module.run(["confg"]) == 2


def test_python_m_evener_warns_about_legacy_env_variables(
    brought: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CINFER_WITH_CYTHON", "1")
    module.run(["model=/m"])
    assert "warning: CINFER_WITH_CYTHON is set, but nothing reads it" in capsys.readouterr().err


def test_running_the_module_ends_with_the_exit_code(brought: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["evener", "model=/m"])
    monkeypatch.delitem(sys.modules, "evener.__main__")
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(module.__file__), run_name="__main__")
    assert caught.value.code == 7


def failing(error: BaseException) -> Callable[[list[str]], int]:
    def command(argv: list[str]) -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (EngineError("the worker is gone"), 1, "error: the worker is gone\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (KeyboardInterrupt("type it again"), 130, "interrupted; type it again\n"),
        (
            ZeroDivisionError("by zero"),
            1,
            "error: ZeroDivisionError: by zero; this is a bug in evener or in a package: set EVENER_DEBUG=1 to see "
            "the stack trace, and report it\n",
        ),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    error: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "find_command", lambda name: failing(error))
    monkeypatch.delenv("EVENER_DEBUG", raising=False)
    assert cli.main(["run"]) == code
    assert capsys.readouterr() == ("", message)


def test_evener_debug_shows_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "find_command", lambda name: failing(EngineError("gone")))
    monkeypatch.setenv("EVENER_DEBUG", "1")
    with pytest.raises(EngineError, match="gone"):
        cli.main(["run"])


def test_help_imports_neither_torch_nor_hydra() -> None:
    code = (
        "import sys; from evener.cli.main import main; assert main(['--help']) == 0; "
        "assert not {'torch', 'transformers', 'hydra', 'fastapi'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: evener COMMAND")


def test_version_names_what_is_installed_without_importing_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"evener", "torch", "python", "system"} <= version.versions().keys()
    assert cli.main(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["evener"]


@pytest.mark.parametrize("name", ["plugins", "doctor", "version"])
def test_commands_without_a_model_refuse_stray_words(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "what"]) == 2
    assert f"evener {name}: unexpected argument 'what'" in capsys.readouterr().err


def test_plugins_speaks_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plugins", "--json"]) == 0
    assert {"candidates", "warnings"} == json.loads(capsys.readouterr().out).keys()

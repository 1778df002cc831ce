from __future__ import annotations

from pathlib import Path

import pytest

from evener.cli.command import Command, read_config
from evener.errors import ConfigError
from evener.plugins.catalog import Catalog


@pytest.fixture
def command() -> Command:
    command = Command("pull", "Pull a load.")
    command.option("--load", metavar="KG")
    command.option("--gently", action="store_true")
    return command


def test_own_options_stand_anywhere_among_the_model_and_the_keys(command: Command) -> None:
    arguments, config = read_config(command, ["--load", "3", "infer.depth=1", "/m", "--gently", "--seed", "4"], {})
    assert (arguments.load, arguments.gently) == ("3", True)
    assert (config.model, config.infer.depth, config.seed) == ("/m", 1, 4)


def test_a_value_of_an_own_option_may_begin_with_dashes(command: Command) -> None:
    assert read_config(command, ["/m", "--load", "-- a list", "--gently"], {})[0].load == "-- a list"
    assert read_config(command, ["/m", "--load=--gently"], {})[0].load == "--gently"


def test_a_wrong_own_option_names_the_command_and_its_help(command: Command) -> None:
    with pytest.raises(ConfigError, match=r"evener pull: .*--load.* expected one argument; type `evener pull --help`"):
        read_config(command, ["/m", "--load"], {})


def test_two_models_are_an_error(command: Command) -> None:
    with pytest.raises(
        ConfigError, match="unexpected argument '/b': the model comes first, then options as key=value or --key value"
    ):
        read_config(command, ["/a", "/b"], {})


def test_a_whole_file_comes_from_the_option_or_from_config_name(command: Command, tmp_path: Path) -> None:
    for name, depth in (("a", 1), ("b", 3)):
        (tmp_path / f"{name}.yaml").write_text(f"model: /m\ninfer:\n  depth: {depth}\n")
    environ = {"CONFIG_NAME": str(tmp_path / "a.yaml")}
    assert read_config(command, [], environ)[1].infer.depth == 1
    assert read_config(command, ["--config", str(tmp_path / "b.yaml")], environ)[1].infer.depth == 3
    assert read_config(command, ["--config_file", str(tmp_path / "b.yaml")], environ)[1].infer.depth == 3
    assert read_config(command, ["infer.depth=5"], environ)[1].infer.depth == 5


def test_old_spellings_are_warned_about_on_standard_error(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    read_config(command, ["models.ckpt_dir=/m", "infer.do_load=False"], {})
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "warning: models.ckpt_dir=/m: models.ckpt_dir is a legacy key; write model=/m",
        "warning: infer.do_load=False: infer.do_load is a legacy key; write load=dummy",
    ]


def test_wrong_world_size_is_an_error_that_says_how_to_start(command: Command, tmp_path: Path) -> None:
    started = {"WORLD_SIZE": "8", "RANK": "3", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "here",
               "MASTER_PORT": "29500"}  # fmt: skip
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=8: 8 ranks were started, .* start one process without torchrun"):
        read_config(command, [str(tmp_path)], started)
    with pytest.raises(ConfigError, match=r"RANK is not set, LOCAL_RANK=x is no number; start them with torchrun"):
        read_config(command, [str(tmp_path)], {**started, "RANK": "", "LOCAL_RANK": "x"})
    assert read_config(command, ["/m"], {"WORLD_SIZE": "1"})[1].model == "/m"
    assert read_config(command, ["/m"], {"WORLD_SIZE": "8"}, ranks=False)[1].model == "/m"
    with pytest.raises(
        ConfigError, match="executor=inline runs all ranks in one process, but torchrun starts one process for each"
    ):
        read_config(command, [str(tmp_path), "executor=inline", "infer.tp_size=8"], started)


def test_prompt_tokens_len_is_accepted_by_run_only(command: Command) -> None:
    with pytest.raises(ConfigError, match=r"request.prompt_tokens_len .* `evener pull` does not use it"):
        read_config(command, ["/m", "request.prompt_tokens_len=5"], {})
    assert read_config(Command("run", ""), ["/m", "request.prompt_tokens_len=5"], {})[1].request.prompt_tokens_len == 5


def test_legacy_env_variables_set_the_log_unless_given_on_the_command_line(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {"KLLM_LOG_LEVEL": "DEBUG", "KLLM_LOG_FILE": "/tmp/a.log", "KLLM_OTHER": "x"}
    config = read_config(command, ["/m", "log.level=warning"], environ)[1]
    assert (config.log.level, config.log.file) == ("warning", "/tmp/a.log")
    assert read_config(command, ["/m"], environ)[1].log.level == "debug"
    assert "KLLM_LOG_LEVEL is a legacy variable; write log.level=DEBUG" in capsys.readouterr().err


def test_keys_without_a_package_that_reads_them_are_an_error_that_names_one(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evener.cli.command.installed_catalog", Catalog)
    with pytest.raises(ConfigError, match="pip install evener-formats"):
        read_config(command, ["/m"], {})

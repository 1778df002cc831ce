from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from evener_keys.command_line import from_command_line, plain_values
from evener_keys.hydra_boundary import compose_flat, find_file
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.config.keys import Override, split_command_line
from evener.config.packages import Packages
from evener.config.schema import Config
from evener.errors import ConfigError


def typed(*words: str, model: str | None = "/m", file: str | None = None, packages: Packages) -> Config:
    return from_command_line(model, split_command_line(words).overrides, file, packages).config


def test_a_secret_that_cannot_be_read_is_not_shown(nothing_installed: Packages) -> None:
    with pytest.raises(ConfigError, match=r"serve\.api_keys cannot be read; write it as") as caught:
        typed("serve.api_keys=[s3cret,{", packages=nothing_installed)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "path",
    ["/data/a b", "/d/a=b,c", "/d/it's", '/d/"x"', "/d/a\\", "/d/(x)[1]{2}", "/d/#1 %~+!@&|;:<>?*", "[x]", "/d/é中"],
)
def test_paths_with_special_characters_are_kept_verbatim(path: str, nothing_installed: Packages) -> None:
    assert typed(f"model={path}", model=None, packages=nothing_installed).model == path
    assert typed(model=path, packages=nothing_installed).model == path


@settings(max_examples=20, deadline=None)
@given(st.text(alphabet="ab=,'\"\\ [](){}:%#~+-/\n\té", min_size=1, max_size=8))
def test_any_text_is_kept_verbatim(text: str) -> None:
    if len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]:
        return  # quoted text is the grammar's own
    assert compose_flat((), [Override("model", text, text)], Packages(lambda: []))["model"] == text


def test_quoted_text_lists_and_interpolations_are_parsed_by_hydra(nothing_installed: Packages) -> None:
    config = typed('serve.served_model_name="a b"', "serve.api_keys=[]", packages=nothing_installed)
    assert (config.serve.served_model_name, config.serve.api_keys) == ("a b", ())
    named = typed("serve.served_model_name=${dtype}", "dtype=float16", packages=nothing_installed)
    assert named.serve.served_model_name == "float16"


def test_a_value_that_hydra_cannot_read_is_an_error_with_what_was_typed(nothing_installed: Packages) -> None:
    with pytest.raises(ConfigError, match=r"'serve.served_model_name=\$\{nothing\}' cannot be read"):
        typed("dtype=bf16", "serve.served_model_name=${nothing}", packages=nothing_installed)
    with pytest.raises(
        ConfigError, match=r"infer.max_reqs='1,2' cannot be read; it takes an integer of at least 1 or auto"
    ):
        typed("infer.max_reqs=1,2", packages=nothing_installed)


def test_options_of_packages_pass_through(packages: Packages) -> None:
    config = typed("--wid-get.mode", "wild", "ops.attention=wid-get", packages=packages)
    assert (config.options, config.ops) == ({"wid-get": {"mode": "wild"}}, {"attention": "wid-get"})


def test_a_whole_file_is_read_and_keys_that_are_typed_win(tmp_path: Path, packages: Packages) -> None:
    file = tmp_path / "my serve.yaml"
    file.write_text(
        "models:\n  ckpt_dir: /from/file\ninfer:\n  max_reqs: 8\n  depth: 1\n  kv_memory: 0.4\n"
        "wid-get:\n  lanes: 2\nserve:\n  served_model_name: ${dtype}\ndtype: bf16\n"
    )
    config = typed("infer.max_reqs=4", model=None, file=str(file), packages=packages)
    assert (config.model, config.dtype, config.serve.served_model_name) == ("/from/file", "bfloat16", "bf16")
    assert (config.infer.max_reqs, config.infer.depth, config.infer.kv_memory) == (4, 1, 0.4)
    assert config.options == {"wid-get": {"lanes": 2}}
    assert typed(model="/typed", file=str(file), packages=packages).model == "/typed"


def test_a_file_may_build_on_another(tmp_path: Path, nothing_installed: Packages) -> None:
    (tmp_path / "base.yaml").write_text("model: /m\ninfer:\n  depth: 1\n  max_reqs: 3\n")
    (tmp_path / "top.yaml").write_text("defaults:\n  - base\n  - _self_\ninfer:\n  max_reqs: 5\n")
    config = typed(model=None, file=str(tmp_path / "top.yaml"), packages=nothing_installed)
    assert (config.infer.depth, config.infer.max_reqs) == (1, 5)


def test_an_unknown_key_in_a_file_is_an_error_too(tmp_path: Path, nothing_installed: Packages) -> None:
    (tmp_path / "f.yaml").write_text("infer:\n  max_req: 8\n")
    with pytest.raises(ConfigError, match=r"unknown option 'infer.max_req'.*did you mean 'infer.max_reqs'"):
        typed(file=str(tmp_path / "f.yaml"), packages=nothing_installed)


def test_a_file_that_cannot_be_read_is_an_error_with_its_name(tmp_path: Path, nothing_installed: Packages) -> None:
    (tmp_path / "f.yaml").write_text("infer: [1,\n")
    with pytest.raises(ConfigError, match=r"config file '.*f\.yaml' cannot be read"):
        typed(file=str(tmp_path / "f.yaml"), packages=nothing_installed)
    (tmp_path / "g.yaml").write_text("defaults:\n  - models: ???\n")
    with pytest.raises(ConfigError, match=r"config file '.*g\.yaml' cannot be read"):
        typed(file=str(tmp_path / "g.yaml"), packages=nothing_installed)


def test_a_file_is_found_by_path_or_by_name_here_or_in_config(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    for file in ("a.yaml", "config/b.yaml"):
        (tmp_path / file).write_text("")
    assert find_file(str(tmp_path / "a.yaml"), Path("/")) == tmp_path / "a.yaml"
    assert find_file("a.yaml", tmp_path) == tmp_path / "a.yaml"
    assert find_file("a", tmp_path) == tmp_path / "a.yaml"
    assert find_file("b", tmp_path) == tmp_path / "config" / "b.yaml"
    with pytest.raises(ConfigError, match=r"config file 'c' does not exist; looked for .*c\.yaml, .*config/c\.yaml"):
        find_file("c", tmp_path)
    (tmp_path / "d.yml").write_text("")
    with pytest.raises(ConfigError, match=r"must end in \.yaml; rename it"):
        find_file("d.yml", tmp_path)


def test_llm_configs_are_built_without_hydra_and_without_torch() -> None:
    code = (
        "import sys; from evener.config import from_overrides; from_overrides('m', {'infer.depth': 1}); "
        "assert not {'hydra', 'omegaconf', 'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_plain_values_are_read_without_hydra_and_as_hydra_reads_them(nothing_installed: Packages) -> None:
    code = (
        "import sys; from evener_keys.command_line import from_command_line as read; "
        "from evener.config.keys import split_command_line as split; "
        "config = read('/m', split(['infer.max_reqs=3', 'infer.kv_memory=0.5', 'dtype=bf16']).overrides).config; "
        "assert (config.infer.max_reqs, config.infer.kv_memory, config.dtype) == (3, 0.5, 'bfloat16'), config; "
        "assert not {'hydra', 'omegaconf'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    overrides = [Override(key, value, value) for key, value in (("model", "a b=c,'d"), ("infer.max_reqs", "3"))]
    assert plain_values(overrides) == compose_flat((), overrides, nothing_installed)


@pytest.mark.parametrize("value", ["[a,b]", "{a: 1}", "'a'", '"a"', "x${dtype}", "???", 3, True])
def test_values_with_a_grammar_are_left_to_hydra(value: object) -> None:
    assert plain_values([Override("model", value, str(value))]) is None

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
from evener_keys.command_line import from_command_line

from evener.config.build import Built, from_overrides
from evener.config.keys import split_command_line
from evener.config.packages import Packages
from evener.config.schema import Config, InferConfig, ServeConfig, key_specs, to_flat
from evener.errors import ConfigError
from evener.key_spec import KeySpec

KEYS = {key: spec for key, spec in key_specs().items() if key != "model"}


def other_value(spec: KeySpec) -> tuple[str, Any]:
    """A value that is not the default, as typed and as meant; the default where this version has no other."""
    if spec.supported:
        value = spec.supported[-1]
        return (",".join(value) if isinstance(value, tuple) else str(value), value)
    if spec.choices:
        value = next(choice for choice in reversed(spec.choices) if choice != spec.default)
        return str(value), value
    if spec.kind == "names":
        return "first,second", ("first", "second")
    values = {
        "str": "some words",
        "path": "/a/b",
        "int": 7,
        "bool": spec.default is not True,
        "size": 2**31,
        "float": 2.5,
    }
    return str(values[spec.kind]), values[spec.kind]


def value_of(config: Config, key: str) -> Any:
    return to_flat(config)[key]


@pytest.mark.parametrize("key", key_specs())
def test_every_key_has_a_sentence_of_help_and_says_what_it_takes(key: str) -> None:
    spec = key_specs()[key]
    assert spec.help.endswith(".") and spec.help[0] in f"`{spec.help[0].upper()}"
    assert spec.takes()


@pytest.mark.parametrize("key", KEYS)
def test_every_key_but_the_model_has_a_default_that_this_version_honours(key: str) -> None:
    assert KEYS[key].default is not dataclasses.MISSING
    assert value_of(Config(model="m"), key) == KEYS[key].default


@pytest.fixture(scope="module")
def typed() -> Built:
    """Every key typed in one command line: composing one for each takes most of the time."""
    words = [f"{key}={other_value(spec)[0]}" for key, spec in KEYS.items()]
    return from_command_line("m", split_command_line(words).overrides, packages=Packages(lambda: []))


@pytest.fixture(scope="module")
def filed(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Every key in one file."""
    sections: dict[str, str] = {"": "model: /m\n"}
    for key, spec in KEYS.items():
        text, value = other_value(spec)
        section, _, name = key.rpartition(".")
        shown = f'"{text}"' if spec.kind in ("str", "path") else "[]" if value == () else text
        sections[section] = sections.get(section, f"{section}:\n") + "  " * bool(section) + f"{name}: {shown}\n"
    path = tmp_path_factory.mktemp("config") / "whole.yaml"
    path.write_text("".join(sections.values()))
    return from_command_line(None, (), str(path), Packages(lambda: []))


@pytest.mark.parametrize("key", KEYS)
def test_every_key_parses_the_same_as_override_flag_and_python_value(
    key: str, typed: Built, nothing_installed: Packages
) -> None:
    text, value = other_value(KEYS[key])
    flag = "--" + key.replace("_", "-")
    ways = [[f"{key}={text}"], [f"{flag}={text}"], [flag, text], [f"++{key}={text}"]]
    read = [split_command_line(way).overrides for way in ways]
    assert [[(each.key, each.value) for each in overrides] for overrides in read] == [[(key, text)]] * 4
    python = [from_overrides("m", {key: each}, nothing_installed) for each in (value, text)]
    assert [value_of(built.config, key) for built in (typed, *python)] == [value] * 3
    assert not any(built.notes for built in (typed, *python))


@pytest.mark.parametrize("key", KEYS)
def test_every_key_can_stand_in_a_file(key: str, filed: Built) -> None:
    assert value_of(filed.config, key) == other_value(KEYS[key])[1]


@pytest.mark.parametrize("key", [key for key, spec in KEYS.items() if spec.kind == "int"])
def test_a_number_that_is_too_small_or_no_number_is_an_error_that_says_what_it_takes(
    key: str, nothing_installed: Packages
) -> None:
    for wrong in ("-1", "many", True, 1.5):
        with pytest.raises(ConfigError, match=r"it takes an integer|is not in this version"):
            from_overrides("m", {key: wrong}, nothing_installed)


@pytest.mark.parametrize(
    ("key", "value", "missing"),
    [
        ("infer.dp_size", 2, "data parallelism"),
        ("trust_model_code", True, "code from a model's folder"),
    ],
)
def test_a_feature_that_is_not_built_yet_is_an_error_that_says_so(
    key: str, value: object, missing: str, nothing_installed: Packages
) -> None:
    with pytest.raises(ConfigError, match=f"not in this version: {missing} (is|are) not built yet; leave {key} out"):
        from_overrides("m", {key: value}, nothing_installed)


@pytest.mark.parametrize("value", [[{"key": "s3cret"}], [["s3cret"]], {"s3cret"}])
def test_an_error_about_a_secret_does_not_show_it(value: object, nothing_installed: Packages) -> None:
    with pytest.raises(ConfigError, match=r"serve\.api_keys is not a list of names") as caught:
        from_overrides("m", {"serve.api_keys": value}, nothing_installed)
    assert "s3cret" not in str(caught.value)


def test_the_config_s_own_text_has_no_secret(nothing_installed: Packages) -> None:
    config = from_overrides("m", {"serve.api_keys": "s3cret"}, nothing_installed).config
    assert config.serve.api_keys == ("s3cret",) and "s3cret" not in repr(config)


def test_building_the_objects_by_hand_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"infer.dp_size=2 is not in this version"):
        InferConfig(dp_size=2)
    with pytest.raises(ConfigError, match=r"serve.port=70000 is out of range; it takes an integer from 0 to 65535"):
        ServeConfig(port=70000)
    with pytest.raises(ConfigError, match=r"infer.depth=True is not an integer"):
        InferConfig(depth=True)


def test_a_wrong_choice_comes_with_the_nearest_one(nothing_installed: Packages) -> None:
    with pytest.raises(ConfigError, match=r"dtype=bfloat15 .*; did you mean 'bfloat16'"):
        from_overrides("m", {"dtype": "bfloat15"}, nothing_installed)
    with pytest.raises(
        ConfigError, match="load=dumy is not a value of load; it takes auto or dummy; did you mean 'dummy'"
    ):
        from_overrides("m", {"load": "dumy"}, nothing_installed)


@pytest.mark.parametrize(("short", "name"), [("bf16", "bfloat16"), ("half", "float16"), ("FP32", "float32")])
def test_short_names_of_types_are_understood(short: str, name: str, nothing_installed: Packages) -> None:
    assert from_overrides("m", {"dtype": short}, nothing_installed).config.dtype == name


@pytest.mark.parametrize(
    ("text", "value"),
    [("4GiB", 4 * 2**30), ("1.5g", 1_500_000_000), ("512 MiB", 2**29), ("0.4", 0.4), (".5", 0.5), ("auto", "auto")],
)
def test_memory_is_bytes_with_a_unit_or_a_fraction(text: str, value: object, nothing_installed: Packages) -> None:
    assert from_overrides("m", {"infer.kv_memory": text}, nothing_installed).config.infer.kv_memory == value


def test_memory_without_its_unit_is_an_error_that_gives_it(nothing_installed: Packages) -> None:
    with pytest.raises(ConfigError, match=r"4 bytes, which is too small; for GiB write infer.kv_memory=4GiB"):
        from_overrides("m", {"infer.kv_memory": "4"}, nothing_installed)
    for wrong in ("1.5", 1.5, "0.0", "lots", "4 apples"):
        with pytest.raises(ConfigError, match=r"infer.kv_memory="):
            from_overrides("m", {"infer.kv_memory": wrong}, nothing_installed)


def test_config_survives_pickling_and_the_to_flat_round_trip(packages: Packages) -> None:
    asked = {"infer.depth": 1, "ops.attention": "wid-get", "wid-get.lanes": "8", "serve.served_model_name": "a b"}
    config = from_overrides("m", asked, packages).config
    assert pickle.loads(pickle.dumps(config)) == config
    flat = to_flat(config)
    assert from_overrides(flat.pop("model"), flat, packages).config == config
    assert config.options == {"wid-get": {"lanes": 8}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4GiB", 2**32),
        ("4 GB", 4 * 10**9),
        ("2500MiB", 2500 * 2**20),
        ("0.9", 0.9),
        (".5", 0.5),
        ("50%", 0.5),
        ("12.5 %", 0.125),
    ],
)
def test_memory_for_state_is_bytes_or_a_share(text: str, value: float, nothing_installed: Packages) -> None:
    built = from_overrides("m", {"infer.kv_memory": text}, nothing_installed)
    assert built.config.infer.kv_memory == value and type(built.config.infer.kv_memory) is type(value)


@pytest.mark.parametrize("text", ["0%", "100%", "1.0", "4", "1.5", "-1GiB", "4 gigs", "150%"])
def test_memory_that_makes_no_sense_is_refused_with_the_key(text: str, nothing_installed: Packages) -> None:
    with pytest.raises(ConfigError, match=r"infer\.kv_memory"):
        from_overrides("m", {"infer.kv_memory": text}, nothing_installed)

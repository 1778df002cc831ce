from __future__ import annotations

from dataclasses import replace

import pytest

from evener.config.build import from_overrides
from evener.config.keys import split_command_line
from evener.config.packages import Packages
from evener.contracts.descriptor import Descriptor, Option
from evener.errors import ConfigError, UnknownNameError


def refuse() -> list[Descriptor]:
    raise AssertionError("descriptors were read for nothing")


def test_plain_keys_read_no_descriptors() -> None:
    from_overrides("m", {"infer": {"depth": 1}, "dtype": "bf16", "infer.attn_type": "ref"}, Packages(refuse))


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("infer.max_req", "'infer.max_reqs'"),
        ("infer.port", "'serve.port'"),
        ("tp_size", "'infer.tp_size'"),
        ("dtyp", "'dtype'"),
        ("infer.prefixcache", "'infer.prefix_cache'"),
        ("wid-get.lane", "'wid-get.lanes'"),
        ("ops.spinn", "'ops.spin'"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_one_that_was_meant(
    wrong: str, meant: str, packages: Packages
) -> None:
    with pytest.raises(UnknownNameError, match=f"did you mean {meant}") as caught:
        from_overrides("m", {wrong: 1}, packages)
    assert "`evener config --keys` lists every option" in str(caught.value)


def test_unknown_key_without_a_close_match_points_to_the_key_list(packages: Packages) -> None:
    with pytest.raises(UnknownNameError) as caught:
        from_overrides("m", {"zzz.qqq": 1}, packages)
    assert str(caught.value) == ("unknown option 'zzz.qqq' (in 'zzz.qqq=1'). `evener config --keys` lists every option")


def test_options_of_a_package_are_typed_and_checked(packages: Packages) -> None:
    config = from_overrides("m", {"wid-get": {"lanes": "8", "loud": "yes", "ratio": 1}}, packages).config
    assert config.options == {"wid-get": {"lanes": 8, "loud": True, "ratio": 1.0}}
    with pytest.raises(ConfigError, match=r"wid-get.mode=wlid is not a value .* did you mean 'wild'"):
        from_overrides("m", {"wid-get.mode": "wlid"}, packages)
    with pytest.raises(ConfigError, match=r"wid-get.lanes='many' cannot be read; it takes an integer"):
        from_overrides("m", {"wid-get.lanes": "many"}, packages)


def test_a_package_is_found_with_dashes_or_underscores(packages: Packages) -> None:
    for typed in ("--wid-get.lanes=2", "wid_get.lanes=2", "wid-get.lanes=2"):
        overrides = {each.key: each.value for each in split_command_line([typed]).overrides}
        assert from_overrides("m", overrides, packages).config.options == {"wid-get": {"lanes": 2}}


def test_an_op_may_be_given_to_a_package(packages: Packages) -> None:
    overrides = {"ops.attention": "wid-get", "ops.linear": "reference", "ops.spin": "wid-get"}
    assert from_overrides("m", overrides, packages).config.ops == {
        "attention": "wid-get",
        "linear": "reference",
        "spin": "wid-get",
    }


def test_a_value_that_a_package_claims_is_rewritten_and_said(packages: Packages) -> None:
    built = from_overrides("m", {"infer.attn_type": "widget", "infer.widget_fast": True}, packages)
    assert built.config.infer.attn_type == "auto"
    assert built.config.ops == {"attention": "wid-get"}
    assert built.config.options == {"wid-get": {"mode": "wild"}}
    assert "infer.attn_type=widget is read as ops.attention=wid-get, as package 'wid-get' defines it" in built.notes


def test_a_value_that_nobody_claims_says_that_no_installed_package_serves_it(nothing_installed: Packages) -> None:
    with pytest.raises(
        ConfigError, match=r"no installed package defines infer.attn_type=widget; .* auto or ref, or a value"
    ):
        from_overrides("m", {"infer.attn_type": "widget"}, nothing_installed)
    with pytest.raises(ConfigError, match=r"no installed package defines infer.op_impl=rfe; did you mean 'ref'"):
        from_overrides("m", {"infer.op_impl": "rfe"}, nothing_installed)


def test_a_spelling_that_two_packages_claim_differently_is_an_error_with_both() -> None:
    def claim(name: str) -> Descriptor:
        return Descriptor(name=name, summary="", contracts={}, aliases={"infer.attn_type=x": f"ops.attention={name}"})

    with pytest.raises(ConfigError, match=r"has different meanings in a and b; type one of: ops\.attention=a"):
        from_overrides("m", {"infer.attn_type": "x"}, Packages(lambda: [claim("a"), claim("b")]))


def test_words_are_split_into_the_model_and_keys() -> None:
    typed = split_command_line(
        ["/m", "--backend", "x", "infer.depth=1", "--trust-model-code", "--infer.kv-memory=1GiB"]
    )
    assert typed.positionals == ("/m",)
    assert [(each.key, each.value) for each in typed.overrides] == [
        ("backend", "x"),
        ("infer.depth", "1"),
        ("trust_model_code", "true"),
        ("infer.kv_memory", "1GiB"),
    ]


def test_a_path_with_an_equals_sign_is_a_model_and_no_key() -> None:
    for path in ("/data/a=b", "./a=b", "data/run=3/x"):
        assert split_command_line([path]).positionals == (path,)


def test_a_switch_takes_the_next_word_only_if_it_says_yes_or_no() -> None:
    typed = split_command_line(["--infer.prefix-cache", "off", "--infer.prefix-cache", "/m"])
    assert [each.value for each in typed.overrides] == ["off", "true"]
    assert typed.positionals == ("/m",)


def test_a_flag_without_its_value_and_a_short_option_say_what_to_type() -> None:
    with pytest.raises(ConfigError, match="--backend needs a value: --backend VALUE, or backend=VALUE"):
        split_command_line(["/m", "--backend"])
    with pytest.raises(ConfigError, match="unknown option '-p'; options are written --name value"):
        split_command_line(["-p", "3"])


def test_last_override_wins_and_a_second_model_is_an_error(nothing_installed: Packages) -> None:
    with pytest.raises(ConfigError, match="the model is given twice: '/a' and 'model=/b'; keep one"):
        from_overrides("/a", {"model": "/b"}, nothing_installed)
    assert from_overrides("/a", {"model": "/a"}, nothing_installed).config.model == "/a"


def test_no_model_is_an_error_that_shows_both_ways_to_name_it(nothing_installed: Packages) -> None:
    with pytest.raises(ConfigError, match=r"no model is given: .*evener serve /path/to/model.*model=/path/to/model"):
        from_overrides(None, {}, nothing_installed)


def test_a_package_that_takes_no_options_says_so() -> None:
    bare = Descriptor(name="my-chip", summary="Takes nothing.", contracts={})
    with pytest.raises(
        ConfigError, match=r"my-chip\.fan=1 cannot be set: package my-chip has no options; leave it out"
    ):
        from_overrides("m", {"my-chip.fan": 1}, Packages(lambda: [bare]))
    other = replace(bare, options={"fans": Option(type=int, default=1, help="")})
    with pytest.raises(UnknownNameError, match=r"did you mean 'my-chip\.fans'"):
        from_overrides("m", {"my-chip.fan": 1}, Packages(lambda: [bare, other]))

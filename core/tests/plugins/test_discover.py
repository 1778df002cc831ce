"""Discovery: descriptors read, broken packages recorded, names unique, packages switched off."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from evener.contracts.descriptor import Descriptor
from evener.errors import (
    CheckpointError,
    ConfigError,
    ContractVersionError,
    DescriptorError,
    DuplicateNameError,
    UnknownNameError,
)
from evener.plugins.discover import core_version, discover, installed_catalog
from evener_conformance.package_site import Site


def test_every_group_is_read_in_order_and_nothing_but_descriptors_is_imported(site: Site) -> None:
    bomb = "raise AssertionError('imported')"
    site.add("plugin", "models", 'architectures={"A": "{pkg}.a:A"}', contracts='"architecture": 2', module=bomb)
    site.add("collectives", "ring", module=bomb)
    site.add("graphs", "replay", module=bomb)
    site.add("kernels", "fast", 'ops=("x",)', module=bomb)
    site.add("backend", "chip", module=bomb)
    catalog = site.discover()
    assert [package.name for package in catalog.packages] == ["chip", "fast", "replay", "ring", "models"]
    assert not catalog.problems
    assert catalog.packages[0].distribution == "dist-chip"
    assert catalog.packages[0].version == "1.0"


def test_a_descriptor_that_raises_is_a_problem_of_that_package_with_its_cause(site: Site) -> None:
    site.add("backend", "good")
    site.add("backend", "bad", init="raise OSError('the driver library is missing')")
    catalog = site.discover()
    assert [package.name for package in catalog.packages] == ["good"]
    (problem,) = catalog.problems
    assert isinstance(problem.error, DescriptorError)
    assert isinstance(problem.error.__cause__, OSError)
    assert "dist-bad" in str(problem.error) and "the driver library is missing" in str(problem.error)
    assert site.choose().backend.name == "good"


def test_a_broken_backend_that_was_asked_for_by_name_raises_with_the_original_cause(site: Site) -> None:
    site.add("backend", "good")
    site.add("backend", "bad", init="raise OSError('the driver library is missing')")
    with pytest.raises(DescriptorError, match="the driver library is missing") as raised:
        site.choose("bad")
    assert isinstance(raised.value.__cause__, OSError)


@pytest.mark.parametrize(
    ("init", "says"),
    [
        ("descriptor = 3", "names a int, not an evener.contracts.descriptor.Descriptor"),
        ("other = 3", "has no attribute 'descriptor'"),
        ("raise SystemExit(4)", "SystemExit: 4"),
    ],
)
def test_an_entry_point_that_names_no_descriptor_is_a_problem(site: Site, init: str, says: str) -> None:
    site.add("backend", "odd", init=init)
    (problem,) = site.discover().problems
    assert says in str(problem.error)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ('ops=["x"]', "ops must be a tuple of names"),
        ('ops=("x", "x")', "names something twice"),
        ('needs="triton"', "needs must be a frozenset of tags"),
        ('serves=frozenset({"x"})', "only a backend"),
        ('commands={"go": "nowhere"}', "must read 'module:attribute'"),
        ('aliases={"a": "b=c"}', "aliases must map 'key=value' to 'key=value'"),
        ('formats=("q",)', "must name the module that delivers its formats"),
        ('options={"n": 3}', "must be an Option"),
        ('options={"n": Option(type=int, default="3", help="")}', "'3' is not int"),
        ('options={"n": Option(type=int, default=3, help="", choices=(1, 2))}', "not among its choices"),
        ("probe_timeout=0", "seconds above 0"),
    ],
)
def test_a_malformed_field_is_a_problem_that_names_it(site: Site, fields: str, says: str) -> None:
    site.add("plugin", "odd", fields, contracts='"ops": 2, "quant": 2')
    (problem,) = site.discover().problems
    assert problem.step == "found"
    assert says in str(problem.error)


def test_a_malformed_name_and_a_name_that_differs_from_the_entry_points_are_problems(site: Site) -> None:
    source = 'from evener.contracts.descriptor import Descriptor\ndescriptor = Descriptor(name="{}", summary="s",{})'
    site.add("plugin", "Bad Name", init=source.format("Bad Name", " contracts={}"), distribution="dist-a")
    site.add("plugin", "one", init=source.format("two", " contracts={}"), distribution="dist-b")
    said = sorted(str(problem.error) for problem in site.discover().problems)
    assert "name 'Bad Name' is malformed" in said[0]
    assert "named 'two' but its entry point 'one'" in said[1]


def test_an_unsupported_contract_version_is_a_problem_with_both_numbers(site: Site) -> None:
    site.add("backend", "new", contracts='"probe": 1, "device": 3')
    path = [str(site.folder)]
    catalog = discover(path=path, environ={}, core_contracts={"probe": (1, 1), "device": (1, 2)})
    (problem,) = catalog.problems
    assert isinstance(problem.error, ContractVersionError)
    assert problem.step == "contracts"
    assert "core speaks device 1..2, this backend speaks 3" in str(problem.error)
    assert "pip install -U evener" in str(problem.error)


def test_an_unknown_contract_comes_with_a_suggestion(site: Site) -> None:
    site.add("backend", "new", contracts='"probe": 2, "devise": 1')
    (problem,) = site.discover().problems
    assert "did you mean 'device'?" in str(problem.error)


def test_a_contract_that_is_implemented_must_be_named(site: Site) -> None:
    site.add("kernels", "fast", 'ops=("x",)', module="", contracts="")
    (problem,) = site.discover().problems
    assert """add "ops": 2 to the descriptor's contracts""" in str(problem.error)


TORCH_PROBE = """
import sys
from evener.plugins.discover import discover
catalog = discover(path=[sys.argv[1]], environ={})
assert "torch" not in sys.modules, "torch was imported"
for problem in catalog.problems:
    print(problem.name, problem.error)
"""


def test_a_descriptor_that_imports_torch_is_a_problem_even_if_it_catches_the_refusal(site: Site) -> None:
    site.add("plugin", "heavy", init="import torch\n")
    tail = 'from evener.contracts.descriptor import Descriptor\ndescriptor = Descriptor(name="sly", summary="s",'
    site.add("plugin", "sly", init=f"try:\n    import torch\nexcept ImportError:\n    pass\n{tail} contracts={{}})")
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, sys.argv[1])\n{TORCH_PROBE}", str(site.folder)],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = ran.stdout.splitlines()
    assert len(lines) == 2
    assert all("imports torch" in line for line in lines)


def test_the_plugin_manager_imports_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "pydantic", "rich", "numpy", "hydra"}
    code = (
        "import sys, evener.plugins.load, evener.plugins.report, evener.backend.torch_marks as marks\n"
        "assert marks.read().version\n"
        f"print(sorted({heavy!r} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("kind", "fields", "contracts", "what"),
    [
        ("backend", "", None, "backend 'same'"),
        ("plugin", 'architectures={"A": "m:A"}', '"architecture": 2', "architecture 'A'"),
        ("plugin", 'commands={"go": "m:go"}', "", "command 'go'"),
        ("plugin", 'op_schemas=("x.op",), module="m"', '"ops": 2', "op 'x.op'"),
    ],
)
def test_a_duplicate_name_raises_with_both_distributions(
    site: Site, kind: str, fields: str, contracts: str | None, what: str
) -> None:
    names = ("same", "same") if kind == "backend" else ("one", "two")
    site.add(kind, names[0], fields, contracts=contracts, distribution="dist-one")
    site.add(kind, names[1], fields, contracts=contracts, distribution="dist-two")
    with pytest.raises(DuplicateNameError) as raised:
        site.discover()
    assert what in str(raised.value)
    assert "'dist-one'" in str(raised.value) and "'dist-two'" in str(raised.value)
    assert len(site.discover(EVENER_DISABLE_PLUGINS="dist-two").packages) == 1


def test_a_folder_that_is_twice_on_the_path_is_read_once(site: Site) -> None:
    site.add("backend", "chip")
    assert len(discover(path=[str(site.folder)] * 2, environ={}).packages) == 1


def test_a_disabled_package_is_not_imported_and_its_reason_names_the_variable(site: Site) -> None:
    site.add("backend", "one", init="raise AssertionError('imported')")
    site.add("backend", "two", init="raise AssertionError('imported')")
    catalog = site.discover(EVENER_DISABLE_PLUGINS="one, Dist_Two")
    assert not catalog.problems and not catalog.packages
    assert [each.reason for each in catalog.disabled] == [
        "EVENER_DISABLE_PLUGINS lists 'one'; take it out of that variable to use the package",
        "EVENER_DISABLE_PLUGINS lists 'Dist_Two'; take it out of that variable to use the package",
    ]


def test_disabling_a_package_that_is_not_installed_is_a_warning(site: Site) -> None:
    assert site.discover(EVENER_DISABLE_PLUGINS="gone").warnings == (
        "EVENER_DISABLE_PLUGINS lists 'gone', which is not installed",
    )


def test_the_allow_list_admits_only_its_distributions_and_the_empty_string_none(site: Site) -> None:
    site.add("backend", "one")
    site.add("backend", "two", init="raise AssertionError('imported')")
    catalog = site.discover(EVENER_PLUGINS="dist-one")
    assert [package.name for package in catalog.packages] == ["one"]
    assert catalog.disabled[0].reason == ("EVENER_PLUGINS does not list 'dist-two'; add it there to use the package")
    assert site.discover(EVENER_PLUGINS="").packages == ()


def test_an_allow_list_with_a_distribution_that_is_not_installed_is_an_error(site: Site) -> None:
    site.add("backend", "one")
    with pytest.raises(UnknownNameError, match=r"did you mean 'dist-one'\?.*pip install dist-onne"):
        site.discover(EVENER_PLUGINS="dist-onne")


def test_core_registers_its_own_packages_the_same_way_and_they_cannot_be_disabled(site: Site) -> None:
    site.add("plugin", "other", 'op_schemas=("x",), module="m"', contracts='"ops": 2')
    own = Descriptor(name="reference", summary="s", contracts={"ops": 2}, module="m", op_schemas=("y",))
    builtins = [own]
    catalog = discover(path=[str(site.folder)], environ={"EVENER_PLUGINS": ""}, builtins=builtins)
    assert [(package.name, package.builtin) for package in catalog.packages] == [("reference", True)]
    clashing = Descriptor(name="reference", summary="s", contracts={"ops": 2}, module="m", op_schemas=("x",))
    with pytest.raises(DuplicateNameError, match="'evener' and 'dist-other'"):
        discover(path=[str(site.folder)], environ={}, builtins=[clashing])


def test_commands_are_known_before_anything_is_chosen(site: Site) -> None:
    site.add("plugin", "tool", 'commands={"go": "{pkg}.plugin:go"}', module="def go():\n    return 'gone'\n")
    assert site.discover().commands()["go"].load()() == "gone"


def test_a_feature_imports_a_plugin_by_name_or_the_first_and_a_missing_one_names_the_package(site: Site) -> None:
    site.add("plugin", "two", 'executors={"b": "{pkg}.plugin:B", "a": "{pkg}.plugin:A"}', module="A, B = 'A', 'B'\n")
    catalog = site.discover()
    assert [catalog.need("executor", name, "it", "x") for name in ("b", "")] == ["B", "A"]
    text = "speed needs a package that is not installed; type: pip install evener-fast"
    for kind, name in (("executor", "c"), ("connector", "")):
        with pytest.raises(ConfigError, match=text):
            catalog.need(kind, name, "speed", "evener-fast")
    with pytest.raises(CheckpointError, match=text):
        catalog.need("executor", "c", "speed", "evener-fast", CheckpointError)


def test_the_installed_catalog_is_read_again_only_when_something_that_it_depends_on_changed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EVENER_PLUGINS", raising=False)
    monkeypatch.setenv("EVENER_DISABLE_PLUGINS", "two")
    monkeypatch.setattr(sys, "path", [str(site.folder), *sys.path])
    site.add("plugin", "one")
    os.utime(site.folder, ns=(1, 1))
    first = installed_catalog()
    assert installed_catalog().packages[0] is first.packages[0]
    site.add("plugin", "two")
    later = installed_catalog()
    assert "two" in {origin.name for origin in later.disabled}
    monkeypatch.setenv("EVENER_DISABLE_PLUGINS", "")
    names = {package.name for package in installed_catalog().packages}
    assert {"one", "two"} <= names and not installed_catalog().disabled
    own = Descriptor(name="core", summary="s", contracts={"ops": 2}, module="m", op_schemas=("y",))
    assert {package.name for package in installed_catalog([own]).packages} == names | {"core"}


def test_core_is_found_while_the_import_of_another_thread_changes_the_lists_that_metadata_is_found_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    version = core_version()
    monkeypatch.setattr("sys.meta_path", [])
    assert core_version() == version

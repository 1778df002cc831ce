"""Loading: only what was chosen, its hooks checked, all or nothing."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import pytest

from evener.contracts.descriptor import CORE_CONTRACTS
from evener.errors import (
    ArchitectureError,
    BackendError,
    ConfigError,
    DescriptorError,
    DuplicateNameError,
    HookError,
    UnknownNameError,
)
from evener.plugins.catalog import Package
from evener.plugins.load import PluginRegistry
from evener_conformance.package_site import DEVICE, Site, score_of

NAMED = """
from types import SimpleNamespace
from evener.contracts.hooks import hookimpl

def named(**fields):
    return SimpleNamespace(**fields)
"""


def kernels(*ops: str) -> str:
    return f"""{NAMED}
@hookimpl
def evener_kernels(device, options):
    return [named(op=op, name=op, device=device, options=options) for op in {ops!r}]
"""


def test_only_chosen_modules_are_imported(site: Site) -> None:
    bomb = "raise AssertionError('imported')"
    site.add("backend", "cpu", module=bomb, probe=score_of(10))
    site.add("backend", "chip")
    site.add("kernels", "foreign", 'needs=frozenset({"tag"}), ops=("x",)', module=bomb)
    site.add("plugin", "lazy", 'architectures={"A": "{pkg}.plugin:A"}', contracts='"architecture": 2', module="A = 1")
    loaded = site.load()
    assert loaded.backend.name == "chip" and loaded.backend.distribution == "dist-chip"
    assert loaded.open_device(0).name == "device 0"
    assert "dist_cpu.plugin" not in sys.modules and "dist_foreign.plugin" not in sys.modules


def test_autoload_of_device_extensions_is_off_before_any_module_is_imported(site: Site) -> None:
    check = "import os\nassert os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] == '0'\n"
    site.add("backend", "chip", module=check + DEVICE)
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"
    site.load()


def test_delivered_objects_come_with_their_package_the_backends_first(site: Site) -> None:
    site.add("backend", "chip", 'ops=("a", "b")', module=DEVICE + kernels("a", "b"), contracts=_contracts("ops"))
    site.add("kernels", "fast", 'ops=("a",)', module=kernels("a", "a"))
    loaded = site.load()
    device: Any = loaded.open_device(0)
    found = [(each.value.op, each.package, each.distribution, each.version) for each in loaded.kernels(device)]
    assert found == [
        ("a", "chip", "dist-chip", "1.0"),
        ("b", "chip", "dist-chip", "1.0"),
        ("a", "fast", "dist-fast", "1.0"),
        ("a", "fast", "dist-fast", "1.0"),
    ]


def _contracts(*more: str) -> str:
    return ", ".join(f'"{name}": {CORE_CONTRACTS[name][1]}' for name in ("probe", "device", *more))


EVERYTHING = f"""{NAMED}
@hookimpl
def evener_op_schemas():
    return [named(name="x.op")]

@hookimpl
def evener_state_kinds():
    return (named(name="kind"),)

@hookimpl
def evener_quant_schemes():
    return [named(name="q9")]

@hookimpl
def evener_state_providers(device, options):
    return [named(name="paged", layout="paged", kinds=frozenset())]

@hookimpl(specname="evener_graph_capture")
def capture(device, options):
    return "the backend's graphs"

@hookimpl
def evener_communicator(options):
    return "the backend's ring"
"""


def test_objects_of_every_hook_are_delivered(site: Site) -> None:
    fields = 'op_schemas=("x.op",), state_kinds=("kind",), formats=("q9",), states=("paged",)'
    site.add("backend", "chip", fields, module=DEVICE + EVERYTHING, contracts=_contracts("ops", "state", "quant"))
    loaded = site.load()
    device = loaded.open_device()
    delivered: list[Any] = [
        *loaded.op_schemas(),
        *loaded.state_kinds(),
        *loaded.quant_schemes(),
        *loaded.state_providers(device),
    ]
    assert [each.value.name for each in delivered] == ["x.op", "kind", "q9", "paged"]
    graphs: Any = loaded.graph_capture(device)
    ring: Any = loaded.communicator()
    assert (graphs.value, graphs.package) == ("the backend's graphs", "chip")
    assert ring.value == "the backend's ring"


GRAPHS = """
from evener.contracts.hooks import hookimpl

@hookimpl
def evener_graph_capture(device, options):
    return "its own graphs"
"""


def test_a_graph_package_goes_before_the_backend_and_two_are_an_error(site: Site) -> None:
    module = DEVICE + GRAPHS.replace("its own", "the backend's")
    site.add("backend", "chip", module=module, contracts=_contracts("graph"))
    site.add("graphs", "one", module=GRAPHS)
    provided: Any = site.load().graph_capture(None)  # type: ignore[arg-type]
    assert (provided.value, provided.distribution) == ("its own graphs", "dist-one")
    assert site.load().communicator() is None
    site.add("graphs", "two", module=GRAPHS)
    with pytest.raises(BackendError, match=r"dist-one.*dist-two.*EVENER_DISABLE_PLUGINS=dist-two"):
        site.load().graph_capture(None)  # type: ignore[arg-type]


MARKED = "from evener.contracts.hooks import hookimpl\n"
OTHERS = 'import pluggy\nhookimpl = pluggy.HookimplMarker("someone")\n'


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def evener_kernels(device, options): ...", "looks like a hook but has no marker"),
        (f"{OTHERS}@hookimpl\ndef evener_kernels(device, options): ...", "is marked for project 'someone'"),
        (f"{MARKED}@hookimpl\ndef evener_kernel(device, options): ...", "no hook 'evener_kernel'; did you mean"),
        ("def evener_kernel(device, options): ...", "looks like a hook but has no marker"),
        (f"{MARKED}@hookimpl(optionalhook=True)\ndef evener_kernel(device, options): ...", "optionalhook=True"),
        (f"{MARKED}@hookimpl(specname='evener_krnels')\ndef f(device, options): ...", "did you mean 'evener_kernels'"),
        (f"{MARKED}@hookimpl\ndef kernels(device, options): ...", "evener has no hook 'kernels'"),
        (f"{MARKED}@hookimpl\ndef evener_kernels(device): ...", "does not take 'options'"),
        (f"{MARKED}@hookimpl\ndef evener_kernels(device, options=None): ...", "does not take 'options'"),
        (f"{MARKED}@hookimpl\ndef evener_kernels(*args): ...", "does not take 'device'"),
        (f"{MARKED}@hookimpl\ndef evener_kernels(device, options, extra): ...", "no argument 'extra' is passed"),
        (f"{MARKED}@hookimpl(wrapper=True)\ndef evener_kernels(device, options):\n    yield", "wrapper=True"),
        ("import functools\nevener_kernels = functools.partial(print)", "is a partial; make it a plain function"),
        (
            f"{MARKED}@hookimpl\ndef evener_kernels(device, options): ...\n"
            "@hookimpl(specname='evener_kernels')\ndef again(device, options): ...",
            "implemented twice",
        ),
    ],
)
def test_a_misspelt_hook_is_an_error_that_names_the_package(site: Site, source: str, says: str) -> None:
    site.add("backend", "chip")
    site.add("kernels", "fast", 'ops=("x",)', module=source)
    with pytest.raises(HookError) as raised:
        site.load()
    assert "dist-fast" in str(raised.value) and says in str(raised.value)


def test_an_imported_hook_specification_and_plain_helpers_are_not_hooks(site: Site) -> None:
    extra = (
        "from evener.contracts.hooks import evener_kernels\n"
        "import evener.errors as evener_errors\n"
        "class evener_thing: ...\n"
        "def helper(): ...\n"
    )
    site.add("backend", "chip", module=DEVICE + extra)
    assert site.load().open_device().name == "device 0"


@pytest.mark.parametrize(
    ("kind", "fields", "module", "says"),
    [
        ("kernels", 'ops=("x",)', "", "announces ops ('x',) but does not implement evener_kernels"),
        ("plugin", "", kernels("x"), "implements evener_kernels but its descriptor announces no ops"),
        ("plugin", "", DEVICE, "implements evener_device, which belongs to evener.backends"),
        ("graphs", "", "", "must implement evener_graph_capture"),
        ("plugin", 'op_schemas=("y",)', EVERYTHING.split("@hookimpl\ndef evener_state_kinds")[0], "'x.op'"),
    ],
)
def test_announced_and_delivered_names_must_match(site: Site, kind: str, fields: str, module: str, says: str) -> None:
    site.add("backend", "chip")
    site.add(kind, "odd", fields, module=module, contracts='"ops": 2, "graph": 1')
    with pytest.raises(DescriptorError) as raised:
        site.load()
    assert "dist-odd" in str(raised.value) and says in str(raised.value)


@pytest.mark.parametrize(("announced", "delivered"), [(("a",), ("a", "b")), (("a", "b"), ("a",))])
def test_kernels_are_compared_with_the_announced_ops_in_both_directions(
    site: Site, announced: tuple[str, ...], delivered: tuple[str, ...]
) -> None:
    site.add("backend", "chip", f"ops={announced!r}", module=DEVICE + kernels(*delivered), contracts=_contracts("ops"))
    loaded = site.load()
    with pytest.raises(DescriptorError, match=r"dist-chip.*'b'"):
        loaded.kernels(loaded.open_device())


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise OSError('no kernels')", "evener_kernels raised OSError: no kernels"),
        ("return None", "returned None; it returns a list or a tuple"),
        ("return [3]", "returned 3, which has no name; set it to a str"),
    ],
)
def test_a_hook_that_fails_is_an_error_that_names_the_package(site: Site, body: str, says: str) -> None:
    source = f"{MARKED}@hookimpl\ndef evener_kernels(device, options):\n    {body}\n"
    site.add("backend", "chip", 'ops=("x",)', module=DEVICE + source, contracts=_contracts("ops"))
    loaded = site.load()
    with pytest.raises(HookError) as raised:
        loaded.kernels(loaded.open_device())
    assert "dist-chip" in str(raised.value) and says in str(raised.value)


PARTS = """
from abc import ABC, abstractmethod
from evener.contracts.hooks import hookimpl

class Base(ABC):
    op = "rms_norm"

    @abstractmethod
    def build(self): ...

class Norm(Base):
    def build(self): ...
"""


def _written(site: Site, text: str) -> str:
    """``file:line`` of the first line of the hooks' module that holds ``text``."""
    file = site.folder / "dist_chip" / "plugin.py"
    return f"{file}:{next(n for n, line in enumerate(file.read_text().splitlines(), 1) if text in line)}"


@pytest.mark.parametrize(
    ("delivered", "says", "at"),
    [
        ("Norm()", "returned Norm (@), which has no name; set it to a str", "class Norm"),
        ("Norm", "returned Norm (@), which is a class: return an object of it", "class Norm"),
        ("Base()", "raised TypeError: Can't instantiate abstract class Base", "[Base()]"),
    ],
)
def test_an_incomplete_kernel_raises_with_its_file_and_line(site: Site, delivered: str, says: str, at: str) -> None:
    hook = f"@hookimpl\ndef evener_kernels(device, options):\n    return [{delivered}]\n"
    site.add("backend", "chip", 'ops=("rms_norm",)', module=DEVICE + PARTS + hook, contracts=_contracts("ops"))
    loaded = site.load()
    with pytest.raises(HookError) as raised:
        loaded.kernels(loaded.open_device())
    said, place = str(raised.value), _written(site, at)
    assert "dist-chip" in said and place in said and says.replace("@", place) in said


def test_a_state_provider_without_layout_raises_on_delivery(site: Site) -> None:
    source = STATES.replace(' layout="paged",', "")
    site.add("backend", "chip", 'states=("paged",)', module=DEVICE + source, contracts=_contracts("state"))
    loaded = site.load()
    with pytest.raises(HookError, match=r"dist-chip.*evener_state_providers returned .*, which has no layout"):
        loaded.state_providers(loaded.open_device())


@pytest.mark.parametrize(
    ("kind", "interface"),
    [("full", "AttentionProvider"), ("window", "AttentionProvider"), ("chunk", "AttentionProvider"),
     ("latent", "LatentProvider"), ("index", "IndexProvider"), ("recurrent", "RecurrentProvider")],
)  # fmt: skip
def test_a_state_provider_without_the_interface_of_its_kind_raises_on_delivery(
    site: Site, kind: str, interface: str
) -> None:
    source = STATES.replace("frozenset()", f"frozenset({{{kind!r}}})")
    site.add("backend", "chip", 'states=("paged",)', module=DEVICE + source, contracts=_contracts("state"))
    loaded = site.load()
    says = f"serves state of kind '{kind}' but is no {interface}; subclass evener.contracts.state.{interface}"
    with pytest.raises(HookError, match=rf"dist-chip.*evener_state_providers returned .*, which {says}"):
        loaded.state_providers(loaded.open_device())


def test_a_state_provider_of_a_kind_that_a_package_adds_needs_no_interface(site: Site) -> None:
    source = STATES.replace("frozenset()", "frozenset({'tally'})")
    site.add("backend", "chip", 'states=("paged",)', module=DEVICE + source, contracts=_contracts("state"))
    loaded = site.load()
    (provided,) = loaded.state_providers(loaded.open_device())
    assert provided.value.kinds == {"tally"}


def test_a_device_without_capabilities_raises_with_its_file_and_line(site: Site) -> None:
    lacking = DEVICE.replace('torch_device, capabilities = "cpu", DeviceCapabilities()', "torch_device = 'cpu'")
    site.add("backend", "chip", module=lacking)
    with pytest.raises(BackendError) as raised:
        site.load().open_device()
    where = _written(site, "class Chip")
    assert f"returned Chip ({where}), which has no capabilities; set it to a DeviceCapabilities" in str(raised.value)


def test_a_misspelt_capability_raises_once_with_its_line_and_a_suggestion(site: Site) -> None:
    site.add("backend", "chip", module=DEVICE.replace("DeviceCapabilities()", "None").replace(
        "    return Chip(index)", "    return DeviceCapabilities(aligment=64)"))  # fmt: skip
    with pytest.raises(BackendError) as raised:
        site.load().open_device()
    said = str(raised.value)
    assert said.endswith(f"(at {_written(site, 'aligment')}); did you mean 'alignment'?") and "'aligment'" in said
    assert said.count("dist-chip 1.0") == 1


@pytest.mark.parametrize(
    ("announced", "delivered"), [(("add_rms_nrom",), ("add_rms_norm",)), (("add_rms_norm",), ("add_rms_nrom",))]
)
def test_a_misspelt_op_raises_with_a_suggestion(
    site: Site, announced: tuple[str, ...], delivered: tuple[str, ...]
) -> None:
    site.add("backend", "chip", f"ops={announced!r}", module=DEVICE + kernels(*delivered), contracts=_contracts("ops"))
    schemas = EVERYTHING.split("@hookimpl\ndef evener_state_kinds")[0].replace("x.op", "add_rms_norm")
    site.add("plugin", "ops", 'op_schemas=("add_rms_norm",)', module=schemas, contracts='"ops": 2')
    loaded = site.load()
    with pytest.raises(DescriptorError) as raised:
        loaded.kernels(loaded.open_device())
    said = str(raised.value)
    assert f"announces op with kernels {announced[0]!r} but does not deliver it" in said
    assert f"delivers op with kernels {delivered[0]!r} but does not announce it" in said
    assert said.endswith("; 'add_rms_nrom' is no op; did you mean 'add_rms_norm'?")


def test_a_device_that_cannot_be_opened_is_a_backend_error_with_the_cause(site: Site) -> None:
    failing = DEVICE.replace("return Chip(index)", "raise OSError('in use')")
    site.add("backend", "chip", module=failing)
    with pytest.raises(BackendError, match=r"dist-chip.*cannot open device 2.*in use") as raised:
        site.load().open_device(2)
    assert isinstance(raised.value.__cause__, OSError)


def test_a_device_that_does_not_exist_is_an_error_that_lists_the_devices_found(site: Site) -> None:
    site.add("backend", "chip", module=DEVICE.replace("return Chip(index)", "return None"))
    with pytest.raises(BackendError, match=r"has no device 7; it found 0 \(a chip\)"):
        site.load().open_device(7)


@pytest.mark.parametrize(("host_memory", "opened"), [(False, False), (True, True)])
def test_a_rank_without_a_chip_of_its_own_is_refused_even_if_the_backend_opens_any_index(
    site: Site, host_memory: bool, opened: bool
) -> None:
    site.add("backend", "chip", module=DEVICE.replace("ilities()", f"ilities(host_memory={host_memory})"))
    loaded = site.load()
    assert loaded.open_device(0).name == "device 0"
    if opened:
        assert loaded.open_device(2).name == "device 2"
        return
    with pytest.raises(BackendError, match=r"has no device 2; it found 0 \(a chip\)"):
        loaded.open_device(2)


def test_a_module_that_fails_to_import_is_an_error_with_the_cause_and_its_line(site: Site) -> None:
    site.add("backend", "chip", module="import os\nimport nowhere_to_be_found")
    with pytest.raises(DescriptorError, match=r"dist-chip.*nowhere_to_be_found.*\(at \S+\.py:2\); .*fix it") as raised:
        site.load()
    assert isinstance(raised.value.__cause__, ModuleNotFoundError)


def test_an_unparsable_module_raises_without_a_line_of_another_file(site: Site) -> None:
    site.add("backend", "chip", module="def")
    with pytest.raises(DescriptorError, match=r"failed with SyntaxError: .*fix it") as raised:
        site.load()
    assert "(at " not in str(raised.value)


STATES = f"""{NAMED}
@hookimpl
def evener_state_providers(device, options):
    return [named(name="paged", layout="paged", kinds=frozenset())]
"""


def test_two_chosen_packages_that_deliver_one_name_are_an_error_that_names_both(site: Site) -> None:
    site.add("backend", "chip", 'states=("paged",)', module=DEVICE + STATES, contracts=_contracts("state"))
    site.add("kernels", "fast", 'states=("paged",)', module=STATES, contracts='"state": 2')
    with pytest.raises(DuplicateNameError, match=r"state provider 'paged'.*'dist-chip'.*'dist-fast'"):
        site.load()


def _module(source: str) -> ModuleType:
    module = ModuleType("made_up")
    exec(source, vars(module))
    return module


def _package(site: Site, name: str) -> Package:
    return next(package for package in site.discover().packages if package.name == name)


def test_a_failed_registration_leaves_everything_as_it_was(site: Site) -> None:
    fields = 'op_schemas=("x.op",), commands={"go": "m:go"}, module="m"'
    site.add("plugin", "fails", fields, contracts='"ops": 2')
    site.add("plugin", "works", 'op_schemas=("y.op",), module="m"', contracts='"ops": 2')
    schemas = EVERYTHING.split("@hookimpl\ndef evener_state_kinds")[0]
    registry = PluginRegistry()
    registry.register(_package(site, "works"), _module(schemas.replace("x.op", "y.op")), {})
    before = (
        registry.packages,
        registry.delivered("evener_op_schemas"),
        registry._manager.list_name_plugin(),
        dict(registry._owners),
    )
    wrong = _module(schemas.replace('named(name="x.op")', 'named(name="x.op"), named(name="z.op")'))
    with pytest.raises(DescriptorError, match=r"z\.op"):
        registry.register(_package(site, "fails"), wrong, {})
    raising = _module(schemas.replace("return", "raise OSError;"))
    with pytest.raises(HookError, match=r"OSError"):
        registry.register(_package(site, "fails"), raising, {})
    after = (
        registry.packages,
        registry.delivered("evener_op_schemas"),
        registry._manager.list_name_plugin(),
        dict(registry._owners),
    )
    assert after == before
    assert registry._manager.hook.evener_op_schemas() == [[each.value for each in before[1]]]
    registry.register(_package(site, "fails"), _module(schemas), {})
    assert [each.value.name for each in registry.delivered("evener_op_schemas")] == ["y.op", "x.op"]


def test_two_packages_cannot_share_a_module_and_one_cannot_register_twice(site: Site) -> None:
    site.add("plugin", "one", 'module="m"')
    site.add("plugin", "two", 'module="m"')
    registry, module = PluginRegistry(), _module("")
    registry.register(_package(site, "one"), module, {})
    with pytest.raises(DescriptorError, match=r"which evener.plugins:one registered already"):
        registry.register(_package(site, "two"), module, {})
    with pytest.raises(DuplicateNameError):
        registry.register(_package(site, "one"), module, {})


def test_options_are_checked_before_anything_is_imported(site: Site) -> None:
    fields = 'options={"depth": Option(type=int, default=2, help="How deep.")}'
    site.add("backend", "chip", fields, module="raise AssertionError('imported')")
    with pytest.raises(UnknownNameError, match=r"did you mean 'depth'"):
        site.load({"chip": {"dept": 3}})
    with pytest.raises(ConfigError, match=r"chip.depth='deep' cannot be read; it takes an integer"):
        site.load({"chip": {"depth": "deep"}})
    with pytest.raises(UnknownNameError, match=r"did you mean 'chip'"):
        site.load({"chap": {"depth": 3}})


def test_hooks_get_their_own_packages_options(site: Site) -> None:
    fields = 'options={"depth": Option(type=int, default=2, help="How deep.")}, ops=("x",)'
    site.add("backend", "chip", fields, module=DEVICE + kernels("x"), contracts=_contracts("ops"))
    site.add("kernels", "fast", fields, module=kernels("x"))
    loaded = site.load({"fast": {"depth": "5"}})
    provided: Any = loaded.kernels(loaded.open_device())
    assert [each.value.options for each in provided] == [{"depth": 2}, {"depth": 5}]


def test_lazy_imports_load_on_first_use_and_failures_become_evener_errors(site: Site) -> None:
    fields = """architectures={"Good": "{pkg}.archs:Good", "Gone": "{pkg}.archs:Gone", "Lost": "{pkg}.lost:X"},
        commands={"go": "{pkg}.archs:gone"}"""
    site.add("backend", "chip")
    site.add("plugin", "models", fields, contracts='"architecture": 2')
    (site.folder / "dist_models" / "archs.py").write_text("class Good: ...\n")
    loaded = site.load()
    assert "dist_models.archs" not in sys.modules
    assert loaded.architectures["Good"].load() is sys.modules["dist_models.archs"].Good
    with pytest.raises(ArchitectureError, match=r"'Gone' of dist-models.*has no 'Gone'") as raised:
        loaded.architectures["Gone"].load()
    assert isinstance(raised.value.__cause__, AttributeError)
    with pytest.raises(ArchitectureError, match=r"'Lost'.*ModuleNotFoundError") as raised:
        loaded.architectures["Lost"].load()
    assert isinstance(raised.value.__cause__, ImportError)
    with pytest.raises(DescriptorError, match=r"command 'go' of dist-models"):
        site.discover().commands()["go"].load()

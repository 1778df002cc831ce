"""What keeps the core slim and free of vendors: names, import direction, cycles, lazy imports, line budgets."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest
from importlib_metadata import entry_points
from packaging.requirements import Requirement
from source_tree import ROOT, Import, Module, code_lines, cycle, functions, imports, modules, named_modules, words

CORE = modules(ROOT / "core/src")
FORMATS = modules(ROOT / "formats/src")
GENERATION = modules(ROOT / "generation/src")
MODELS = modules(ROOT / "models/src")
CONFORMANCE = modules(ROOT / "conformance/src")
INSPECTION = modules(ROOT / "inspection/src")
OFFLOAD = modules(ROOT / "offload/src")
SERVER = modules(ROOT / "server/src")
DEPLOY = modules(ROOT / "deploy/src")
BACKENDS = modules(*sorted(ROOT.glob("backends/*/src")))
ALL = {**CORE, **FORMATS, **GENERATION, **MODELS, **INSPECTION, **OFFLOAD, **CONFORMANCE, **SERVER, **DEPLOY,
       **BACKENDS}  # fmt: skip

VENDOR_WORDS = {
    *("ascend", "npu", "cann", "hccl", "huawei"),
    *("hygon", "dcu", "dtk", "rocm", "rccl", "hip"),
    *("muxi", "metax", "maca", "mccl"),
    *("enflame", "gcu", "eccl"),
    *("nvidia", "cuda", "nccl"),
}

#: Text that holds such a word and may stand in shared code, with the reason. Keep it this short.
ALLOWED = {
    "use_cuda_graph": "a legacy configuration key whose spelling is fixed (design, section 6)",
}

#: Whether a module may import the one named.
Judge = Callable[[str], bool]

#: Distributions that know no vendor.
SHARED_FOLDERS = ("core", "formats", "generation", "models", "inspection", "offload", "deploy", "conformance", "server")
SHARED_TEXT = {".py", ".pyi", ".toml", ".md", ".json", ".yaml", ".yml", ".html", ".js", ".css", ".jinja", ".txt"}


def shared_files() -> list[Path]:
    found = [p for folder in SHARED_FOLDERS for p in (ROOT / folder).rglob("*")]
    return sorted(p for p in found if p.suffix in SHARED_TEXT and p.is_file() and ".egg-info" not in str(p))


def test_no_vendor_is_named_in_shared_code() -> None:
    named = []
    for path in shared_files():
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            for text in ALLOWED:
                line = line.replace(text, "")
            if found := words(line) & VENDOR_WORDS:
                named.append(f"{path.relative_to(ROOT)}:{number}: {', '.join(sorted(found))}")
    assert not named, "move it to the vendor's backend, or ask the capabilities:\n" + "\n".join(named)


def test_every_allowed_vendor_word_is_still_used() -> None:
    text = "".join(path.read_text() for path in shared_files())
    assert [allowed for allowed in ALLOWED if allowed not in text] == []


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("torch.cuda.synchronize()", {"cuda"}),
        ("import torch_npu", {"npu"}),
        ("class CudaGraph: pass", {"cuda"}),
        ('backend="nccl"', {"nccl"}),
        ("HIPGraph and is_hip", {"hip"}),
        ("relationship, friendship, descending", set()),
    ],
)
def test_vendor_words_are_seen_in_any_spelling(line: str, found: set[str]) -> None:
    assert words(line) & VENDOR_WORDS == found


#: Which top-level packages nobody in the core may import, not even lazily.
FOREIGN_TO_CORE = ("evener_", "fastapi", "starlette", "uvicorn", "triton", "vllm", "torch_", "xgrammar", "llguidance",
                   "hydra", "omegaconf", "jinja2", "tokenizers", "safetensors", "transformers")  # fmt: skip


def test_the_core_imports_no_distribution_built_on_it_and_no_web_server_or_vendor_sdk() -> None:
    assert violations(CORE, lambda target: not target.startswith(FOREIGN_TO_CORE)) == []


#: What starts the engine or talks to people; little of the core may know it.
COMMANDS = ("evener.cli", "evener.llm", "evener.async_llm")
OUTSIDE = ("evener.engine", "evener.frontend", *COMMANDS)
#: Rooms of the core and what they must not know, as in the table of CONTRIBUTING.md.
UPWARD = {
    "evener.plugins": ("evener.layers", *OUTSIDE),
    "evener.ops": ("evener.layers", "evener.plugins", *OUTSIDE),
    "evener.builtin": ("evener.layers", *OUTSIDE),
    "evener.backend": ("evener.engine",),
    "evener.layers": ("evener.plugins", *OUTSIDE),
    "evener.tuning_files": ("evener.layers", *OUTSIDE),
    "evener.resolution": OUTSIDE,
    "evener.loading": OUTSIDE,
    "evener.distributed": OUTSIDE,
    "evener.engine": ("evener.frontend", *COMMANDS),
    "evener.engine.facts": tuple(f"evener.engine.{room}" for room in (
        "wire", "batching", "controller", "quantized", "sampling", "worker", "processes")),
    "evener.engine.wire": tuple(f"evener.engine.{room}" for room in (
        "batching", "controller", "quantized", "sampling", "worker", "processes")),
    "evener.engine.batching": tuple(f"evener.engine.{room}" for room in (
        "controller", "quantized", "sampling", "worker", "processes")),
    "evener.engine.controller": ("evener.engine.worker", "evener.engine.processes"),
    "evener.engine.quantized": ("evener.engine.worker", "evener.engine.controller", "evener.engine.processes"),
    "evener.engine.inputs": tuple(f"evener.engine.{room}" for room in (
        "sampling", "controller", "worker", "processes")),
    "evener.engine.sampling": ("evener.engine.worker", "evener.engine.controller", "evener.engine.processes"),
    "evener.engine.worker": ("evener.engine.processes",),
    "evener.frontend": ("evener.layers", *COMMANDS),
    "evener.api": ("evener.engine.processes", "evener.layers", *COMMANDS),
}  # fmt: skip
#: Rooms that import nothing of evener but these and themselves.
CLOSED = {
    "evener.contracts": ("evener.errors",), "evener.exits": (), "evener.folders": ("evener.errors",),
    "evener.state_pages": ("evener.contracts",),
}  # fmt: skip


@pytest.mark.parametrize("room", UPWARD)
def test_imports_inside_the_core_point_towards_the_contracts(room: str) -> None:
    modules = inside(room, CORE)
    assert modules and violations(modules, lambda target: not belongs(target, *UPWARD[room]), typing=True) == []


@pytest.mark.parametrize("room", CLOSED)
def test_a_closed_room_imports_itself_and_what_it_names(room: str) -> None:
    modules = inside(room, CORE)
    assert modules and violations(modules, allow_of_evener(room, *CLOSED[room]), typing=True) == []


def test_the_table_of_rooms_has_a_row_for_each_that_is_held_to_it() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    rooms = {room.removeprefix("evener.").replace(".", "/") for room in (*UPWARD, *CLOSED)} - {"engine"}
    assert [room for room in sorted(rooms) if f"| `{room}` |" not in page] == []


def test_formats_import_only_contracts_errors_and_where_the_cache_folder_is() -> None:
    allowed = allow_of_evener("evener_formats", "evener.contracts", "evener.errors", "evener.folders")
    assert violations(inside("evener_formats", FORMATS), allowed, typing=True) == []


def test_commands_that_come_with_the_formats_import_only_them_and_the_core() -> None:
    commands = {name: module for name, module in FORMATS.items() if not belongs(name, "evener_formats")}
    # It writes folders as the converter does, and reads a text as the calibration does.
    more = {"evener_quantize": ("evener_convert", "evener_calibrate.text")}
    for name in {name.split(".")[0] for name in commands}:
        own = allow_of_evener(name, "evener", "evener_formats", *more.get(name, ()))
        assert violations(inside(name, commands), own, typing=True) == []


def test_the_converter_imports_no_engine_no_front_end_and_no_other_distribution() -> None:
    convert = inside("evener_convert", FORMATS)
    assert convert
    above = ("evener.engine", "evener.frontend", "evener.llm", "evener.async_llm", "evener.ops", "evener.backend")
    # What it writes as GGUF must be what the reader of its own distribution reads: both use the same tables. What it
    # describes without files must be what the schemes read.
    own = allow_of_evener("evener_convert", "evener", "evener_formats.gguf", "evener_formats.tokenizers",
                          "evener_formats.safetensors_files", "evener_formats.described")  # fmt: skip
    assert violations(convert, lambda t: own(t) and not belongs(t, *above), typing=True) == []


def test_the_model_cache_imports_no_front_end_and_only_the_reader_of_its_files() -> None:
    cache = inside("evener_model_cache", FORMATS)
    above = ("evener.engine.controller", "evener.engine.processes", "evener.frontend", "evener.cli", "evener.llm")
    own = allow_of_evener("evener_model_cache", "evener", "evener_formats.safetensors_files")
    assert cache and violations(cache, lambda t: own(t) and not belongs(t, *above), typing=True) == []


def test_grammars_and_parsers_import_only_contracts_and_errors() -> None:
    allowed = allow_of_evener("evener_generation", "evener.contracts", "evener.errors")
    assert violations(inside("evener_generation", GENERATION), allowed, typing=True) == []


def test_beam_search_imports_only_the_python_api_and_how_searches_fork() -> None:
    own = ("evener_beam", "evener.async_llm", "evener.sampling_params", "evener.contracts", "evener.errors",
           "evener_forks.search")  # fmt: skip
    beams = inside("evener_beam", GENERATION)
    assert beams and violations(beams, allow_of_evener(*own), typing=True) == []


def test_states_of_ended_requests_import_only_the_controller_and_the_python_api() -> None:
    # A command has a part at each level: front ends and controller.
    own = ("evener_forks", "evener.async_llm", "evener.engine.controller", "evener.engine.wire.messages",
           "evener.contracts.connector", "evener.errors")  # fmt: skip
    forks = inside("evener_forks", GENERATION)
    assert forks and violations(forks, allow_of_evener(*own), typing=True) == []


def test_masks_of_grammars_import_only_what_the_controller_knows_and_no_other_distribution() -> None:
    own = ("evener_constraints", "evener_generation.forced_tokens", "evener.engine.controller.grammars",
           "evener.engine.wire", "evener.config", "evener.loading.checkpoint", "evener.plugins.discover",
           "evener.contracts", "evener.errors")  # fmt: skip
    masks = inside("evener_constraints", GENERATION)
    assert masks and violations(masks, allow_of_evener(*own), typing=True) == []


def test_drafters_in_the_worker_import_only_the_core_below_its_controller() -> None:
    above = ("evener.engine.controller", "evener.engine.processes", "evener.frontend", "evener.cli", "evener.llm")
    own, drafts = allow_of_evener("evener_drafts", "evener"), inside("evener_drafts", GENERATION)
    opening = {name: drafts.pop(name) for name in ["evener_drafts.opening"]}  # in the controller: asks who gets drafts
    policy = allow_of_evener("evener_drafts", "evener", "evener_generation.drafting")
    assert violations(opening, lambda t: policy(t) and not belongs(t, *above), typing=True) == []
    assert drafts and violations(drafts, lambda t: own(t) and not belongs(t, *above), typing=True) == []


def test_adapters_import_only_messages_ops_and_the_declarations_of_layers() -> None:
    own = ("evener_adapters", "evener.engine.wire", "evener.layers.builder", "evener.ops", "evener.config.schema",
           "evener.plugins.discover", "evener.contracts", "evener.errors")  # fmt: skip
    adapters = inside("evener_adapters", GENERATION)
    assert adapters and violations(adapters, allow_of_evener(*own), typing=True) == []


def test_only_the_worker_s_part_of_the_adapters_imports_torch() -> None:
    assert heavy_after_import("evener_adapters.lora", "evener_adapters.loaded", "evener_adapters.slots") == {}


def test_vectors_of_texts_import_only_what_callers_know_and_pooling_only_the_core_below_its_controller() -> None:
    pooled = inside("evener_pooling", GENERATION)
    pooler = {name: pooled.pop(name) for name in ["evener_pooling.outputs", "evener_pooling.pooler"]}
    rows = {name: pooled.pop(name) for name in ["evener_pooling.rows"]}
    own = ("evener_pooling", "evener.plugins.discover", "evener.sampling_params", "evener.config.schema",
           "evener.contracts", "evener.errors")  # fmt: skip
    worker = ("evener.engine.worker.runner", "evener.engine.inputs.step_layout", "evener.engine.sampling",
              "evener.engine.wire")  # fmt: skip
    assert pooled and violations(pooled, allow_of_evener(*own), typing=True) == []
    assert violations(pooler, allow_of_evener(*own, *worker), typing=True) == []
    # It reads what the engine sends.
    assert violations(rows, allow_of_evener(*own, "evener.engine.wire.messages"), typing=True) == []


def test_media_import_only_messages_and_what_the_scheduler_asks_and_only_the_worker_s_part_imports_torch() -> None:
    own = ("evener_media", "evener.engine.wire", "evener.engine.controller.media", "evener.contracts", "evener.errors")
    media, allowed = inside("evener_media", GENERATION), allow_of_evener(*own)
    assert media and violations(media, allowed) == []
    # For type checkers: the requests that the scheduler hands over.
    assert violations(media, lambda t: allowed(t) or t == "evener.engine.controller.request", typing=True) == []
    assert heavy_after_import("evener_media.checks", "evener_media.planner") == {}


def test_the_pace_of_steps_imports_only_plans_and_what_the_scheduler_asks_and_no_torch() -> None:
    own = ("evener_pacing", "evener.engine.batching", "evener.engine.wire", "evener.config.schema", "evener.contracts",
           "evener.errors")  # fmt: skip
    pacing = inside("evener_pacing", GENERATION)
    assert pacing and violations(pacing, allow_of_evener(*own), typing=True) == []
    assert heavy_after_import(*pacing) == {}


def test_models_import_only_layers_contracts_errors_and_readers_of_tokenizer_files() -> None:
    own = ("evener_models", "evener_encoders", "evener_formats.tokenizers")
    allowed = allow_of_evener(*own, "evener.layers", "evener.contracts", "evener.errors")
    foreign = {target.split(".")[0] for module in MODELS.values() for target in targets(module)}
    # huggingface_hub fetches, numpy and PIL resize images.
    ours = {"evener", "evener_models", "evener_encoders", "evener_formats"}
    foreign -= sys.stdlib_module_names | ours | {"torch", "numpy", "huggingface_hub", "PIL"}
    assert violations(MODELS, allowed, typing=True) == []
    assert not foreign, "an architecture is torch over shared layers"


def test_the_server_imports_neither_models_nor_backends_nor_what_lies_below_the_engine() -> None:
    below = ("evener_models", "evener_backend", "evener_kernels", "evener.layers", "evener.ops", "torch")
    allowed = lambda target: not belongs(target, *below) and not target.startswith(below[1:3])  # noqa: E731
    assert violations(inside("evener_server", SERVER), allowed, typing=True) == []


def test_ranks_of_torchrun_import_only_keys_and_what_starts_workers_and_torch_later() -> None:
    ranks = inside("evener_torchrun", SERVER)
    own = ("evener_torchrun", "evener.config.schema", "evener.distributed", "evener.engine.processes", "evener.errors",
           "evener.logs")  # fmt: skip
    assert ranks and violations(ranks, allow_of_evener(*own), typing=True) == []
    assert heavy_after_import(*ranks) == {}


def test_the_inspection_commands_import_only_the_core() -> None:
    assert violations(INSPECTION, allow_of_evener("evener_inspection", "evener"), typing=True) == []


def test_only_the_kit_imports_the_kit() -> None:
    others = {name: module for name, module in ALL.items() if name not in CONFORMANCE}
    assert violations(others, lambda target: not belongs(target, "evener_conformance"), typing=True) == []


def test_the_offload_package_imports_only_the_core_below_its_controller() -> None:
    above = ("evener.engine.controller", "evener.engine.processes", "evener.frontend", "evener.cli", "evener.llm")
    own, offload = allow_of_evener("evener_offload", "evener"), inside("evener_offload", OFFLOAD)
    assert offload and violations(offload, lambda t: own(t) and not belongs(t, *above), typing=True) == []


def test_unlike_stages_import_only_the_core_below_its_controller_and_where_they_run_only_keys_and_packages() -> None:
    above = ("evener.engine.controller", "evener.engine.processes", "evener.frontend", "evener.cli", "evener.llm")
    own, stages = allow_of_evener("evener_stages", "evener"), inside("evener_stages", OFFLOAD)
    assert stages and violations(stages, lambda t: own(t) and not belongs(t, *above), typing=True) == []
    keys = allow_of_evener("evener_stages", "evener.config", "evener.plugins.discover", "evener.errors")
    assert violations({"evener_stages.devices": stages["evener_stages.devices"]}, keys, typing=True) == []


def test_kept_state_imports_only_the_core_up_to_the_pools_of_the_controller() -> None:
    controller = ("evener.engine.controller.blocks", "evener.engine.controller.state")
    above = ("evener.engine.controller", "evener.engine.processes", "evener.frontend", "evener.cli", "evener.llm")
    own, kept = allow_of_evener("evener_kv", "evener_offload", "evener"), inside("evener_kv", OFFLOAD)
    allowed = lambda t: own(t) and (t in controller or not belongs(t, *above))  # noqa: E731
    assert kept and violations(kept, allowed, typing=True) == []


def test_changes_of_weights_import_only_the_core_below_its_command_line() -> None:
    # A command has a part at each level: front ends, controller, workers.
    own, changes = allow_of_evener("evener_weights", "evener"), inside("evener_weights", OFFLOAD)
    above = ("evener.cli", "evener.config", "evener.engine.processes")
    assert changes and violations(changes, lambda t: own(t) and not belongs(t, *above), typing=True) == []


def test_deployments_import_the_core_s_commands_and_python_api_and_one_module_each_of_ray_and_dynamo() -> None:
    core = ("evener.cli", "evener.config", "evener.logs", "evener.errors", "evener.contracts", "evener.async_llm",
            "evener.sampling_params")  # fmt: skip
    own = allow_of_evener("evener_deploy", *core)
    assert DEPLOY and violations(DEPLOY, own, typing=True) == []
    for name, foreign in (("evener_deploy.ray_app", "ray"), ("evener_deploy.dynamo_engine", "dynamo")):
        rest = {other: module for other, module in DEPLOY.items() if other != name}
        assert violations(rest, lambda target, foreign=foreign: target.split(".")[0] != foreign) == []


#: Beside the contracts: what ops mean, and ready-made parts for those who want them. Parts that name vendors' libraries
#: are a distribution of their own.
FOR_BACKENDS = ("evener.ops", "evener.backend", "evener.state_pages.elements", "evener_backend_parts")


def test_backends_import_only_contracts_errors_the_reference_ops_and_ready_made_parts() -> None:
    wrong = []
    for name in {name.split(".")[0] for name in BACKENDS}:
        # The CUDA backend requires the Triton kernels, and has a kernel over their layout of state.
        kernels = ("evener_kernels_triton",) if name == "evener_backend_cuda" else ()
        allowed = allow_of_evener(name, "evener.contracts", "evener.errors", *FOR_BACKENDS, *kernels)
        wrong += violations(inside(name, BACKENDS), allowed, typing=True)
    assert wrong == []


def test_no_modules_import_each_other_in_a_cycle() -> None:
    """Imports inside functions and for type checkers count too."""
    graph = {m.name: {i.target for i in imported(m) if i.target in ALL} for m in ALL.values()}
    assert cycle(graph) is None


#: Imports between areas of the core that close a cycle and may stay, with the reason. At most five.
ALLOWED_BACKWARD: Mapping[tuple[str, str], str] = {}


def test_no_areas_of_the_core_import_each_other_in_a_cycle() -> None:
    """Imports inside functions, for type checkers, and modules named in strings count too."""
    graph = area_graph()
    assert len(ALLOWED_BACKWARD) <= 5
    for source, target in ALLOWED_BACKWARD:
        assert target in graph[source], f"{source} no longer imports {target}: take the pair off the list"
        graph[source].remove(target)
    assert cycle(graph) is None


def test_import_evener_leaves_torch_and_transformers_alone() -> None:
    assert heavy_after_import("evener") == {}


def test_no_contract_imports_torch() -> None:
    assert heavy_after_import(*inside("evener.contracts", CORE), "evener.errors") == {}


def test_no_descriptor_imports_torch() -> None:
    found = [point for point in entry_points() if point.group.startswith("evener.")]
    assert {point.module.split(".")[0] for point in found} >= {"evener_models", "evener_server", "evener_backend_cpu"}
    assert heavy_after_import(*sorted({point.module for point in found})) == {}


#: Lines of code that each area of the core has today. These caps are never raised: a feature that needs more lines
#: first moves something out of the area, to a package of its own or to nothing. When an area shrinks, its cap follows.
CAPS: Mapping[str, int] = {
    "evener.engine.facts": 154, "evener.engine.wire": 309, "evener.engine.batching": 28,
    "evener.engine.controller": 966, "evener.engine.inputs": 296, "evener.engine.worker": 1_228,
    "evener.engine.processes": 802, "evener.engine.sampling": 166, "evener.engine.quantized": 41,
    "evener.ops": 1_391, "evener.plugins": 1_476, "evener.frontend": 739, "evener.layers": 1_127,
    "evener.config": 820, "evener.cli": 260, "evener.loading": 628, "evener.resolution": 513,
    "evener.distributed": 166, "evener.folders": 62, "evener.backend": 244, "evener.builtin": 65, "evener.exits": 51,
    "evener.state_pages": 28, "evener.tuning_files": 138, "evener.api": 41,
    # What a device, a kernel, a model and a format implement; then what came later, each a room of its own.
    "evener.contracts": 713, "evener.contracts.communicator": 41, "evener.contracts.declared": 107,
    "evener.contracts.adapters": 63, "evener.contracts.builder": 15, "evener.contracts.connector": 48,
    "evener.contracts.conversion": 83, "evener.contracts.sizes": 11,
    "evener.contracts.generation": 125, "evener.contracts.grammar": 28, "evener.contracts.interfaces": 11,
    "evener.contracts.outputs": 57, "evener.contracts.parts": 38, "evener.contracts.placement": 21,
    "evener.contracts.pooling": 42, "evener.contracts.quantized": 40, "evener.contracts.statics": 127,
    "evener.contracts.storage": 61, "evener.contracts.tokenizer": 31, "evener.contracts.weights": 77,
    "evener.contracts.writing": 23,
}  # fmt: skip
#: Modules at the top of the core: the Python API, settings that every area uses, and start-up.
TOP_CAP = 952
#: The whole core.
TOTAL_CAP = 14_453


def test_each_area_of_the_core_stays_within_its_lines() -> None:
    lines: Counter[str] = Counter()
    for name, module in CORE.items():
        lines[area(name)] += code_lines(module)
    over = {a: f"{n} of {CAPS[a]}" for a, n in lines.items() if a in CAPS and n > CAPS[a]}
    top = sum(n for a, n in lines.items() if a not in CAPS)
    assert not over
    assert top <= TOP_CAP, f"{top} lines at the top of the core"
    # A new folder gets a cap of its own.
    folders = {area(name) for name, module in CORE.items() if module.path.name != "__init__.py" and name.count(".") > 1}
    assert folders == CAPS.keys()


def test_the_core_stays_small() -> None:
    total = sum(code_lines(module) for module in CORE.values())
    assert total <= TOTAL_CAP, f"{total} code lines in the core: a feature that needs more moves something out first"


def test_no_module_and_no_function_is_long() -> None:
    long = [f"{m.where}: {n} lines" for m in ALL.values() if (n := len(m.text.splitlines())) > 600]
    long += [f"{m.where}: {name}() {n} lines" for m in ALL.values() for name, n in functions(m) if n > 90]
    assert long == []


#: Who may require what; nobody else may.
MAY_REQUIRE: Mapping[str, set[str]] = {
    "triton": {"evener-kernels-triton", "evener-backend-cuda"},
    "xgrammar": set(),
}


def test_no_distribution_pins_torch_or_pulls_in_what_replaces_it() -> None:
    tomllib = pytest.importorskip("tomllib", reason="part of Python 3.11 and later")
    wrong = []
    for path in [ROOT / f"{name}/pyproject.toml" for name in SHARED_FOLDERS] + sorted(
        ROOT.glob("backends/*/pyproject.toml")
    ):
        project = tomllib.loads(path.read_text())["project"]
        for line in project["dependencies"]:
            need = Requirement(line)
            if need.name == "torch" and (need.specifier or need.url):
                wrong.append(f"{project['name']} pins {line}")
            if project["name"] not in MAY_REQUIRE.get(need.name, {project["name"]}):
                wrong.append(f"{project['name']} requires {line}")
    assert wrong == []


#: A table in a package's docstring: two lines of ``=`` around its head, and one at its end.
TABLE = re.compile(r"^=+ +=+\n.*\n=+ +=+\n(.+?)\n=+ +=+$", re.MULTILINE | re.DOTALL)
PACKAGES = [module for module in ALL.values() if module.path.name == "__init__.py"]


@pytest.mark.parametrize("package", [each for each in PACKAGES if TABLE.search(each.text)], ids=lambda each: each.name)
def test_a_table_of_modules_names_every_module_of_its_package_and_no_other(package: Module) -> None:
    table = TABLE.search(package.text)
    assert table
    named = re.findall(r"``(\w+)``", table[1])
    first = re.findall(r"``(\w+)``", " ".join(row.split("  ")[0] for row in table[1].splitlines()))
    inside = {name.removeprefix(f"{package.name}.") for name in ALL if name.startswith(f"{package.name}.")}
    inside = {name for name in inside if "." not in name}
    assert inside - set(named) == set() and set(first) - inside == set()


def test_the_rooms_of_the_core_have_such_tables() -> None:
    engine = ("engine", "engine/facts", "engine/wire", "engine/controller", "engine/worker")
    rooms = ("contracts", "plugins", "resolution", *engine)
    shown = {package.path.parent for package in PACKAGES if TABLE.search(package.text)}
    assert shown >= {ROOT / "core/src/evener" / room for room in rooms}


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        ({"a": ["b"], "b": ["c"], "c": []}, None),
        ({"a": ["b"], "b": ["c"], "c": ["b"]}, ["b", "c", "b"]),
        ({"a": ["b", "c"], "b": ["c"], "c": []}, None),
    ],
)
def test_a_circle_is_found_where_there_is_one(graph: dict[str, list[str]], expected: list[str] | None) -> None:
    assert cycle(graph) == expected


def test_a_module_named_in_a_string_is_found_and_a_docstring_is_not(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/__init__.py").write_text("")
    (tmp_path / "pack/one.py").write_text("'pack.two'\nLATER = 'pack.two:g'\nlog('pack')\nOTHER = 'pack.three'\n")
    (tmp_path / "pack/two.py").write_text("")
    found = modules(tmp_path)
    assert [(i.target, i.line) for i in named_modules(found["pack.one"], found)] == [("pack.two", 2)]


def test_imports_are_told_apart_by_when_they_happen(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack/__init__.py").write_text("")
    (tmp_path / "pack/one.py").write_text(
        "from typing import TYPE_CHECKING\nfrom . import two\nif TYPE_CHECKING:\n    import torch\n"
        "def f():\n    from pack.two import g\n"
    )
    (tmp_path / "pack/two.py").write_text("def g():\n    '''Doc.'''\n\n    return 1  # why\n")
    found = modules(tmp_path)
    seen = {(i.target, i.lazy, i.typing) for i in imports(found["pack.one"], found)}
    assert seen == {
        ("typing", False, False),
        ("pack.two", False, False),
        ("torch", False, True),
        ("pack.two", True, False),
    }
    assert code_lines(found["pack.two"]) == 2


def inside(part: str, among: Mapping[str, Module]) -> dict[str, Module]:
    return {name: module for name, module in among.items() if belongs(name, part)}


def belongs(name: str, *parts: str) -> bool:
    return any(name == part or name.startswith(part + ".") for part in parts)


def area(name: str) -> str:
    """A folder of the core, a room of the engine, a room of the contracts if it has a cap, or a module at the top."""
    room = ".".join(name.split(".")[:3])
    return room if belongs(name, "evener.engine") or room in CAPS else ".".join(name.split(".")[:2])


def area_graph() -> dict[str, set[str]]:
    """Which areas of the core each area imports, in any way."""
    graph: dict[str, set[str]] = defaultdict(set)
    for module in CORE.values():
        for found in [*imports(module, CORE), *named_modules(module, CORE)]:
            source, target = area(module.name), area(found.target)
            # The package `evener` itself hands out names of every area when they are asked for.
            if found.target in CORE and source != target and "evener" not in (source, target):
                graph[source].add(target)
    return graph


def allow_of_evener(own: str, *parts: str) -> Judge:
    """A judge of imports: everything that is not ours, ``own``, and these ``parts``."""
    return lambda target: not target.split(".")[0].startswith("evener") or belongs(target, own, *parts)


@cache
def imported(module: Module) -> list[Import]:
    """What a module imports. A dozen tests ask for the same modules."""
    return imports(module, ALL)


def targets(module: Module) -> set[str]:
    return {found.target for found in imported(module)}


def violations(among: Mapping[str, Module], allowed: Judge, typing: bool = False) -> list[str]:
    """Where a module imports what it may not. ``typing``: imports that only a type checker sees count too."""
    return [
        f"{module.where}:{found.line} imports {found.target}"
        for module in among.values()
        for found in imported(module)
        if (typing or not found.typing) and not allowed(found.target)
    ]


def heavy_after_import(*names: str) -> dict[str, list[str]]:
    """The first of the modules whose import loads torch, transformers or triton, and which; asked of a new process."""
    script = (
        "import importlib, json, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    heavy = sorted({'torch', 'transformers', 'triton'} & set(sys.modules))\n"
        "    if heavy:\n"
        "        print(json.dumps({name: heavy})); break\n"
        "else:\n"
        "    print('{}')\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded: dict[str, list[str]] = json.loads(done.stdout)
    return loaded

"""Which slow tests a change can reach: those whose files, or files that they import, differ from when they last passed.

    python scripts/slow_tests.py list              # every file with slow tests
    python scripts/slow_tests.py select            # those to run
    python scripts/slow_tests.py record [FILE...]  # after they passed (all of them): remember what they ran on
    PYTHONPATH=scripts pytest -p slow_tests …      # remember each file whose slow tests all passed in this run

``make test-all`` runs every slow test, ``.ci/run`` those that are selected; both record each file that passed. The
record is ``docs/results/slow-tests.json``: for each test file a digest of everything that it reaches, and when it last
passed. Comments, docstrings and line breaks of Python files are left out of it. Nothing is recorded of a file with a
failure or a skipped test, of one that an interrupted run did not finish, or of a run that leaves tests of a file out
(``-k``, ``FILE::TEST``).

A test file reaches the modules that it imports, and what these import or name in strings, imports inside functions
too. A test that finds packages through entry points reaches the source of every package that can be found. One that
starts processes reaches the whole repository without other tests' modules, unless a line ``# runs: FILE`` names the
one script that it starts. Of a package for hardware that no machine for tests has, either reaches only what finding the
package imports, unless the test imports the package or names what belongs to it.
"""

from __future__ import annotations

import ast
import datetime
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from source_tree import Module, imports, modules, named_modules  # noqa: E402

RECORD = ROOT / "docs/results/slow-tests.json"
#: What every test stands on.
SHARED = (
    "constraints.txt",
    "pyproject.toml",
    "conftest.py",
    "scripts/dev-requirements.txt",
    "scripts/no-deps-requirements.txt",
    "scripts/model_sources.py",
)
#: What chooses among tests decides nothing about how they end.
SELECTION = {"scripts/slow_tests.py", "Makefile", ".ci/run"}
TEST_MODULE = re.compile(r"(\w+/)*tests/(\w+/)*\w+\.py")
#: A file with this line has no test for a machine without a GPU.
ALL_GPU = re.compile(r"^pytestmark = .*\bmark\.gpu\b", re.MULTILINE)
#: With these a run has every slow test of its files.
WHOLE = ("slow and not gpu", "not gpu")
#: Read by whoever reads entry points.
DISCOVERY = "evener.plugins.discover"
#: Distributions that engines find through entry points.
FOUND = ("core", "formats", "generation", "models", "inspection", "offload", "conformance", "backends")
#: Packages for hardware that no machine for tests has, and the words by which a test names what belongs to them.
HARDWARE = {
    "backends/ascend": r"ascend|npu|torch_npu", "backends/cuda": r"cuda|nvidia", "backends/gcu": r"gcu|enflame",
    "backends/hygon": r"hygon|dcu", "backends/muxi": r"muxi|maca", "backends/triton": r"triton",
    "backends/parts": r"evener_backend_parts|cuda|hygon|muxi", "backends/triton-binaries": r"triton",
}  # fmt: skip
#: What a test reads that goes through all packages, whatever their names are.
ANY_PACKAGE = r"backends/\*|build_wheels|make wheels|tracked_files"
#: Text for readers; the packages' own pages too. Only tests of the documents read it.
PROSE = re.compile(r"\w+\.md|docs/(?!examples/).*|.*/README(\.\w+)?\.md")
#: How code that starts processes is recognized.
PROCESSES = ("import subprocess", "sys.executable", "create_subprocess")


@cache
def tracked() -> tuple[str, ...]:
    """Every file of the repository, below its root."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(name for name in done.stdout.splitlines() if (ROOT / name).is_file())


@cache
def sources() -> Mapping[str, Module]:
    """Every module that a test may import, by the name it imports it by."""
    folders = [*ROOT.glob("*/src"), *ROOT.glob("backends/*/src"), ROOT / "scripts", ROOT / "benchmarks", ROOT / "tests"]
    folders += [path for path in ROOT.glob("backends/*/tests") if path.is_dir()]
    found: dict[str, Module] = {}
    for folder in folders:
        for name, module in modules(folder).items():
            found.setdefault(name, module)
    return found


@cache
def imported(path: Path) -> frozenset[str]:
    """The names of the modules of ours that a file imports or names in a string."""
    module = next((m for m in sources().values() if m.path == path), Module(path.stem, path))
    # A package imports no script or test; a plain word in a string is no module.
    known = {n: m for n, m in sources().items() if "/src/" not in str(path) or "/src/" in str(m.path)}
    named = (each for each in named_modules(module, known) if "." in each.target)
    return frozenset(i.target for i in (*imports(module, known), *named) if i.target in known and not i.typing)


def closure(start: Iterable[Path]) -> dict[str, Module]:
    """The modules that files import, directly or through others, by name."""
    found, queue = dict[str, Module](), list(start)
    while queue:
        for name in imported(queue.pop()) - found.keys():
            found[name] = sources()[name]
            queue.append(found[name].path)
    return found


def conftests(path: Path) -> list[Path]:
    """The files of fixtures that pytest reads for a test file."""
    return [folder / "conftest.py" for folder in path.parents if (folder / "conftest.py").is_file() and folder != ROOT]


@cache
def reached(path: Path) -> set[str]:
    """The files that a test file depends on, below the root."""
    scripts = [ROOT / name for name in re.findall(r"^# runs: (\S+)$", path.read_text(), re.MULTILINE)]
    start = [path, *conftests(path), *scripts]
    found = closure(start)
    helpers = [m.path for m in found.values() if "/src/" not in str(m.path)]
    if not scripts and any(word in each.read_text() for each in (path, *helpers) for word in PROCESSES):
        pages = path.name.startswith("test_docs")
        prose = {name for name in tracked() if PROSE.fullmatch(name)}
        everything = set(tracked()) - (set() if pages else prose)
        results = {name for name in everything if name.startswith("docs/results/")}
        mine = {str(each.relative_to(ROOT)) for each in (*start, *(m.path for m in found.values()))}
        # Modules of tests that neither this one nor its helpers import or name.
        text = "".join(each.read_text() for each in (path, *helpers))
        others = {n for n in everything - mine if TEST_MODULE.fullmatch(n) and Path(n).stem not in text}
        return everything - results - others - SELECTION - idle_hardware(text, mine)
    names = {str(each.relative_to(ROOT)) for each in (*start, *(m.path for m in found.values()))}
    own = frozenset(names)
    folders = {distribution(name) for name in names if "/src/" in name}
    if DISCOVERY in found:
        folders |= {distribution(name) for name in tracked() if name.startswith(FOUND) and "/src/" in name}
        names |= {name for name in tracked() if "/src/" in name and distribution(name) in folders}
    # Native sources, measured tables and templates of the packages that are reached, and what they require.
    beside = (name for name in tracked() if distribution(name) in folders and "/tests/" not in name)
    names |= {name for name in beside if not name.endswith(".py") and not PROSE.fullmatch(name)}
    names -= idle_hardware("".join(each.read_text() for each in (path, *helpers)), own)
    names |= {name for name in tracked() if name.startswith(f"{path.parent.relative_to(ROOT)}/data/")}
    return names | set(SHARED)


def idle_hardware(text: str, imported: Iterable[str]) -> set[str]:
    """The files of packages for hardware that a test cannot reach, because no such device is there to choose them.

    Args:
        text: of the test file and its helpers.
        imported: the files that they import.
    """
    if re.search(ANY_PACKAGE, text):
        return set()
    named = {name for name, words in HARDWARE.items() if re.search(rf"(\b|_)({words})", text, re.IGNORECASE)}
    idle = HARDWARE.keys() - named - {distribution(name) for name in imported}
    return {name for name in tracked() if distribution(name) in idle} - finding()


@cache
def finding() -> frozenset[str]:
    """Of the packages for hardware: what says which modules they have, the descriptors, and what the probes import."""
    of = {str(m.path.relative_to(ROOT)): m.path for m in sources().values()}
    ours = {name: path for name, path in of.items() if distribution(name) in HARDWARE}
    probes = [path for path in ours.values() if path.name == "probe.py"]
    probed = {str(m.path.relative_to(ROOT)) for m in closure(probes).values()}
    found = {name for name, path in ours.items() if path.name in ("__init__.py", "probe.py") or name in probed}
    return frozenset(found | {f"{name}/pyproject.toml" for name in HARDWARE})


def distribution(name: str) -> str:
    """``backends/cpu/src/…`` → ``backends/cpu``; ``core/src/…`` → ``core``."""
    parts = name.split("/")
    return "/".join(parts[:2]) if parts[0] == "backends" else parts[0]


@cache
def content(name: str) -> str:
    """Of one file. Of a Python file only what it does: no comments, docstrings or line breaks."""
    data = (ROOT / name).read_bytes()
    if name.endswith(".py"):
        tree = ast.parse(data)
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
                ast.get_docstring(node, clean=False) is not None
            ):
                node.body = node.body[1:]
        data = ast.dump(tree).encode()
    return hashlib.sha256(data).hexdigest()


@cache
def digest(path: Path) -> str:
    """Of everything that a test file reaches."""
    total = hashlib.sha256()
    for name in sorted(reached(path)):
        total.update(f"{name} {content(name)}\n".encode())
    return total.hexdigest()[:16]


def slow_files() -> list[Path]:
    """Test files with slow tests, without those whose every test needs a GPU."""
    names = (name for name in tracked() if Path(name).name.startswith("test_") and name.endswith(".py"))
    texts = {name: (ROOT / name).read_text() for name in sorted(names)}
    return [ROOT / n for n, text in texts.items() if "pytest.mark.slow" in text and not ALL_GPU.search(text)]


def read_record() -> dict[str, dict[str, str]]:
    """What is known of each test file: ``digest`` and ``passed``, a date."""
    if not RECORD.is_file():
        return {}
    found: dict[str, dict[str, str]] = json.loads(RECORD.read_text())
    return found


def select() -> list[str]:
    """The test files that a change since the record can reach."""
    record = read_record()
    names = {str(path.relative_to(ROOT)): path for path in slow_files()}
    return [name for name, path in names.items() if record.get(name, {}).get("digest") != digest(path)]


def write_record(names: Iterable[str]) -> None:
    """Remember that these test files passed as they are now."""
    record = {name: entry for name, entry in read_record().items() if (ROOT / name).is_file()}
    today = datetime.date.today().isoformat()
    record.update({name: {"digest": digest(ROOT / name), "passed": today} for name in names})
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


class Outcomes:
    """Which files passed whole in a run of pytest, with any number of processes.

    ``collected``: test ids that were to run, by file; ``passed``: ids that did and had no error in any phase.
    """

    def __init__(self) -> None:
        self.collected: dict[str, set[str]] = {}
        self.passed: set[str] = set()
        self.failed: set[str] = set()

    def expect(self, ids: Iterable[str]) -> None:
        """These tests were collected; once for each process that collected them."""
        for each in ids:
            self.collected.setdefault(each.partition("::")[0], set()).add(each)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Without processes of its own, a run collects here."""
        self.expect(item.nodeid for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """A process has collected."""
        self.expect(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of a test has ended."""
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def complete(self) -> list[str]:
        """Files with slow tests whose collected tests all ended without a failure."""
        slow = {str(path.relative_to(ROOT)) for path in slow_files()}
        good = self.passed - self.failed
        return sorted(name for name, ids in self.collected.items() if name in slow and ids <= good)

    def pytest_sessionfinish(self) -> None:
        """Write the record, of an interrupted run too."""
        write_record(self.complete())


def pytest_configure(config: pytest.Config) -> None:
    """``-p slow_tests``: the process that hands tests out keeps the record."""
    option = config.option
    whole = option.markexpr in WHOLE and not (option.keyword or option.deselect or option.lf)
    if whole and not hasattr(config, "workerinput") and not any("::" in word for word in config.args):
        config.pluginmanager.register(Outcomes(), "slow-test-outcomes")


def main(words: list[str]) -> int:
    """``list``, ``select`` or ``record [FILE...]``; returns the exit code."""
    every = [str(path.relative_to(ROOT)) for path in slow_files()]
    if words in (["list"], ["select"]):
        print("\n".join(every if words == ["list"] else select()))
        return 0
    if words[:1] == ["record"]:
        write_record(words[1:] or every)
        return 0
    print("usage: slow_tests.py list | select | record [FILE...]", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

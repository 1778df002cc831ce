"""Fixtures for the tests of every distribution: the real models' folders."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.assertion import rewrite
from hypothesis import HealthCheck, settings
from model_sources import SOURCES, models_root, problem

# Imported modules and collected tests stay: until the tests begin, collections of garbage are a tenth of the time.
gc.disable()
# Last, not first as pytest's ``pythonpath`` would: ``profile.py`` there must not hide the standard library's.
sys.path.append(str(Path(__file__).parent / "benchmarks"))

# No test asserts how long something takes; a machine with other work is slow. The same examples each time: a run tells
# of this commit, and what chance finds is looked for by ``make search``.
settings.register_profile("evener", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("search", settings.get_profile("evener"), derandomize=False, print_blob=True)
#: For one more interpreter: what the examples prove is proved by the whole suite's own.
settings.register_profile("few", settings.get_profile("evener"), max_examples=10)
settings.load_profile("evener")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Of several processes that test a new checkout, each compiles a part of the test files with pytest's messages for
    ``assert``. Otherwise each would compile them all, at the same time: twelve seconds of each."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None or sys.dont_write_bytecode:
        return
    state, ours = session.config.stash[rewrite.assertstate_key], int(worker["workerid"].removeprefix("gw"))
    given = [session.config.invocation_params.dir / word.partition("::")[0] for word in session.config.args]
    files = sorted(file for path in given for file in ([path] if path.is_file() else path.rglob("test_*.py")))
    for file in files[ours :: worker["workercount"]]:
        compiled = rewrite.get_cache_dir(file) / (file.name[:-3] + rewrite.PYC_TAIL)
        if rewrite._read_pyc(file, compiled) is None and rewrite.try_makedirs(compiled.parent):
            source, code = rewrite._rewrite_test(file, session.config)
            rewrite._write_pyc(state, code, source, compiled)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file is handed out first, so that nobody waits for it alone. Slow tests may take longer before they
    are taken to hang: several of them share the cores."""
    items.sort(key=lambda item: item.path.name != "test_real_models.py")
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(1200))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.enable()


def pytest_collection_finish() -> None:
    """Imported modules and collected tests stay to the end. A garbage collection that walks them too takes seconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def settled() -> None:
    """What earlier files have left, imported modules most of all, is walked by no later collection: in a process that
    ran many files each took two seconds. First what they left in circles goes, and the memory of their devices."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Python ends as it does without ``gc.freeze``: libraries count what is left."""
    gc.unfreeze()


def _folder(key: str) -> Path:
    """The folder of a real model. A missing one fails: a skipped test would look as if it had passed."""
    source, root = SOURCES[key], models_root()
    if (why := problem(source, root)) is not None:
        pytest.fail(f"{root / source.name}: {why}; run 'make models'", pytrace=False)
    return root / source.name


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct: the one real model that the quick tests may use."""
    return _folder("smollm2")


@pytest.fixture(scope="session")
def qwen_dir() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct; for tests marked ``slow``."""
    return _folder("qwen2.5")


@pytest.fixture(scope="session")
def gemma_dir() -> Path:
    """Gemma 3 270M (base, no chat template); for tests marked ``slow``."""
    return _folder("gemma3")


@pytest.fixture
def warm_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes that begin with torch imported, for tests of what they say and not of how they end."""
    from warm import CHILDREN, warm

    python = str(warm() / "python")
    monkeypatch.setattr(sys, "executable", python)
    monkeypatch.setenv(CHILDREN, python)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tests whose tensors are tiny: threads would only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

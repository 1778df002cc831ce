"""Kernels that packages carry compiled: found by Triton's own key, and only where nothing differs."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton.runtime import cache as triton_cache

import evener_kernels_triton
from evener_conformance.distributions import write_distribution
from evener_kernels_triton import binaries
from evener_kernels_triton.binaries import DIGITS, GROUP, INDEX, StoredFirst, use_stored

# runs: backends/triton/tests/stored_start.py
# runs: scripts/triton_binaries.py
HERE = Path(__file__).parent
ROOT = HERE.parents[2]
VERSION = str(triton.__version__)
#: The hashes of Triton's own files, and which of them is of the library.
PARTS, LIBRARY = ["aa", "bb", "cc", "dd"], 2


def hashed(text: str) -> Any:
    return SimpleNamespace(hash=lambda: text)


def key_of(source: str, options: str = "options", environment: dict[str, str] | None = None) -> str:
    """The name of a kernel's folder in Triton's cache."""
    key = triton_cache.get_cache_key(hashed(source), hashed("ptxas 12, sm_90"), hashed(options), environment or {})
    return str(triton_cache._base32(hashlib.sha256(key.encode()).hexdigest()))


def put(folder: Path, content: bytes, suffix: str) -> str:
    name = hashlib.sha256(content).hexdigest()[:DIGITS] + suffix
    (folder / name).write_bytes(content)
    return name


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package with one kernel and one launcher; Triton's cache is another, empty folder."""
    site, folder = tmp_path / "site", tmp_path / "site/some_binaries"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    write_distribution(site, "some-binaries", {GROUP: {"some": "some_binaries"}})
    kernel = ["add_kernel", "source", "options", put(folder, b"{}", ".json"), put(folder, b"machine code", ".cubin")]
    index = {
        "format": 1, "triton": {"version": VERSION, "parts": PARTS, "library": LIBRARY},
        "targets": {"sm_90": {"tool": "ptxas 12, sm_90", "kernels": [kernel]}},
        "modules": {"LAUNCHER": {"launcher.so": put(folder, b"host code", ".so")}},
    }  # fmt: skip
    (folder / INDEX).write_text(json.dumps(index))
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(triton_cache, "triton_key", lambda: VERSION + "-".join(PARTS))
    monkeypatch.setattr(triton.knobs.cache, "manager_class", None)
    monkeypatch.setattr(StoredFirst, "behind", None)
    forget()
    yield folder
    forget()


def forget() -> None:
    binaries.stored.cache_clear()
    binaries._whole.cache_clear()


def change(package: Path, **changes: Any) -> None:
    index = json.loads((package / INDEX).read_bytes())
    (package / INDEX).write_text(json.dumps(index | changes))


def found(key: str) -> Any:
    """What Triton finds of a kernel in the manager that it would use."""
    use_stored()
    return triton_cache.knobs.cache.manager_class(key).get_group("add_kernel.json")


def test_a_kernel_is_found_under_the_key_that_triton_makes_and_nothing_is_written(
    package: Path, tmp_path: Path
) -> None:
    use_stored()
    manager = triton_cache.get_cache_manager(hashlib.sha256(b"any").hexdigest())
    assert type(manager) is StoredFirst
    group = found(key_of("source"))
    assert {name: Path(path).read_bytes() for name, path in group.items()} == {
        "add_kernel.json": b"{}", "add_kernel.cubin": b"machine code",
    }  # fmt: skip
    launcher = StoredFirst("LAUNCHER").get_file("launcher.so")
    assert launcher is not None and Path(launcher).read_bytes() == b"host code"
    assert not (tmp_path / "cache").exists()


def test_of_anything_else_nothing_is_found_and_it_goes_to_tritons_own_cache(package: Path, tmp_path: Path) -> None:
    others = (key_of("another source"), key_of("source", "other options"),
              key_of("source", environment={"TRITON_ENABLE_ASAN": "1"}))  # fmt: skip
    for key in others:
        assert not found(key)
        manager = StoredFirst(key)
        written = manager.put(b"compiled here", "add_kernel.cubin")
        manager.put_group("add_kernel.json", {"add_kernel.cubin": written})
        assert Path(written).is_relative_to(tmp_path / "cache")
        assert StoredFirst(key).get_group("add_kernel.json") == {"add_kernel.cubin": written}
    assert StoredFirst("LAUNCHER").get_file("launcher.cpython-399.so") is None
    assert StoredFirst(key_of("source"), override=True).get_file("add_kernel.cubin") is None


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ({"version": "3.1.4", "parts": PARTS}, f"they are of Triton 3.1.4, this is {VERSION}"),
        ({"version": VERSION, "parts": ["aa", "xx", "yy", "dd"]}, f"they are of another build of Triton {VERSION}"),
        ({"version": VERSION, "parts": ["aa", "xx", "cc", "dd"]}, f"they are of another build of Triton {VERSION}"),
        ({"version": VERSION, "parts": ["aa", "bb", "cc"]}, f"they are of another build of Triton {VERSION}"),
    ],
)
def test_kernels_of_another_triton_are_not_used(
    package: Path, made: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    change(package, triton={**made, "library": LIBRARY})
    assert not found(key_of("source"))
    assert f"some_binaries are not used: {reason}" in caplog.text


def test_the_compilers_library_may_be_that_of_another_python(package: Path) -> None:
    made = {"version": VERSION, "parts": ["aa", "bb", "of another Python", "dd"], "library": LIBRARY}
    change(package, triton=made)
    assert found(key_of("source"))


def test_a_damaged_file_and_one_that_everybody_may_write_are_not_used(
    package: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (binary,) = package.glob("*.cubin")
    binary.chmod(0o646)
    assert not found(key_of("source"))
    binary.chmod(0o644)
    forget()
    assert found(key_of("source"))
    binary.write_bytes(b"other code")
    forget()
    assert not found(key_of("source"))
    assert caplog.text.count("is missing or damaged, or everybody may write it: it is compiled here") == 2


@pytest.mark.parametrize("which", ["", INDEX])
def test_a_package_that_everybody_may_write_is_not_used(
    package: Path, which: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = package / which
    path.chmod(path.stat().st_mode | 0o002)
    assert not found(key_of("source"))
    assert f"are not used: everybody may write {path}" in caplog.text


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "triton": {}}'])
def test_an_invalid_index_is_named_and_not_used(package: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    (package / INDEX).write_text(text)
    assert not found(key_of("source"))
    assert "compiled kernels of some_binaries are not used" in caplog.text


def test_a_package_that_cannot_be_found_is_named_and_the_others_are_used(
    package: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_distribution(package.parent, "broken-binaries", {GROUP: {"broken": "removed_package.kernels"}})
    assert found(key_of("source"))
    assert "compiled kernels of removed_package.kernels are not used: No module named 'removed_package'" in caplog.text


def test_a_kernel_that_no_package_has_is_logged(package: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "evener.triton"):
        assert not found(key_of("another source"))
    assert "no package has add_kernel in this form" in caplog.text


def test_without_a_package_triton_stays_as_it_is_and_a_users_own_cache_comes_second(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(triton_cache.FileCacheManager):  # type: ignore[misc]
        def get_group(self, filename: str) -> dict[str, str]:
            return {"own": filename}

    monkeypatch.setattr(triton.knobs.cache, "manager_class", Own)
    index = (package / INDEX).rename(package / "no index")
    use_stored()
    assert triton.knobs.cache.manager_class is Own
    index.rename(package / INDEX)
    use_stored()
    use_stored()
    assert triton.knobs.cache.manager_class is StoredFirst
    assert "own" not in found(key_of("source"))
    assert found(key_of("another source")) == {"own": "add_kernel.json"}


@pytest.mark.slow
def test_a_first_start_with_the_package_compiles_nothing_and_with_a_changed_source_what_changed(tmp_path: Path) -> None:
    """The whole start of a worker, on a card that is not here: Triton compiles, or finds, and loads each kernel."""
    plain = started(tmp_path / "plain")
    assert len(plain["compiled"]) >= 8 and plain["found"] == [] and plain["launched"] > plain["loaded"]
    folder = tmp_path / "site/some_binaries"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    made = """if True:
        import sys
        import stored_start, triton_binaries
        from pathlib import Path
        from model_configs import CONFIGS

        CONFIGS["tiny"] = stored_start.tiny()
        triton_binaries.MODELS["tiny"] = ("tiny", {}, stored_start.KEYS)
        work, store = map(Path, sys.argv[1:])
        triton_binaries.write(store, work, [triton_binaries.compiled("h200", "tiny", work, True, [])])
    """
    (tmp_path / "work").mkdir()
    subprocess.run([sys.executable, "-c", made, tmp_path / "work", folder], cwd=ROOT, env=environ(tmp_path), check=True)
    here = [str(path).encode() for path in (tmp_path, ROOT, sysconfig.get_paths()["include"])]
    assert not [file for file in folder.iterdir() for path in here if path in file.read_bytes()]
    write_distribution(tmp_path / "site", "some-binaries", {GROUP: {"some": "some_binaries"}})

    with_package = started(tmp_path / "stored", tmp_path / "site")
    assert with_package["compiled"] == []
    assert sorted(with_package["found"]) == sorted(plain["compiled"])
    assert with_package["launched"] == plain["launched"]
    assert not (tmp_path / "stored").exists()

    other = tmp_path / "other"
    shutil.copytree(Path(evener_kernels_triton.__file__).parent, other / "evener_kernels_triton")
    rows = other / "evener_kernels_triton/jit/rows.py"
    rows.write_text(rows.read_text().replace("tl.store(", "tl.debug_barrier()\n    tl.store(", 1))
    changed = started(tmp_path / "changed", other, tmp_path / "site")
    assert 0 < len(changed["compiled"]) < len(plain["compiled"])
    assert sorted(changed["compiled"] + changed["found"]) == sorted(plain["compiled"])


def environ(cache: Path, *paths: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
    path = os.pathsep.join(map(str, (*paths, ROOT / "scripts", ROOT / "benchmarks", HERE)))
    return kept | {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache)}


def started(cache: Path, *paths: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, HERE / "stored_start.py"],
        env=environ(cache, *paths),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout)
    return said

"""Native code of packages: compiled once, and again when anything that it depends on changes; no partial files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from evener.backend.native_code import Unavailable, compile_library

#: Writes what it was asked for into a log, and something into the file after -o, which comes last.
COMPILER = """#!/bin/sh
test "$1" = --version && echo {version} && exit
echo "$@" >> {log}
for last; do :; done
echo a library > "$last"
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/evener/parts"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "native").mkdir()
    (tmp_path / "native/all.cpp").write_text("int one;\n")
    return tmp_path / "native/all.cpp"


def script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_a_library_is_rebuilt_only_for_new_sources_flags_processors_or_compilers(
    source: Path, cache: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    compiler = script(tmp_path / "cc", COMPILER.format(version=1, log=log))

    def makes(flags: tuple[str, ...] = ("-O3",), depends: tuple[str, ...] = ()) -> int:
        """How many were made for three who ask."""
        before = len(log.read_text().splitlines()) if log.exists() else 0
        paths = {compile_library(source, flags, "parts", "the parts", depends, compiler) for _ in range(3)}
        (path,) = paths
        assert isinstance(path, Path) and path.parent == cache and path.read_text() == "a library\n"
        return len(log.read_text().splitlines()) - before

    assert (makes(), makes()) == (1, 0)
    assert (makes(("-O2",)), makes(depends=("another processor",))) == (1, 1)
    (source.parent / "beside.h").write_text("int two;\n")
    assert (makes(), makes()) == (1, 0)
    script(tmp_path / "cc", COMPILER.format(version=2, log=log))
    assert (makes(), len(list(cache.iterdir()))) == (1, 5)


def test_a_compiler_that_fails_says_how_and_leaves_nothing_behind(source: Path, cache: Path, tmp_path: Path) -> None:
    broken = script(tmp_path / "cc", "#!/bin/sh\necho 'all.cpp:1: error: no such thing' >&2\nexit 1\n")
    assert compile_library(source, (), "parts", "the parts", compiler=broken) == Unavailable(
        f"{broken} could not compile the parts: all.cpp:1: error: no such thing"
    )
    assert list(cache.iterdir()) == []
    no_program = script(tmp_path / "text", "not a program")
    found = compile_library(source, (), "parts", "the parts", compiler=no_program)
    assert isinstance(found, Unavailable) and found.reason.startswith(f"{no_program} could not compile the parts: ")
    cache.rmdir()
    cache.write_text("a file")
    found = compile_library(source, (), "parts", "the parts", compiler=broken)
    assert isinstance(found, Unavailable) and found.reason.startswith(f"the parts could not be compiled into {cache}: ")


def test_a_compiler_that_computes_without_end_is_ended_with_all_that_it_started(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is on processor time: one on wall time ended compilations on busy machines."""
    monkeypatch.setattr("evener.backend.native_code._LIMITED", ("/bin/sh", "-c", 'ulimit -t 1; exec "$@"', "sh"))
    part = script(tmp_path / "part", "#!/bin/sh\nwhile :; do :; done\n")
    driver = script(tmp_path / "cc", f'#!/bin/sh\ntest "$1" = --version && exit\n{part} || exit 1\n')
    found = compile_library(source, (), "parts", "the parts", compiler=driver)
    assert isinstance(found, Unavailable) and found.reason.startswith(f"{driver} could not compile the parts: ")


def test_a_missing_compiler_is_reported(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = compile_library(source, (), "parts", "the parts", compiler="no-such-compiler")
    assert isinstance(found, Unavailable) and "no-such-compiler was not found; install one" in found.reason
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    found = compile_library(source, (), "parts", "the parts")
    assert isinstance(found, Unavailable) and "no C++ compiler was found" in found.reason


def test_a_library_that_was_cut_short_or_replaced_is_made_again(source: Path, cache: Path, tmp_path: Path) -> None:
    compiler = script(tmp_path / "cc", COMPILER.format(version=1, log=tmp_path / "log"))
    made = compile_library(source, (), "parts", "the parts", compiler=compiler)
    assert isinstance(made, Path)
    for content in (b"", b"a lib", b"another library\n"):
        made.write_bytes(content)
        again = compile_library(source, (), "parts", "the parts", compiler=compiler)
        assert again == made and made.read_text() == "a library\n"


def test_a_library_of_another_user_is_not_loaded(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    compiler = script(tmp_path / "cc", COMPILER.format(version=1, log=log))
    compile_library(source, (), "parts", "the parts", compiler=compiler)
    made = next((tmp_path / "cache/evener/parts").glob("*.so"))
    monkeypatch.setattr(os, "getuid", lambda: made.stat().st_uid + 1)
    compile_library(source, (), "parts", "the parts", compiler=compiler)
    # Root's libraries are trusted: an image may have been made with them.
    assert len(log.read_text().splitlines()) == (1 if made.stat().st_uid == 0 else 2)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_the_folder_is_this_users_alone_under_any_umask(umask: int, source: Path, cache: Path, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        compile_library(
            source,
            (),
            "parts",
            "the parts",
            compiler=script(tmp_path / "cc", COMPILER.format(version=1, log="/dev/null")),
        )
    finally:
        os.umask(before)
    assert cache.stat().st_mode & 0o777 == 0o700

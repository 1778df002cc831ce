"""Compile the Triton kernels that known models launch on known cards into a folder, on a machine without any of them.

    python scripts/triton_binaries.py --out FOLDER [--cards a100 h100 h200 b200] [--models qwen3-8b ...]
        [--headers FOLDER ...] [--jobs N]

The Triton that is imported compiles, so it has to be the one that will look for the kernels (``make triton-binaries``
sees to that). ``--headers``: folders with the ``Python.h`` of other versions of Python: each has launchers of its own.
Compiled kernels stay in FOLDER/work and are not compiled again. ``backends/triton-binaries/hatch_build.py`` puts
FOLDER/store into a wheel.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "benchmarks")]

from model_configs import CONFIGS  # noqa: E402

_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_QWEN3 = ("qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b")
#: A model of ``benchmarks/model_configs.py``, how its weights are stored, and keys of evener.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{name: (name, {}, {}) for name in (*_QWEN3, "deepseek-v2-lite", "gemma-3-4b")},
    **{f"{name}-fp8": (name, _FP8, {}) for name in _QWEN3},
}
CARDS = ("a100", "h100", "h200", "b200")


def main(argv: Sequence[str]) -> int:
    """Compile everything that was asked for, and write the store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cards", nargs="+", choices=CARDS, default=CARDS)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--headers", type=Path, nargs="*", default=[])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--start", action="store_true", help="only what is launched before a worker is ready")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    work = args.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    if args.one:
        card, model = args.one
        made = compiled(card, model, work, args.start, args.headers)
        (work / f"{card}-{model}.json").write_text(json.dumps(made))
        return 0
    # Each in a process of its own: a worker's weights go with it.
    common = ["--out", str(args.out), *(["--start"] if args.start else []), "--headers", *map(str, args.headers)]

    def run(pair: tuple[str, str]) -> None:
        subprocess.run([sys.executable, __file__, "--one", *pair, *common], check=True, env=_environment(args.jobs))
        print(*pair, flush=True)

    with ThreadPoolExecutor(args.jobs) as threads:
        list(threads.map(run, [(card, model) for model in args.models for card in args.cards]))
    parts = [json.loads((work / f"{card}-{model}.json").read_text()) for model in args.models for card in args.cards]
    store = args.out / "store"
    write(store, work, parts)
    print(
        f"{store}: {sum(f.stat().st_size for f in store.iterdir()):,} bytes, {len(list(store.glob('*.cubin')))} kernels"
    )
    return 0


def _environment(jobs: int) -> dict[str, str]:
    """Without settings of Triton: they are part of its keys."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("TRITON_", "CUDA_"))}
    return kept | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}


def compiled(card_name: str, model: str, work: Path, start: bool, headers: Sequence[Path]) -> dict[str, Any]:
    """Compile a model's launches on a card, and their launchers, into the folder ``work``. Returns the entries of the
    index, with files of ``work``."""
    import triton
    from triton import knobs
    from triton.compiler import ASTSource, make_backend
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.runtime.cache import get_cache_key
    from triton_launches import CARDS, record

    knobs.propagate_env = False
    # Where the sources lie on this machine is nobody's concern, and lines make binaries larger.
    knobs.cache.dir, knobs.compilation.disable_line_info = str(work / "cache"), True
    card, (name, quantized, keys) = CARDS[card_name], MODELS[model]
    config = {**CONFIGS[name], **({"quantization_config": quantized} if quantized else {})}
    backend, kernels = make_backend(card.compiled_for), []
    launchers = Launchers(work, headers)
    launchers.add_utilities()
    for function, signature, constants, attrs, options in record(card, config, keys, all_steps=not start):
        source = (GluonASTSource if function.is_gluon() else ASTSource)(function, signature, constants, attrs)
        made = triton.compile(source, target=card.compiled_for, options=dict(options.__dict__), _env_vars={})
        parsed = backend.parse_options(dict(options.__dict__))
        key = get_cache_key(source, backend, parsed, {})
        assert made.hash == hashlib.sha256(key.encode()).hexdigest(), "this Triton makes its keys in another way"
        launchers.add(source, made.metadata)
        name, files = source.name[:150], made.metadata_group
        found = [files[f"{name}.{kind}"] for kind in ("json", "cubin")]
        kernels.append([name, source.hash(), parsed.hash(), *found])
    return {"target": card.target, "tool": backend.hash(), "kernels": kernels, "modules": launchers.found}


class _NotLoadedError(Exception):
    """In place of a module that would need the driver's library to be loaded."""


class Launchers:
    """The host's side of kernels, compiled for each version of Python as Triton compiles it for one, and not loaded.

    Attributes:
        found: by Triton's key, files by the name that Triton looks for.
    """

    def __init__(self, work: Path, headers: Sequence[Path]) -> None:
        from triton import knobs
        from triton.runtime import cache

        self.found: dict[str, dict[str, str]] = {}
        self._folder = work / "launchers"
        self._folder.mkdir(exist_ok=True)
        self._headers = [Path(sysconfig.get_paths()["include"]), *headers]
        self._asked = ""
        launchers = self

        class Asked(cache.FileCacheManager):  # type: ignore[misc]
            """Notes which file is looked for, and under which key."""

            def get_file(self, filename: str) -> str | None:
                if filename.endswith(".so"):
                    launchers._asked = self.key
                    return None
                found: str | None = super().get_file(filename)
                return found

        self._stub = _stand_in(work)
        knobs.nvidia.libcuda_path, knobs.cache.manager_class, knobs.build.impl = str(self._stub), Asked, self._build

    def add_utilities(self) -> None:
        """What loads kernels and makes descriptors of tensors."""
        from triton.backends.nvidia import driver

        self._collect(driver.CudaUtils)

    def add(self, source: Any, metadata: Any) -> None:
        """What launches a kernel. Later versions of Triton than 3.6 have one launcher for all kernels."""
        from triton.backends.nvidia import driver

        if hasattr(driver, "make_launcher"):
            self._collect(lambda: driver.CudaLauncher(source, metadata))

    def _collect(self, make: Callable[[], object]) -> None:
        try:
            make()
        except _NotLoadedError:
            return

    def _build(
        self, name: str, source: str, folder: str, library_dirs: list[str], include_dirs: list[str],
        libraries: list[str],
    ) -> str:  # fmt: skip
        """In place of Triton's own build of one module: one for each version of Python."""
        if self._asked not in self.found:
            digest = hashlib.sha256(Path(source).read_bytes()).hexdigest()[:16]
            self.found[self._asked] = {
                name + suffix: str(self._compile(source, f"{digest}{suffix}", include, include_dirs, libraries))
                for include in self._headers for suffix in [_suffix(include)]
            }  # fmt: skip
        raise _NotLoadedError

    def _compile(
        self, source: str, name: str, include: Path, include_dirs: Sequence[str], libraries: Sequence[str]
    ) -> Path:
        made = self._folder / name
        if not made.exists():
            with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
                first = Path(scratch) / name
                command = [
                    "gcc",
                    source,
                    "-O3",
                    "-shared",
                    "-fPIC",
                    "-s",
                    "-Wno-psabi",
                    "-o",
                    str(first),
                    f"-I{include}",
                ]
                command += [f"-I{folder}" for folder in include_dirs]
                # Assertions name their files.
                command += [f"-ffile-prefix-map={path}=." for path in (include, Path(source).parent, *include_dirs)]
                # It has to name the driver's library even where the linker leaves out what it takes for unused.
                command += [f"-L{self._stub}", "-Wl,--no-as-needed", *(f"-l:{library}" for library in libraries)]
                subprocess.run(command, check=True)
                if include == self._headers[0]:
                    loads(first, self._stub)
                first.replace(made)
        return made


def _stand_in(work: Path) -> Path:
    """A folder with a library of the driver's name, which is not here: it has the functions that the host's side of
    kernels calls, and they do nothing."""
    from triton.backends.nvidia import driver

    folder = work / "stub"
    folder.mkdir(exist_ok=True)
    library = folder / "libcuda.so.1"
    if not library.exists():
        sources = Path(driver.__file__).read_text() + Path(driver.__file__).with_name("driver.c").read_text()
        names = sorted(set(re.findall(r"\bcu[A-Z]\w*", sources)))
        with tempfile.TemporaryDirectory(dir=work) as scratch:
            text, made = Path(scratch) / "stub.c", Path(scratch) / library.name
            text.write_text("".join(f"int {name}(void) {{ return 999; }}\n" for name in names))
            subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", text, "-o", made], check=True)
            made.replace(library)
    return folder


def loads(module: Path, stub: Path) -> None:
    """See that a module finds the driver's functions in a process that has loaded its library, as torch does.

    Raises:
        subprocess.CalledProcessError: it does not; the loader's reason is on standard error.
    """
    code = "import ctypes, os, sys; ctypes.CDLL(sys.argv[1]); ctypes.CDLL(sys.argv[2], mode=os.RTLD_NOW)"
    subprocess.run([sys.executable, "-c", code, stub / "libcuda.so.1", module], check=True)


def _suffix(include: Path) -> str:
    """The end of an extension module's name for the Python whose headers these are."""
    found = re.findall(r"#define PY_(?:MAJOR|MINOR)_VERSION\s+(\d+)", (include / "patchlevel.h").read_text())
    own = str(sysconfig.get_config_var("EXT_SUFFIX"))
    return re.sub(r"cpython-\d+", "cpython-" + "".join(found), own)


def write(store: Path, work: Path, parts: Sequence[dict[str, Any]]) -> None:
    """Make the folder ``store`` of what was compiled: files named after their contents, and the index."""
    import triton

    from evener_kernels_triton.binaries import FORMAT, INDEX, key_parts, own_key

    store.mkdir(exist_ok=True)
    for old in store.iterdir():
        old.unlink()
    targets: dict[str, Any] = {}
    modules: dict[str, dict[str, str]] = {}
    for part in parts:
        target = targets.setdefault(part["target"], {"tool": part["tool"], "kernels": []})
        for name, source, options, metadata, binary in part["kernels"]:
            entry = [name, source, options, _kept(store, _plain(metadata, source), ".json"),
                     _kept(store, Path(binary).read_bytes(), ".cubin")]  # fmt: skip
            if entry not in target["kernels"]:
                target["kernels"].append(entry)
        for key, files in part["modules"].items():
            modules[key] = {name: _kept(store, Path(file).read_bytes(), ".so") for name, file in files.items()}
    parts_of_key = key_parts(own_key())
    made_by = {"version": triton.__version__, "parts": parts_of_key, "library": parts_of_key.index(_library())}
    index = {"format": FORMAT, "triton": made_by, "targets": targets, "modules": modules}
    (store / INDEX).write_text(json.dumps(index, indent=1), "utf-8")


def _library() -> str:
    """The part of Triton's key that is of the compiler's library."""
    import triton

    suffix = str(sysconfig.get_config_var("EXT_SUFFIX")).split(".")[-1]
    return hashlib.sha256((Path(triton.__file__).parent / f"_C/libtriton.{suffix}").read_bytes()).hexdigest()


def _plain(metadata: str, source: str) -> bytes:
    """A kernel's metadata without paths of this machine, and without what depends on the version of Python."""
    found = json.loads(Path(metadata).read_text())
    return json.dumps({**found, "extern_libs": [], "hash": source}, sort_keys=True).encode()


def _kept(store: Path, content: bytes, suffix: str) -> str:
    from evener_kernels_triton.binaries import DIGITS

    name = hashlib.sha256(content).hexdigest()[:DIGITS] + suffix
    (store / name).write_bytes(content)
    return name


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""What ``make test-peers`` installs into the cache: programs that drive the server, and vLLM's tests of its HTTP API.

Everything is pinned: Python packages in ``*-requirements.txt``, those for Node.js and the source distribution
of vLLM here. Nothing of vLLM is built, installed or imported; its tests are unpacked and read by pytest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import tempfile
import urllib.parse
import urllib.request
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "scripts/peers-requirements.txt"
#: Of agents and their clients, which need other versions.
AGENTS = ROOT / "scripts/agents-requirements.txt"
CONSTRAINTS = ROOT / "constraints.txt"
#: Ray, and routers of others.
DEPLOY = ROOT / "scripts/deploy-requirements.txt"
DYNAMO = ROOT / "scripts/dynamo-requirements.txt"
#: What the programs need.
PYTHON = (3, 11)
#: Clients for Node.js: OpenAI's, Vercel's AI SDK with what it needs, and two coding agents.
NODE = ("openai@7.57.0", "ai@6.0.326", "@ai-sdk/openai-compatible@2.0.92", "@ai-sdk/anthropic@3.0.140", "zod@4.6.7",
        "@openai/codex@0.171.0", "@anthropic-ai/claude-code@2.1.197")  # fmt: skip
#: What Grafana publishes about dashboards, and what checks one against it.
GRAFANA = ("@grafana/schema@13.2.3", "ts-json-schema-generator@2.4.0", "typescript@7.0.2", "ajv@8.20.0")

VLLM = "0.33.0"
VLLM_SHA256 = "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112"
VLLM_BYTES = 47_101_396
#: Where its tests of the HTTP API are.
TESTS = "tests/entrypoints"
#: What is unpacked: tests of OpenAI's and Anthropic's APIs, and of endpoints for embeddings, tokens, health, metrics.
UNPACKED = (
    "LICENSE",
    "examples/template_chatml.jinja",
    "tests/__init__.py",
    f"{TESTS}/__init__.py",
    f"{TESTS}/conftest.py",
    f"{TESTS}/anthropic/__init__.py",
    f"{TESTS}/anthropic/test_messages.py",
    f"{TESTS}/openai/",
    f"{TESTS}/pooling/__init__.py",
    f"{TESTS}/pooling/embed/__init__.py",
    f"{TESTS}/pooling/embed/test_online.py",
    f"{TESTS}/serve/__init__.py",
    f"{TESTS}/serve/instrumentator/__init__.py",
    f"{TESTS}/serve/instrumentator/test_basic.py",
    f"{TESTS}/serve/instrumentator/test_metrics.py",
    f"{TESTS}/serve/tokenize/__init__.py",
    f"{TESTS}/serve/tokenize/test_tokenization.py",
)
_INDEX = "https://pypi.org/simple/vllm/"
#: Names that the archive may have below its top folder: letters, digits and the like, no parent.
_PLAIN = re.compile(r"(?!.*\.\.)[\w./-]+")


class PeerError(Exception):
    """Something cannot be installed; the message says why and what to do."""


@dataclass(frozen=True)
class Places:
    """Where things are in the cache.

    Attributes:
        root: the folder of everything else.
    """

    root: Path

    @classmethod
    def default(cls) -> Places:
        """``$XDG_CACHE_HOME/evener/peers``."""
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return cls(Path(cache) / "evener/peers")

    @property
    def environment(self) -> Path:
        """The virtual environment with what ``peers-requirements.txt`` lists."""
        return self.root / "environment"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.environment / "bin/python"

    @property
    def agents(self) -> Path:
        """The virtual environment with what ``agents-requirements.txt`` lists."""
        return self.root / "agents"

    @property
    def agents_python(self) -> Path:
        """Its interpreter."""
        return self.agents / "bin/python"

    @property
    def deploy(self) -> Path:
        """The virtual environment with what ``deploy-requirements.txt`` lists, and with this one's packages."""
        return self.root / "deploy"

    @property
    def deploy_python(self) -> Path:
        """Its interpreter."""
        return self.deploy / "bin/python"

    @property
    def dynamo(self) -> Path:
        """The virtual environment with what ``dynamo-requirements.txt`` lists, and with this one's packages."""
        return self.root / "dynamo"

    @property
    def dynamo_python(self) -> Path:
        """Its interpreter."""
        return self.dynamo / "bin/python"

    @property
    def node(self) -> Path:
        """The folder with ``node_modules``."""
        return self.root / "node"

    @property
    def grafana(self) -> Path:
        """The folder with ``node_modules`` of Grafana's types."""
        return self.root / "grafana"

    @property
    def vllm(self) -> Path:
        """The unpacked part of vLLM's source distribution."""
        return self.root / f"vllm-{VLLM}"


def install(places: Places) -> None:
    """Make what is not there.

    Raises:
        PeerError: Python is too old, Node.js is missing, or vLLM's archive is not the pinned one.
        OSError: the cache cannot be written, or the index does not answer.
        subprocess.CalledProcessError: pip or npm failed.
    """
    if sys.version_info < PYTHON:
        wanted, found = (".".join(map(str, version)) for version in (PYTHON, sys.version_info[:2]))
        raise PeerError(f"locust and vLLM's tests need Python {wanted} or newer, and .venv has {found}; make it anew")
    places.root.mkdir(parents=True, exist_ok=True)
    torch = re.search(r"^torch==\S+", CONSTRAINTS.read_text("utf-8"), re.MULTILINE)
    assert torch is not None, f"{CONSTRAINTS.name} has no line for torch"
    _environment(places.environment, REQUIREMENTS, torch.group())
    _environment(places.agents, AGENTS, None)
    _node(places.node, NODE)
    _vllm(places)


def install_deploy(places: Places) -> None:
    """Make the environments for Ray and for Dynamo, if they are not there.

    Raises:
        OSError: the cache cannot be written.
        subprocess.CalledProcessError: pip failed.
    """
    places.root.mkdir(parents=True, exist_ok=True)
    _environment(places.deploy, DEPLOY, None)
    _environment(places.dynamo, DYNAMO, None, "--no-deps")
    # evener, torch and the rest come from this environment; what Ray and Dynamo need comes first.
    ours = "\n".join(f"import site; site.addsitedir({path!r})" for path in site.getsitepackages())
    for folder in (places.deploy, places.dynamo):
        (packages,) = folder.glob("lib/python3*/site-packages")
        (packages / "zz_development.pth").write_text(ours + "\n", "utf-8")


def _environment(folder: Path, requirements: Path, torch: str | None, *options: str) -> None:
    """An environment with ``requirements``, and with ``torch`` unless nothing in it needs it; ``options`` are pip's."""
    wanted = hashlib.sha256((torch or "").encode() + requirements.read_bytes()).hexdigest()
    stamp = folder / "requirements.sha256"
    if stamp.is_file() and stamp.read_text("utf-8") == wanted:
        return
    print(f"installing {requirements.name} into {folder}: some minutes", flush=True)
    venv.create(folder, clear=True, with_pip=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    if torch is not None:
        # First and alone, as for development: what follows finds it there and leaves it as it is.
        subprocess.run([*pip, torch], check=True)
        pip += ["--constraint", str(CONSTRAINTS)]
    subprocess.run([*pip, *options, "--requirement", str(requirements)], check=True)
    stamp.write_text(wanted, "utf-8")


def install_grafana(places: Places) -> None:
    """Install Grafana's types, if they are not there.

    Raises:
        PeerError: Node.js is missing.
        subprocess.CalledProcessError: npm failed.
    """
    places.root.mkdir(parents=True, exist_ok=True)
    _node(places.grafana, GRAFANA)


def _node(folder: Path, packages: tuple[str, ...]) -> None:
    if all(_is_there(folder, *package.rsplit("@", 1)) for package in packages):
        return
    if shutil.which("npm") is None or shutil.which("node") is None:
        raise PeerError("node or npm is not on the PATH; install Node.js 20 or newer: clients need it")
    folder.mkdir(exist_ok=True)
    npm = ["npm", "install", "--no-save", "--ignore-scripts", "--no-audit", "--no-fund", "--silent", *packages]
    subprocess.run(npm, cwd=folder, check=True)


def _is_there(folder: Path, name: str, version: str) -> bool:
    package = folder / "node_modules" / name / "package.json"
    return package.is_file() and json.loads(package.read_text("utf-8"))["version"] == version


def _vllm(places: Places) -> None:
    if all((places.vllm / each).exists() for each in UNPACKED):
        return
    print(f"fetching vLLM {VLLM}'s source distribution ({VLLM_BYTES >> 20} MiB) for its tests", flush=True)
    with tempfile.TemporaryDirectory(prefix=".vllm-", dir=places.root) as temp:
        archive = Path(temp) / f"vllm-{VLLM}.tar.gz"
        _download(archive)
        unpack(archive, Path(temp) / "unpacked")
        shutil.rmtree(places.vllm, ignore_errors=True)  # of an earlier list
        os.replace(Path(temp) / "unpacked" / archive.name.removesuffix(".tar.gz"), places.vllm)


def _download(archive: Path) -> None:
    request = urllib.request.Request(_INDEX, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        files = json.load(answer)["files"]
    # Not pip download: it would run the archive's own code to learn what it needs.
    url = next((file["url"] for file in files if file["filename"] == archive.name), None)
    if url is None:
        raise PeerError(f"{_INDEX} does not list {archive.name}")
    with urllib.request.urlopen(urllib.parse.urljoin(_INDEX, url), timeout=60) as answer:
        content = answer.read(VLLM_BYTES + 1)
    if (found := hashlib.sha256(content).hexdigest()) != VLLM_SHA256:
        raise PeerError(f"{archive.name}: sha256 is {found}, pinned is {VLLM_SHA256}; the file has changed")
    archive.write_bytes(content)


def unpack(archive: Path, into: Path) -> None:
    """Unpack the regular files of ``UNPACKED``.

    Raises:
        PeerError: a wanted file is not in the archive.
    """
    top = archive.name.removesuffix(".tar.gz")
    found = set()
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name.removeprefix(f"{top}/")
            wanted = next((each for each in UNPACKED if _is_below(name, each)), None)
            if wanted is None or not member.isreg() or not _PLAIN.fullmatch(name):
                continue
            found.add(wanted)
            path = into / top / name
            path.parent.mkdir(parents=True, exist_ok=True)
            content = tar.extractfile(member)
            assert content is not None
            path.write_bytes(content.read())
    if lost := sorted(set(UNPACKED) - found):
        raise PeerError(f"{archive.name} has no {', '.join(lost)}")


def _is_below(name: str, wanted: str) -> bool:
    return name.startswith(wanted) if wanted.endswith("/") else name == wanted

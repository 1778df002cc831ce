"""Commands in processes that begin with torch imported: one process imports it, and forks for each command.

A command costs its work instead of two to three seconds of imports. It is a process of its own, with the arguments,
folder, environment and files that its starter gave it; signals reach it, and its exit status comes back. With
``CHILDREN`` in its environment the processes that it starts with ``sys.executable`` begin so, too: the controller and
the worker of a server. Not for tests of what is imported when, or of which process ends with which.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import random
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
from functools import cache
from pathlib import Path
from typing import NoReturn

from evener.plugins.catalog import prepare_torch_import

EVENER = "import sys; from evener.cli.main import main; sys.exit(main())"
#: Most files that a command may be given.
_FILES = 32
#: The variable that makes a command's own children such processes.
CHILDREN = "EVENER_WARM_CHILDREN"
#: What most commands import. A module that is found broken here would be so in a command.
_IMPORTED = (
    "torch", "hydra", "omegaconf", "tokenizers", "safetensors.torch", "evener.cli.main", "evener.cli.doctor",
    "evener.llm", "evener.engine.processes.child", "evener.engine.processes.start", "evener.engine.worker.worker",
    "evener.engine.worker.inline_executor", "evener.ops.reference.basic", "evener.ops.reference.sampling",
    "evener.ops.reference.state", "evener_models.llama", "evener_server.process",
)  # fmt: skip
#: Sends its arguments, folder, environment and files, and ends as the command does. It imports little, for speed.
_CLIENT = """#!{python} -IS
import json, os, signal, socket, sys
def is_open(number):  # not that of the listing itself, which is closed again
    try:
        return os.get_inheritable(number)
    except OSError:
        return False
with socket.socket(socket.AF_UNIX) as to:
    to.connect({path!r})
    others = {{int(name) for name in os.listdir("/proc/self/fd")}} - {{0, 1, 2, to.fileno()}}
    files = [0, 1, 2, *filter(is_open, sorted(others))]
    said = json.dumps([{words!r} + sys.argv[1:], os.getcwd(), dict(os.environ), files]).encode()
    socket.send_fds(to, [len(said).to_bytes(8, "big")], files)
    to.sendall(said)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: to.send(bytes([number])))
    status = int(to.recv(4) or 70)
    if status < 0:  # it was killed by a signal, and so is this process
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status)
"""


#: The exit status of the command of this process, once it is known.
_status: int | None = None


@cache
def warm() -> Path:
    """A folder for PATH: ``evener``, ``pytest`` and ``python`` in it run in such processes. It is made when it is first
    asked for, and is there until this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen(64)
    for name, words in (("evener", ["-c", EVENER]), ("pytest", ["-m", "pytest"]), ("python", [])):
        text = _CLIENT.format(python=os.path.realpath(sys.executable), path=str(folder / "socket"), words=words)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, "-I", __file__, str(listener.fileno()), str(os.getpid())], pass_fds=[listener.fileno()],
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    listener.close()
    atexit.register(server.wait)
    atexit.register(server.terminate)
    return folder


def _serve(listener: socket.socket, parent: int) -> list[str]:
    """Fork for each connection; returns in a process for a command, with the words after ``python``."""
    atexit.register(_leave)  # the first one, so it runs last
    prepare_torch_import()
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # a collection in a command would write to, and so copy, what it shares with this process
    while True:
        if not select.select([listener], [], [], 5)[0]:
            if os.getppid() != parent:  # it was killed
                sys.exit()
            continue
        to, _ = listener.accept()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork():
            to.close()
            continue
        listener.close()
        words, folder, environ, files = _request(to)
        pid = os.fork()
        if pid:
            for file in files.values():  # a pipe's reader waits until nobody can write
                os.close(file)
            _accompany(to, pid)
        to.close()
        _become(folder, environ, files)
        return words


def _request(to: socket.socket) -> tuple[list[str], str, dict[str, str], dict[int, int]]:
    """The words after ``python``, the folder, the environment and the files of what is to be run, by the number that
    each is to have."""
    head, files, *_ = socket.recv_fds(to, 8, _FILES)
    left, said = int.from_bytes(head, "big"), b""
    while len(said) < left:
        more = to.recv(left - len(said))
        if not more:  # its starter is gone
            os._exit(1)
        said += more
    words, folder, environ, numbers = json.loads(said)
    return words, folder, environ, dict(zip(numbers, files, strict=True))


def _accompany(to: socket.socket, pid: int) -> NoReturn:
    """Hand signals from the starter to the command, and its exit status back; end it if the starter is gone."""
    ends = os.pidfd_open(pid)
    watched: list[socket.socket | int] = [to, ends]
    while ends not in select.select(watched, [], [])[0]:
        said = to.recv(1)
        os.kill(pid, said[0] if said else signal.SIGKILL)
        if not said:
            break
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        to.send(str(status).encode())
    os._exit(0)


def _become(folder: str, environ: dict[str, str], files: dict[int, int]) -> None:
    os.setsid()  # a command may end its whole process group, which the tests must not be in
    # Out of the way first: the number that one file is to have may be that of another one.
    away = {number: fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 1000) for number, file in files.items()}
    for file in files.values():
        os.close(file)
    for number, file in away.items():
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    if python := os.environ.get(CHILDREN):
        sys.executable = python
    sys.path[:0] = ["", *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.dont_write_bytecode = bool(environ.get("PYTHONDONTWRITEBYTECODE"))
    random.seed()


def _leave() -> None:
    """End a command whose exit status is known, after all others that run at the exit. Python would take every module
    apart, and so copy much of what the processes share: that took five times as long as all else of a short command."""
    if _status is None:
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # Python says so itself, and ends with 120
        return
    os._exit(_status)


def _exit_status(code: object) -> int | None:
    """What ``sys.exit(code)`` ends with; None where Python still has something to say."""
    return code & 0xFF if isinstance(code, int) else 0 if code is None else None


def _run(words: list[str]) -> None:
    """``python WORDS``, for ``-c``, ``-m`` and a file."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    elif words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    words = _serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    try:
        _run(words)
        _status = 0
    except SystemExit as end:
        _status = _exit_status(end.code)
        raise

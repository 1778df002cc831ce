"""Commands of ``warm`` end as they do in a new Python."""

from __future__ import annotations

import os
import subprocess

import pytest
from warm import warm


@pytest.mark.parametrize(
    ("program", "status", "out", "error"),
    [
        ("print('said', end='')", 0, "said", ""),
        ("raise SystemExit(3)", 3, "", ""),
        ("raise SystemExit(-1)", 255, "", ""),
        ("raise SystemExit('why')", 1, "", "why\n"),
        ("import atexit; atexit.register(print, 'last', end=''); raise SystemExit(2)", 2, "last", ""),
        ("import threading; threading.Timer(0.01, lambda: print('late', end='')).start()", 0, "late", ""),
        ("raise KeyboardInterrupt", -2, "", "KeyboardInterrupt\n"),
        ("raise ValueError('wrong')", 1, "", "ValueError: wrong\n"),
    ],
)
def test_a_command_ends_with_its_own_status_and_all_that_it_said(
    program: str, status: int, out: str, error: str
) -> None:
    done = subprocess.run([warm() / "python", "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, out)
    assert done.stderr.endswith(error) and bool(done.stderr) == bool(error)


def test_a_command_whose_last_words_cannot_be_written_ends_with_pythons_status_for_it() -> None:
    with open("/dev/full", "w") as full:
        command = [warm() / "python", "-c", "print('said')"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 120 and "No space left on device" in done.stderr


def test_a_command_has_the_files_that_it_was_given_under_their_numbers() -> None:
    pipes = [os.pipe() for _ in range(3)]
    given = [end for _, end in pipes]
    program = "import os, sys\nfor number in sys.argv[1:]: os.write(int(number), number.encode())"
    subprocess.run([warm() / "python", "-c", program, *map(str, given)], pass_fds=given, check=True)
    for reading, writing in pipes:
        os.close(writing)
        assert os.read(reading, 9) == str(writing).encode()
        os.close(reading)


def test_a_command_that_ends_its_process_group_ends_nothing_else() -> None:
    code = "import os, signal; os.killpg(0, signal.SIGKILL)"
    assert subprocess.run([warm() / "python", "-c", code], timeout=60).returncode in (-9, 137, 247)
    assert subprocess.run([warm() / "python", "-c", "print('on')"], capture_output=True, timeout=60).stdout == b"on\n"

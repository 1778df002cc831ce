"""Starts two of ``machine.py`` in network namespaces of their own, with a cable between them, and passes lines of JSON
on: ``[machine, line]`` on the standard input, the machine's answer on the standard output; ``"cut"`` cuts the cable.

It runs in a user namespace with a network (``unshare --map-root-user --net``), with which all of it ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ADDRESSES = "10.77.0.1", "10.77.0.2"


def start(folder: str, keys: dict[str, Any]) -> subprocess.Popen[str]:
    program = [sys.executable, str(Path(__file__).with_name("cabled_machine.py")), folder, json.dumps(keys)]
    made = subprocess.Popen(["unshare", "--net", *program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    ask(made, None)
    return made


def ask(machine: subprocess.Popen[str], line: Any) -> Any:
    """Say something, if it is not None, and wait for the next line."""
    assert machine.stdin is not None and machine.stdout is not None
    if line is not None:
        machine.stdin.write(json.dumps(line) + "\n")
        machine.stdin.flush()
    return json.loads(machine.stdout.readline())


def ip(machine: subprocess.Popen[str], *words: str) -> None:
    subprocess.run(["nsenter", "--target", str(machine.pid), "--net", "ip", *words], check=True)


def main(folders: list[str], keys: list[dict[str, Any]]) -> None:
    machines = [start(*each) for each in zip(folders, keys, strict=True)]
    subprocess.run(["ip", "link", "add", "end0", "type", "veth", "peer", "name", "end1"], check=True)
    for number, machine in enumerate(machines):
        subprocess.run(["ip", "link", "set", f"end{number}", "netns", str(machine.pid)], check=True)
        ip(machine, "address", "add", f"{ADDRESSES[number]}/24", "dev", f"end{number}")
        for each in ("lo", f"end{number}"):
            ip(machine, "link", "set", each, "up")
    assert [ask(machine, "go") for machine in machines] == ["ready", "ready"]
    for line in sys.stdin:
        said = json.loads(line)
        if said == "cut":
            ip(machines[0], "link", "set", "end0", "down")
            print(json.dumps("cut"), flush=True)
        else:
            print(json.dumps(ask(machines[said[0]], said[1])), flush=True)
    for machine in machines:
        machine.communicate()


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))

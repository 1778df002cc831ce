"""Two machines, each with a network of its own and a cable between them (network namespaces of Linux): a prompt is
computed on one and answered on the other, and computed again when the cable is cut."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cabled_machines import ADDRESSES

PORT = 21_100
#: A user namespace, in which the user of the tests is root, with a network.
APART = ["unshare", "--map-root-user", "--net"]
PROMPT = [5 + 7 * i * i % 89 for i in range(90)]


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Callable[[Any], Any]]:
    """``ask([machine, request])``: the machine's answer; ``ask("cut")`` cuts the cable."""
    tried = [*APART, "ip", "link", "add", "end0", "type", "veth", "peer", "name", "end1"]
    refused = subprocess.run(tried, capture_output=True, text=True, check=False)
    if refused.returncode:
        pytest.skip(f"this kernel gives no network namespaces with a cable between them: {refused.stderr.strip()}")
    (tmp_path / "key").write_text("a key that both of them share")
    common = {"offload.kv_key_file": str(tmp_path / "key"), "offload.kv_transfer_seconds": 20.0,
              "infer.kv_host_memory": "4MiB"}  # fmt: skip
    keys = [{"offload.kv_transfer": f"{own}:{PORT}", "offload.kv_peers": f"{peer}:{PORT}", **common}
            for own, peer in (ADDRESSES, ADDRESSES[::-1])]  # fmt: skip
    given = json.dumps([[str(tmp_path / "0"), str(tmp_path / "1")], keys])
    program = [*APART, sys.executable, str(Path(__file__).with_name("cabled_machines.py")), given]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as both:
        assert both.stdin is not None and both.stdout is not None

        def said(line: Any) -> Any:
            both.stdin.write(json.dumps(line) + "\n")
            both.stdin.flush()
            return json.loads(both.stdout.readline())

        yield said
        both.stdin.close()
        assert both.wait(60) == 0


@pytest.mark.slow
def test_a_prompt_goes_over_the_cable_between_two_machines(ask: Callable[[Any], Any]) -> None:
    (token,) = ask([0, {"id": "p", "prompt": PROMPT, "max_tokens": 1, "transfer": "hold"}])["tokens"]
    source = f"{ADDRESSES[0]}:{PORT}/p"
    moved = ask([1, {"id": "d", "prompt": PROMPT, "max_tokens": 8, "transfer": source}])
    assert moved["cached"] == 80 and moved["kv_transfer_hits"] == 1 and moved["kv_transfer_failures"] == 0
    alone = ask([0, {"id": "a", "prompt": PROMPT, "max_tokens": 8}])
    assert moved["tokens"] == alone["tokens"] and moved["tokens"][0] == token

    other = [*PROMPT[7:], *PROMPT[:7]]
    ask([0, {"id": "q", "prompt": other, "max_tokens": 1, "transfer": "hold"}])
    assert ask("cut") == "cut"
    lost = ask([1, {"id": "e", "prompt": other, "max_tokens": 8, "transfer": f"{ADDRESSES[0]}:{PORT}/q"}])
    assert lost["cached"] == 0 and lost["kv_transfer_hits"] == 1 and lost["kv_transfer_failures"] == 1
    assert lost["tokens"] == ask([0, {"id": "b", "prompt": other, "max_tokens": 8}])["tokens"]

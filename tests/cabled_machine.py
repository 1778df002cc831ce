"""One of two machines that share KV blocks: an engine, told what to do by lines of JSON on its standard input.

It says where it is first, so that who started it can lay a cable to its network namespace before it opens a port.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}


def main(folder: str, keys: dict[str, Any]) -> None:
    print(json.dumps("here"), flush=True)
    if not sys.stdin.readline():
        return
    from evener.engine.processes.start import build_controller
    from evener.engine.wire.messages import NewRequest, Sampling
    from evener_conformance.reference.engine import play, small_config

    every = {"backend": "cpu", "infer.threads": 1, "infer.block_size": 16, "infer.max_seq_len": 128, **keys}
    controller, _ = build_controller(small_config(Path(folder), "Llama", HEADS, **every))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        played = play(controller, [NewRequest(sampling=Sampling(temperature=0.0), **asked)])
        found = {"tokens": played.tokens[asked["id"]], "cached": played.cached[asked["id"]],
                 **controller.scheduler.connector.counters}  # fmt: skip
        print(json.dumps(found), flush=True)
    controller.close()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))

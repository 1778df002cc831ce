"""One start of an engine in this process, and where its time goes: a thread looks at the main thread's stack.

    python benchmarks/start_parts.py MODEL KEYS BEGAN

KEYS: a JSON object of configuration keys. BEGAN: the system's clock when the process was asked for. Prints one line of
JSON: seconds from BEGAN to an engine that is ready, those in which weights are loaded, and those of each part, with
the places in the program in which the main thread was seen most. As in ``evener serve`` and ``evener run``, reading the
weights begins first. No text is generated: a folder of random weights has no tokenizer. A few ids show that the engine
runs.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from evener_formats.read_ahead import begin_reading

#: Seconds between two looks.
PAUSE = 0.004
#: Frames of a place, from the innermost.
DEPTH = 5
#: A part, and what a frame of it is like: the end of its file's name and its function; "" is any. The first that fits
#: is taken.
PARTS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("weights: waits for reads", (("_base.py", "result"),)),
    ("weights: copies, packing", (("upload.py", "_send"), ("uploader.py", "_send"), ("stored.py", "_write"))),
    ("weights: other", (("weights.py", "load_stage"),)),
    ("capture", (("graphs.py", "_get"), ("graphs.py", "_capture"))),
    ("warm-up, kernels", (("worker.py", "_warm_up"),)),
    ("imports", (("<frozen importlib._bootstrap>", ""),)),
    ("device", (("", "open_device"), ("", "select"))),
    ("choosing and resolving", (("assembly.py", ""), ("resolver.py", ""))),
    ("pool", (("geometry.py", "bind"),)),
    ("other", (("", ""),)),
)


def stack_of(frame: FrameType | None) -> list[tuple[str, str, int]]:
    """File, function and line of each frame, the innermost first."""
    found = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_code.co_name, frame.f_lineno))
        frame = frame.f_back
    return found


def part_of(stack: list[tuple[str, str, int]]) -> str:
    """The part that a stack belongs to."""
    in_weights = any(function == "load_stage" for _, function, _ in stack)
    for name, likes in PARTS:
        if name.startswith("weights: ") and not in_weights:
            continue
        for file, function, _ in stack:
            if any(file.endswith(end) and function.startswith(start) for end, start in likes):
                return name
    raise AssertionError("the last part fits any stack")


class Looks(threading.Thread):
    """Looks at the main thread until ``done`` is set.

    Attributes:
        parts: seconds of each part; places: seconds of each place.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.parts: defaultdict[str, float] = defaultdict(float)
        self.places: defaultdict[str, float] = defaultdict(float)
        self.done = threading.Event()

    def run(self) -> None:
        before = time.perf_counter()
        while not self.done.wait(PAUSE):
            stack = stack_of(sys._current_frames().get(threading.main_thread().ident or 0))
            now = time.perf_counter()
            part = part_of(stack)
            self.parts[part] += now - before
            inner = " < ".join(f"{file.rpartition('/')[2]}:{line} {name}" for file, name, line in stack[:DEPTH])
            self.places[f"{part}: {inner}"] += now - before
            before = now


def most(seconds: Mapping[str, float]) -> dict[str, float]:
    """The 40 largest, the largest first."""
    return {name: round(seconds[name], 3) for name in sorted(seconds, key=seconds.__getitem__, reverse=True)[:40]}


def main(model: str, keys: dict[str, str], began: float) -> None:
    """Start, and print what was found."""
    looks = Looks()
    looks.parts["Python"] = time.time() - began
    looks.start()
    begin_reading(Path(model))
    from evener import LLM, SamplingParams

    with LLM(model, executor="inline", **keys) as llm:
        ready = time.time() - began
        looks.done.set()
        looks.join()
        (answer,) = llm.generate([[1, 2, 3, 4]], SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False))
        assert len(answer.outputs[0].token_ids) == 2
    weights = sum(seconds for part, seconds in looks.parts.items() if part.startswith("weights: "))
    parts, places = most(looks.parts), most(looks.places)
    found = {"device": llm.info.device, "ready_s": ready, "weights_s": weights, "parts": parts, "places": places}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3]))

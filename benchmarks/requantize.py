"""Convert a GGUF file to another type with llama.cpp: ``requantize.py SOURCE TARGET BF16|F16|Q8_0|Q4_0``, run by
llama.cpp's Python."""

from __future__ import annotations

import os
import sys


def main(argv: list[str]) -> int:
    """Write the file; returns llama.cpp's status."""
    import llama_cpp as lib

    source, target, kind = argv
    params = lib.llama_model_quantize_default_params()
    params.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.allow_requantize, params.nthread = True, len(os.sched_getaffinity(0))
    return int(lib.llama_model_quantize(source.encode(), target.encode(), params))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What is mutated: the CPU backend's C++ and Python, and the Triton kernels under Triton's interpreter.

Left out is what the kit's verdict cannot depend on here: how fast a kernel is, how much memory it names (the kit
measures that where a device counts its memory), which calls it refuses (a kernel may refuse more), checks of arguments
that no caller of the kit gets wrong, and kernels that need the hardware.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mutation import cpp_code, python_code
from mutation.mutant import Mutant
from mutation.trial import ROOT

#: Functions that choose, refuse, or plan memory and launches.
_NOT_COMPUTING = frozenset({
    "supports", "_unsupported_reason", "workspace", "variants", "_variants", "block_sizes", "partial_sums", "launches",
})  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A group of files with one way to run them.

    Attributes:
        sources: folder with the packages, from the root.
        files: file, from ``sources`` → names of the kit's checks that run first; "formats/NAME" for those of an area
            that takes long.
        count: mutants of a sample.
    """

    name: str
    sources: str
    files: Mapping[str, tuple[str, ...]]
    count: int

    def mutants_of(self, file: str) -> list[Mutant]:
        """Every mutant of a file."""
        path = f"{self.sources}/{file}"
        source = (ROOT / path).read_text("utf-8")
        if not file.endswith(".py"):
            return list(cpp_code.mutants(path, source))
        silent = list(_lines_of(source, _NOT_COMPUTING))
        return [m for m in python_code.mutants(path, source) if not any(m.line in lines for lines in silent)]

    def first(self, mutant: Mutant) -> tuple[str, ...]:
        """Names of the checks that most likely find a mutant."""
        return self.files[mutant.file.removeprefix(f"{self.sources}/")]

    def sample(self, seed: int) -> list[Mutant]:
        """``count`` mutants: the files in turn, and within a file its operators in turn, so that none of either is
        missed; the same ones for a seed while the files are the same."""
        draw, found = random.Random(f"{self.name} {seed}"), list[Mutant]()
        queues = [_by_operator(self.mutants_of(file), draw) for file in self.files]
        while len(found) < self.count and any(queues):
            found += [queue.pop() for queue in queues if queue]
        return found[: self.count]


def _by_operator(mutants: Sequence[Mutant], draw: random.Random) -> list[Mutant]:
    """The mutants, the last first: one of each operator, then another one of each."""
    by: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by.setdefault(mutant.operator, []).append(mutant)
    for each in by.values():
        draw.shuffle(each)
    operators = sorted(by)
    draw.shuffle(operators)
    order = []
    while any(by.values()):
        order += [by[operator].pop() for operator in operators if by[operator]]
    return order[::-1]


def _lines_of(source: str, names: frozenset[str]) -> Iterator[range]:
    """Lines of the functions with these names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name in names:
            yield range(node.lineno, (node.end_lineno or node.lineno) + 1)


_ROWS = ("rms_norm", "add_rms_norm", "rotary", "act_and_mul")
_LAYERS = ("decoder_layer", "attention_block", "mlp_block", "norm_qkv_rotary_write")
_NATIVE, _CPU, _JIT, _TRITON = (
    "evener_backend_cpu/native/", "evener_backend_cpu/", "evener_kernels_triton/jit/", "evener_kernels_triton/",
)  # fmt: skip

NATIVE = Target("cpu-native", "backends/cpu/src", {
    f"{_NATIVE}rows.h": _ROWS, f"{_NATIVE}simd.h": ("linear", "act_and_mul", "sample", *_ROWS),
    f"{_NATIVE}two_registers.h": ("linear", "act_and_mul", "sample", *_ROWS), f"{_NATIVE}corners.h": ("linear",),
    f"{_NATIVE}gemm.h": ("linear",), f"{_NATIVE}attention.h": ("attention",), f"{_NATIVE}layer.h": _LAYERS,
    f"{_NATIVE}pieces.h": _LAYERS, f"{_NATIVE}experts.h": ("moe_block", "grouped_linear"),
    f"{_NATIVE}sampling.h": ("sample", "apply_mask"), f"{_NATIVE}quant_gemm.h": ("formats",),
    f"{_NATIVE}quant_blocks.h": ("formats",),
    f"{_NATIVE}kernels.cpp": ("greedy", "sample", "apply_mask", *_ROWS),
}, 40)  # fmt: skip
PYTHON = Target("cpu-python", "backends/cpu/src", {
    f"{_CPU}primitives.py": ("linear", "greedy", "sample", "apply_mask", *_ROWS), f"{_CPU}composites.py": _LAYERS,
    f"{_CPU}experts.py": ("moe_block", "grouped_linear"), f"{_CPU}state.py": ("attention",),
    f"{_CPU}block_packing.py": ("formats",),
}, 15)  # fmt: skip
TRITON = Target("triton", "backends/triton/src", {
    f"{_JIT}rows.py": ("softcap", "take_rows", "add_rms_norm", "act_and_mul", "decoder_layer"),
    f"{_JIT}linear.py": ("linear", "mlp_block"), f"{_JIT}heads.py": ("rotary", "triton.paged"),
    f"{_JIT}attention.py": ("triton.paged",), f"{_JIT}latent.py": ("triton.latent",),
    f"{_JIT}experts.py": ("grouped_linear", "moe_block"), f"{_JIT}routing.py": ("route", "grouped_linear", "moe_block"),
    f"{_JIT}sampling.py": ("greedy", "apply_mask", "sample"), f"{_JIT}logits.py": ("add_bias", "penalize"),
    f"{_TRITON}primitives.py": ("softcap", "take_rows", "rms_norm", "add_rms_norm", "act_and_mul"),
    f"{_TRITON}linear.py": ("linear", "mlp_block", "formats/linear"), f"{_TRITON}state.py": ("triton.paged",),
    f"{_TRITON}latent_state.py": ("triton.latent",), f"{_TRITON}experts.py": ("grouped_linear", "route"),
    f"{_TRITON}sampling.py": ("greedy", "apply_mask"), f"{_TRITON}logits.py": ("add_bias", "penalize"),
    f"{_TRITON}layers.py": ("decoder_layer",),
}, 20)  # fmt: skip
TARGETS = {target.name: target for target in (NATIVE, PYTHON, TRITON)}

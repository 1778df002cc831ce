"""The tensors of a GGUF file that is going to be written, each with what it is made from in a model folder: most from
one tensor, a stack of experts from a tensor of each. Torch-free until a tensor is made."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evener.contracts.checkpoint import Headers
from evener.contracts.quant import BLOCKS
from evener.errors import ConfigError
from evener_formats.gguf.families import Deepseek2, GptOss, Llama
from evener_formats.gguf.header import MXFP4, TYPES
from evener_formats.gguf.written import stored_header, stored_name, stored_numbers

if TYPE_CHECKING:
    import torch

_BYTES: Mapping[str, tuple[int, int]] = {name: (elements, nbytes) for name, elements, nbytes in TYPES.values()}
#: What chooses experts, and what the parts of gpt-oss's experts add: llama.cpp has both in float32 only.
_FLOAT32 = re.compile(r".*\.(?:ffn_gate_inp(?:_shexp)?\.weight|ffn_\w+_exps\.bias)")
#: gpt-oss's stacks of all experts.
_OSS_STACK = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias|_blocks|_scales|)")
#: DeepSeek's up-projection of keys and values.
_UP = re.compile(r"model\.layers\.(\d+)\.self_attn\.kv_b_proj\.weight")


@dataclass(frozen=True)
class FileTensor:
    """One tensor of the file.

    Attributes:
        dtype, shape: dtype or block format, and shape in elements.
        names: of the tensors of the folder that it is made from, in order.
        make: from the family, made of the file's own header, and these tensors, its numbers or bytes.
        read: what the file's reader says of the same tensors, by their names in a folder.
    """

    dtype: str
    shape: tuple[int, ...]
    names: Sequence[str]
    make: Callable[[Llama, Sequence[torch.Tensor]], torch.Tensor]
    read: Headers

    @property
    def bytes_shape(self) -> tuple[str, tuple[int, ...]]:
        """Torch's name of the dtype of its bytes or numbers, and their shape."""
        elements, nbytes = _BYTES[self.dtype]
        if elements == 1:
            return self.dtype, self.shape
        return "uint8", (*self.shape[:-1], self.shape[-1] // elements * nbytes)


def file_tensors(family: type[Llama], config: Mapping[str, Any], headers: Headers) -> dict[str, FileTensor]:
    """All tensors, by GGUF's names, in the order of the folder's.

    Args:
        family: whose names and forms the file has.
        config: of the folder.
        headers: of the folder's tensors; of blocks, the format and the shape in elements.

    Raises:
        ArchitectureError: the family has no such tensor in GGUF.
        ConfigError: GGUF has no such dtype, or experts of one layer have several.
    """
    experts, stacks = _expert_names(family), dict[str, dict[int, str]]()
    for name in headers:
        if numbered := experts(name):
            stacks.setdefault(numbered[0], {})[numbered[1]] = name
    found: dict[str, FileTensor] = {}
    for name, header in headers.items():
        if numbered := experts(name):
            if numbered[0] not in found:
                found[numbered[0]] = _stack(numbered[0], stacks[numbered[0]], headers)
        elif issubclass(family, GptOss) and (match := _OSS_STACK.fullmatch(name)):
            found |= _oss_stacks(name, match, headers)
        elif issubclass(family, Deepseek2) and (part := _UP.fullmatch(name)):
            found |= _keys_and_values(name, f"blk.{part[1]}", header, config)
        else:
            found |= _alone(stored_name(family, name), name, header)
    return found


def _expert_names(family: type[Llama]) -> Callable[[str], tuple[str, int] | None]:
    """From the name of an expert's matrix: GGUF's name of its stack, and its number; None of another tensor."""
    stacks = {long: short for short, long in family.names.items() if "{}" in long}

    def of(name: str) -> tuple[str, int] | None:
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(\d+)\.(.+)\.weight", name)
        short = stacks.get(f"{match[2]}.{{}}.{match[4]}") if match else None
        return (f"blk.{match[1]}.{short}.weight", int(match[3])) if match and short else None

    return of


def _alone(stored: str, name: str, header: tuple[str, tuple[int, ...]]) -> dict[str, FileTensor]:
    dtype, shape = stored_header(stored, header)
    if _FLOAT32.fullmatch(stored) and dtype not in BLOCKS:
        dtype = "float32"
    row = stored.endswith("ffn_gate_inp_shexp.weight")

    def make(family: Llama, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        values = stored_numbers(family, stored, tensors[0])
        values = values.float() if dtype == "float32" else values
        return values[0] if row else values

    return {stored: FileTensor(dtype, shape[1:] if row else shape, (name,), make, {name: (dtype, shape)})}


def _stack(stored: str, names: Mapping[int, str], headers: Headers) -> FileTensor:
    """The stack of the matrices ``names``, by their numbers.

    Raises:
        ConfigError: they are stored in several ways.
    """
    ordered = [names[number] for number in sorted(names)]
    kinds = dict.fromkeys(stored_header(stored, headers[name]) for name in ordered)
    if len(kinds) > 1:
        shown = " and ".join(f"{dtype} {list(shape)}" for dtype, shape in kinds)
        raise ConfigError(
            f"the experts of {stored} would be stored as {shown}, and in a GGUF file they are one tensor; let "
            "formats.quant_rules give all experts of a layer the same format"
        )
    dtype, shape = next(iter(kinds))

    def make(family: Llama, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        import torch

        del family
        return torch.stack(list(tensors))

    return FileTensor(dtype, (len(ordered), *shape), ordered, make, dict.fromkeys(ordered, (dtype, shape)))


def _keys_and_values(
    name: str, layer: str, header: tuple[str, tuple[int, ...]], config: Mapping[str, Any]
) -> dict[str, FileTensor]:
    """DeepSeek's up-projection of keys and values, as two stacks with a matrix for each head. Keys are transposed, so
    blocks of them are made anew, in Q8_0, which loses least."""
    dtype, (_, rank) = stored_header(name, header)
    heads = config["num_attention_heads"]
    width, values = config["qk_nope_head_dim"], config["v_head_dim"]
    blocks = dtype in BLOCKS
    of_keys = dtype if not blocks else "q8_0" if width % BLOCKS["q8_0"][0] == 0 else "bfloat16"

    def by_head(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        stored: torch.Tensor = tensors[0].unflatten(0, (heads, width + values))
        return stored

    def make_keys(family: Llama, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        import torch

        del family
        stored = by_head(tensors)[:, :width]
        if not blocks:
            return stored.transpose(1, 2).contiguous()
        from evener_formats.gguf.block_numbers import numbers
        from evener_formats.quantize.blocks import to_blocks

        wide = numbers(stored.flatten(0, 1).contiguous(), dtype, BLOCKS[dtype], torch.float32)
        wide = wide.view(heads, width, rank).transpose(1, 2).contiguous()
        return to_blocks("q8_0", wide) if of_keys == "q8_0" else wide.bfloat16()

    def make_values(family: Llama, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        del family
        return by_head(tensors)[:, width:].contiguous()

    read = {name: ("float32", header[1])}
    return {
        f"{layer}.attn_k_b.weight": FileTensor(of_keys, (heads, rank, width), (name,), make_keys, read),
        f"{layer}.attn_v_b.weight": FileTensor(dtype, (heads, values, rank), (name,), make_values, read),
    }


def _oss_stacks(name: str, match: re.Match[str], headers: Headers) -> dict[str, FileTensor]:
    """The stacks of gpt-oss's experts that ``name`` is, or its part: those of gate and up, whose rows alternate in a
    folder, or that of down."""
    layer, part, form = match.groups()
    if form == "_scales":
        return {}  # with the blocks
    dtype, shape = headers[name]
    parts = ("gate", "up") if part == "gate_up" else ("down",)
    kind, names, read = ("bias" if form == "_bias" else "weight"), [name], {name: (dtype, shape)}
    transposed = form == "" and dtype not in BLOCKS
    if form == "_blocks":
        names.append(name.removesuffix("_blocks") + "_scales")
        read |= {each: headers[each] for each in names}
        dtype, shape = MXFP4, (*shape[:2], shape[2] * 32)
    elif form == "_bias":
        dtype, read = "float32", {name: ("float32", shape)}
    elif transposed:
        stored_header(name, headers[name])  # raises for dtypes that GGUF lacks
        shape = (shape[0], shape[2], shape[1])
    size = (shape[0], shape[1] // len(parts), *shape[2:])

    def made(first: int) -> Callable[[Llama, Sequence[torch.Tensor]], torch.Tensor]:
        def make(family: Llama, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            del family
            rows = [(each.mT if transposed else each)[:, first :: len(parts)] for each in tensors]
            if form == "_blocks":
                return _in_mxfp4(rows[0], rows[1])
            return rows[0].float() if kind == "bias" else rows[0].contiguous()

        return make

    return {f"blk.{layer}.ffn_{each}_exps.{kind}": FileTensor(dtype, size, tuple(names), made(first), read)
            for first, each in enumerate(parts)}  # fmt: skip


def _in_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    import torch

    from evener_formats.gguf.stored import join_mxfp4

    # An expert at a time, so that intermediate results are small.
    made = torch.empty((*blocks.shape[:-1], 17), dtype=torch.uint8)
    for number, (one, of_one) in enumerate(zip(blocks, scales, strict=True)):
        made[number] = join_mxfp4(one, of_one)
    return made.flatten(-2)

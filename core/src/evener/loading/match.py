"""Comparing a checkpoint's headers with the weights that a model declares. Torch-free."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from evener.contracts.checkpoint import Headers
from evener.contracts.declared import Declared, LinearWeight, Slice, StackedWeight, Weight
from evener.contracts.quant import QuantScheme, WeightPart
from evener.errors import CheckpointError
from evener.layers.builder import Builder
from evener.loading.scheme import scheme_of

#: Buffers that old transformers versions saved although they are computed from the config.
IGNORABLE_BUFFERS = (r".*\.rotary_emb\.inv_freq", r".*\.masked_bias", r".*\.attn\.bias")


def declared_names(item: Declared) -> Iterator[str]:
    """Names of the weights that ``item`` joins; none for a table."""
    if isinstance(item, Weight):
        yield from item.sources
    elif isinstance(item, StackedWeight):
        yield from item.stored_parts()
    elif isinstance(item, LinearWeight):
        yield from (part.name for part in item.parts)


def stored_names(item: Declared, scheme: QuantScheme, headers: Headers) -> Iterator[str]:
    """Names of the checkpoint's tensors that ``item`` is made of."""
    for name in declared_names(item):
        yield from scheme_of(name, scheme, headers).tensors(name, headers).values()


def check_match(
    declared: Sequence[Declared], headers: Headers, scheme: QuantScheme, builds: Sequence[Builder] = (),
    where: str = "the checkpoint",
) -> None:  # fmt: skip
    """Compare the declared weights with the stored tensors.

    Args:
        declared: the model's weights; tables are skipped.
        headers: ``{tensor: (dtype, shape)}``.
        scheme: how the checkpoint stores linear weights.
        builds: of all stages. What they declare, ignore or tie may be stored too: other stages, and other calls, read
            it.
        where: what to call the checkpoint in the message.

    Raises:
        CheckpointError: tensors are missing, left over, or of other shapes; one error names ten of each kind.
    """
    wanted = dict.fromkeys(name for item in declared for name in stored_names(item, scheme, headers))
    missing = [name for name in wanted if name not in headers]
    read, ignored = set(map(id, declared)), [pattern for each in builds for pattern in each.ignored]
    rest = [item for each in builds for item in each.weights if id(item) not in read]
    others = {name for item in rest for name in stored_names(item, scheme, headers)} | tied_names(builds).keys()
    pattern = re.compile("|".join(f"(?:{p})" for p in (*IGNORABLE_BUFFERS, *ignored)))
    extra = [n for n in headers if n not in wanted and n not in others and not pattern.fullmatch(n)]
    misshapen = [line for item in declared for line in _misshapen(item, headers, scheme)]
    findings = [
        finding("missing", missing), finding("not part of the model", sorted(extra)),
        finding("of another shape than config.json implies", list(dict.fromkeys(misshapen))),
    ]  # fmt: skip
    if any(findings):
        raise CheckpointError(
            f"the weights in {where} are not those of its config.json's model: {'; '.join(filter(None, findings))}. "
            "Check that config.json belongs to these weights; if the architecture is yours, check the names it declares"
        )


def tied_names(builds: Sequence[Builder]) -> dict[str, str]:
    """Names that may be stored beside their twins, which are read: ``{name: twin}``."""
    return {name: twin for each in builds for name, twin in each.ties.items()}


def finding(what: str, names: Sequence[str], limit: int = 10) -> str:
    """How many tensors are ``what``, and the first of their names; empty if there are none."""
    if not names:
        return ""
    noun = "tensor is" if len(names) == 1 else "tensors are"
    return f"{len(names)} {noun} {what}: {', '.join(names[:limit])}" + (", …" if len(names) > limit else "")


def _misshapen(item: Declared, headers: Headers, scheme: QuantScheme) -> Iterator[str]:
    if isinstance(item, Weight):
        shapes = [_shape(name, headers, scheme) for name in item.sources if name in headers]
        wanted = item.shapes or tuple(cut.full_shape(item.shape) for cut in item.slices if cut is not None)
        if len(shapes) < len(item.sources):
            return  # named as missing
        if not (tuple(shapes) == wanted if wanted else _joined(shapes) == item.shape):
            stored = " + ".join(str(list(shape)) for shape in shapes)
            yield f"{' + '.join(item.sources)} is {stored}, not {list(wanted or item.shape)}"
    elif isinstance(item, StackedWeight):
        for part, cut in item.pieces():
            whole = "{}" not in part.name
            for n in range(1 if whole else item.experts):
                yield from _misfit(part, cut, part.name.format(item.held.start + n), item, whole, headers, scheme)
    elif isinstance(item, LinearWeight):
        for declared, cut in item.pieces():
            yield from _misfit(declared, cut, declared.name, item, False, headers, scheme)


def _misfit(
    declared: WeightPart, cut: Slice | None, name: str, item: LinearWeight, whole: bool, headers: Headers,
    scheme: QuantScheme,
) -> Iterator[str]:  # fmt: skip
    part = scheme.part(name, headers)
    if part is None:
        return
    shapes = [list(headers[n][1]) for n in scheme.tensors(name, headers).values() if n in headers]
    wanted = [declared.rows, declared.columns]
    wanted = wanted if cut is None else list(cut.full_shape(wanted))
    stack = list[int]()
    if isinstance(item, StackedWeight) and whole:
        wanted = wanted[::-1] if item.transposed and part.format.plain else wanted
        stack = [item.held.whole or item.experts]
    # A scheme need not say that it reads stacks, but none is read in place of a matrix if it does.
    stacked = len(shapes[0]) > 2 if part.format.plain else part.format.stack or bool(stack)
    fits = [part.rows, part.columns] == wanted and stacked == bool(stack)
    if not fits or any(stack and shape[:1] != stack for shape in shapes):
        yield f"{name} is {', '.join(map(str, shapes))}, not {[*stack, *wanted]}"


def _shape(name: str, headers: Headers, scheme: QuantScheme) -> tuple[int, ...]:
    """The shape of the tensor ``name`` after dequantization."""
    part = scheme_of(name, scheme, headers).part(name, headers)
    return headers[name][1] if part is None or part.format.plain or part.format.stack else (part.rows, part.columns)


def _joined(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    if len(shapes) == 1:
        return shapes[0]
    if not all(shapes) or len({shape[1:] for shape in shapes}) > 1:
        return None
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def shared_names(declared: Sequence[Declared]) -> frozenset[str]:
    """Names that more than one declared weight reads (a tied head)."""
    readers = Counter(name for item in declared for name in dict.fromkeys(declared_names(item)))
    return frozenset(name for name, count in readers.items() if count > 1)

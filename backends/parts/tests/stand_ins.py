"""Stand-ins for a vendor's op package: the published schemas, registered with torch, over plain torch code.

They accept what the vendor's schema accepts, and assert what its source requires; they compute what the op is for.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from evener_backend_parts.vendor_ops import PublishedOps, VendorOps
from evener_conformance.distributions import write_distribution


def rms_norm(result: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
    assert result.is_contiguous() and weight.is_contiguous() and result.dtype == input.dtype == weight.dtype
    wide = input.float()
    wide = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + epsilon)
    result.copy_((wide * weight.float()).to(input.dtype))


def gated(activation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    def run(out: torch.Tensor, input: torch.Tensor) -> None:
        inner = out.shape[-1]
        assert input.shape[-1] == 2 * inner and input.is_contiguous() and out.dtype == input.dtype
        out.copy_((activation(input[..., :inner].float()) * input[..., inner:].float()).to(input.dtype))

    return run


#: Ops that several vendors ship, by the name in their schemas.
COMMON: Mapping[str, Callable[..., None]] = {
    "_C::rms_norm": rms_norm,
    "_C::silu_and_mul": gated(lambda x: x / (1 + torch.exp(-x))),
    "_C::gelu_and_mul": gated(F.gelu),
    "_C::gelu_tanh_and_mul": gated(lambda x: F.gelu(x, approximate="tanh")),
}


@contextmanager
def installed(
    folder: Path,
    ops: VendorOps,
    schemas: Mapping[str, str] | None = None,
    functions: Mapping[str, Callable[..., None]] = COMMON,
) -> Iterator[None]:
    """Install the package's distribution and module in ``folder``, and register its ops.

    Args:
        schemas: the registered schemas; default: the published ones.
        functions: what each op computes.
    """
    write_distribution(folder, ops.library.distributions[0], {}, "1.0")
    module = folder.joinpath(*ops.library.module.split("."))
    module.parent.mkdir(parents=True, exist_ok=True)
    module.with_suffix(".py").write_text("")
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    libraries: dict[str, Any] = {}
    for name, schema in (ops.published.schemas if schemas is None else schemas).items():
        namespace, _, op = name.partition("::")
        library = libraries.setdefault(namespace, torch.library.Library(namespace, "FRAGMENT"))
        library.define(schema)
        library.impl(op, functions[name], "CompositeExplicitAutograd")
    try:
        yield
    finally:
        for library in libraries.values():
            library._destroy()
        sys.path.remove(str(folder))
        for part in (ops.library.module, ops.library.module.partition(".")[0]):
            sys.modules.pop(part, None)


def source_is_cited(published: PublishedOps) -> bool:
    """Whether every schema names a public file, a whole commit and a line."""
    return (
        published.repository.startswith("https://github.com/")
        and len(published.commit) == 40
        and published.file.endswith(".cpp")
        and all(line > 0 for line in published.lines.values())
        and published.lines.keys() == published.schemas.keys()
    )

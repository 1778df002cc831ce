"""gpt-oss checkpoints whose experts are stored one by one, as bitsandbytes checkpoints by Unsloth are. Torch-free until
a bias is read."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from evener.contracts.checkpoint import Extent, Headers
from evener.contracts.conversion.views import CheckpointView, ViewRequest
from evener.errors import CheckpointError
from evener_models.gpt_oss import GptOssForCausalLM

if TYPE_CHECKING:
    import torch

_ONE = re.compile(r"(.+\.mlp\.experts)\.(gate_up|down)_projs\.(\d{1,6})\.(.+)")
_ROUTER = re.compile(r"(.+\.mlp\.router)\.linear\.(weight|bias)")
#: Gate and up of an expert as two weights, as GPTQModel and llm-compressor store them.
_APART = re.compile(r".+\.mlp\.experts\.\d+\.(gate|up)_proj\..+")


class GptOssExperts(CheckpointView):
    """Gives the tensors the names that the family declares. Rows of gate and up alternate in both layouts.

    - ``experts.gate_up_projs.3.weight`` and what is beside it become ``experts.3.gate_up_proj.weight``, and in the same
      way for ``down_projs``.
    - ``experts.gate_up_projs.3.bias`` of all experts become one tensor, ``experts.gate_up_proj_bias``.
    - ``router.linear`` becomes ``router``.
    """

    changes = "names"

    @classmethod
    def of(cls, request: ViewRequest) -> GptOssExperts | None:
        if not issubclass(request.architecture, GptOssForCausalLM):
            return None
        names = request.checkpoint.headers
        if apart := next(filter(_APART.fullmatch, names), None):
            raise CheckpointError(
                f"{apart} is stored: gate and up of an expert are two weights, and evener reads gpt-oss only with the "
                "rows of both in one weight; use the checkpoint in MXFP4 (openai/gpt-oss-20b or openai/gpt-oss-120b), "
                "one of bitsandbytes, or a GGUF file"
            )
        return cls(request.checkpoint) if any(map(_ONE.fullmatch, names)) else None

    @cached_property
    def _names(self) -> Mapping[str, str]:
        """``{name here: name in inner}``; without biases of experts."""
        joined = {source for sources in self._joined.values() for source in sources}
        return {_renamed(name): name for name in self.inner.headers if name not in joined}

    @cached_property
    def _joined(self) -> Mapping[str, tuple[str, ...]]:
        """The biases of all experts: ``{name here: names in inner}``, the first expert's first."""
        found: dict[str, dict[int, str]] = defaultdict(dict)
        for name in self.inner.headers:
            match = _ONE.fullmatch(name)
            if match and match[4] == "bias":
                found[f"{match[1]}.{match[2]}_proj_bias"][int(match[3])] = name
        joined = {}
        for name, each in found.items():
            kinds = {self.inner.headers[source] for source in each.values()}
            # Otherwise they keep their names, and the message about missing tensors says what is wrong.
            if sorted(each) == list(range(len(each))) and len(kinds) == 1:
                joined[name] = tuple(each[number] for number in range(len(each)))
        return joined

    @cached_property
    def headers(self) -> Headers:
        found = {name: self.inner.headers[source] for name, source in self._names.items()}
        for name, sources in self._joined.items():
            dtype, shape = self.inner.headers[sources[0]]
            found[name] = dtype, (len(sources), *shape)
        return found

    @cached_property
    def copied(self) -> frozenset[str]:  # type: ignore[override]  # known once the files are read
        return frozenset(n for n, source in self._names.items() if source in self.inner.copied) | self._joined.keys()

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self._joined:
            return self.inner.tensor(self._names.get(name, name))
        import torch

        return torch.stack([self.inner.tensor(source) for source in self._joined[name]])

    def extent(self, name: str) -> Extent | None:
        return None if name in self._joined else self.inner.extent(self._names.get(name, name))


def _renamed(name: str) -> str:
    if match := _ONE.fullmatch(name):
        return f"{match[1]}.{int(match[3])}.{match[2]}_proj.{match[4]}"
    match = _ROUTER.fullmatch(name)
    return f"{match[1]}.{match[2]}" if match else name

"""Expert parallelism (``infer.ep_size``): a rank holds some of a layer's experts, and computes them for all tokens.

The tensor parallel ranks are divided into ``ep_size`` groups of neighbours. Each group holds neighbouring experts; if
they cannot be divided equally, the first groups hold one more. The ranks of a group share each of its experts, as all
ranks do without groups. Attention, routers and shared experts are divided as without groups. So all ranks have the same
rows before the experts, and the sum over all ranks after the experts adds up their parts. Tokens are not sent to other
ranks. SGLang without ``moe-a2a-backend`` and vLLM without data parallelism do the same.

For a kernel, an expert of another group has no slot (``ExpertMap``): the kernel skips its rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

from evener.contracts.declared import Span, StackedWeight, Table, Weight
from evener.contracts.sizes import Size
from evener.errors import ConfigError
from evener.layers.builder import Builder

if TYPE_CHECKING:
    import torch


def builder_of(ep_size: int) -> Callable[..., Builder]:
    """The class, with ``ep_size`` bound, that is constructed in place of ``Builder``, with the same arguments."""
    return partial(ExpertRanks, ep_size=ep_size)


class ExpertRanks(Builder):
    """A builder that divides the experts of each layer among ``ep_size`` groups of its ranks.

    Args:
        ep_size: number of groups; it divides the number of ranks.
        args, more: see ``Builder``.

    Raises:
        ConfigError: the ranks cannot be divided into so many groups.
    """

    def __init__(self, *args: Any, ep_size: int, **more: Any) -> None:
        super().__init__(*args, **more)
        self.ep_size = ep_size
        if self.ranks % ep_size:
            raise self.ep_size_error(f"infer.tp_size={self.ranks} ranks", self.ranks)

    def ep_size_error(self, what: str, most: int) -> ConfigError:
        """The error if ``what`` cannot be divided into ``ep_size`` groups. It lists sizes that fit, up to ``most``."""
        fits = ", ".join(str(size) for size in range(1, most + 1) if not self.ranks % size)
        return ConfigError(
            f"infer.ep_size={self.ep_size}: {what} cannot be divided into so many groups; sizes that fit: {fits}"
        )

    def replicated(self) -> Builder:
        twin = super().replicated()
        assert isinstance(twin, ExpertRanks), "a copy"
        twin.ep_size = 1
        return twin

    def expert_group(self, experts: int) -> Builder:
        if self.ep_size > experts:
            raise self.ep_size_error(f"{experts} experts", experts)
        twin = copy(self)
        twin.__class__ = _ExpertGroup
        assert isinstance(twin, _ExpertGroup), "it is now"
        ranks = self.ranks // self.ep_size
        twin.rank, twin.ranks = self.rank // ranks, self.ep_size
        twin.own = twin.shard(experts, "experts")
        twin.rank, twin.ranks = self.rank % ranks, ranks
        return twin


class _ExpertGroup(ExpertRanks):
    """Declares what the ranks of one group share: the stacks, the stacked biases and the map of a layer's experts.

    Attributes:
        own: which experts this group holds.
    """

    own: Span

    def tp_size_error(self, why: str, sizes: Sequence[int]) -> ConfigError:
        fit = ", ".join(str(size * self.ep_size) for size in sizes)
        return ConfigError(
            f"infer.tp_size={self.ranks * self.ep_size} infer.ep_size={self.ep_size}: {why}; values of infer.tp_size "
            f"that fit: {fit}; or raise infer.ep_size"
        )

    def experts(self, name: str, experts: int, *args: Any, **more: Any) -> StackedWeight:
        weight = super().experts(name, self.own.size, *args, **more)
        weight.held = self.own
        others = "|".join(str(n) for n in range(experts) if not self.own.start <= n < self.own.stop)
        for part in weight.parts if others else ():
            # One pattern for all layers: each tensor's name is compared with every pattern.
            stem = re.sub(r"\d+", r"\\d+", re.escape(part.name.removesuffix(".weight")))
            pattern = stem.replace(r"\{\}", f"(?:{others})") + r"\..+"
            if "{}" in part.name and pattern not in self.ignored:
                self.ignore(pattern)
        return weight

    def weight(
        self, name: str, *shape: Size, sources: Sequence[str] = (), spans: Sequence[Span] = (), axis: int = 0,
        **more: Any,
    ) -> Weight:  # fmt: skip
        """A tensor with the experts along its first axis. A source can be cut along one axis while it is read. If its
        columns are divided too, this rank's columns are taken after reading."""
        rest, whole = shape[1:], not spans or all(span.size == span.whole for span in spans)
        if self.own.size == self.own.whole:
            return super().weight(name, *shape, sources=sources, spans=spans, axis=axis, **more)
        if whole:
            return super().weight(name, self.own, *rest, **more)
        assert axis == 1 and set(sources) == {name}, "columns of one tensor"
        columns = [column for span in spans for column in range(span.start, span.stop)]

        def cut(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            return tensors[0][:, columns].contiguous()

        stored: dict[str, tuple[Size, ...]] = {name: (self.own, spans[0].whole)}
        weight = self.precomputed(name, self.own.size, len(columns), stored, cut)
        weight.dummy = more.get("dummy", weight.dummy)
        return weight

    def table(self, key: tuple[Any, ...], nbytes: int, make: Callable[[torch.device], torch.Tensor]) -> Table:
        """A table of the expert map, without the experts of other groups."""
        first, last = self.own.start, self.own.stop

        def made(device: torch.device) -> torch.Tensor:
            """The table in which this group's experts are numbered from 0; ``make`` numbers all experts in order."""
            import torch

            every, missing = make(torch.device("cpu")), -1 if key[0] == "expert slots" else 0
            found = torch.full_like(every, missing)
            found[first:last] = every[: last - first]
            return found.to(device)

        return super().table(key, nbytes, made)

"""What ``evener quantize`` is asked for. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from evener.errors import ConfigError
from evener_formats.words import BITS

Method = Literal["gptq", "awq"]
Order = Literal["none", "static", "groups"]
METHODS: tuple[str, ...] = get_args(Method)
ORDERS: tuple[str, ...] = get_args(Order)
#: Columns of a group, the first that divides the columns of all matrices.
GROUPS = (128, 64, 32)


@dataclass(frozen=True)
class Settings:
    """How a model is quantized.

    Attributes:
        method: whose format is written, and by which algorithm.
        bits: of a number.
        group: columns of a group; 0: the whole row; None: the first of ``GROUPS`` that divides.
        symmetric: whether the zero point is the middle of the numbers; awq: never.
        order: of the columns in gptq: "none": as they are; "static": those with the largest inputs first, in groups of
            neighbours; "groups": the same, in groups of that order, which the checkpoint names ("desc_act").
        nearest: round to the nearest number, without a text.
        tokens: of the text, at most; window: so many see each other.

    Raises:
        ConfigError: the method has no such numbers.
    """

    method: Method = "gptq"
    bits: int = 4
    group: int | None = None
    symmetric: bool = True
    order: Order = "static"
    nearest: bool = False
    tokens: int = 32768
    window: int = 2048

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"--method {self.method} is not known; it is {' or '.join(METHODS)}")
        if self.order not in ORDERS:
            raise ConfigError(f"--order {self.order} is not known; it is {', '.join(ORDERS)}")
        if self.bits not in BITS or (self.method == "awq" and self.bits != 4):
            if self.method == "awq" and self.bits in BITS:
                raise ConfigError(
                    f"--bits {self.bits}: awq is written with 4 bits; leave --bits out, or use --method gptq"
                )
            kinds = "4" if self.method == "awq" else ", ".join(map(str, BITS))
            raise ConfigError(f"--bits {self.bits}: {self.method} is written with {kinds} bits; give one of these")
        if self.method == "awq" and (self.symmetric or self.order != "none"):
            raise ConfigError("--order is for --method gptq; leave it out")
        if self.group is not None and self.group != 0 and (self.group < 32 or self.group % 32):
            raise ConfigError(f"--group {self.group}: write a multiple of 32, or -1 for whole rows")
        if self.tokens < 1 or self.window < 1:
            raise ConfigError("--tokens and --window are numbers of tokens, at least 1")

    def to_json(self) -> Mapping[str, Any]:
        """As a plain object."""
        return asdict(self)

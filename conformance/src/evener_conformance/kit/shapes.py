"""The shapes of layers whose state and attention the check of state providers builds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from evener.contracts.state import AttentionSpec, StateSpec, StateTensor


@dataclass(frozen=True)
class Shape:
    """The shape of a layer's state and attention. For a latent layer ``value_dim`` is the rank, and ``top`` makes it
    sparse; an index layer has one key and ``top``. ``scale``: factor on the scores, by default head_dim ** -0.5.
    ``long``: the window is made longer than ``window`` and than a block. ``stored``: the element type of quantized
    state."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    kind: str = ""
    top: int | None = None
    slopes: tuple[float, ...] | None = None
    scale: float | None = None
    long: bool = False
    stored: str | None = None

    def for_block_size(self, size: int) -> Shape:
        """The shape for blocks of ``size``: a long window ends inside a block."""
        if not self.long or self.window is None:
            return self
        return replace(self, window=(self.window // size + 1) * size + size // 2 + 1)

    def __str__(self) -> str:
        kind = self.kind or ("full" if self.window is None else "window")
        more = [f"window {self.window}" + " and a block" * self.long] if self.window else []
        more += [f"softcap {self.softcap}"] if self.softcap else []
        more += ["sinks"] if self.sinks else []
        more += ["slopes"] if self.slopes else []
        more += [f"top {self.top}"] if self.top else []
        more += [f"scale {self.scale}"] if self.scale else []
        more += [f"stored as {self.stored}"] if self.stored else []
        return ", ".join([f"{kind}: {self.heads}/{self.kv_heads} heads of {self.head_dim}/{self.value_dim}", *more])

    def spec(self, dtype: str) -> StateSpec:
        """The ``StateSpec`` of such a layer."""
        if self.kind == "latent":
            rope = StateTensor("rope", (self.head_dim - self.value_dim,), dtype)
            return StateSpec("latent", (StateTensor("latent", (self.value_dim,), dtype), rope))
        if self.kind == "index":
            return StateSpec("index", (StateTensor("key", (self.head_dim,), dtype),))
        sizes = {"key": self.head_dim, "value": self.value_dim}
        how: tuple[str, str | None] = (dtype, None) if self.stored is None else (self.stored, dtype)
        tensors = tuple(StateTensor(name, (self.kv_heads, size), *how) for name, size in sizes.items())
        return StateSpec(self.kind or ("full" if self.window is None else "window"), tensors, window=self.window)

    def attention(self, dtype: str) -> AttentionSpec:
        """The ``AttentionSpec`` of such a layer."""
        return AttentionSpec(
            self.heads, self.head_dim, self.scale or self.head_dim**-0.5, self.softcap, self.sinks, dtype, self.top,
            slopes=self.slopes,
        )  # fmt: skip


SHAPES = (
    Shape(9, 3, 64, 64), Shape(4, 4, 16, 16, scale=0.7), Shape(2, 1, 80, 80), Shape(4, 2, 32, 16), Shape(6, 2, 10, 10),
    Shape(4, 1, 32, 32, window=7), Shape(4, 2, 16, 16, window=24, softcap=5.0), Shape(2, 1, 256, 256),
    Shape(4, 1, 32, 32, window=7, kind="chunk"), Shape(4, 2, 16, 16, window=24, kind="chunk", sinks=True),
    Shape(4, 2, 16, 16, sinks=True), Shape(6, 3, 16, 16, slopes=(0.5, 0.25, 0.125, 0.06, 0.7, 0.02)),
    Shape(2, 2, 32, 32, window=7, softcap=5.0, slopes=(0.6, 0.1)), Shape(5, 1, 42, 32, kind="latent"),
    Shape(3, 1, 24, 16, kind="latent", top=9), Shape(16, 1, 576, 512, kind="latent"),
    Shape(6, 1, 18, 18, kind="index", top=7), Shape(4, 2, 16, 16, window=128, long=True),
    Shape(4, 1, 16, 16, window=128, kind="chunk", long=True),
)  # fmt: skip
#: For providers of quantized state.
QUANTIZED = (
    Shape(9, 3, 64, 64, stored="float8_e4m3fn"), Shape(4, 2, 48, 16, window=24, softcap=5.0, stored="float8_e4m3fn"),
    Shape(4, 2, 16, 16, window=7, kind="chunk", sinks=True, stored="float8_e5m2"), Shape(4, 4, 32, 32, stored="int8"),
    Shape(6, 3, 16, 16, slopes=(0.5, 0.25, 0.125, 0.06, 0.7, 0.02), stored="int8"),
)  # fmt: skip

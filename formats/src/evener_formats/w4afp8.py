"""The scheme "w4afp8" (SGLang): experts of four bits, other matrices in FP8 with blocks of 128 × 128, FP8 activations.

An expert's weight ``<name>`` [rows, columns] is stored as int8 [rows, columns / 2], signed numbers with the even column
of a pair in the low half of a byte, and ``<name>_scale_inv`` [rows, columns / 128], which is used in bfloat16. Its
``input_scale``, one for all tokens, is not used: activations get a scale a token, which is finer. The others are stored
as the scheme "fp8" reads them. Imports torch only to read weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from evener.contracts.checkpoint import Checkpoint, Headers
from evener.contracts.quant import QuantFormat, QuantScheme, Rounding, WeightPart
from evener.errors import CheckpointError
from evener_formats.beside import PLAIN, Along, Axes, BesideScheme
from evener_formats.compressed import PartlyPacked
from evener_formats.rules import number

if TYPE_CHECKING:
    import torch

_FP8, _SCALE = "float8_e4m3fn", "bfloat16"


class SignedPairs(BesideScheme):
    """The experts.

    Args:
        group: columns of a group.
    """

    name = "w4afp8"

    def __init__(self, group: int) -> None:
        self._group = group

    def detect(self, config: Mapping[str, Any]) -> bool:
        del config
        return False  # W4Afp8Scheme speaks for it

    def tensors(self, name: str, headers: Headers) -> Mapping[str, str]:
        return {"numbers": name, "scale": f"{name}_scale_inv"}

    def part(self, name: str, headers: Headers) -> WeightPart | None:
        (kind, shape), (scale, scales) = headers[name], headers.get(f"{name}_scale_inv", ("nothing", ()))
        rows, columns = (shape[0], 2 * shape[1]) if len(shape) == 2 else (0, 0)
        fits = kind == "int8" and scale in PLAIN and rows > 0 < columns and columns % self._group == 0
        if not fits or scales != (rows, columns // self._group):
            raise CheckpointError(
                f"{name} is {kind} {list(shape)} with scales {scale} {list(scales)}; {self.name} is int8 [rows, "
                f"columns / 2] and scales [rows, columns / {self._group}]; use the config.json that was published with "
                "these weights"
            )
        form = QuantFormat("uint4", self._group, scale=_SCALE, activation=Rounding(_FP8), cut=(1, self._group))
        return WeightPart(name, rows, columns, form)

    def axes(self, part: WeightPart) -> Mapping[str, Axes]:
        return {"numbers": Axes(Along(0), Along(1, 2)), "scale": Axes(Along(0), Along(1, self._group))}

    def arrange(self, part: WeightPart) -> WeightPart:
        import torch

        # Adding 8 to a signed number of four bits turns over its highest bit.
        numbers = part.tensors["numbers"].view(torch.uint8) ^ 0x88
        return replace(part, tensors={"weight": numbers, "scale": part.tensors["scale"].to(getattr(torch, _SCALE))})


class W4Afp8Scheme(PartlyPacked):
    """``"quant_method": "w4afp8"``.

    Args:
        group: columns of a group of an expert's weight.
    """

    name, methods = "w4afp8", ("w4afp8",)

    def __init__(self, group: int = 128) -> None:
        self._pairs = SignedPairs(group)

    def configured(self, config: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> QuantScheme:
        settings = config["quantization_config"]
        group = number(settings, ("group_size",), 128)
        if group is None or group <= 0 or group % 2:
            raise CheckpointError(
                f"config.json's quantization_config has group_size: {str(settings.get('group_size'))[:40]}; "
                f"{self.name} has an even number of columns, usually 128; use the config.json that was published with "
                "these weights"
            )
        return W4Afp8Scheme(group)

    def packed(self, name: str, headers: Headers) -> BesideScheme | None:
        stored = headers.get(name, ("", ()))[0] == "int8" and f"{name}_scale_inv" in headers
        return self._pairs if stored else None

    def reader(self, part: WeightPart) -> BesideScheme | None:
        return self._pairs if "numbers" in part.tensors else None

    def rounding(self, name: str, form: QuantFormat) -> Rounding | None:
        return Rounding(_FP8, max(0, form.group))

    def examples(self, name: str, seed: int) -> Iterator[tuple[Mapping[str, Any], Headers, Mapping[str, torch.Tensor]]]:
        import torch

        config: dict[str, Any] = {"quantization_config": {"quant_method": self.name}}
        for _, headers, tensors in super().examples(name, seed):
            if headers[name][0] == _FP8:
                yield config, headers, tensors
        random, rows, columns = torch.Generator().manual_seed(seed), 64, 192
        for group, kind in ((64, torch.float32), (32, torch.bfloat16)):
            tensors = {
                name: torch.randint(-128, 128, (rows, columns // 2), generator=random).to(torch.int8),
                f"{name}_scale_inv": ((torch.rand(rows, columns // group, generator=random) + 1) / 64).to(kind),
            }
            found = {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()}
            yield {"quantization_config": {"quant_method": self.name, "group_size": group}}, found, tensors

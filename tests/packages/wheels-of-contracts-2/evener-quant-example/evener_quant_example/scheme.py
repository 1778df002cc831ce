"""The scheme: which tensors of a checkpoint hold a weight, and which numbers they mean. It knows no device.

A weight ``w`` [rows, columns] is stored as two tensors:

- ``w``: the codes, int8 [rows, columns], from -127 to 127;
- ``w_scale``: the scales, float32 [rows, groups]; with one group the scale is that of the whole row.

The number is code times scale. A weight without ``w_scale`` is not quantized.
"""

from dataclasses import replace

from evener.contracts.quant import QuantFormat, QuantScheme, WeightPart, plain
from evener.errors import CheckpointError


def int8_format(columns, groups):
    """The format of a row of ``columns`` codes in ``groups`` groups. A group of 0 means the whole row."""
    size = columns // groups
    return QuantFormat("int8", group=0 if groups == 1 else size, scale="float32", bits=8 + 32 / size)


class Int8Groups(QuantScheme):
    name = "int8-groups"

    def detect(self, config):
        return (config.get("quantization_config") or {}).get("quant_method") == self.name

    def tensors(self, name, headers):
        scale = f"{name}_scale"
        return {"weight": name, "scale": scale} if scale in headers else {"weight": name}

    def part(self, name, headers):
        if name not in headers:
            return None
        dtype, shape = headers[name]
        # A stack of experts has a third axis in front. Vectors, such as norms, are not linear weights.
        rows, columns = shape[-2:] if len(shape) in (2, 3) else (0, 0)
        if f"{name}_scale" not in headers:
            return WeightPart(name, rows, columns, plain(dtype))
        scale_dtype, scale_shape = headers[f"{name}_scale"]
        groups = scale_shape[-1] if scale_shape else 0
        fits = scale_shape == (*shape[:-1], groups) and groups and columns % groups == 0
        if (dtype, scale_dtype) != ("int8", "float32") or not fits:
            raise CheckpointError(
                f"{name} is stored as {dtype} {list(shape)} with scales as {scale_dtype} {list(scale_shape)}; "
                "int8-groups needs int8 [rows, columns] with float32 [rows, groups]; convert the checkpoint again"
            )
        return WeightPart(name, rows, columns, int8_format(columns, groups))

    def dequantize(self, part, dtype):
        import torch  # here, because commands such as `evener doctor` import this module too

        codes = part.tensors["weight"]
        if part.format.plain:
            return codes.to(getattr(torch, dtype))
        scales = part.tensors["scale"]
        numbers = codes.float().unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]
        return numbers.flatten(-2).to(getattr(torch, dtype))

    def cut(self, part, axis, start, stop):
        # Ranks that share a layer call this: each of them loads its piece, still quantized.
        extent = part.rows if axis == "out" else part.columns
        unit = max(1, part.format.group) if axis == "in" else 1
        if not 0 <= start < stop <= extent or start % unit or stop % unit:
            raise CheckpointError(
                f"cannot cut {start}..{stop} out of the {extent} {axis}-features of {part.name}: "
                f"both ends must be multiples of {unit}"
            )
        tensors = dict(part.tensors)  # empty while memory is planned
        if axis == "out":
            tensors = {role: tensor[start:stop] for role, tensor in tensors.items()}
            return replace(part, rows=stop - start, tensors=tensors)
        if "weight" in tensors:
            tensors["weight"] = tensors["weight"][:, start:stop]
        if "scale" in tensors and part.format.group:
            tensors["scale"] = tensors["scale"][:, start // unit : stop // unit]
        return replace(part, columns=stop - start, tensors=tensors)

    def examples(self, name, seed):
        import torch

        from evener_quant_example.convert import quantize

        generator = torch.Generator().manual_seed(seed)
        config = {"quantization_config": {"quant_method": self.name}}
        for group in (32, 96):  # three groups in a row, and one scale per row
            codes, scales = quantize(torch.randn(6, 96, generator=generator), group)
            stored = {name: codes, f"{name}_scale": scales}
            headers = {key: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for key, t in stored.items()}
            yield config, headers, stored

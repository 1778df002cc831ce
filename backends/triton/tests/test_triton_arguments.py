"""Launchers refuse arguments that their kernels would read or write outside of; with right ones they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreted import host_kernels, host_states, schemas

from evener.contracts.ops import Bucket, Kernel, OpCall, OpCase
from evener.contracts.quant import WeightPart
from evener.contracts.state import AttentionSpec, StateProvider, StateSpec, StateStep, StateTensor
from evener.contracts.statics import ExpertsStatic, select
from evener.contracts.weights import AttentionWeights, MLPWeights, MoEWeights
from evener.ops.reference.linear import PLAIN
from evener_conformance.kit.cases import has_cases, load_cases
from evener_conformance.kit.composites import TinyModel
from evener_conformance.kit.families import families
from evener_conformance.reference.device import HostDevice
from evener_kernels_triton.arguments import check_inputs

DEVICE = HostDevice(0)
#: Kernels that take stored weights alone are checked by the same code; test_triton_stored.py has their weights.
KERNELS = [
    k for k in host_kernels(composite=False)
    if has_cases(schemas()[k.op]) and "plain" in {p.layout for p in k.packings or (PLAIN,)}
]  # fmt: skip


def first_case(kernel: Kernel) -> tuple[OpCall, OpCase]:
    """The smallest case that the kernel takes, with its weights packed."""
    schema = schemas()[kernel.op]
    for case in load_cases(schema)("float32", torch.Generator().manual_seed(1)):
        call = OpCall(kernel.op, case.static, Bucket(1, 4), DEVICE.capabilities, dict.fromkeys(schema.weights, "plain"))
        if kernel.supports(call) is None:
            return call, OpCase(case.static, tuple(map(packed, case.inputs)))
    raise AssertionError(f"{kernel.name} takes no case")


def packed(value: Any) -> Any:
    if not isinstance(value, (tuple, list)) or not value:
        return value
    if isinstance(value[0], WeightPart):
        return PLAIN.pack(value, "float32", torch.device("cpu"))
    return PLAIN.pack_stack(value, len(value), "float32", torch.device("cpu"))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_each_primitive_refuses_each_argument_of_another_shape_or_dtype(kernel: Kernel, one_thread: None) -> None:
    call, case = first_case(kernel)
    names = [declared for declared, _ in zip(schemas()[kernel.op].inputs, case.inputs, strict=True)]
    changes: list[tuple[str, Callable[[torch.Tensor], Any]]] = [
        ("shape", lambda t: torch.cat((t, t[..., :1]), -1)),
        ("axes", lambda t: t[None]),
        ("dtype", lambda t: t.to(torch.float64 if t.is_floating_point() else torch.uint8)),
    ]
    wrong = 0
    for index, declared in enumerate(names):
        value = case.inputs[index]
        for what, change in changes:
            inputs = list(case.inputs)
            if isinstance(value, torch.Tensor):
                dynamic = {str(d) for d in declared.shape} - case.static.keys()
                if (what == "shape" and str(declared.shape[-1]) in dynamic) or (what == "axes" and "…" in dynamic):
                    continue  # any size fits
                inputs[index] = change(value)
            elif hasattr(value, "layout") and what == "shape":
                inputs[index] = replace(value, shape=(*value.shape[:-1], value.shape[-1] + 1))
            else:
                continue
            with pytest.raises(ValueError, match=f"{kernel.op} was called with wrong arguments: {declared.name} is "):
                kernel.build(call)(*inputs)
            wrong += 1
    assert wrong
    run = kernel.build(call)
    run(*case.inputs)
    assert run(*case.inputs) is not None


def test_a_missing_argument_and_one_on_another_device_are_refused() -> None:
    schema, x, weight = schemas()["rms_norm"], torch.ones(2, 8), torch.ones(8)
    static = {"hidden": 8, "dtype": "float32", "eps": 1e-6, "offset": 0.0}
    check_inputs(schema, static, (x, weight))
    with pytest.raises(ValueError, match="weight is missing"):
        check_inputs(schema, static, (x, None))
    with pytest.raises(ValueError, match="tensors are on"):
        check_inputs(schema, static, (x, weight.to("meta")))


@pytest.mark.parametrize("op", ["attention_block", "mlp_block"])
def test_weights_of_layers_are_checked(op: str, one_thread: None) -> None:
    family = next(f for f in families() if f.name == "grouped")
    kernels = [k for k in host_kernels(composite=True) if k.op == op]
    model = TinyModel(DEVICE, "float32", family, kernels, host_states()[0], list(schemas().values()))
    layer = next(site.static for site in model.build.sites if site.op == "decoder_layer")
    static = layer["attention" if op == "attention_block" else "mlp"]
    record = AttentionWeights if op == "attention_block" else MLPWeights
    right = next(group.values for group in model.build.groups if group.kind is record)
    stream = [torch.ones(2, family.hidden)] * 2 + [torch.zeros(2, dtype=torch.int32)] * (op == "attention_block")
    check_inputs(schemas()[op], static, (*stream, right))
    wrong = []
    for name, value in right._asdict().items():
        if isinstance(value, torch.Tensor) and name != "cos_sin":
            wrong.append(right._replace(**{name: value[..., :-1]}))
        elif value is not None and name != "cos_sin":
            wrong.append(right._replace(**{name: replace(value, shape=(value.shape[0] - 1, value.shape[1]))}))
    assert len(wrong) >= 3
    for weights in wrong:
        with pytest.raises(ValueError, match="wrong arguments: weights is given "):
            check_inputs(schemas()[op], static, (*stream, weights))


def test_weights_of_both_halves_of_a_whole_layer_are_checked(one_thread: None) -> None:
    family, every = next(f for f in families() if f.name == "windowed"), list(schemas().values())
    model = TinyModel(DEVICE, "float32", family, host_kernels(composite=True), host_states()[0], every)
    static = next(site.static for site in model.build.sites if site.op == "decoder_layer")
    first, second = (
        next(group.values for group in model.build.groups if group.kind is kind)
        for kind in (AttentionWeights, MLPWeights)
    )
    stream = [torch.ones(2, family.hidden)] * 2 + [torch.zeros(2, dtype=torch.int32)]
    check_inputs(schemas()["decoder_layer"], static, (*stream, first, second))
    wrong = [(first._replace(post_norm=first.post_norm[:-1]), second), (first._replace(qkv=first.o), second)]
    wrong += [(first, second._replace(norm=second.norm[:-1])), (first, second._replace(down=second.gate_up))]
    for records in wrong:
        with pytest.raises(ValueError, match=r"wrong arguments: (attention|mlp) is given "):
            check_inputs(schemas()["decoder_layer"], static, (*stream, *records))


def test_weights_of_experts_are_checked_where_a_static_parameter_has_the_name_of_the_record(one_thread: None) -> None:
    """``experts`` is their number, and the argument with their weights."""
    family, every = next(f for f in families() if f.calls("moe_block")), list(schemas().values())
    model = TinyModel(DEVICE, "float32", family, host_kernels(composite=True), host_states()[0], every)
    whole = next(site.static for site in model.build.sites if site.op == "moe_block")
    static = select(whole, ExpertsStatic)
    right = next(group.values for group in model.build.groups if group.kind is MoEWeights)
    ids = torch.zeros(2, static["top"], dtype=torch.int32)
    rows = (torch.ones(2, family.hidden), ids, torch.ones(ids.shape))
    assert isinstance(static["experts"], int)
    check_inputs(schemas()["routed_experts"], static, (*rows, right))
    for wrong in (right._replace(gate_up=right.down), right._replace(down=right.gate_up)):
        with pytest.raises(ValueError, match="wrong arguments: experts is given "):
            check_inputs(schemas()["routed_experts"], static, (*rows, wrong))


def a_step(**changes: Any) -> StateStep:
    right = StateStep(
        tokens=2, requests=2, max_query=1, max_kv=3, query_start=torch.tensor([0, 1, 2]).int(),
        kv_lens=torch.tensor([3, 1]).int(), positions=torch.tensor([2, 0]).int(),
        slot_mapping=torch.tensor([34, 64]).int(), block_table=torch.tensor([[1, 3], [2, 3]]).int(),
        host_query_lens=[1, 1], host_kv_lens=[3, 1],
    )  # fmt: skip
    return replace(right, **changes)


@pytest.mark.parametrize("provider", host_states(), ids=lambda p: p.name)
def test_state_providers_refuse_steps_and_rows_that_do_not_fit(provider: StateProvider, one_thread: None) -> None:
    latent = "latent" in provider.kinds
    if latent:
        spec = StateSpec("latent", (StateTensor("latent", (32,), "float32"), StateTensor("rope", (16,), "float32")))
        how, values = AttentionSpec(4, 48, 0.2, dtype="float32"), [torch.ones(2, 32), torch.ones(2, 16)]
    else:
        spec = StateSpec("full", (StateTensor("key", (2, 32), "float32"), StateTensor("value", (2, 16), "float32")))
        how, values = AttentionSpec(4, 32, 0.2, dtype="float32"), [torch.ones(2, 2, 32), torch.ones(2, 2, 16)]
    wrong_steps = [
        {"slot_mapping": torch.tensor([34]).int()}, {"kv_lens": torch.tensor([3, 1]).float()},
        {"block_table": torch.tensor([[1, 3]]).int()}, {"block_table": torch.tensor([[1, 2], [3, 3]]).int().t()},
        {"query_start": torch.tensor([0, 1]).int()}, {"slot_mapping": torch.zeros(2, 1).int()},
    ]  # fmt: skip
    for change in wrong_steps:
        with pytest.raises(ValueError, match=f"{next(iter(change))} of the step is"):
            provider.prepare(a_step(**change), spec, how, 32)
    storage = torch.zeros(4, provider.bytes_per_block(spec, 32), dtype=torch.uint8)
    views, meta = provider.bind(storage, spec, 32), provider.prepare(a_step(), spec, how, 32)
    query = torch.ones(2, 4, how.head_dim)
    short, double = [values[0][..., 1:], values[1]], [values[0], values[1].double()]
    for other in (short, double, [torch.cat([v, v]) for v in values]):
        with pytest.raises(ValueError, match="as the layer's state and step say"):
            provider.write(views, meta, *other)
    for asked in (query[:, 1:], query[..., 1:], query.half(), torch.cat((query, query))):
        with pytest.raises(ValueError, match="as the layer's state and step say"):
            provider.attend(views, meta, asked)
    assert not storage.any(), "nothing was launched"
    provider.write(views, meta, *values)
    assert provider.attend(views, meta, query).isfinite().all()

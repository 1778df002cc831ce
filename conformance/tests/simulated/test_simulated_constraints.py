"""Breaking a constraint of the simulated chip is an error that names the switch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from evener.contracts.state import AttentionSpec, StateSpec, StateStep, StateTensor
from evener.engine.wire.messages import NewRequest, Sampling
from evener.errors import ConfigError, MemoryPlanError
from evener_conformance.simulated.constraints import ConstraintError, Constraints
from evener_conformance.simulated.device import SimulatedDevice
from evener_conformance.simulated.state import SimulatedPaged

SPEC = StateSpec("full", (StateTensor("key", (2, 8), "float32"), StateTensor("value", (2, 8), "float32")))
ATTENTION = AttentionSpec(heads=2, head_dim=8, scale=0.3)


@pytest.fixture
def opened() -> Callable[..., SimulatedDevice]:
    """``opened(chip="older")``: the device, with all constraints on except those given."""
    return lambda **options: SimulatedDevice(0, Constraints.all_on(**options))


@pytest.fixture
def start_one(start: Any) -> Callable[..., Any]:
    """A tiny engine with one request to play."""

    def make(**options: Any) -> Any:
        return start("Llama", {"num_hidden_layers": 1}, **options)

    return make


ONE = [NewRequest(id="a", prompt=[5, 6, 7], max_tokens=6, sampling=Sampling(temperature=0.0))]


def step(device: SimulatedDevice, length: int, host: Any) -> StateStep:
    """One query of a request of ``length`` tokens; ``host``: its length as the host reports it."""
    ints = [torch.tensor(v, dtype=torch.int32).to(device.torch_device) for v in ([0, 1], [length], [length - 1])]
    slot = torch.tensor([128 + length - 1], dtype=torch.int32).to(device.torch_device)
    table = torch.tensor([[1, 2]], dtype=torch.int32).to(device.torch_device)
    return StateStep(1, 1, 1, 256, ints[0], ints[1], ints[2], slot, table, [1], [host])


def attend(device: SimulatedDevice, length: int, host: Any) -> torch.Tensor:
    provider = SimulatedPaged(device)
    storage = device.zeros(3 * provider.bytes_per_block(SPEC, 128)).view(3, -1)
    views = provider.bind(storage, SPEC, 128)
    meta = provider.prepare(step(device, length, host), SPEC, ATTENTION, 128)
    row = torch.ones(1, 2, 8, device=device.torch_device)
    provider.write(views, meta, row, row)
    return provider.attend(views, meta, row)


def test_a_block_size_other_than_128_is_refused(opened: Any, start_one: Any) -> None:
    provider = SimulatedPaged(opened())
    with pytest.raises(ConstraintError, match=r"^simulated\.block_128=true: state was bound in blocks of 64 tokens"):
        provider.bind(torch.zeros(2, 8192, dtype=torch.uint8, device="simulated"), SPEC, 64)
    assert list(provider.block_sizes(SPEC)) == [128]
    with pytest.raises(ConfigError, match=r"block_size=64 is not offered by simulated\.paged"):
        start_one(**{"infer.block_size": 64})


def test_pages_that_are_not_aligned_are_refused(opened: Any) -> None:
    provider = SimulatedPaged(opened())
    pool = torch.zeros(3, 16400, dtype=torch.uint8, device="simulated")
    with pytest.raises(ConstraintError, match=r"^simulated\.alignment=32: pages begin at"):
        provider.bind(pool, SPEC, 128)


@pytest.mark.parametrize(
    ("options", "tensor", "message"),
    [
        ({}, lambda: torch.zeros(9, device="simulated")[1:], "simulated.alignment=32: kernel k was given tensor 0, "
         r"float32 \[8\], which begins 4 bytes off"),
        ({}, lambda: torch.zeros(4, dtype=torch.int64, device="simulated"), "simulated.int64=false: kernel k was given "
         r"tensor 0, int64 \[4\]; this chip's kernels take int32"),
        ({"chip": "older"}, lambda: torch.zeros(4, dtype=torch.bfloat16, device="simulated"), "simulated.chip=older: "
         r"kernel k was given tensor 0, bfloat16 \[4\]; this chip has no bfloat16"),
        ({}, lambda: torch.zeros(4), r"simulated: kernel k was given tensor 0, float32 \[4\], which is on cpu"),
        ({}, lambda: torch.zeros(4, 4, device="simulated").t(), r"its kernels ignore strides"),
    ],
    ids=["misaligned", "int64", "no bfloat16", "host tensor", "strides"],
)  # fmt: skip
def test_a_kernel_takes_no_tensor_that_the_chip_cannot_read(
    opened: Any, options: Mapping[str, Any], tensor: Callable[[], torch.Tensor], message: str
) -> None:
    device = opened(**options)
    with pytest.raises(ConstraintError, match=message):
        device.launch("k", lambda x: x, tensor())


def test_values_are_transposed_in_a_block_unless_that_is_switched_off(opened: Any) -> None:
    keys, values = torch.randn(2, 5, 2, 8).unbind()

    def block(**options: Any) -> torch.Tensor:
        """The values of block 1 in memory order, after its tokens 0 to 4 were written."""
        device = opened(host_reads=True, **options)
        provider = SimulatedPaged(device)
        storage = device.zeros(3 * provider.bytes_per_block(SPEC, 128)).view(3, -1)
        slots = torch.arange(128, 133, dtype=torch.int32).to(device.torch_device)
        meta = provider.prepare(replace(step(device, 5, 5), slot_mapping=slots), SPEC, ATTENTION, 128)
        rows = [t.to(device.torch_device) for t in (keys, values)]
        provider.write(provider.bind(storage, SPEC, 128), meta, *rows)
        return device.readback(storage).wait()[1].view(torch.float32)[128 * 16 : 2 * 128 * 16]

    assert torch.equal(block().view(2, 8, 128)[:, :, :5], values.permute(1, 2, 0))
    assert torch.equal(block(transposed_values=False).view(128, 2, 8)[:5], values)


def test_lengths_that_are_not_on_the_host_are_refused(opened: Any) -> None:
    device = opened()
    with pytest.raises(ConstraintError, match=r"^simulated\.host_lengths=true: .* are not host integers"):
        attend(device, 3, torch.tensor(3, device="simulated"))


def test_host_lengths_that_differ_from_device_lengths_are_refused(opened: Any) -> None:
    assert attend(opened(), 3, 3).shape == (1, 2, 8)
    with pytest.raises(ConstraintError, match=r"^simulated\.host_lengths=true: attention has the lengths \[4\]"):
        attend(opened(), 3, 4)
    assert attend(opened(host_lengths=False), 3, 4).shape == (1, 2, 8), "the kernel reads the device's own"


def test_a_replay_without_its_update_ends_the_engine_with_the_reason(start_one: Any) -> None:
    run = start_one()
    run.device.capabilities = replace(run.device.capabilities, graph_update=False)
    (reason,) = run.play(ONE).dead
    assert "need an update before each run" in reason


def test_a_replay_updated_with_wrong_lengths_ends_the_engine(start_one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from evener_conformance.graph.record import RecordedReplay

    run, told = start_one(), RecordedReplay.update
    monkeypatch.setattr(RecordedReplay, "update", lambda self, queries, keys: told(self, queries, [9 for _ in keys]))
    (reason,) = run.play(ONE).dead
    assert reason.startswith("simulated.graph_update=true: attention has the lengths [9]")


def test_more_captures_than_the_chip_holds_are_refused(opened: Any) -> None:
    capture = opened(max_captures=1).capture
    capture.capture(lambda: None)
    with pytest.raises(ConstraintError, match=r"^simulated\.max_captures=1: this device holds 1 captures at once"):
        capture.capture(lambda: None)


def test_host_reads_are_refused_during_a_step(opened: Any) -> None:
    device = opened()
    tensor = device.upload(np.arange(3, dtype=np.int32))
    for read in (lambda: tensor.sum().item(), tensor.tolist, tensor.cpu):
        with pytest.raises(RuntimeError, match=r"simulated\.host_reads=false forbids it"):
            read()
    torch.zeros(3, dtype=torch.int32).copy_(tensor, non_blocking=True)  # reads no value now
    assert device.readback(tensor).wait().tolist() == [0, 1, 2] == tensor.tolist()
    lenient = opened(host_reads=True)
    assert lenient.upload(np.arange(3)).tolist() == [0, 1, 2] and lenient.namespace.reads() > 0


def test_a_host_read_inside_a_kernel_ends_the_engine(start_one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from evener.engine.sampling.sampler import Sampler

    adjust = Sampler.adjust

    def curious(self: Sampler, logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        assert logits.abs().max().item() >= 0.0
        return adjust(self, logits, *rest)

    run = start_one(**{"simulated.graphs": False})
    monkeypatch.setattr(Sampler, "adjust", curious)
    sampled = [msgspec.structs.replace(each, sampling=Sampling(temperature=1.0)) for each in ONE]
    with pytest.raises(RuntimeError, match=r"Tensor\.item: .* while a step was submitted"):
        run.play(sampled)


def test_an_op_that_the_chip_lacks_is_counted_by_name_or_refused(opened: Any) -> None:
    device = opened()
    x = torch.tensor([3.0, 1.0], device=device.torch_device)
    assert device.host_fallbacks() == 0
    _ = x + 1, x.sort(), x.sort()
    assert device.host_fallbacks() == 2 and device.fallbacks() == {"aten::sort": 2}
    opened(missing="refuse")
    with pytest.raises(NotImplementedError, match=r"no kernel for aten::sort and simulated\.missing=refuse"):
        x.sort()
    lenient = opened(missing="none")
    x.sort()
    assert lenient.host_fallbacks() == 0


def test_more_memory_than_the_chip_has_is_out_of_memory(opened: Any, used: int) -> None:
    device = opened(memory=used + (1 << 22))
    before = device.memory()
    held = torch.empty(1 << 20, dtype=torch.uint8, device=device.torch_device)
    assert before.total == used + (1 << 22) and before.free == 1 << 22
    assert before.free - device.memory().free == held.nbytes
    with pytest.raises(
        torch.OutOfMemoryError, match=rf"simulated\.memory={before.total}: .* 0 is out of memory: 4194304 bytes"
    ):
        torch.empty(1 << 22, dtype=torch.uint8, device=device.torch_device)
    del held
    assert device.memory().free == before.free


def test_a_model_that_does_not_fit_is_refused_before_weights_are_read(start_one: Any, used: int) -> None:
    with pytest.raises(MemoryPlanError, match=r"infer\.max_seq_len|does not fit"):
        start_one(**{"simulated.memory": used + (1 << 16)})

"""The device, and two kernels: one that fails, and one that is right."""

import ctypes
import os
import subprocess
import sys
import time

import torch

from evener.contracts.hooks import hookimpl
from evener.contracts.ops import Kernel
from evener_conformance.reference.device import HostDevice

FAILS = os.environ.get("FAILS", "")


class FailingDevice(HostDevice):
    """Host memory."""

    def __init__(self, index):
        super().__init__(index)
        if FAILS == "the device does not open":
            raise RuntimeError(
                f"no chip at 192.168.7.12: {os.path.expanduser('~')}/secret/driver.log of alice@example.org"
            )
        if FAILS == "opening the device hangs":
            time.sleep(600)
        self.name = "failing chip"


class Activation(Kernel):
    """``act_and_mul`` for silu."""

    op, name = "act_and_mul", "failing_activation"

    def supports(self, call):
        return None if call.static["activation"] == "silu" else "silu only"

    def build(self, call):
        def run(x):
            fail()
            gate, up = x.chunk(2, dim=-1)
            y = torch.nn.functional.silu(gate.float()) * up.float()
            if FAILS == "a kernel is wrong":
                y[..., -1] *= 2
            return y.to(x.dtype)

        return run


class Norm(Kernel):
    """``rms_norm``, which is right."""

    op, name = "rms_norm", "right_norm"

    def supports(self, call):
        return None

    def build(self, call):
        eps, offset = call.static["eps"], call.static["offset"]

        def run(x, weight):
            wide = x.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
            return (wide * (weight.float() + offset)).to(x.dtype)

        return run


def fail():
    if FAILS == "a kernel crashes":
        ctypes.string_at(0)
    if FAILS == "a kernel hangs":
        time.sleep(600)
    if FAILS == "a kernel ends the process quietly":
        os._exit(0)
    if FAILS == "a kernel raises":
        raise RuntimeError("error code 507011 on device serial number 0123456789")
    if FAILS == "a kernel prints without end":
        while True:
            print("retry" * 1000, flush=True)
    if FAILS == "a kernel leaves a daemon that holds the pipes":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"], start_new_session=True, close_fds=False)
        os.abort()


@hookimpl
def evener_device(index, options):
    return FailingDevice(index)


@hookimpl
def evener_kernels(device, options):
    return [Activation(), Norm()]

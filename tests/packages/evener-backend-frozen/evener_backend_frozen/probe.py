from evener.contracts.probe import Marks, ProbedDevice, ProbeResult


def marks():
    return Marks(True, ("it is cold here",))


def result_from_marks(found):
    return ProbeResult(5, (ProbedDevice(0, "a frozen chip", 1 << 30),), found.reasons)

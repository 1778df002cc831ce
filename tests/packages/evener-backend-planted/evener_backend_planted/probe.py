from evener.contracts.probe import Marks, ProbedDevice, ProbeResult


def marks():
    return Marks(True, ("it is planted here",))


def result_from_marks(found):
    chips = tuple(ProbedDevice(index, "a planted chip", 1 << 30) for index in range(2))
    return ProbeResult(1, chips, found.reasons)

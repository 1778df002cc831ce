"""Commands: what a package has the engine do between steps, on one rank and on several, with and without a listener."""

from __future__ import annotations

import re
from typing import Any

import pytest

from evener.contracts.descriptor import Descriptor
from evener.engine.controller.controller import Controller
from evener.engine.processes.start import build_controller
from evener.engine.sampling.pending import PendingStep
from evener.engine.wire.messages import Command, CommandDone, FromController, NewRequest
from evener.engine.wire.plan import StepResult
from evener.engine.worker.worker import Worker
from evener.plugins.catalog import Catalog, Package
from evener.plugins.discover import installed_catalog


class Answer(PendingStep):
    """The order's argument, with the rank's number."""

    every_rank = True

    def __init__(self, error: str) -> None:
        self._error = error

    def ready(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return StepResult(plan=-1, error=self._error)


class Repeat:
    """A package's commands: all ranks repeat what they were told, and the controller reports it."""

    @staticmethod
    def run(controller: Controller, order: Command) -> list[FromController]:
        controller.paused = None if order.arguments[0] == "go on" else "nothing runs after that"
        answers = controller.executor.command(order)
        return [CommandDone(", ".join(sorted(str(answer.error) for answer in answers)))]

    @staticmethod
    def execute(worker: Worker, order: Command) -> PendingStep:
        return Answer(f"{order.arguments[0]} {worker.assembly.ranks.world.rank}")


@pytest.fixture
def repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    about = Descriptor(name="tell", summary="", contracts={}, engine_commands={"tell": f"{__name__}:Repeat"})
    package = Package(group="evener.plugins", name="tell", distribution="d", version="1", descriptor=about)
    catalog = Catalog((*installed_catalog().packages, package))
    monkeypatch.setattr("evener.engine.wire.installed.installed_catalog", lambda: catalog)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("size", "answer"), [(1, "hello 0"), (2, "hello 0, hello 1")])
def test_a_command_of_a_package_reaches_every_rank_and_all_answers_come_back(
    size: int, answer: str, streaming: bool, make_config: Any, repeat: None
) -> None:
    config = make_config("Llama", **{"infer.tp_size": size, "executor": "inline"})
    controller, _ = build_controller(config, streaming=streaming)
    try:
        assert controller.handle([Command("tell", ["hello"])]) == [CommandDone(answer)]
    finally:
        controller.close()


def test_a_command_may_say_that_no_request_can_run_and_that_they_can_again(make_config: Any, repeat: None) -> None:
    controller, _ = build_controller(make_config("Llama"))
    request = NewRequest(id="a", prompt=[3, 4], max_tokens=1)
    controller.handle([Command("tell", ["stop"])])
    (refused,) = controller.handle([request])
    assert (refused.error, refused.status) == ("nothing runs after that", 503)  # type: ignore[union-attr]
    controller.handle([Command("tell", ["go on"])])
    assert controller.handle([request]) == [] and not controller.idle
    controller.close()


def test_a_command_that_no_package_has_is_answered_with_one_to_install_and_the_engine_goes_on(
    make_config: Any, play: Any
) -> None:
    controller, _ = build_controller(make_config("Llama"))
    (done,) = controller.handle([Command("numbers")])
    assert re.search(r"changing numbers of a running engine needs .* pip install evener-off", done.error)
    assert len(play(controller, [NewRequest(id="a", prompt=[3, 4], max_tokens=2)]).tokens["a"]) == 2
    controller.close()

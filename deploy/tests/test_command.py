"""The command line of ``evener deploy``, and the child that a replica runs."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import types
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from served import tiny_model
from source_tree import ROOT

import evener_deploy
from evener.cli.command import Command, read_config
from evener.errors import ConfigError, EngineError
from evener_deploy import command
from evener_deploy.engine_process import EngineProcess
from evener_deploy.options import DeployOptions, read_resources
from evener_server.process import bind

KEYS = ("load=dummy", "dtype=float32", "infer.kv_memory=4194304", "infer.threads=1", "log.level=warning")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("deploy") / "m")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--replicas", "0"], "--replicas 0 is not valid"),
        (["--replicas", "3", "--max-replicas", "2"], "--max-replicas 2 is less than --replicas 3"),
        (["--resources", "GPU"], "GPU=2,CPU=4"),
        (["--resources", "GPU=-1"], "GPU=2,CPU=4"),
        (["server.kv_events=tcp://127.0.0.1:5557"], "server.kv_events is for one server"),
        (["server.weights_folder=/models"], "start the deployment again with other weights"),
        (["server.tls_cert=a.pem"], "put a proxy with the certificate before the address"),
        (["infer.tp_sise=2"], "infer.tp_size"),
        (["infer.layers=0-3"], "so it is not served: leave it out"),
        (["--start-timeout", "-1"], "--start-timeout -1.0 is not valid; it takes seconds, 0 or more"),
        (["--grow-after", "-2"], "--grow-after -2.0 is not valid"),
        (["--shrink-after", "inf"], "--shrink-after inf is not valid"),
        (["--drain-timeout", "nan"], "--drain-timeout nan is not valid"),
    ],
)
def test_a_wrong_command_line_is_an_error_before_anything_starts(model: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        command.main([str(model), *words])


def test_without_ray_the_message_says_what_to_install(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'evener-deploy\[ray\]'"):
        command.main([str(model)])


@pytest.mark.parametrize("moment", ["start", "ready"])
def test_a_signal_ends_a_deployment_also_while_ray_waits_for_resources(
    moment: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def start(options: DeployOptions) -> str:
        if moment == "start":
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(10)
        else:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        said.append("started")
        return "http://127.0.0.1"

    fake = types.SimpleNamespace(start=start, stop=lambda timeout: said.append("stopped"))
    monkeypatch.setitem(sys.modules, "evener_deploy.ray_app", fake)
    monkeypatch.setattr(evener_deploy, "ray_app", fake, raising=False)
    monkeypatch.setattr(command, "find_spec", lambda name: object())
    monkeypatch.setattr(command, "set_up_logging", lambda *args: None)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with pytest.raises(SystemExit, match="0"):
            command.main([str(model)])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert said == (["stopped"] if moment == "start" else ["started", "stopped"])


def test_resources_have_rays_names() -> None:
    assert read_resources("GPU=2, CPU=0.5,other=1") == {"GPU": 2.0, "CPU": 0.5, "other": 1.0}
    assert read_resources("") == {}


def test_a_child_serves_until_it_is_stopped_and_its_end_is_not_reported_then(model: Path, warm_children: None) -> None:
    ends: list[int] = []
    engine = EngineProcess([str(model), *KEYS, "serve.port=1"], {}, ends.append)
    try:
        body: dict[str, Any] = {"prompt": "hi", "max_tokens": 2}
        answer = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=60, trust_env=False)
        assert answer.status_code == 200 and engine.alive
    finally:
        assert engine.stop() == 0
    assert not ends and not engine.alive


def test_a_child_that_dies_is_reported_and_one_whose_parent_is_gone_ends(model: Path, warm_children: None) -> None:
    ended, codes = threading.Event(), list[int]()

    def on_end(code: int) -> None:
        codes.append(code)
        ended.set()

    engine = EngineProcess([str(model), *KEYS], {}, on_end)
    os.close(engine._held)  # as if this process had ended
    engine._held = -1
    assert ended.wait(120) and codes == [0]  # it drained
    engine.stop()
    ended.clear()
    engine = EngineProcess([str(model), *KEYS], {}, on_end)
    os.kill(engine.pid, signal.SIGKILL)
    assert ended.wait(120) and codes[1:] == [-9]
    engine.stop()


def test_a_child_that_does_not_start_is_an_error_with_the_end_of_its_log(model: Path, warm_children: None) -> None:
    with pytest.raises(EngineError, match=r"before it was ready(.|\n)*infer.tp_sise"):
        EngineProcess([str(model), "infer.tp_sise=2"], {}, lambda code: None)


def test_a_child_that_is_not_ready_in_time_is_ended_with_the_end_of_its_log(model: Path) -> None:
    with pytest.raises(EngineError, match=r"was not ready within 0\.01 s; give it more time with --start-timeout; the"):
        EngineProcess([str(model), *KEYS], {}, lambda code: None, 0.01)


def test_the_port_of_a_child_is_nobody_elses_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    ports: list[int] = []

    def wait(engine: EngineProcess) -> None:
        port = int(engine.url.rpartition(":")[2])
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))  # as another replica would, for a port that nobody has
        with bind("127.0.0.1", port) as own:  # as the child does
            own.listen()
        ports.append(port)
        raise EngineError("enough")

    monkeypatch.setattr(EngineProcess, "_wait_until_ready", wait)
    with pytest.raises(EngineError, match="enough"):
        EngineProcess(["/nowhere"], {}, lambda code: None)
    assert ports
    with socket.socket() as after:
        after.bind(("127.0.0.1", ports[0]))


def test_the_example_for_kubernetes_has_keys_that_a_server_takes(model: Path) -> None:
    pods, service, policy = yaml.safe_load_all((ROOT / "docs/examples/kubernetes.yaml").read_text("utf-8"))
    (container,) = pods["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["evener", "serve"]
    serve = Command("serve", "")
    serve.option("--drain-timeout", type=float)
    arguments, config = read_config(serve, [str(model), *container["args"][1:]], ranks=False)
    assert arguments.drain_timeout < pods["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    own = config.options["server"]
    assert ports["http"] == config.serve.port and own["kv_events"].endswith(f":{ports['kv-events']}")
    assert own["kv_events_replay"].endswith(f":{ports['kv-replay']}")
    open_to_all, for_routers = policy["spec"]["ingress"]
    assert [port["port"] for port in open_to_all["ports"]] == [ports["http"]] and for_routers["from"]
    assert service["spec"]["selector"] == pods["spec"]["selector"]["matchLabels"]

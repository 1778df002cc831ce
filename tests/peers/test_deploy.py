"""Several servers behind one address: Ray Serve by ``evener deploy``, and routers of others in front of two servers.
``make test-peers ARGS=deploy`` installs them and runs this."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from client_programs import run
from peer_sources import DEPLOY, DYNAMO, ROOT, Places
from served import PATIENCE, Served, descendants, free_port, tiny_model

pytestmark = pytest.mark.peers

Note = Callable[[str, str], None]
#: Little enough for several servers on one machine.
KEYS = ("infer.threads=1", "infer.kv_memory=400000000", "infer.block_size=16")
COMMAND = "import sys; from evener.cli.main import main; sys.exit(main())"
CONTRACT = ROOT / "tests/peers/clients/dynamo_contract.py"
EXAMPLE = ROOT / "docs/examples/kubernetes.yaml"
TOPICS = ("Apples", "Bridges", "Clouds", "Deserts")


def document(topic: str) -> str:
    """About 500 tokens, which no other topic begins with."""
    return f"{topic}: " + " ".join(f"{topic} number {n} is described here" for n in range(60))


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Note:
    pinned = DEPLOY.read_text("utf-8") + DYNAMO.read_text("utf-8")
    versions = dict(re.findall(r"^([\w-]+)==(\S+)$", pinned, re.MULTILINE))

    def say(package: str, what: str) -> None:
        record_property("client", f"{package} {versions[package]}")
        record_property("what", what)

    return say


@pytest.fixture(scope="session")
def deploy_places() -> Places:
    found = Places.default()
    for path in (found.deploy_python, found.dynamo_python):
        if not path.exists():
            pytest.fail(f"{path} is not there; run 'make test-peers ARGS=deploy'", pytrace=False)
    return found


@contextmanager
def program(command: list[str], url: str, log: Path, environ: Mapping[str, str]) -> Iterator[httpx.Client]:
    """A program that listens at ``url``; it ends with the context."""
    with log.open("w") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=dict(environ))
        try:
            with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as client:
                deadline = time.monotonic() + 2 * PATIENCE
                while not is_ready(client):
                    assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-5000:]
                    time.sleep(0.2)
                client.headers["x-pid"] = str(process.pid)
                yield client
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health", timeout=5.0).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def deployment(places: Places, model: Path, log: Path, *words: str) -> Iterator[httpx.Client]:
    """``evener deploy MODEL WORDS`` on a Ray cluster of this machine."""
    port = free_port()
    command = [str(places.deploy_python), "-c", COMMAND, "deploy", str(model), *words, *KEYS, f"serve.port={port}",
               "--resources", "CPU=0.5"]  # fmt: skip
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    with program(command, f"http://127.0.0.1:{port}", log, environ) as client:
        yield client


@pytest.fixture(scope="module")
def deployed(
    deploy_places: Places, smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """Two replicas of a real model."""
    log = tmp_path_factory.mktemp("deploy") / "log"
    with deployment(deploy_places, smollm2_dir, log, "--replicas", "2") as client:
        yield client


def complete(client: httpx.Client, prompt: str, **fields: Any) -> httpx.Response:
    body = {"model": "SmolLM2-135M-Instruct", "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
    return client.post("/v1/completions", json=body).raise_for_status()


def both_homes(client: httpx.Client) -> dict[str, str]:
    """A prompt for each of two replicas, which has it in its cache. The router may hear of a replica a little later
    than it is ready: until then all prompts go to the other one."""
    homes: dict[str, str] = {}
    for number in range(80):
        prompt = f"{number}. {document(TOPICS[number % 4])}"
        homes.setdefault(complete(client, prompt, max_tokens=1).headers["x-evener-replica"], prompt)
        if len(homes) == 2:
            return homes
    raise AssertionError(f"one replica answers everything: {homes}")


@pytest.mark.timeout(900)  # Ray decides over half a minute, several times
def test_replicas_come_under_load_and_go_after_it_without_cutting_an_answer(
    deploy_places: Places, smollm2_dir: Path, tmp_path: Path, note: Note,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    note("ray", "`evener deploy --max-replicas 2`, each of two stages: one more under load, one less after it, "
         "whose stream ends whole; so does the last one after SIGTERM")  # fmt: skip
    words = ("--max-replicas", "2", "--target", "8", "--grow-after", "1", "--shrink-after", "20", "--spread", "1",
             "infer.pp_size=2")  # fmt: skip
    with deployment(deploy_places, smollm2_dir, tmp_path / "log", *words) as client:
        assert len(_servers()) == 1
        began, enough = time.monotonic(), threading.Event()
        answered: Counter[str] = Counter()

        def ask(number: int) -> None:
            while not enough.is_set():
                prompt = f"{document(TOPICS[number % len(TOPICS)])} Question {number}:"
                answered[complete(client, prompt, max_tokens=16).headers["x-evener-replica"]] += 1

        with ThreadPoolExecutor(10) as pool:
            asked = [pool.submit(ask, number) for number in range(10)]
            try:
                while len(answered) < 2 and time.monotonic() < began + 2 * PATIENCE:
                    time.sleep(0.2)
            finally:
                enough.set()
            grown = time.monotonic() - began
            for each in asked:
                each.result()
        assert len(answered) == 2 and len(_servers()) == 2, (tmp_path / "log").read_text()[-5000:]
        # Little enough for one replica, but each has streams all the while: the one that goes must let its own end.
        homes = both_homes(client)
        assert homes.keys() == answered.keys(), homes
        begun: list[str] = []
        ends: list[tuple[str, float]] = []
        over = threading.Event()

        def stream(prompt: str, tokens: int) -> None:
            body = {"model": "SmolLM2-135M-Instruct", "prompt": f"{prompt} Tell:", "max_tokens": tokens, "stream": True,
                    "ignore_eos": True, "temperature": 0, "stream_options": {"include_usage": True}}  # fmt: skip
            while not over.is_set():
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    home = answer.headers["x-evener-replica"]
                    begun.append(home)
                    lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
                assert lines[-1] == "data: [DONE]", lines[-1]
                assert json.loads(lines[-2][6:])["usage"]["completion_tokens"] == tokens
                ends.append((home, time.monotonic()))

        def run_on(home: str) -> int:
            return begun.count(home) - [each for each, _ in ends].count(home)

        began = time.monotonic()
        with ThreadPoolExecutor(4) as pool:
            # Of unlike lengths, so that the two of a replica do not end at one time.
            streams = [pool.submit(stream, prompt, tokens) for prompt in homes.values() for tokens in (150, 250)]
            try:
                left: set[str] = set()
                while not (len(left) == 1 and run_on(*left)):
                    assert time.monotonic() < began + 2 * PATIENCE and not any(each.done() for each in streams), streams
                    time.sleep(0.5)
                    # A replica that goes gets no new request, not even one whose beginning it has; its stream goes on.
                    left = homes.keys() - {complete(client, prompt, max_tokens=1).headers["x-evener-replica"]
                                           for prompt in homes.values()}  # fmt: skip
            finally:
                over.set()
            (gone,), seen = left, time.monotonic()
            for each in streams:
                each.result()
        assert max(end for home, end in ends if home == gone) > seen, "its last stream was over before it went"
        while len(_servers()) > 1:
            assert time.monotonic() < began + 3 * PATIENCE, _servers()
            time.sleep(0.2)
        assert complete(client, "hi").headers["x-evener-replica"] in homes.keys() - left
        # SIGTERM ends the remaining replicas, after their answers: longer than Ray gives them by itself, which is 20 s.
        began = time.monotonic()
        body = {"model": "SmolLM2-135M-Instruct", "prompt": "A long story:", "max_tokens": 8000, "stream": True,
                "ignore_eos": True, "temperature": 0, "max_time": 40}  # fmt: skip
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            os.kill(int(client.headers["x-pid"]), signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]" and time.monotonic() > began + 20
        deadline = time.monotonic() + PATIENCE
        while _servers():
            assert time.monotonic() < deadline, _servers()
            time.sleep(0.2)
    assert "Traceback" not in (tmp_path / "log").read_text()
    record_property("figures", f"2 replicas after {grown:.0f} s of load, 1 again {seen - began:.0f} s after it")


def test_two_prefixes_each_stay_on_one_replica_of_ray_serve(
    deployed: httpx.Client, note: Note, record_property: Callable[[str, object], None]
) -> None:
    note("ray", "`evener deploy`, 2 replicas: each of two prefixes stays on one, and is found in its cache")
    assert deployed.get("/ready").status_code == deployed.get("/v1/models").status_code == 200
    both_homes(deployed)
    seen: dict[str, set[str]] = {topic: set() for topic in TOPICS[:2]}
    prompts = cached = 0
    for number in range(6):
        for topic, replicas in seen.items():
            answer = complete(deployed, f"{document(topic)} Question {number}:")
            replicas.add(answer.headers["x-evener-replica"])
            usage = answer.json()["usage"]
            if number:
                prompts += usage["prompt_tokens"]
                cached += usage["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0.9 * prompts
    record_property("figures", f"{cached / prompts:.1%} of the prompts' tokens were cached, after the first of each")
    assert all(len(replicas) == 1 for replicas in seen.values()) and len(set.union(*seen.values())) == 2, seen


def test_paths_that_concern_one_server_are_refused(deployed: httpx.Client, note: Note) -> None:
    note("ray", "paths that concern one server are refused")
    refused = deployed.post("/v1/responses", json={"input": "hi"})
    assert refused.status_code == 404 and "it concerns one server" in refused.json()["error"]["message"]


@pytest.mark.parametrize("what", ["server", "process of Ray"])
def test_no_request_is_lost_that_had_not_begun_when_a_replica_is_killed_under_load(
    what: str, deployed: httpx.Client, note: Note, record_property: Callable[[str, object], None]
) -> None:
    note("ray", f"a replica's {what} is killed under load: no request is lost that had not begun to stream")
    servers = _servers()
    assert len(servers) == 2, servers
    victim = servers[0] if what == "server" else _parent(servers[0])
    begun, killed = threading.Semaphore(0), threading.Event()

    def whole(number: int) -> int:
        begun.release()
        topic = TOPICS[number % len(TOPICS)]
        answer = complete(deployed, f"{document(topic)} Question {number}:", max_tokens=24, ignore_eos=True)
        assert answer.json()["usage"]["completion_tokens"] == 24
        return answer.status_code

    def stream(number: int) -> str:
        begun.release()
        body = {"model": "SmolLM2-135M-Instruct", "prompt": f"{document(TOPICS[number % 4])} Tell {number}:",
                "max_tokens": 24, "temperature": 0, "ignore_eos": True, "stream": True}  # fmt: skip
        started_after = False
        with deployed.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            text = ""
            for piece in answer.iter_text():
                if not text:
                    started_after = killed.is_set()
                text += piece
        if "data: [DONE]" in text:
            return "whole"
        # Only a stream that had begun before may be cut, and it says so.
        assert not started_after and "replica_lost" in text, text[-500:]
        return "cut"

    with ThreadPoolExecutor(24) as pool:
        answers = [pool.submit(whole, number) for number in range(24)]
        streams = [pool.submit(stream, number) for number in range(12)]
        for _ in range(20):
            assert begun.acquire(timeout=PATIENCE)
        os.kill(victim, signal.SIGKILL)
        killed.set()
        assert [answer.result() for answer in answers] == [200] * 24
        ends = [each.result() for each in streams]
    assert ends.count("whole") > 0
    cut = f"; {ends.count('cut')} had begun and end with an error" if "cut" in ends else ""
    record_property("figures", f"24 of 24 answers and {ends.count('whole')} of 12 streams whole{cut}")
    # Ray has started another replica, and the server of the lost one has ended with it.
    deadline = time.monotonic() + 2 * PATIENCE
    while len(now := _servers()) < 2 or servers[0] in now:
        assert time.monotonic() < deadline, now
        time.sleep(0.5)
    while deployed.get("/ready").status_code != 200:
        time.sleep(0.2)


def _servers() -> list[int]:
    """The replicas' servers."""
    return [pid for pid, words in _all_processes().items() if "evener_deploy.child" in words and "serve" in words]


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _all_processes() -> dict[int, str]:
    """Command lines below this process and of Ray's, whose processes have another parent."""
    found = descendants(os.getpid())
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found[int(path.parent.name)] = path.read_text().replace("\0", " ")
        except OSError:
            continue
    return {pid: words for pid, words in found.items() if words}


@pytest.fixture(scope="module")
def pair(smollm2_dir: Path) -> Iterator[list[tuple[Served, int]]]:
    """Two servers, and the port on which each publishes its events."""
    ports = [free_port(), free_port()]
    with (
        Served.model(smollm2_dir, *KEYS, f"server.kv_events=tcp://127.0.0.1:{ports[0]}") as first,
        Served.model(smollm2_dir, *KEYS, f"server.kv_events=tcp://127.0.0.1:{ports[1]}") as second,
    ):
        yield [(first, ports[0]), (second, ports[1])]


@contextmanager
def router(
    places: Places, module: str, pair: list[tuple[Served, int]], tmp_path: Path, *more: str
) -> Iterator[httpx.Client]:
    port, metrics = free_port(), free_port()
    command = [str(places.deploy_python), "-m", module, "--worker-urls", *(server.url for server, _ in pair)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics), *more]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with program(command, f"http://127.0.0.1:{port}", tmp_path / "router.log", environ) as client:
        yield client


def answered_by(pair: list[tuple[Served, int]], ask: Callable[[], Any]) -> int:
    """Which server computed what ``ask`` asks for."""
    before = [server.stats()["finished"] for server, _ in pair]
    ask()
    rose = [server.stats()["finished"] - count for (server, _), count in zip(pair, before, strict=True)]
    assert sum(rose) == 1, rose
    return rose.index(1)


def test_sglangs_router_reads_our_limits_and_keeps_prefixes_on_one_server(
    deploy_places: Places, pair: list[tuple[Served, int]], tmp_path: Path, note: Note
) -> None:
    note("sglang-router", "cache_aware: reads /server_info and /model_info; each of two prefixes stays on one server")
    with router(deploy_places, "sglang_router.launch_router", pair, tmp_path, "--policy", "cache_aware") as client:
        seen: dict[str, set[int]] = {}
        for number in range(5):
            for topic in TOPICS[:2]:
                prompt = f"{document(topic)} Question {number}:"
                seen.setdefault(topic, set()).add(answered_by(pair, lambda text=prompt: complete(client, text)))  # type: ignore[misc]
        assert all(len(servers) == 1 for servers in seen.values()), seen
    for server, _ in pair:
        assert all(f"path=/{name} status=200" in server.log for name in ("server_info", "model_info"))


def test_dynamos_frontend_finds_prompts_in_our_engines_caches_without_etcd_and_nats(
    deploy_places: Places, smollm2_dir: Path, tmp_path: Path, note: Note, record_property: Callable[[str, object], None]
) -> None:
    note("ai-dynamo", "frontend in KV mode, 2 of our engines, no etcd, no NATS: prompts go where they are cached")
    (tmp_path / "found").mkdir()
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"DYN_FILE_KV": str(tmp_path / "found"), "HF_HUB_OFFLINE": "1"}
    planes = ["--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq"]
    port, python = free_port(), str(deploy_places.dynamo_python)
    frontend = [python, "-m", "dynamo.frontend", "--router-mode", "kv", "--http-host", "127.0.0.1"]
    engine = [python, "-m", "evener_deploy.dynamo_engine", str(smollm2_dir), *KEYS, *planes]
    frontend += ["--http-port", str(port), *planes]
    with program(frontend, f"http://127.0.0.1:{port}", tmp_path / "frontend.log", environ) as client:
        logs = [(tmp_path / f"engine{number}.log").open("w") for number in range(2)]
        engines = [subprocess.Popen(engine, stdout=log, stderr=log, env=environ) for log in logs]
        try:
            deadline = time.monotonic() + PATIENCE
            ready = "Registered endpoint 'dynamo.backend.generate'"
            while not all(ready in Path(log.name).read_text() for log in logs) or not _models(client):
                assert time.monotonic() < deadline and all(each.poll() is None for each in engines), logs
                time.sleep(0.2)
            chat = {"model": "SmolLM2-135M-Instruct", "max_tokens": 12, "temperature": 0,
                    "messages": [{"role": "user", "content": "What is the capital of France?"}]}  # fmt: skip
            answer = client.post("/v1/chat/completions", json=chat).raise_for_status().json()
            assert "Paris" in answer["choices"][0]["message"]["content"]
            prompts = cached = 0
            for number in range(5):
                for topic in TOPICS[:3]:
                    usage = complete(client, f"{document(topic)} Question {number}:").json()["usage"]
                    if number:
                        prompts += usage["prompt_tokens"]
                        cached += usage["prompt_tokens_details"]["cached_tokens"]
            assert cached > 0.9 * prompts
            figures = f"{cached / prompts:.1%} of the prompts' tokens were cached, after the first of each"
            record_property("figures", figures)
            refused = client.post("/v1/completions", json={"model": chat["model"], "prompt": "hi", "logprobs": 2})
            assert refused.status_code == 400 and "not supported by evener under Dynamo" in refused.text, refused.text
        finally:
            for process, log in zip(engines, logs, strict=True):
                process.send_signal(signal.SIGTERM)
                process.wait(60)
                log.close()


def test_our_engine_keeps_what_dynamos_contract_promises(deploy_places: Places, tmp_path: Path, note: Note) -> None:
    note("ai-dynamo", "LLMEngine: from_args, start, generate, abort of a running and a waiting request, cleanup")
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    model = tiny_model(tmp_path / "tiny")
    seen = json.loads(run(deploy_places.dynamo_python, CONTRACT, model, environ=environ, folder=tmp_path))
    assert seen["is_llm_engine"] and seen["namespace"] == "here" and seen["sources"] == ["ZmqSource"]
    assert (seen["block_size"], seen["context"], seen["most"]) == (16, 4096, 1) and seen["blocks"] > 100
    assert (seen["tokens"], seen["indices"], seen["ends"], seen["reason"]) == (8, [0], 1, "length")
    assert seen["usage"]["prompt_tokens"] == 37 and seen["usage"]["completion_tokens"] == 8
    assert seen["packed_is_equal"] and seen["at_once_is_equal"] and seen["after"] >= 1
    ended = dict.fromkeys(("new", "waiting", "running"), "cancelled")
    assert seen["aborted"] == {**ended, "others_go_on": True}
    assert "multi_modal_data is not supported" in seen["refused"] and "weights" in seen["start_fails"]


def _models(client: httpx.Client) -> list[Any]:
    return list(client.get("/v1/models").json()["data"])


def test_the_example_for_kubernetes_fits_its_schema(deploy_places: Places, tmp_path: Path, note: Note) -> None:
    note("kubernetes-validate", "the example fits the schemas of Kubernetes 1.37, and no field is unknown")
    check = [str(deploy_places.deploy_python.with_name("kubernetes-validate")), "--strict", "-k", "1.37.0"]
    done = subprocess.run([*check, str(EXAMPLE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and (done.stdout + done.stderr).count(" passed for resource ") == 3, done
    (tmp_path / "wrong.yaml").write_text(EXAMPLE.read_text().replace("readinessProbe", "readyProbe"))
    done = subprocess.run([*check, str(tmp_path / "wrong.yaml")], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "readyProbe" in done.stdout + done.stderr, done


def test_vllms_router_sends_prompts_where_our_events_say_that_they_are_cached(
    deploy_places: Places, pair: list[tuple[Served, int]], smollm2_dir: Path, tmp_path: Path, note: Note
) -> None:
    note("vllm-router", "kv_aware: KV events alone tell it where prompts are that it never saw")
    sources = [word for server, port in pair for word in ("--kv-event-source", f"{server.url}=tcp://127.0.0.1:{port}")]
    more = ["--policy", "kv_aware", *sources, "--kv-event-block-size", "16", "--kv-event-model", str(smollm2_dir)]
    with router(deploy_places, "vllm_router.launch_router", pair, tmp_path, *more) as client:
        placed = {f"{topic}, once more. {document(topic)}": number % 2 for number, topic in enumerate(TOPICS)}
        for text, place in placed.items():
            complete(pair[place][0].http, text)
        time.sleep(1.0)  # nothing says when the router has read the events
        for number in range(2):
            for text, place in placed.items():
                prompt = f"{text} Question {number}:"
                assert answered_by(pair, lambda text=prompt: complete(client, text)) == place  # type: ignore[misc]

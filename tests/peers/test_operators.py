"""Programs that operators use: a real Prometheus runs the dashboard's queries, systemd reads the unit.
``make test-peers ARGS=operators`` runs this; it needs Debian's packages ``prometheus`` and ``systemd``."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from docs_blocks import DOCS, blocks
from peer_sources import GRAFANA, Places
from served import PATIENCE, Served, free_port
from systemd_unit import ANALYZE, UNIT, complaints

from evener_server.dashboard import FILE

pytestmark = pytest.mark.peers

Note = Callable[[str, str], None]
BOARD = json.loads(FILE.read_text("utf-8"))
#: Of each panel its title and its queries, as Grafana sends them where everything is chosen.
_VARIABLES = {"$__rate_interval": "30s", "$model": ".*", "$instance": ".*"}
QUERIES = [
    (panel["title"], re.sub(r"\$\w+", lambda match: _VARIABLES[match[0]], target["expr"]))
    for panel in BOARD["panels"]
    for target in panel.get("targets", ())
]
KEYS = """
- {name: chat, key: sk-chat}
- {name: batch, key: sk-batch, requests_per_minute: 1}
"""
#: Seconds between two readings of the server.
_SCRAPE = 1


def installed(name: str) -> str:
    """The program. A missing one fails: a skipped test would look as if it had passed."""
    found = shutil.which(name)
    if found is None:
        pytest.fail(f"{name} is not there; type apt-get install prometheus systemd", pytrace=False)
    return found


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Note:
    def say(program: str, what: str) -> None:
        done = subprocess.run([installed(program), "--version"], capture_output=True, text=True, check=True)
        version = re.search(r"\d+[.\d]*", done.stdout + done.stderr)
        assert version is not None
        record_property("client", f"{program} {version[0]}")
        record_property("what", what)

    return say


@pytest.fixture(scope="module")
def busy(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with keys and a drafter that answers requests all the while."""
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text(KEYS)
    small = ("infer.kv_memory=200000000", "infer.max_seq_len=512", "infer.threads=1", "infer.drafter=ngram")
    with Served.model(smollm2_dir, f"server.api_key_file={keys}", *small) as served:
        stop = threading.Event()
        body = {"prompt": "one two three four one two three four one two", "max_tokens": 16, "temperature": 0}

        def ask() -> None:
            with httpx.Client(base_url=served.url, timeout=PATIENCE, trust_env=False) as client:
                while not stop.is_set():
                    for key in ("chat", "batch"):
                        client.post("/v1/completions", json=body, headers={"authorization": f"Bearer sk-{key}"})

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield served
        finally:
            stop.set()
            thread.join(PATIENCE)


@pytest.fixture(scope="module")
def prometheus(busy: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A Prometheus that reads the server with the settings of docs/serving.md, more often."""
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    (shown,) = (each.text for each in blocks(DOCS / "serving.md") if "scrape_configs" in each.text)
    address = busy.url.removeprefix("http://")
    assert "127.0.0.1:21002" in shown
    config = f"global: {{scrape_interval: {_SCRAPE}s}}\n" + shown.replace("127.0.0.1:21002", address)
    (folder / "prometheus.yml").write_text(config)
    command = [installed("prometheus"), f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE, trust_env=False) as client:
                deadline = time.monotonic() + PATIENCE
                # Two readings at least, between which something happened.
                while not _values(client, "sum(rate(evener:generation_tokens_total[30s])) > 0"):
                    assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
                    time.sleep(0.2)
                yield client
        finally:
            process.terminate()
            process.wait(PATIENCE)


def _values(client: httpx.Client, query: str) -> list[float]:
    """The numbers that a query gives now; none while Prometheus starts.

    Raises:
        AssertionError: it is no query.
    """
    try:
        answer = client.get("/api/v1/query", params={"query": query})
    except httpx.TransportError:
        return []
    if answer.status_code == 503:
        return []
    assert answer.status_code == 200, answer.text
    found: Any = answer.json()["data"]["result"]
    return [float(each["value"][1]) for each in found]


def test_prometheus_finds_nothing_wrong_in_the_metrics(busy: Served, note: Note) -> None:
    note("promtool", "check metrics: the names, types and help texts of GET /metrics")
    done = subprocess.run(
        [installed("promtool"), "check", "metrics"], input=busy.get("/metrics").text, capture_output=True, text=True
    )
    # The names under which vLLM's dashboards and routers look; ours have a prefix of the same kind.
    found = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    colons = [line for line in found if line.endswith("metric names should not contain ':'")]
    assert colons and [line for line in found if line not in colons and not line.startswith("vllm:")] == []


def test_each_query_of_the_dashboard_gives_numbers(prometheus: httpx.Client, note: Note) -> None:
    note("prometheus", "scrapes the server; each query of the dashboard for Grafana gives numbers")
    deadline, empty = time.monotonic() + PATIENCE, QUERIES
    while empty and time.monotonic() < deadline:
        empty = [
            (title, query) for title, query in empty
            if not (found := _values(prometheus, query)) or not all(map(math.isfinite, found))
        ]  # fmt: skip
        time.sleep(_SCRAPE if empty else 0)
    assert empty == []
    assert len(QUERIES) > 25


def test_the_variables_of_the_dashboard_find_the_model_and_the_server(
    prometheus: httpx.Client, busy: Served, note: Note
) -> None:
    note("prometheus", "the dashboard's lists of models and servers")
    found = {}
    for each in BOARD["templating"]["list"]:
        if each["type"] == "query":
            match, label = each["query"]["query"].removeprefix("label_values(").removesuffix(")").rsplit(", ", 1)
            params = {"match[]": match.replace("$model", ".*")}
            found[label] = prometheus.get(f"/api/v1/label/{label}/values", params=params).json()["data"]
    headers = {"authorization": "Bearer sk-chat"}
    model = busy.http.get("/v1/models", headers=headers).json()["data"][0]["id"]
    assert found == {"model_name": [model], "instance": [busy.url.removeprefix("http://")]}


def test_the_dashboard_is_of_the_types_that_grafana_publishes(record_property: Callable[[str, object], None]) -> None:
    """Grafana itself is not run: no registry that we use has it."""
    record_property("client", GRAFANA[0].replace("schema@", "schema "))
    record_property("what", "the types of a dashboard and of its panels' options: each field of ours is known there")
    folder = Places.default().grafana
    if not (folder / "node_modules").is_dir():
        pytest.fail(f"{folder} is not there; run 'make test-peers ARGS=operators'", pytrace=False)

    def complaints_about(board: Any) -> str:
        command = [installed("node"), str(Path(__file__).parent / "clients/grafana_schema.mjs"), str(folder)]
        done = subprocess.run(command, input=json.dumps(board), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert complaints_about(BOARD) == ""
    worse = json.loads(FILE.read_text("utf-8"))
    worse["panels"][1]["options"]["colour"] = "value"
    worse["panels"][1]["fieldConfig"]["defaults"]["units"] = "s"
    found = complaints_about(worse)
    assert "/panels/1/options" in found and "colour" in found and '"units"' in found


def test_systemd_finds_nothing_wrong_in_the_unit(tmp_path: Path, note: Note) -> None:
    note("systemd-analyze", "verify and security: the example of a unit")
    assert ANALYZE is not None and complaints(UNIT.read_text("utf-8"), tmp_path) == ""

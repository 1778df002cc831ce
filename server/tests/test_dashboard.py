"""The dashboard for Grafana: each of its queries finds what it asks for in ``/metrics``.

``tests/peers/test_operators.py`` runs the queries in a real Prometheus (``make test-peers ARGS=operators``).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from evener_server.api_keys import ApiKeys
from evener_server.app import create_app
from evener_server.dashboard import FILE
from evener_server.key_file import ApiKey, digest_of

BOARD = json.loads(FILE.read_text("utf-8"))
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
QUERIES += [each["query"]["query"] for each in BOARD["templating"]["list"] if each["type"] == "query"]
#: What Prometheus adds to each series.
ADDED = {"instance", "job"}


@pytest.fixture(scope="module")
def series(api: Any) -> dict[str, set[str]]:
    """The labels of each series of a server with keys, of which one has reached its limit."""
    keys = ApiKeys([ApiKey(name="a", digest=digest_of(b"sk-a"), requests_per_minute=1)])
    app = create_app(api.llm, keys=keys)

    async def ask() -> str:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            for _ in range(2):
                body = {"model": "fake", "prompt": "hello", "max_tokens": 2}
                await client.post("/v1/completions", json=body, headers={"authorization": "Bearer sk-a"})
            return (await client.get("/metrics")).text

    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(api.run(ask())):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def named(query: str) -> set[str]:
    """The series that a query reads."""
    return set(re.findall(r"\b(?:evener:|process_)\w+", query))


@pytest.mark.parametrize("query", sorted(set(QUERIES)))
def test_each_series_of_a_query_is_served_with_the_labels_that_it_asks_for(
    query: str, series: dict[str, set[str]]
) -> None:
    assert named(query) and named(query) <= series.keys()
    asked = set(re.findall(r'(\w+)=~?"', query))
    asked |= {label.strip() for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(",")}
    if query.startswith("label_values"):
        asked.add(query.rpartition(",")[2].strip(" )"))
    for name in named(query):
        assert asked <= series[name] | ADDED, name


def test_a_legend_names_only_labels_that_its_query_keeps() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            kept = set(re.findall(r"\w+", "".join(re.findall(r"by \(([^)]*)\)", target["expr"])))) or {"instance"}
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept, target


def test_panels_do_not_overlap_and_every_one_follows_the_chosen_servers() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    for panel in PANELS:
        for target in panel["targets"]:
            assert 'instance=~"$instance"' in target["expr"] and target["datasource"]["uid"] == "${datasource}"
            assert target["expr"].count("rate(") == target["expr"].count("[$__rate_interval]")


def test_ends_are_split_by_reason_and_answers_by_status() -> None:
    # Counters by reason and by status tell a bad minute from a good one; a sum over them does not.
    assert any("http_responses_total" in query and "by (status)" in query for query in QUERIES)
    assert any("request_success_total" in query and "by (finished_reason)" in query for query in QUERIES)


def test_a_command_writes_it() -> None:
    done = subprocess.run([sys.executable, "-m", "evener_server.dashboard"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == BOARD

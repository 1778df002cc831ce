"""Tables of positions in host memory: rows are made when a request gets there, and are those of the whole table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evener.backend_search import BackendSearch
from evener.config.schema import Config
from evener.engine.worker.worker import Worker

ROWS = 16


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evener.engine.worker.weights.ROWS", ROWS)


def compute(worker: Worker, tokens: int) -> None:
    step = worker.execute(worker.assembly.geometry.one_request(tokens))
    assert step is not None
    step.wait()


def start(make_lively: Any, **options: object) -> Worker:
    config: Config = make_lively("Gemma3", **{"infer.max_seq_len": 128, "infer.step_tokens": 64, **options})
    return Worker(config, BackendSearch("reference"))


def test_a_step_makes_the_rows_that_it_reads_and_a_longer_one_the_rest(make_lively: Any) -> None:
    worker = start(make_lively)
    tables = list(worker.assembly.build.rows)
    wanted = [table.make(torch.device("cpu")) for table in tables]
    addresses = [table.value.data_ptr() for table in tables if table.value is not None]
    assert len(addresses) == len(tables) == 2  # of full attention, and of windows
    for tokens, made in ((1, ROWS), (ROWS, ROWS), (ROWS + 1, 2 * ROWS), (3, 2 * ROWS), (50, 4 * ROWS)):
        compute(worker, tokens)
        for table, whole in zip(tables, wanted, strict=True):
            assert table.value is not None and len(whole) > made
            assert torch.equal(table.value[:made], whole[:made]) and not table.value[made:].any()
    assert addresses == [table.value.data_ptr() for table in tables if table.value is not None]


def test_the_last_rows_are_made_where_their_number_divides_no_context(make_lively: Any) -> None:
    worker = start(make_lively, **{"infer.max_seq_len": 41})
    compute(worker, 41)
    for table in worker.assembly.build.rows:
        assert table.value is not None and torch.equal(table.value, table.make(torch.device("cpu")))


def test_other_devices_get_whole_tables_with_the_weights(make_lively: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from evener.engine.worker import worker as module

    whole = module.PositionTables

    def elsewhere(a: Any) -> Any:
        kept = a.device.capabilities
        a.device.capabilities = type(kept)(**{**vars(kept), "host_memory": False})
        try:
            return whole(a)
        finally:
            a.device.capabilities = kept

    monkeypatch.setattr(module, "PositionTables", elsewhere)
    for table in start(make_lively).assembly.build.rows:
        assert table.value is not None and torch.equal(table.value, table.make(torch.device("cpu")))

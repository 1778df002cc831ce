"""The example of a systemd unit: its command serves and drains, and systemd finds nothing wrong in it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from docs_blocks import DOCS
from served import Served, tiny_model
from systemd_unit import ANALYZE, UNIT, complaints, values
from warm import CHILDREN, warm

TEXT = UNIT.read_text("utf-8")
SET = values(TEXT)


def test_the_command_of_the_unit_serves_what_the_config_file_says_and_ends_well_on_sigterm(tmp_path: Path) -> None:
    program, *words = shlex.split(SET["ExecStart"])
    assert program == "/opt/evener/bin/evener" and "/etc/evener/server.yaml" in words
    model = tiny_model(tmp_path / "model")
    config = tmp_path / "server.yaml"
    config.write_text(f"model: {model}\nload: dummy\nserve.port: 0\ninfer.kv_memory: 16MiB\ninfer.threads: 1\n")
    words = [str(config) if word == "/etc/evener/server.yaml" else word for word in words]
    with Served("env", f"{CHILDREN}={warm() / 'python'}", warm() / "evener", *words) as server:
        assert server.get("/ready").status_code == 200
        assert server.stop() == 0
        # The drain of the unit is the one that the server uses.
        assert "60 s to finish" in server.log


def test_systemd_waits_longer_than_the_server_drains() -> None:
    words = SET["ExecStart"].split()
    assert int(SET["TimeoutStopSec"]) >= int(words[words.index("--drain-timeout") + 1]) + 10
    assert SET["KillMode"] == "mixed"


def test_the_operators_guide_names_the_files_of_the_unit() -> None:
    guide = (DOCS / "operator.md").read_text("utf-8")
    named = ("/opt/evener", "/etc/evener/server.yaml", "/etc/evener/environment", "/var/cache/evener",
             "/var/lib/evener")  # fmt: skip
    assert [path for path in named if path not in guide] == []
    assert SET["CacheDirectory"] == SET["StateDirectory"] == SET["User"] == "evener"
    assert SET["EnvironmentFile"] == "-/etc/evener/environment"


@pytest.mark.skipif(ANALYZE is None, reason="no systemd-analyze here; make test-peers ARGS=operators needs it")
def test_systemd_finds_nothing_wrong_in_the_unit_and_something_in_a_worse_one(tmp_path: Path) -> None:
    assert complaints(TEXT, tmp_path) == ""
    assert "Unknown key 'KillMod'" in complaints(TEXT.replace("KillMode", "KillMod"), tmp_path)
    worse = TEXT.replace("CapabilityBoundingSet=\n", "").replace("SystemCallFilter", "#")
    assert "exposure" in complaints(worse, tmp_path)

"""The benchmarks: their options, their arithmetic, what they read and send, and one small run of each."""

from __future__ import annotations

import csv
import itertools
import json
import math
import os
import re
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import cold_start
import cpu_products
import cpu_start
import draft_costs
import gpu_check
import host_experts
import hybrid
import machine
import mixed_load
import offline
import pytest
import quantized_checkpoint
import sanitize
import serving
import start_parts
from arrivals import offsets
from compare import Difference, changes, differences, read_answers, read_rows
from dataset import PromptRequest, body_of, conversations, cut
from hypothesis import given
from hypothesis import strategies as st
from model_configs import CONFIGS
from model_sources import SOURCES, models_root
from report import page
from rounded_steps import weights_read
from served import tiny_model
from serving_metrics import ServiceLevel, percentile, standard_deviation, summary
from serving_options import NOT_HERE, fields_of, parse
from source_tree import ROOT
from stream_client import Sample, read
from warm import warm

from evener.backend.torch_device import TorchDevice
from evener.contracts.device import MemoryInfo
from evener.errors import ConfigError
from evener_conformance.command import command as conformance_command
from evener_conformance.kit.outcome import AREAS
from evener_conformance.naive.model import find_architecture
from evener_conformance.simulated import install_simulated_backend

BENCHMARKS = ROOT / "benchmarks"
SMALL = ["load=dummy", "infer.kv_memory=8MiB", "infer.max_seq_len=256", "infer.max_reqs=8"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def sample(sent: float, times: list[float], tokens: int = 0, error: str = "") -> Sample:
    return Sample(sent, times, times[-1] if times else sent, 10, tokens or len(times), "x", error=error)


# Arithmetic


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], percent: float) -> None:
    import numpy as np

    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-6)
    assert standard_deviation(values) == pytest.approx(float(np.std(values)), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(("values", "percent"), [([], 50), ([1.0], 101), ([1.0], -1)])
def test_a_percentile_that_does_not_exist_is_refused(values: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        percentile(values, percent)


def test_a_summary_counts_tokens_and_times_of_answers_that_ended_well() -> None:
    samples = [sample(0, [0.5, 0.6, 0.8]), sample(1, [1.1, 1.3], tokens=5), sample(0, [], error="refused")]
    row = summary(samples, 2.0, [50, 99], ServiceLevel({"ttft": 0.3}))
    assert (row["requests"], row["completed"], row["failed"]) == (3, 2, 1)
    assert row["output_throughput"] == 4.0 and row["request_throughput"] == 1.0
    assert row["total_token_throughput"] == 14.0 and row["goodput"] == 0.5
    assert row["decode_throughput"] == 7.5, "two and four later tokens from 0.5 s to 1.3 s"
    assert row["mean_ttft_ms"] == 300 and row["p50_ttft_ms"] == 300 and row["std_ttft_ms"] == 200
    assert row["p99_itl_ms"] == 200 and row["median_itl_ms"] == 200
    assert row["mean_tpot_ms"] == 100, "150 and 50"
    assert row["mean_e2el_ms"] == 550


def test_an_answer_of_one_token_has_no_time_between_tokens() -> None:
    row = summary([sample(0, [0.5])], 1.0, [50])
    assert "mean_itl_ms" not in row and "mean_tpot_ms" not in row and row["decode_throughput"] is None


def test_goals_hold_for_each_request_by_itself() -> None:
    goal = ServiceLevel({"ttft": 0.5, "itl": 0.1})
    assert goal.met(sample(0, [0.5, 0.6]))
    assert not goal.met(sample(0, [0.6, 0.65]))
    assert not goal.met(sample(0, [0.1, 0.3]))
    assert not goal.met(sample(0, [], error="gone"))


# Arrivals


def test_without_a_rate_everything_is_sent_at_once() -> None:
    assert offsets(3, math.inf) == [0, 0, 0]


def test_equal_gaps_come_in_bursts() -> None:
    assert offsets(5, 4, burst=2, poisson=False) == [0, 0, 0.5, 0.5, 1.0]


def test_poisson_arrivals_have_the_rate_that_was_asked_for_and_exponential_gaps() -> None:
    when = offsets(20_000, 8, seed=3)
    gaps = [b - a for a, b in itertools.pairwise(when)]
    assert len(when) == 20_000 and when == sorted(when)
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 8, rel=0.03)
    assert standard_deviation(gaps) == pytest.approx(1 / 8, rel=0.03), "an exponential distribution's is its mean"
    assert offsets(20_000, 8, seed=3) == when


@pytest.mark.parametrize("settings", [{"rate": 0.0}, {"rate": -1.0}, {"rate": 1.0, "burst": 0}])
def test_a_rate_that_cannot_be_sent_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        offsets(3, **settings)


# Mixed load


def test_the_requests_of_a_load_come_at_its_rate_and_are_of_the_lengths_that_were_asked_for() -> None:
    args = mixed_load.parser().parse_args(["m", "--prompts", "20,80", "--answers", "4,12", "--seed", "3"])
    found = mixed_load.arrive(args, 50.0, 40.0)
    assert len(found) == pytest.approx(2000, rel=0.1) and found == mixed_load.arrive(args, 50.0, 40.0)
    assert {len(each.prompt) for each in found} == set(range(20, 81))
    assert {each.answer for each in found} == set(range(4, 13))
    assert all(0 <= each.at < 40 for each in found)


def test_a_mixed_load_is_measured_for_each_budget_and_its_parts_are_of_the_best_fixed_one(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--budgets", "16,64,measured,pace", "--rate", "2000", "--loads", "0.3,0.5", "--at-loads",
             "pace,measured", "--waiting", "3", "--prompts", "8,60", "--answers", "4,12", "--seconds", "0.15", "--skip",
             "0.05", "--first", "0.05"]  # fmt: skip
    pairs = [word for pair in (*SMALL, "infer.threads=1") for word in ("--set", pair)]
    assert mixed_load.main([str(model), *words, "--vocab", "200", "--out", str(tmp_path / "out"), *pairs]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [(row["load"], row["budget"]) for row in rows] == [
        ("full", "16"), ("full", "64"), ("full", "measured"), ("full", "pace"),
        (0.3, "pace"), (0.3, "measured"), (0.5, "measured"), (0.5, "pace")]  # fmt: skip
    best = max(row["computed_tokens_s"] for row in rows if row["budget"].isdigit() and row["load"] == "full")
    assert rows[-1]["requests_s"] == pytest.approx(0.5 * best / ((8 + 60 + 4 + 12) / 2), abs=0.01)
    # A machine that stands still for a tenth of a second sends nothing in one of these short runs.
    assert any(row["refused"] for row in rows[:4]) and max(row["most_waiting"] for row in rows) <= 3
    assert all(0 <= row["itl_p50_ms"] <= row["itl_p99_ms"] <= row["itl_max_ms"] for row in rows[:4])
    assert all(
        row["steps"] * int(row["budget"]) >= row["measured_s"] * row["computed_tokens_s"] * 0.95 for row in rows[:2]
    )
    assert capsys.readouterr().out.count("| pace |") == 3


def test_a_budget_beyond_the_engine_s_is_refused(model: Path) -> None:
    pairs = [word for pair in SMALL for word in ("--set", pair)]
    with pytest.raises(SystemExit, match="steps have at most 2048 tokens"):
        mixed_load.main([str(model), "--budgets", "4096", "--prompts", "8,60", "--answers", "4,12", *pairs])


def test_a_limit_that_does_not_exist_is_named_before_anything_is_measured(model: Path) -> None:
    pairs = [word for pair in SMALL for word in ("--set", pair)]
    with pytest.raises(ConfigError, match="it takes measured or pace"):
        mixed_load.main([str(model), "--budgets", "16,auto", "--prompts", "8,60", "--answers", "4,12", *pairs])


# Data sets


def test_a_csv_file_gives_one_prompt_a_row(tmp_path: Path) -> None:
    path = tmp_path / "d.csv"
    path.write_text('id,prompt\n1,"one, two"\n2,three\n')
    assert [talk[0]["content"] for talk in conversations("csv", path, 1)] == ["one, two", "three"]
    assert len(conversations("csv", path, 1, header=False)) == 3


def test_conversations_come_without_the_answer_at_their_end(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    path.write_text(json.dumps([{"conversations": []}, {"conversations": turns}]))
    assert conversations("sharegpt", path) == [[{"role": "user", "content": "hi"}]]
    path.write_text(json.dumps({"message": [{"role": "user", "content": "a"}]}) + "\n\n")
    assert conversations("trace", path) == [[{"role": "user", "content": "a"}]]


@pytest.mark.parametrize(
    ("kind", "text"),
    [("csv", "head\n"), ("csv", "a,b\n1\n"), ("sharegpt", "{"), ("sharegpt", '[{"x": 1}]'), ("trace", "[]"),
     ("sharegpt", '[{"conversations": [{"from": "robot", "value": "x"}]}]'), ("longbench", "[{}]")],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_named(kind: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_text(text)
    with pytest.raises(SystemExit, match="data"):
        conversations(kind, path, 1)


def test_prompts_of_a_file_are_cut_and_joined_to_the_asked_length() -> None:
    talks = [[{"role": "user", "content": "abc"}], [{"role": "user", "content": "de"}]]
    text = cut(talks, 1, 4, lambda text: list(text.encode()), lambda ids: bytes(ids).decode())
    assert text == "deab"


def test_bodies_carry_only_what_was_asked_for() -> None:
    args = parse(["--base-url", "http://x", "--top-k", "3", "--extra-body", '{"min_p": 0.1}'])
    body = body_of(PromptRequest([1, 2], 5), False, fields_of(args))
    assert body == {
        "temperature": 0.0, "top_k": 3, "min_p": 0.1, "max_tokens": 5, "prompt": [1, 2],
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert body_of(PromptRequest("hi", 5), True, {})["messages"] == [{"role": "user", "content": "hi"}]


# Options


def test_chitus_command_is_understood() -> None:
    options = (
        "--model deepseek-r1 --batch-size 2 --iterations 10 --input-len 128 --output-len 1024 --warmup 3 "
        "--base-url http://localhost:21002 --metric-percentiles 50,99 --percentile-metrics ttft,tpot --output-dir out "
        "--append-result --dataset random --request-interval 0.5"
    )
    args = parse(options.split())
    assert args.engine == ["openai-url"] and args.requests == 2 and args.iterations == 10 and args.warmup == 3
    assert (args.input_len, args.output_len) == (128, 1024)
    assert args.request_rate == [2.0] and args.arrival == "uniform" and args.metric_percentiles == [50, 99]


def test_answers_may_be_searched_for_or_have_a_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beams = parse(["--base-url", "http://x", "--num_beams", "4", "--length_penalty", "0.5", "--no-stream"])
    assert fields_of(beams) == {"temperature": 0.0, "num_beams": 4, "length_penalty": 0.5}
    (tmp_path / "form").write_text("[0-9]+\n")
    for option in ("--structured_output_regex [0-9]+", f"--structured_output_file {tmp_path / 'form'}"):
        formed = parse(f"--base-url http://x {option}".split())
        assert fields_of(formed) == {"temperature": 0.0, "structured_outputs": {"regex": "[0-9]+"}}
    for options, message in (
        ("--num-beams 4", "add --no-stream"), ("--structured-output-file gone", "gone"),
        (f"--structured-output-file {tmp_path / 'form'} --structured-output-regex x", "leave one out"),
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            parse(f"--base-url http://x {options}".split())
        assert message in capsys.readouterr().err


def test_ksanas_command_is_understood() -> None:
    options = (
        "--host localhost --port 8080 --prompt_num 512 --input_csv d.csv --col_idx 1 --stream --mode async "
        "--request_rate 2 --request_rate_step 3 --request_rate_num_iters 3 --random --percentiles 25 75 --shuffle "
        "--warmup_num_iters 2 --repeat_num_iters 4 --max_avg_latency 9 --max_first_token_latency 1 --max_new_tokens 7 "
        "--topk 5 --topp 0.5 --repetition_penalty 1.1 --stop_strings a b --stop_token_ids 3 4 --ignore_eos "
        "--client_timeout 60 --show_decode_token_throughput --output_csv o.csv --perf_csv p.csv"
    )
    args = parse(options.split())
    assert args.base_url == "http://localhost:8080" and args.dataset == "csv" and args.column == 1
    assert args.request_rate == [2, 5, 8] and args.arrival == "poisson"
    assert (args.warmup, args.iterations, args.requests, args.output_len) == (2, 4, 512, 7)
    assert fields_of(args) == {
        "temperature": 0.0, "top_p": 0.5, "top_k": 5, "repetition_penalty": 1.1, "stop": ["a", "b"],
        "stop_token_ids": [3, 4],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "--model DIR is needed"),
        ("--engine openai-url", "needs --base-url"),
        ("--base-url localhost:1", "give the scheme too"),
        ("--model m --engine llamacpp", "needs --gguf"),
        ("--model m --dataset sharegpt", "needs --dataset-path"),
        ("--model m --dataset-path d.csv --input-len 5", "needs --tokenizer-path"),
        ("--model m --api chat", "needs --tokenizer-path"),
        ("--model m --request-rate 0", "is not a rate"),
        ("--model m --requests 0", "is not 1 or more"),
        ("--model m --goodput fast:3", "METRIC:MILLISECONDS"),
        ("--model m --metric-percentiles 101", "percentages"),
        ("--model m --length-spread 1", "less than 1"),
        ("--model m --request-rat 1", "unrecognized arguments"),
        *((f"--model m {flag} 1", reason) for flag, reason in NOT_HERE.items()),
    ],
)
def test_options_that_cannot_be_used_say_why(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(options.split())
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_setting_goes_to_the_engine_that_it_names() -> None:
    given = ["llamacpp:gguf=a:b.gguf", "infer.depth=1", "evener:dtype=float32", "x:y=1"]
    assert offline.settings_of("llamacpp", given) == ["gguf=a:b.gguf"]
    assert offline.settings_of("evener", given) == ["infer.depth=1", "dtype=float32", "x:y=1"]
    assert offline.settings_of("transformers", given) == []


# Answers


def answer(*parts: bytes, head: bytes = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n") -> list[Any]:
    chunks = [b"%x\r\n%s\r\n" % (len(part), part) for part in parts]
    return [(0.0, head + b"transfer-encoding: chunked\r\n\r\n"), *((float(i), c) for i, c in enumerate(chunks, 1)),
            (99.0, b"0\r\n\r\n")]  # fmt: skip


def event(value: Any) -> bytes:
    return b"data: " + (json.dumps(value).encode() if value != "[DONE]" else b"[DONE]") + b"\n\n"


def test_a_stream_is_read_with_the_time_at_which_each_token_came() -> None:
    pieces = answer(
        event({"choices": [{"text": "a"}]}),
        event({"choices": [{"delta": {"content": "b"}}]})[:9],
        event({"choices": [{"delta": {"content": "b"}}]})[9:] + event({"choices": [{"delta": {}}]}),
        event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}) + event("[DONE]"),
    )
    got = read(0.5, pieces)
    assert (got.error, got.text, got.times) == ("", "ab", [1.0, 3.0])
    assert (got.prompt_tokens, got.output_tokens, got.ttft, got.e2e, got.itl) == (7, 3, 0.5, 2.5, [2.0])
    assert got.tpot == 1.0


def test_an_answer_in_one_piece_is_read_too() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 3}
    body = json.dumps({"choices": [{"message": {"content": "ab"}}], "usage": usage}).encode()
    got = read(0.0, answer(body, head=b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"))
    assert (got.error, got.text, got.output_tokens, len(got.times)) == ("", "ab", 3, 1)


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([], "without an answer"),
        (answer(b"no", head=b"HTTP/1.1 503 Busy\r\ncontent-type: text/plain\r\n"), "status 503, text/plain: no"),
        (answer(event({"choices": [{"text": "a"}]})), "ended without"),
        (answer(event("[DONE]")), "no token came"),
        (answer(event({"error": {"message": "oh"}}), event("[DONE]")), "oh"),
        (answer(b"data: {\n\n"), "JSONDecodeError"),
        ([(0.0, b"nonsense\r\n\r\n")], "RemoteProtocolError"),
    ],
)
def test_an_answer_that_did_not_end_well_says_why(pieces: list[Any], error: str) -> None:
    assert error in read(0.0, pieces).error


# Runs


def program(name: str, *words: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *map(str, words)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def settings() -> list[str]:
    return [word for pair in SMALL for word in ("--set", pair)]


@pytest.mark.slow
def test_a_sweep_over_a_csv_file_is_measured_written_and_drawn(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.csv"
    data.write_text("prompt\nhello there\nhow are you\n")
    out, perf, texts, picture, report = (tmp_path / name for name in ("o.jsonl", "p.csv", "t.csv", "p.png", "r.html"))
    program(
        "serving.py", "--model", model, "--dataset-path", data, "--requests", "4", "--output-len", "6",
        "--request-rate", "50", "100", "--goodput", "ttft:60000", "--out-json", out, "--perf-csv", perf,
        "--output-csv", texts, "--plot", picture, "--report", report, "--threads", "1", *settings(),
    )  # fmt: skip
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["request_rate"] for row in rows] == [50, 100]
    for row in rows:
        assert row["completed"] == 4 and row["failed"] == 0 and row["total_output_tokens"] == 24
        assert row["goodput"] == row["request_throughput"] and row["cpu"] and row["versions"]["torch"]
    with perf.open() as file:
        assert [float(row["request_rate"]) for row in csv.DictReader(file)] == [50, 100]
    with texts.open() as file:
        assert [row["prompt"] for row in csv.DictReader(file)] == ["hello there", "how are you"] * 4
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert_whole(report.read_text())
    # The same again: a page of both runs.
    again = tmp_path / "again.html"
    assert "8 of 8 answers are equal" in program(
        "serving.py", "--model", model, "--dataset-path", data, "--requests", "4", "--output-len", "6",
        "--request-rate", "50", "100", "--goodput", "ttft:60000", "--compare", out, "--compare-answers", texts,
        "--report", again, "--threads", "1", *settings(),
    )  # fmt: skip
    assert "Since the other run" in again.read_text() and "8 of 8 answers are equal" in again.read_text()


def assert_whole(page: str) -> None:
    """A page of a run: plots and tables, and nothing that is fetched from elsewhere."""
    assert page.startswith("<!doctype html>") and page.count("<svg") == 1 and "time to the first token" in page
    assert "50 requests/s" in page and "100 requests/s" in page
    fetched = re.findall(r"<(?:script|link|img|iframe)\b|url\((?!#)|@import", page)
    assert not fetched and not re.findall(r'(?:src|(?<!xlink:)href)="(?!#)', page)


def row_of(rate: float | None, **figures: Any) -> dict[str, Any]:
    return {
        "engine": "e", "api": "chat", "dataset": "csv", "request_rate": rate, "concurrency": None, "input_len": 8,
        "output_len": 8, "request_throughput": 1.0, **figures,
    }  # fmt: skip


def test_figures_of_two_runs_are_compared_at_the_same_load() -> None:
    now = [row_of(2.0, median_ttft_ms=50.0, request_throughput=3.0), row_of(4.0)]
    was = [row_of(2.0, median_ttft_ms=100.0, request_throughput=2.0), row_of(None)]
    found = {change.unit: (change.point, change.was, change.now, change.part) for change in changes(now, was)}
    assert found == {
        "requests/s": ("e, 2 requests/s", 2.0, 3.0, 0.5),
        "median ms to the first token": ("e, 2 requests/s", 100.0, 50.0, 1.0),
    }


def test_answers_of_two_runs_are_compared_by_prompt_in_order() -> None:
    was = [{"engine": "e", "prompt": p, "text": t} for p, t in (("a", "one"), ("a", "two"), ("b", "three"), ("c", "x"))]
    now = [{"engine": "e", "prompt": p, "text": t} for p, t in (("a", "one"), ("a", "too"), ("b", "three"), ("d", "x"))]
    both, found = differences(now, was)
    assert both == 3 and [(each.was, each.now, each.same) for each in found] == [("two", "too", 1)]
    failed = [{**row, "error": "gone"} for row in now]
    assert differences(failed, was) == differences(now, failed) == (0, [])


def test_a_page_shows_texts_of_answers_as_text() -> None:
    row = {**row_of(None), "completed": 1, "failed": 0, "output_throughput": 1.0, "total_token_throughput": 1.0,
           "others_cores": [0.5], "requests": 1, "median_ttft_ms": 5.0, "median_itl_ms": 5.0}  # fmt: skip
    made = page([row], {"cpu": "<b>", "cores": 2}, answers=(1, [Difference("<script>", "<i>", "</i>")]))
    assert "<script>" not in made and "&lt;script&gt;" in made and "<b>" not in made


@pytest.mark.parametrize("text", ["", "{}", "[1]", "no json"])
def test_something_other_than_a_run_is_not_compared(text: str, tmp_path: Path) -> None:
    (tmp_path / "f").write_text(text)
    for read_file in (read_rows, read_answers):
        with pytest.raises(SystemExit, match="cannot be compared"):
            read_file(tmp_path / "f")


@pytest.mark.slow
def test_many_streams_end_once_each_and_priorities_and_keys_are_measured(model: Path, tmp_path: Path) -> None:
    out, small = tmp_path / "o.jsonl", ("--vocab", "200", "--input-len", "8", "--output-len", "4", *settings())
    program("front_door.py", "streams", model, "--streams", "40", "--rounds", "2", "--out", out, *small)
    program("front_door.py", "priorities", model, "--seconds", "2", "--at-once", "2", "--out", out, *small)
    program("front_door.py", "keys", "--keys", "20", "--repeats", "10", "--out", out)
    streams, priorities, keys = (json.loads(line) for line in out.read_text().splitlines())
    for each in streams["rounds"]:
        assert each["whole"] == each["one_end"] == 40 and each["memory_mib"] > 0
    for name in ("priorities", "equal"):
        assert all(found["whole"] == found["requests"] for found in map(priorities["runs"][name].get, ("high", "low")))
    assert keys["median_us"].keys() == {"first", "last", "wrong", "last character wrong"} and keys["spread"] >= 0
    assert all(str(tmp_path) not in line and str(model) not in line for line in out.read_text().splitlines())


def test_a_stream_that_ends_twice_is_told_from_one_that_ends_once() -> None:
    ends = ['{"choices": [{"text": "x", "finish_reason": "stop"}]}', '{"error": {"message": "gone"}}']
    for count in (1, 2):
        body = "".join(f"data: {event}\n\n" for event in ends[:count]) + "data: [DONE]\n\n"
        head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
        assert read(0.0, [(1.0, (head + body).encode())]).ends == count


def test_the_cost_of_installed_packages_is_measured() -> None:
    found = json.loads(program("plugin_startup.py", "--plugins", "2", "--repeats", "1"))
    assert found["plugins"] == 2 and found["seconds_with"] > 0


@pytest.mark.slow
def test_later_turns_of_chats_are_measured_with_host_memory_and_files(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    text = program(
        "chat_turns.py", model, "--chats", "24", "--prompt", "140", "--more", "4", "--answer", "4", "--kv", "1MiB",
        "--host", "64MiB", "--repeats", "1", "--vocab", "200", "--out", out, "--set", "load=dummy",
        "--set", "infer.threads=1", "--files", tmp_path / "kv",
    )  # fmt: skip
    without, kept, files = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["engine"] for row in (without, kept, files)] == ["without", "host memory", "files after a restart"]
    assert files["cached"][1] > 0 and files["kv_files_hits"] > 0
    assert kept["computed_tokens"] < without["computed_tokens"] and kept["kv_host_hits"] > 0
    assert "times with host memory" in text and "times with files after a restart" in text


@pytest.mark.slow
def test_divisions_of_layers_among_stages_are_measured_and_one_that_does_not_start_says_why(
    model: Path, tmp_path: Path
) -> None:
    program("stage_splits.py", model, "--stages", "cpu:0,cpu:1", "--splits", "auto,9:9", "--alone", "cpu", "--cases",
            "2x8", "--set", "infer.threads=1", "--set", "load=dummy", "--vocab", "200", "--out", tmp_path / "o"
    )  # fmt: skip
    auto, wrong, alone = [json.loads(line) for line in (tmp_path / "o").read_text().splitlines()]
    assert auto["step_ms"] > 0 and auto["prompt_s"] > 0 and alone["split"] == "cpu alone" and alone["step_ms"] > 0
    assert wrong["split"] == "9:9" and "ConfigError" in wrong["problem"]


@pytest.mark.slow
def test_adapters_new_weights_and_stages_are_tried_on_a_device() -> None:
    lines = [json.loads(line) for line in program("device_moves.py", "--backend", "cpu").splitlines()]
    assert [line["part"] for line in lines] == ["adapters", "new weights", "stages cpu,cpu"]
    assert all(line["equal"] and not line["error"] for line in lines)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_perplexity_of_a_real_file_is_within_a_hundredth_of_llama_cpps(tmp_path: Path) -> None:
    """The program fails if it is not."""
    pages = (ROOT / "docs").glob("*author*.md")
    (tmp_path / "text").write_text("".join(page.read_text() for page in sorted(pages)))
    file = models_root() / "gguf" / SOURCES["smollm2"].gguf
    size = ("--context", "256", "--windows", "8")
    found = json.loads(program("perplexity.py", file, "--text", tmp_path / "text", *size))
    assert abs(found["difference"]) < 0.01 and 1 < found["ours"] < 1000


@pytest.mark.slow
@pytest.mark.model
def test_starts_with_and_without_a_model_cache_are_measured(tmp_path: Path) -> None:
    file, out = models_root() / "gguf" / SOURCES["smollm2"].gguf, tmp_path / "o.jsonl"
    program("model_cache.py", file, "--repeats", "1", "--set", "infer.max_reqs=2", "--out", out)
    found = json.loads(out.read_text())
    assert found["cache_mb"] > 90 and found["weights_s"].keys() == found["start_s"].keys() == {"without", "with"}


def test_processes_that_take_turns_are_measured_and_one_that_fails_says_why() -> None:
    code = "import time; data = b'x' * ({} << 20); time.sleep({})"
    commands = {name: [sys.executable, "-c", code.format(*of)] for name, of in (("a", (500, 0)), ("b", (0, 0.2)))}
    found = cpu_start.measure(commands, 1)
    # A process begins as a copy of this one, which may have gigabytes: only the unit is sure.
    assert 500 < found["a"].memory_mib < 50_000
    assert 0 < found["b"].processor_seconds < found["b"].seconds and found["b"].seconds > 0.2
    with pytest.raises(SystemExit, match=r"failed:\n.*no model"):
        cpu_start.once([sys.executable, "-c", "import sys; sys.exit('no model')"])


@pytest.mark.slow
def test_the_engine_alone_is_measured(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    text = program(
        "offline.py", model, "--engine", "evener", "--batch-size", "1", "2", "--input-len", "8", "--output-len", "4",
        "--repeats", "1", "--vocab", "200", "--threads", "1", "--out", out, *settings(),
    )  # fmt: skip
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["job"] for row in rows] == ["1x8+4", "2x8+4"] and all(row["useful_tok_s"] > 0 for row in rows)
    assert "| 2x8+4 | evener" in text


@pytest.mark.slow
def test_the_cost_of_http_is_measured(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    program(
        "http_ratio.py", model, "--streams", "2", "--input-len", "8", "--output-len", "8", "--repeats", "2", "--vocab",
        "200", "--threads", "1", "--out", out, *settings(),
    )  # fmt: skip
    row = json.loads(out.read_text())
    assert len(row["ratios"]) == 2 and row["ratio"] > 0 and set(row["cpu_us_per_token"]) >= {"front end", "worker"}


@pytest.mark.slow
def test_profiled_steps_have_ranges_and_a_trace(model: Path, tmp_path: Path) -> None:
    trace, out = tmp_path / "trace.json", tmp_path / "o.jsonl"
    program(
        "profile.py", model, "--fixed", "2,8,12", "--steps", "2:6", "--trace", trace, "--vocab", "200", "--out", out,
        *settings(),
    )  # fmt: skip
    row = json.loads(out.read_text())
    calls = {line["range"]: line["calls"] for line in row["ranges"]}
    assert calls["step"] == calls["forward"] == 4 and calls["op decoder_layer"] % 4 == 0
    assert [step["requests"] for step in row["steps"]] == [2] * 4
    assert any(entry.get("name") == "forward" for entry in json.loads(trace.read_text())["traceEvents"])


def test_a_step_reads_the_weights_of_the_experts_that_even_choices_hit() -> None:
    one, few = weights_read(CONFIGS["qwen3-30b-a3b"], 1), weights_read(CONFIGS["qwen3-30b-a3b"], 16)
    assert one[0] == pytest.approx(8) and few[0] == pytest.approx(82.42, abs=0.01)
    assert few[1] - one[1] == pytest.approx(48 * (few[0] - 8) * 3 * 2048 * 768)
    cut = {**CONFIGS["qwen3-30b-a3b"], "num_experts": 8}
    assert weights_read(cut, 1)[0] == weights_read(cut, 64)[0] == 8
    linear = 36 * 4096 * (6144 + 4096 + 3 * 12288)
    assert weights_read(CONFIGS["qwen3-8b"], 64) == (1, linear + 2 * 151936 * 4096)


def test_a_failed_request_fails_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--base-url", "http://127.0.0.1:9", "--served-model-name", "m", "--warmup", "0"]
    assert serving.main(options) == 1
    assert "1 requests failed, the first with: ConnectionRefusedError" in capsys.readouterr().err


# What has to be seen on accelerators


def test_every_part_of_the_accelerator_check_names_something_that_there_is() -> None:
    words = Namespace(backend="cuda", set=[], out="out", cases="", weights="normal")
    tests = re.findall(r"def (test_\w+)", (ROOT / "tests" / "test_accelerator.py").read_text())
    for part in (*gpu_check.PARTS, "kit:collectives", "models"):
        command, (kind, _, name) = gpu_check.command_of(part, words), part.partition(":")
        if kind == "kit":
            asked, _ = conformance_command().parse(command[command.index("conformance") + 1 :])
            assert asked.op[0] in AREAS and set(asked.dtype) <= {"float32", "float16", "bfloat16"}
        elif kind == "models":
            assert any(command[command.index("-k") + 1] in test for test in tests)
        else:
            assert part == "doctor" or (kind in ("speed", "eager", "profile", "experts") and name in CONFIGS), part


def test_the_memory_of_a_device_can_be_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("memory", "select"):
        monkeypatch.setattr(TorchDevice, name, getattr(TorchDevice, name))
    limits: list[tuple[float, int]] = []
    monkeypatch.setattr(TorchDevice, "memory", lambda device: MemoryInfo(70_000, 80_000))
    device = TorchDevice.__new__(TorchDevice)
    device.index, device.module = (
        0,
        Namespace(set_device=lambda index: None, set_per_process_memory_fraction=lambda *limit: limits.append(limit)),
    )
    hybrid.cap_memory(16_000)
    device.select()
    assert device.memory() == MemoryInfo(6_000, 16_000) and limits == [(0.2, 0)]


@pytest.mark.slow
def test_a_model_larger_than_the_device_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_simulated_backend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    config = {**find_architecture("Qwen3MoeForCausalLM").tiny_config(), "num_attention_heads": 4, "num_experts": 64,
              "num_key_value_heads": 4, "hidden_size": 64, "moe_intermediate_size": 64}  # fmt: skip
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    keys = ("backend=simulated", "infer.max_seq_len=128", "infer.max_reqs=2", "infer.step_tokens=64", "dtype=float32",
            "infer.kv_memory=4MiB", "offload.stream_prompts=off", "offload.pass_experts=25",
            "offload.pass_experts_rows=2", "offload.host_when_sooner=auto")  # fmt: skip
    program(
        "hybrid.py", tmp_path / "model", "--cap", "16MiB", "--forms", "bf16", "--layers", "1", "--residents", "8",
        "--cases", "2x16", "--steps", "3", "--apart", "8MiB", "--pass", "0,25", "--out", tmp_path,
        *(word for pair in keys for word in ("--set", pair)),
    )  # fmt: skip
    rows = [json.loads(line) for line in (tmp_path / "hybrid.jsonl").read_text().splitlines()]
    without, host, alone, resident = rows
    assert (host["way"], host["host_layers"], resident["way"], resident["residents"]) == ("host", 1, "resident", 8)
    for first, second in ((without, host), (alone, resident)):
        assert (first["passing"], first["counted_a_step"]["host_expert_passed_bytes"], second["passing"]) == (0, 0, 25)
    for row in (host, resident):
        assert row["step_ms"] > 0 and row["moved_ms"] > 0 and row["cap_gb"] == 0.02
    # On a busy machine the share of so small a model is rounded to 0.
    assert host["step_host_share"] >= 0 and host["counted_a_step"]["host_expert_read_bytes"] > 0
    for row, layers in ((host, 1), (resident, config["num_hidden_layers"])):
        passed, counted = layers * 16 * 3 * 64 * 64 * 4, row["counted_a_step"]
        assert passed <= counted["host_expert_passed_bytes"] < 1.1 * passed, "16 of 64 experts, in each step"
    assert resident["counted_a_prompt"]["expert_hits"] > 0


def test_products_of_the_processor_are_timed_in_each_form(tmp_path: Path) -> None:
    out = tmp_path / "products.jsonl"
    words = ["--size", "256", "--rows", "1,5", "--calls", "2", "--out", str(out)]
    assert cpu_products.main(["--forms", "nvfp4,nf4,q4_k,plain", *words]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["form"], row["rows"]) for row in rows] == [
        (form, rows) for form in ("nvfp4", "nf4", "q4_k", "plain") for rows in (1, 5)]  # fmt: skip
    for row in rows:
        assert 0 < row["ms"] <= row["median_ms"]
        assert row["gflops"] == pytest.approx(2 * row["rows"] * 256**2 / row["ms"] / 1e6, rel=0.2)
    with pytest.raises(SystemExit, match="unknown forms: nvfp5; known are plain, nvfp4, "):
        cpu_products.main(["--forms", "nvfp5", *words])


def test_a_profile_says_where_no_kernel_runs() -> None:
    def event(name: str, where: str, start: float, end: float) -> Namespace:
        return Namespace(name=name, device_type=Namespace(name=where), time_range=Namespace(start=start, end=end))

    work = [event(gpu_check._WORK, where, 0, 100_000) for where in ("CPU", "CUDA")]
    kernels = [event("a", "CUDA", 2_000, 5_000), event("b", "CUDA", 4_000, 9_000), event("c", "CUDA", 9_500, 98_000)]
    profile = Namespace(events=lambda: [*work, *kernels])
    assert gpu_check.idle(profile).startswith("2.00 before, 2.00 after, 0.50 between: 0.50 at 9.5 (b, c)")
    assert gpu_check.busy(profile) == 95.5


def test_experts_of_the_host_are_timed_beside_the_speed_of_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_experts, "HIDDEN", 256)
    monkeypatch.setattr(host_experts, "MODEL", replace(host_experts.MODEL, experts=8, top=2, inner=256))
    monkeypatch.setattr(host_experts, "APART", 1 << 22)
    words = ["--layers", "2", "--tokens", "1,3", "--threads", "1", "--pause", "0", "--calls", "3"]
    words += ["--out", str(tmp_path)]
    assert host_experts.main(["--forms", "q4_k:q6_k,bf16", *words]) == 0
    rows = [json.loads(line) for line in (tmp_path / "host_experts.jsonl").read_text().splitlines()]
    assert [(row["form"], row["tokens"]) for row in rows] == [
        ("q4_k:q6_k", 1), ("q4_k:q6_k", 3), ("bf16", 1), ("bf16", 3)]  # fmt: skip
    for row in rows:
        nbytes = 2 * 256 * 256 * ((2 * 4.5 + 6.5625) / 8 if "q4" in row["form"] else 6)
        assert row["gb_s"] == pytest.approx(nbytes / row["us"] / 1e3, abs=0.06, rel=0.06)
    with pytest.raises(SystemExit, match="unknown forms: q4_x; known are bf16, "):
        host_experts.main(["--forms", "q4_k:q4_x", *words])


@pytest.mark.slow
def test_a_model_that_nothing_here_holds_is_planned_and_its_steps_are_added_up_from_one_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_simulated_backend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    shape = {"first_k_dense_replace": 1, "num_hidden_layers": 9, "n_routed_experts": 64, "hidden_size": 64,
             "moe_intermediate_size": 64}  # fmt: skip
    config = {**find_architecture("DeepseekV3ForCausalLM").tiny_config(), **shape}
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    keys = ("backend=simulated", "infer.max_seq_len=128", "infer.max_reqs=2", "infer.step_tokens=64", "dtype=float32",
            "infer.kv_memory=4MiB", "offload.stream_prompts=off")  # fmt: skip
    program(
        "one_expert_layer.py", tmp_path / "model", "--cap", "24MiB", "--host", "64GiB", "--cases", "2x16",
        "--steps", "3", "--apart", "8MiB", "--out", tmp_path, *(word for pair in keys for word in ("--set", pair)),
    )  # fmt: skip
    [row] = (json.loads(line) for line in (tmp_path / "one_expert_layer.jsonl").read_text().splitlines())
    assert row["expert_layers"] == 8 and row["plan_gb"] and row["layer_host_gb"] > 0
    whole = row["first_part_ms"] + 7 * row["layer_ms"]
    assert row["model_step_ms"] == pytest.approx(whole, abs=0.1)


@pytest.mark.slow
def test_pipeline_transport_is_checked_between_two_ranks() -> None:
    rows = {row["rank"]: row for row in map(json.loads, program("rank_check.py", "pipe").splitlines())}
    assert "post_s" in rows[0] and rows[0]["round_us"] > 0 and "synchronize_s" in rows[1]


@pytest.mark.slow
def test_ranks_that_hang_show_where_and_are_ended() -> None:
    words = ["tokens", "--families", "Llama", "--ranks", "1", "--stages", "2", "--limit", "2"]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "rank_check.py"), *words], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 1 and json.loads(done.stdout)["answers"] is None
    assert "Fatal Python error: Aborted" in done.stderr and "most recent call first" in done.stderr


def test_a_pretended_backend_takes_every_gpu_there_is_and_is_the_installed_package_otherwise(tmp_path: Path) -> None:
    code = """
import importlib, sys
from pathlib import Path
import torch
from pretend import pretend
from evener.plugins.discover import discover

pretend("hygon", Path(sys.argv[1]))
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 2
torch.cuda.get_device_name = lambda index: f"a GPU of somebody, {index}"
[found] = [package.descriptor for package in discover(environ={}).backends if package.name == "hygon"]
probe = importlib.import_module(found.probe)
print(found.module, probe.marks().fit, [device.name for device in probe.probe().devices])
"""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(BENCHMARKS)]))
    done = subprocess.run([warm() / "python", "-c", code, str(tmp_path)], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": path})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split(" ", 2) == [
        "evener_backend_hygon.plugin", "True", "['a GPU of somebody, 0', 'a GPU of somebody, 1']\n",
    ]  # fmt: skip


def test_ranks_of_a_pretended_backend_are_for_tokens_alone() -> None:
    words = [sys.executable, str(BENCHMARKS / "rank_check.py"), "sums", "--pretend", "hygon"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 2 and "type: tokens --pretend BACKEND" in done.stderr


@pytest.mark.slow
def test_tokens_of_stages_are_compared_with_those_of_one_rank() -> None:
    row = json.loads(program("rank_check.py", "tokens", "--families", "Llama", "--ranks", "1", "--stages", "2"))
    assert row["answers"] == row["same"] == 38 and row["lacks"] == []


# The memory checker


@pytest.mark.parametrize(
    ("status", "text", "verdict"),
    [
        (0, "cases: 3 passed\n========= ERROR SUMMARY: 0 errors\n", (0, "clean")),
        (9, "========= Invalid __global__ write of size 2\n========= ERROR SUMMARY: 4 errors\n", (1, "4 findings")),
        (1, "========= ERROR SUMMARY: 0 errors\n", (1, "0 findings, status 1")),
        (9, "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n", (1, "1 findings")),
        (0, "========= Error: Device not supported\n========= ERROR SUMMARY: 0 errors\n", (2, "runtime refuses it")),
        (-11, "", (1, "without a summary")),
    ],
)
def test_a_run_under_the_checker_is_clean_only_if_it_was_followed_to_its_end(
    status: int, text: str, verdict: tuple[int, str]
) -> None:
    code, words = sanitize.parse_verdict(status, text)
    assert code == verdict[0]
    assert verdict[1] in words


def test_a_machine_without_the_checker_is_told_where_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sanitize, "find_tool", lambda: None)
    assert sanitize.main([]) == 2
    assert "comes with the CUDA toolkit" in capsys.readouterr().out


@pytest.mark.parametrize("form", quantized_checkpoint.QUANTIZATION)
@pytest.mark.parametrize("model", [pytest.param("qwen3-8b", marks=pytest.mark.slow), "qwen3-30b-a3b"])
def test_a_written_folder_of_8_bit_weights_is_read_as_it_is_stored(model: str, form: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    small = {"intermediate_size": 384, "moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
    known = {name: size for name, size in {**sizes, **small}.items() if name in CONFIGS[model]}
    folder = quantized_checkpoint.write(model, form, tmp_path, num_hidden_layers=2, **known)
    options = ["--backend", "cpu", "infer.max_seq_len=64", "infer.kv_memory=8MiB"]
    done = subprocess.run(
        [warm() / "evener", "explain", str(folder), *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    layouts = next(line for line in done.stdout.splitlines() if line.startswith("packings:"))
    assert "cpu.stored" in layouts and "it fits" in done.stdout, layouts


@pytest.mark.slow
@pytest.mark.parametrize("requests", [1, 3])
def test_a_draft_model_with_the_same_weights_is_right_and_a_row_says_what_it_cost(
    requests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256}  # fmt: skip
    monkeypatch.setitem(CONFIGS, "qwen3-8b", {**CONFIGS["qwen3-8b"], **tiny})
    args = ["qwen3-8b", "--always", "--drafts", "2", "--tokens", "25", "--out", str(tmp_path / "rows")]
    args += ["--requests", str(requests)]
    args += [f"--set={pair}" for pair in ("infer.use_cuda_graph=false", "infer.kv_memory=8MiB", "backend=cpu")]
    assert draft_costs.main(args) == 0
    plain, drafted = (json.loads(line) for line in (tmp_path / "rows").read_text().splitlines())
    assert (plain["steps"], plain["drafted"]) == (24, 0)
    assert drafted["equal"] == 25 and drafted["steps"] < 14, "nearly all requests are in each step"
    assert drafted["accepted"] == drafted["drafted"] > 11 * requests


def test_a_start_s_parts_are_told_from_the_main_thread_s_stack() -> None:
    loading = [("/x/weights.py", "load_stage", 70), ("/x/worker.py", "__init__", 70), ("/x/start.py", "_executor", 60)]
    waits = [("/lib/concurrent/futures/_base.py", "result", 1), ("/x/upload.py", "_send", 2), *loading]
    imports = [("<frozen importlib._bootstrap>", "_find_and_load", 1), ("/x/start.py", "_executor", 60)]
    assert start_parts.part_of(waits) == "weights: waits for reads"
    assert start_parts.part_of(waits[1:]) == "weights: copies, packing"
    assert start_parts.part_of(loading) == "weights: other"
    assert start_parts.part_of(waits[:2]) == "other", "a thread's result that is no weight"
    assert start_parts.part_of(imports) == "imports"


def test_a_cold_start_reads_files_past_the_systems_cache(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes((3 << 20) + 5))
    assert cold_start.weight_files(tmp_path) == [file] == cold_start.weight_files(file)
    file.read_bytes()
    assert cold_start.resident_share(file) == 1.0
    cold_start.evict([file])
    assert cold_start.direct_read([file], 2, 1 << 20) > 0
    assert cold_start.fastest_reading([file]) in cold_start.TRIED
    assert cold_start.resident_share(file) <= cold_start.MAX_RESIDENT, "the direct read went through the cache"


def test_processes_that_a_benchmark_started_and_that_have_ended_are_its_own() -> None:
    # The system counts whole ticks, rounded down: of 0.5 seconds some hundredths may be missing.
    spin = "import time\nwhile time.process_time() < 0.5: pass"
    before = machine.own_seconds()
    subprocess.run([sys.executable, "-c", spin], check=True)
    assert machine.own_seconds() - before >= 0.4


@pytest.mark.parametrize(
    ("text", "reason"),
    [("messages/1/10", "a way is"), ("messages/1/ten/all", "a way is"), ("rumours/1/10/all", "kernels are"),
     ("leader-push/1/10/all", "clusters have 8, 16 programs"), ("messages/4/10/all", "or 1"),
     ("none/1/11/all", "at most 10"), ("none/1/0/all", "at least 1"), ("messages/1/10/-1", "AHEAD")],
)  # fmt: skip
def test_a_way_of_exchanging_that_does_not_exist_is_refused(text: str, reason: str) -> None:
    import exchange_latency

    with pytest.raises(ValueError, match=reason):
        exchange_latency.Way.of(text)


def test_rows_of_exchanges_leave_out_first_rounds_and_the_times_of_leaders() -> None:
    import exchange_latency
    import torch

    ways = [exchange_latency.Way.of(text) for text in exchange_latency.WAYS]
    assert {way.kernel for way in ways} == set(exchange_latency.KERNELS)
    assert [exchange_latency.Way("leader-push", c, 10, None).workers(128 // c) for c in (8, 16)] == [112, 120]
    assert exchange_latency.Way("probe", 1, 10, None).workers(128) == 128
    stamps, rounds = torch.zeros(3, exchange_latency.WARM + 4, 4, dtype=torch.int64), range(4)
    for n in rounds:  # every 20 µs: one tells 500 ns after the other, both have all 2,000 ns after that
        at, end = 20_000 * n, 20_000 * n + 2500
        stamps[1, exchange_latency.WARM + n] = torch.tensor([7, 7 + 4000 + n, at, end])
        stamps[2, exchange_latency.WARM + n] = torch.tensor([7, 7 + 3000, at + 500, end])
        stamps[0, exchange_latency.WARM + n, 2:] = torch.tensor([at + 1300, at + 1400])
    leaders = torch.tensor([True, False, False])
    row = exchange_latency.exchanged(stamps, leaders, 90_000_000)
    assert row == {
        "us": 20.0, "tb_s": 4.5, "cycles": [3000, 4000, 4003], "last_cycles": 3000, "after_last_ns": [2000] * 3,
        "gathered_ns": [800] * 3,
    }  # fmt: skip
    assert "gathered_ns" not in exchange_latency.exchanged(stamps[1:], leaders[1:], 90_000_000)
    way = exchange_latency.Way("probe", 8, 10, None)
    found = exchange_latency.probed(stamps[:, exchange_latency.WARM :], leaders, way)
    assert found["leaders"]["neighbour"] == [1300, 41_300, 61_300]
    assert found["workers"]["fence"] == [3007, 4007, 4010]

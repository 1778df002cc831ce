"""What ``evener bench-engine`` measures: an engine's steps on synthetic prompts, without a server; with
``infer.layers`` also what a layer of each kind costs, and what the whole model would."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from evener.config.resolve import layer_numbers
from evener.config.schema import Config
from evener.errors import ConfigError
from evener_inspection.kind_costs import CostRun, Costs, cost_runs, costs, estimate
from evener_inspection.layer_facts import LayerFacts, ModelFacts, model_facts
from evener_inspection.step_times import Load, StepTimes, TimedClient, time_steps

#: Tokens of a step by which a request's length is planned before the engine has chosen: no device has fewer.
_LEAST_STEP = 2048
_STAGES = ("prefill", "decode")
_UNKNOWN = "the estimate is smaller than the noise: name more layers, or raise --repeats"


@dataclass(frozen=True)
class Bench:
    """The batches that are run, one after another on one engine, and how often."""

    loads: tuple[Load, ...]
    repeats: int


def run_bench(config: Config, bench: Bench) -> dict[str, Any]:
    """The times, as plain data.

    Raises:
        ConfigError: the model generates nothing, a batch does not fit the configuration, or it has a drafter.
        EvenerError: as when the engine starts.
    """
    if config.infer.proposes != "none":
        raise ConfigError(f"infer.drafter={config.infer.proposes}: evener bench-engine times steps of one token a "
                          "request; leave infer.drafter and infer.draft_model out")  # fmt: skip
    facts = model_facts(config)
    chosen = layer_numbers("infer.layers", config.infer.layers) or tuple(each.number for each in facts.layers)
    if chosen[-1] > facts.layers[-1].number:
        raise ConfigError(f"infer.layers={','.join(config.infer.layers)}: the model has layers 0 to "
                          f"{facts.layers[-1].number}")  # fmt: skip
    kinds, config = facts.kinds(), _sized(config, bench, facts.positions)
    about, whole = _measure(config, bench)
    runs = cost_runs(chosen, kinds) if config.infer.layers else []
    apart = [(run, _measure(_with_layers(config, run), bench)[1]) for run in runs]
    layers = [layer for layer in facts.layers if layer.number in chosen]
    counts = {kind: len(numbers) for kind, numbers in kinds.items()}
    rows = []
    for index, load in enumerate(bench.loads):
        row = _row(load, whole[index], layers, facts.head)
        if runs:
            held = {kind: len([n for n in chosen if n in numbers]) for kind, numbers in kinds.items()}
            found = {stage: costs(_seconds(whole[index], stage),
                                  [(run, _seconds(times[index], stage)) for run, times in apart], held)
                     for stage in _STAGES}  # fmt: skip
            row |= {"by_layer": _by_layer(found), "estimate": _estimate(load, found, counts)}
        rows.append(row)
    notes = _notes(config, chosen, facts, bool(runs))
    unknown = [_UNKNOWN] if any(None in each.values() for row in rows for each in row.get("by_layer", ())) else []
    return {
        **about, "layers": list(chosen), "layer_count": len(facts.layers),
        "kinds": [{"kind": kind, "layers": numbers, "run": [n for n in numbers if n in chosen]}
                  for kind, numbers in kinds.items()],
        "rows": rows, "notes": [*notes, *unknown],
    }  # fmt: skip


def _sized(config: Config, bench: Bench, positions: int) -> Config:
    """The configuration with room for the batches where it says ``auto``.

    Args:
        positions: tokens of the model's longest request.

    Raises:
        ConfigError: it says otherwise, or the model's requests are shorter.
    """
    infer = config.infer
    most = max(load.requests for load in bench.loads)
    step = _LEAST_STEP if infer.step_tokens == "auto" else infer.step_tokens
    longest = max(load.prompt + load.new_tokens(step) for load in bench.loads)
    if infer.max_reqs != "auto" and infer.max_reqs < most:
        raise ConfigError(f"--batch-size {most} is more than infer.max_reqs={infer.max_reqs}; leave infer.max_reqs out")
    if infer.max_seq_len != "auto" and infer.max_seq_len < longest:
        raise ConfigError(
            f"requests get up to {longest} tokens: --input-len, --output-len, and those of steps in which other "
            f"prompts are computed; but infer.max_seq_len={infer.max_seq_len}: leave it out"
        )
    if longest > positions:
        raise ConfigError(f"--input-len and --output-len make requests of up to {longest} tokens, and the model has "
                          f"{positions} positions: lower --input-len or --output-len")  # fmt: skip
    reqs = most if infer.max_reqs == "auto" else infer.max_reqs
    length = longest if infer.max_seq_len == "auto" else infer.max_seq_len
    return replace(config, infer=replace(infer, max_reqs=reqs, max_seq_len=length))


def _with_layers(config: Config, run: CostRun) -> Config:
    return replace(config, infer=replace(config.infer, layers=tuple(map(str, run.layers))))


@contextmanager
def _engine(config: Config) -> Iterator[tuple[Any, TimedClient]]:
    from evener.engine.processes.start import start_engine
    from evener.frontend.settings import FrontendSettings
    from evener.llm import LLM

    client = TimedClient(start_engine(config, "inline"))
    with LLM.from_client(client, settings=FrontendSettings.from_config(config)) as llm:
        yield llm, client


def _measure(config: Config, bench: Bench) -> tuple[dict[str, Any], list[list[StepTimes]]]:
    """What ran, and the times of each load's repeats. A first repeat that does not count warms up."""
    seeds = count(config.seed)
    with _engine(config) as (llm, client):
        info = llm.info
        if info.pooling is not None:
            raise ConfigError(f"{config.model} generates no text, and evener bench-engine times generation")
        step = info.config["infer.step_tokens"].value
        times = []
        for load in bench.loads:
            wanted = load.new_tokens(min(step, _LEAST_STEP))
            every = [time_steps(llm, client, load, wanted, next(seeds)) for _ in range(bench.repeats + 1)]
            times.append(every[1:])
    about = {
        "model": info.served_name, "architecture": info.architecture, "device": info.device, "backend": info.backend,
        "dtype": info.dtype, "tp_size": config.infer.tp_size, "pp_size": config.infer.pp_size,
        "weights": "random" if config.load == "dummy" else "the checkpoint's", "memory": info.memory.to_json(),
    }  # fmt: skip
    del llm, client
    gc.collect()  # an engine has cycles, and its weights are on the device
    return about, times


def _decode(times: Sequence[StepTimes]) -> list[float]:
    return sorted(step for each in times for step in each.decode)


def _seconds(times: Sequence[StepTimes], stage: str) -> float:
    """The median: of a step, or of a batch's prefill."""
    return statistics.median(_decode(times) if stage == "decode" else [each.prefill for each in times])


def _row(load: Load, times: Sequence[StepTimes], layers: Sequence[LayerFacts], head: int) -> dict[str, Any]:
    steps, prefill = _decode(times), _seconds(times, "prefill")
    median, context = statistics.median(steps), load.prompt + load.steps // 2
    weights = head + sum(layer.weight_bytes(load.requests) for layer in layers)
    state = sum(layer.state_bytes(load.requests, context) for layer in layers)
    return {
        "batch_size": load.requests, "input_len": load.prompt, "decode_steps": load.steps,
        "prefill_s": prefill, "prefill_tok_s": load.requests * load.prompt / prefill,
        "step_ms": 1e3 * median, "step_p90_ms": 1e3 * steps[int(0.9 * (len(steps) - 1))], "steps": len(steps),
        "decode_tok_s": load.requests / median,
        "step_weight_bytes": round(weights), "step_state_bytes": state, "read_gb_s": (weights + state) / median / 1e9,
    }  # fmt: skip


def _by_layer(found: Mapping[str, Costs]) -> list[dict[str, Any]]:
    prefill, decode = (found[stage] for stage in _STAGES)
    rows = [
        {"kind": kind, "prefill_ms": _ms(prefill.layers[kind]), "step_ms": _ms(decode.layers[kind])}
        for kind in decode.layers
    ]
    return [*rows, {"kind": "the rest", "prefill_ms": _ms(prefill.rest), "step_ms": _ms(decode.rest)}]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _estimate(load: Load, found: Mapping[str, Costs], counts: Mapping[str, int]) -> dict[str, Any]:
    """Of the whole model. Not measured."""
    prefill, step = (estimate(found[stage], counts) for stage in _STAGES)
    return {"prefill_s": prefill, "step_ms": _ms(step), "decode_tok_s": None if step is None else load.requests / step}


def _notes(config: Config, chosen: Sequence[int], facts: ModelFacts, apart: bool) -> Iterator[str]:
    if not config.infer.layers:
        yield "all layers ran; infer.layers=0-3 runs some of them, and shows the time of one layer of each kind"
        return
    yield (f"{len(chosen)} of the model's {len(facts.layers)} layers ran: the times are theirs, and the text that they "
           "computed is not the model's")  # fmt: skip
    if not apart:
        yield "the time of one layer is not known: it takes two layers of a kind, or layers of two kinds"
    for kind, numbers in facts.kinds().items():
        if apart and not any(n in chosen for n in numbers):
            yield f"no layer of the kind {kind!r} ran, so the whole model is not estimated; add layer {numbers[0]}"
    if config.infer.tp_size > 1:
        yield "bytes are those of one rank"
    if any(layer.experts for layer in facts.layers if layer.number in chosen):
        yield "bytes of experts are those that are expected if all are equally likely"

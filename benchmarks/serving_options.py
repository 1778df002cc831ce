"""The options of ``serving.py``.

They are those of chitu's ``benchmark_serving`` and of KsanaLLM's ``benchmark_throughput``, with one spelling each; the
old spellings are accepted too. ``NOT_HERE`` lists options that are not supported, and why.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from dataset import KINDS
from serving_metrics import METRICS, ServiceLevel

SERVERS = ("evener", "llamacpp", "transformers", "openai-url")

#: Options of the two programs that are refused, with what to do.
NOT_HERE = {
    "--backend": "all servers are used through the OpenAI API; name the server with --engine",
    "--triton_model_name": "the OpenAI API only; name the model with --served-model-name",
    "--clear_cache": "random prompts share no prefix; start the server with infer.prefix_cache=false to be sure",
    "--force-max-min-bs": "no server here waits for a batch to fill",
    "--no_repeat_ngram_size": "no such parameter in the OpenAI API; KsanaLLM's /generate has it",
    "--encoder_no_repeat_ngram_size": "no such parameter in the OpenAI API; KsanaLLM's /generate has it",
    "--decoder_no_repeat_ngram_size": "no such parameter in the OpenAI API; KsanaLLM's /generate has it",
    "--enable_diff_check": "--compare-answers FILE compares the answers with those of an earlier --output-csv",
}


class _Refuse(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        parser.error(f"{flag}: {NOT_HERE[str(flag)]}")


def _rate(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not a rate; give requests a second, or inf")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _goal(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    name = "e2el" if name == "e2e" else name
    try:
        value = float(limit)
    except ValueError:
        value = -1.0
    if name not in METRICS or not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not METRIC:MILLISECONDS with a metric of {', '.join(METRICS)}")
    return name, value / 1000


def _percents(text: str) -> list[float]:
    found = [float(word) for word in text.split(",")]
    if not all(0 <= value <= 100 for value in found):
        raise argparse.ArgumentTypeError(f"{text} is not a list of percentages")
    return found


def _what_is_asked(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is asked")
    group.add_argument("--dataset", "--dataset_name", choices=KINDS, help="default: random, or csv with --dataset-path")
    group.add_argument("--dataset-path", "--dataset_path", "--input_csv", type=Path, metavar="FILE")
    group.add_argument("--column", "--col_idx", type=int, default=0, metavar="N", help="of a CSV file, from 0")
    group.add_argument("--no-header", action="store_true", help="the CSV file's first row is a prompt")
    group.add_argument("--shuffle", action="store_true", help="take the file's prompts in a random order")
    group.add_argument("--input-len", "--seq-len", "--random_input_len", type=_count, metavar="TOKENS",
                       help="length of made-up prompts (default 128); a file's are cut and joined to this")  # fmt: skip
    group.add_argument("--output-len", "--max_new_tokens", type=_count, default=128, metavar="TOKENS")
    group.add_argument("--length-spread", type=float, default=0.0, metavar="X", help="lengths vary by up to this part")
    group.add_argument("--tokenizer-path", "--tokenizer_path", type=Path, metavar="DIR", help="has tokenizer.json: for "
                       "made-up text, and to cut prompts of a file")  # fmt: skip
    group.add_argument("--vocab", type=_count, default=40000, help="made-up token ids are below this")
    group.add_argument("--template", metavar="TEXT", help="text around each prompt, which replaces %%s")
    group.add_argument("--requests", "--num-prompts", "--batch-size", "--prompt_num", type=_count, default=1,
                       help="requests of an iteration")  # fmt: skip
    group.add_argument("--seed", type=int, default=0)


def _how(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how it is asked")
    group.add_argument("--api", choices=("completions", "chat"), default="completions")
    group.add_argument("--chat-template", "--chat_template", dest="api", action="store_const", const="chat",
                       help="the same as --api chat")  # fmt: skip
    group.add_argument("--stream", action="store_true", default=True, help="server-sent events (the default)")
    group.add_argument("--no-stream", dest="stream", action="store_false", help="answers in one piece")
    group.add_argument("--ignore-eos", "--ignore_eos", action="store_true", default=True, help="go on after the end "
                       "token, so that answers have the asked length (the default)")  # fmt: skip
    group.add_argument("--stop-at-eos", dest="ignore_eos", action="store_false")
    group.add_argument("--temperature", type=float, default=0.0)
    group.add_argument("--top-p", "--topp", type=float)
    group.add_argument("--top-k", "--topk", type=int)
    group.add_argument("--repetition-penalty", "--repetition_penalty", type=float)
    group.add_argument("--n", "--num_return_sequences", type=_count)
    group.add_argument("--num-beams", "--num_beams", type=_count, metavar="N", help="beam search; with --no-stream")
    group.add_argument("--length-penalty", "--length_penalty", type=float, metavar="X", help="of beam search")
    group.add_argument("--structured-output-regex", "--structured_output_regex", metavar="REGEX", help="answers have "
                       "this form")  # fmt: skip
    group.add_argument("--structured-output-file", "--structured_output_file", type=Path, metavar="FILE",
                       help="file with such a regular expression")  # fmt: skip
    group.add_argument("--logprobs", type=int)
    group.add_argument("--stop", "--stop_strings", nargs="*")
    group.add_argument("--stop-token-ids", "--stop_token_ids", type=int, nargs="*")
    group.add_argument("--extra-body", type=json.loads, default={}, metavar="JSON", help="further fields of each body")
    group.add_argument("--api-key", help="sent as Authorization: Bearer")
    group.add_argument("--timeout", "--client_timeout", type=float, default=600.0, metavar="SECONDS")


def _load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument("--request-rate", "--request_rate", type=_rate, nargs="+", default=[math.inf], metavar="PER_S",
                       help="requests a second; several: a sweep; inf (the default): all at once")  # fmt: skip
    group.add_argument("--request-rate-step", "--request_rate_step", type=float, default=1.0)
    group.add_argument("--request-rate-num-iters", "--request_rate_num_iters", type=_count, default=1,
                       help="a sweep by steps from the first rate on")  # fmt: skip
    group.add_argument("--request-interval", type=float, default=0.0, metavar="SECONDS", help="equal gaps instead of a "
                       "rate")  # fmt: skip
    group.add_argument("--arrival", choices=("poisson", "uniform"), default="poisson")
    group.add_argument("--random", dest="arrival", action="store_const", const="poisson", help="the same as "
                       "--arrival poisson")  # fmt: skip
    group.add_argument("--burst", type=_count, default=1, help="requests that arrive together (KsanaLLM's "
                       "--concurrency at a finite rate)")  # fmt: skip
    group.add_argument("--concurrency", "--max-concurrency", type=_count, nargs="+", default=[], help="at most so many "
                       "under way; several: a sweep")  # fmt: skip
    group.add_argument("--mode", choices=("async", "sync"), default="async", help="sync: one after the other")
    group.add_argument("--iterations", "--repeat_num_iters", type=_count, default=1)
    group.add_argument("--warmup", "--warmup_num_iters", type=int, default=1, help="iterations that are not counted")
    group.add_argument("--max-avg-latency", "--max_avg_latency", type=float, default=math.inf, metavar="SECONDS",
                       help="end a sweep above this mean")  # fmt: skip
    group.add_argument("--max-first-token-latency", "--max_first_token_latency", type=float, default=math.inf,
                       metavar="SECONDS")  # fmt: skip


def _results(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument("--metric-percentiles", type=_percents, default=[50.0, 90.0, 99.0], metavar="P,P,…")
    group.add_argument("--percentiles", type=float, nargs="+", dest="metric_percentiles", metavar="P")
    group.add_argument("--percentile-metrics", default=",".join(METRICS), metavar="NAME,NAME,…", help="those printed")
    group.add_argument("--show_decode_token_throughput", "--show-decode-throughput", action="store_true")
    group.add_argument("--goodput", type=_goal, nargs="+", default=[], metavar="METRIC:MS", help="count requests that "
                       "keep these limits, as in ttft:500 tpot:50")  # fmt: skip
    group.add_argument("--out-json", type=Path, metavar="FILE", help="a JSON line for each row")
    group.add_argument("--perf-csv", "--perf_csv", type=Path, metavar="FILE", help="a CSV row for each row")
    group.add_argument("--output-csv", "--output_csv", type=Path, metavar="FILE", help="a CSV row for each request, "
                       "with its text")  # fmt: skip
    group.add_argument("--output-dir", type=Path, metavar="DIR", help="benchmark_results.jsonl in this folder")
    group.add_argument("--append-result", action="store_true", help="append to JSON files instead of overwriting them")
    group.add_argument("--plot", type=Path, metavar="FILE", help="a picture of the sweep; needs matplotlib")
    group.add_argument("--report", type=Path, metavar="FILE", help="a page about the run in one HTML file; needs "
                       "matplotlib")  # fmt: skip
    group.add_argument("--compare", type=Path, metavar="FILE", help="--out-json of an earlier run: what has changed")
    group.add_argument("--compare-answers", type=Path, metavar="FILE", help="--output-csv of an earlier run: which "
                       "answers differ")  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """All options."""
    made = argparse.ArgumentParser(
        prog="serving.py", description="Load on servers that speak the OpenAI API.", allow_abbrev=False
    )
    group = made.add_argument_group("servers")
    group.add_argument("--model", help="model folder (or, for openai-url alone, just the name)")
    group.add_argument("--engine", action="append", choices=SERVERS, help="server to start and measure; may be "
                       "repeated, then they take turns. Default: openai-url with --base-url, else evener")  # fmt: skip
    group.add_argument("--base-url", help="of a server that runs already")
    group.add_argument("--host", help="the same in two parts")
    group.add_argument("--port", type=int)
    group.add_argument("--served-model-name", help="the model name to send; default: the first that the server lists")
    group.add_argument("--gguf", type=Path, metavar="FILE", help="what llamacpp serves")
    group.add_argument("--threads", type=_count, help="of servers that are started")
    group.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings of evener serve")
    group.add_argument("--model_type", help=argparse.SUPPRESS)
    for add in (_what_is_asked, _how, _load, _results):
        add(made)
    for flag in NOT_HERE:
        made.add_argument(flag, action=_Refuse, nargs="*", help=argparse.SUPPRESS)
    return made


def parse(argv: list[str]) -> argparse.Namespace:
    """The options, checked together.

    Raises:
        SystemExit: as argparse does.
    """
    made = parser()
    args = made.parse_args(argv)
    if args.host or args.port:
        args.base_url = args.base_url or f"http://{args.host or 'localhost'}:{args.port or 21002}"
    if args.base_url and "://" not in args.base_url:
        made.error(f"--base-url {args.base_url}: give the scheme too, as in http://{args.base_url}")
    args.engine = args.engine or ["openai-url" if args.base_url else "evener"]
    if "openai-url" in args.engine and not args.base_url:
        made.error("--engine openai-url needs --base-url http://HOST:PORT")
    if args.model is None and set(args.engine) != {"openai-url"}:
        made.error("--model DIR is needed to start a server")
    if "llamacpp" in args.engine and args.gguf is None:
        made.error("--engine llamacpp needs --gguf FILE")
    args.dataset = args.dataset or ("csv" if args.dataset_path else "random")
    if args.dataset != "random" and args.dataset_path is None:
        made.error(f"--dataset {args.dataset} needs --dataset-path FILE")
    if args.dataset != "random" and args.input_len and args.tokenizer_path is None:
        made.error("--input-len cuts prompts of a file, which needs --tokenizer-path DIR")
    if args.dataset == "random" and args.api == "chat" and args.tokenizer_path is None:
        made.error("made-up prompts of a chat are text, which needs --tokenizer-path DIR")
    if not 0 <= args.length_spread < 1:
        made.error(f"--length-spread {args.length_spread}: give 0 or more, less than 1")
    if args.request_interval > 0:
        args.request_rate, args.arrival = [1 / args.request_interval], "uniform"
    if args.request_rate_num_iters > 1:
        first = args.request_rate[0]
        args.request_rate = [first + i * args.request_rate_step for i in range(args.request_rate_num_iters)]
    if args.mode == "sync":
        args.concurrency = [1]
    if (args.num_beams or 1) > 1 and args.stream:
        made.error("--num-beams: beam search has no streams; add --no-stream")
    if args.structured_output_file:
        if args.structured_output_regex:
            made.error("--structured-output-file and --structured-output-regex say the same; leave one out")
        try:
            args.structured_output_regex = args.structured_output_file.read_text("utf-8").strip()
        except (OSError, UnicodeError) as error:
            made.error(f"--structured-output-file {args.structured_output_file}: {error}")
    args.goal = ServiceLevel(dict(args.goodput)) if args.goodput else None
    return args


def fields_of(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of every request body besides prompt and length; only those that were asked for."""
    fields = {
        "temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k,
        "repetition_penalty": args.repetition_penalty, "n": args.n, "stop": args.stop,
        "stop_token_ids": args.stop_token_ids, "num_beams": args.num_beams, "length_penalty": args.length_penalty,
        "structured_outputs": args.structured_output_regex and {"regex": args.structured_output_regex},
    }  # fmt: skip
    found = {key: value for key, value in fields.items() if value is not None}
    if args.logprobs:
        chat = args.api == "chat"
        found |= {"logprobs": True, "top_logprobs": args.logprobs} if chat else {"logprobs": args.logprobs}
    return {**found, **args.extra_body}

"""What routers ask for: /server_info, /model_info, and metrics for the Gateway API inference extension."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from evener.config.resolve import ResolvedValue
from evener.contracts.adapters import AdapterLimits
from evener_conformance.fake_engine import FakeEngine

CONFIG = {
    "infer.tp_size": ResolvedValue(2, "set"), "infer.block_size": ResolvedValue(16, "auto"),
    "infer.prefix_cache": ResolvedValue(True, "default"), "infer.max_loras": ResolvedValue(4, "set"),
    "infer.kv_dtype": ResolvedValue("bfloat16", "auto"),
    "serve.api_keys": ResolvedValue(["secret-key"], "set"),
}  # fmt: skip
#: The extension's model server protocol (its docs/proposals/003), with the names that it expects from vLLM.
GATEWAY_GAUGES = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc")
GATEWAY_CACHE, GATEWAY_CACHE_LABELS = "vllm:cache_config_info", {"block_size": "16", "num_gpu_blocks": "100"}
GATEWAY_LORA = "vllm:lora_requests_info"
#: Fields that SGLang's router (0.3.2) reads from each endpoint, with their types.
SGLANG_SERVER = {"model_path": str, "served_model_name": str, "tp_size": int, "dp_size": int, "version": str,
                 "max_running_requests": int}  # fmt: skip
SGLANG_MODEL = {"model_path": str, "tokenizer_path": str, "is_generation": bool, "architectures": list}


def engine(**overrides: Any) -> FakeEngine:
    return FakeEngine(info_overrides={"config": CONFIG, "max_reqs": 8, "architecture": "LlamaForCausalLM", **overrides})


def samples(api: Any, name: str) -> list[Any]:
    families = text_string_to_metric_families(api.get("/metrics").text)
    return [sample for family in families for sample in family.samples if sample.name == name]


def test_routers_find_the_fields_of_sglang_under_the_new_and_the_old_paths(make_api: Any) -> None:
    api = make_api(engine())
    for path, fields in (("server_info", SGLANG_SERVER), ("model_info", SGLANG_MODEL)):
        found = api.get(f"/{path}").json()
        assert {name: type(found[name]) for name in fields} == fields
        assert api.get(f"/get_{path}").json() == found
    server, model = api.get("/server_info").json(), api.get("/model_info").json()
    assert (server["tp_size"], server["dp_size"], server["page_size"], server["max_running_requests"]) == (2, 1, 16, 8)
    assert (server["served_model_name"], server["disable_radix_cache"]) == ("fake", False)
    assert model["is_generation"] is True and model["architectures"] == ["LlamaForCausalLM"]
    assert model["tokenizer_path"] == model["model_path"]


def test_no_secret_is_in_what_routers_are_told(make_api: Any) -> None:
    api = make_api(engine())
    assert "secret" not in api.get("/server_info").text + api.get("/model_info").text + api.get("/metrics").text


def test_routers_get_a_503_while_the_engine_starts(make_api: Any) -> None:
    api = make_api(FakeEngine(auto_ready=False), wait=False)
    assert api.get("/server_info").status_code == api.get("/model_info").status_code == 503


def test_the_gateway_extension_finds_each_of_its_metrics_once_with_its_type_and_labels(make_api: Any) -> None:
    api = make_api(engine(adapters=AdapterLimits(targets={}, rank=16, loaded=8)))
    types = {f.name: f.type for f in text_string_to_metric_families(api.get("/metrics").text)}
    for name in GATEWAY_GAUGES:
        (sample,) = samples(api, name)
        assert types[name] == "gauge" and sample.value == 0 and sample.labels["model_name"] == "fake"
    (cache,) = samples(api, GATEWAY_CACHE)
    assert GATEWAY_CACHE_LABELS.items() <= cache.labels.items() and cache.value == 1
    assert cache.labels["enable_prefix_caching"] == "True" and cache.labels["cache_dtype"] == "bfloat16"
    (lora,) = samples(api, GATEWAY_LORA)
    assert lora.labels == {"max_lora": "4", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert types[GATEWAY_LORA] == "gauge" and lora.value > 1.7e9


def test_a_server_without_adapters_has_no_metric_of_them(make_api: Any) -> None:
    assert samples(make_api(engine()), GATEWAY_LORA) == []

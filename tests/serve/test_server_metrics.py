"""/metrics has what the list says, under vLLM's names too, and what it counts is what happened."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from api_server import MODEL, Api, House, until
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from lmworks.observability.catalog import ENGINE, METRICS, SERVER

# Series that the Grafana dashboards in vLLM's repository ask for (examples/observability, vLLM 0.26).
VLLM_DASHBOARDS = [
    "e2e_request_latency_seconds_bucket", "e2e_request_latency_seconds_count", "e2e_request_latency_seconds_sum",
    "generation_tokens_total", "inter_token_latency_seconds_bucket", "inter_token_latency_seconds_count",
    "inter_token_latency_seconds_sum", "iteration_tokens_total_count", "kv_cache_usage_perc",
    "num_requests_running", "num_requests_waiting", "prompt_tokens_total", "request_decode_time_seconds_sum",
    "request_generation_tokens_bucket", "request_max_num_generation_tokens_sum", "request_prefill_time_seconds_sum",
    "request_prompt_tokens_bucket", "request_queue_time_seconds_sum", "request_success_total",
    "time_to_first_token_seconds_bucket", "time_to_first_token_seconds_count", "time_to_first_token_seconds_sum",
]  # fmt: skip
OPTIONAL = {"gpu_utilization_ratio", "gpu_power_watts", "gpu_memory_used_bytes", "gpu_memory_total_bytes",
            "tls_certificate_expiry_timestamp_seconds"}  # of machines that have any  # fmt: skip


def scrape(api: Api) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(api.http.get("/metrics").text)}


def values(found: Mapping[str, Metric], prefix: str = "vllm:") -> dict[str, float]:
    """Of the model: series, with the labels that tell its values apart."""
    result = {}
    for family in found.values():
        for sample in family.samples:
            if sample.name.startswith(prefix) and sample.labels.get("model_name") == MODEL:
                more = [sample.labels[label] for label in ("le", "finished_reason") if label in sample.labels]
                result[" ".join([sample.name.removeprefix(prefix), *more])] = sample.value
    return result


def test_names_types_and_labels(api: Api) -> None:
    api.post("/v1/completions", {"model": MODEL, "prompt": "Hello", "max_tokens": 2})
    found = scrape(api)
    for spec in (*ENGINE, *SERVER):
        if spec.name in OPTIONAL:
            continue
        for name in [spec.exported, *([f"vllm:{spec.name}"] if spec.vllm else [])]:
            family = found.pop(name.removesuffix("_total") if spec.kind == "counter" else name)
            more = {"engine"} if name.startswith("vllm:") else set()
            assert (family.type, family.documentation) == (spec.kind, spec.help), name
            for sample in family.samples:
                assert set(sample.labels) - {"le"} == {*spec.labels} | more, sample
    assert not [name for name in found if not name.startswith("process_")], "not in the list"


def test_dashboards_of_vllm_find_their_series(api: Api) -> None:
    found = values(scrape(api))
    assert set(VLLM_DASHBOARDS) <= {name.partition(" ")[0] for name in found}


def test_counts(house: House, api: Api) -> None:
    prompt = list(range(1, 41))
    before = values(scrape(api))
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "ignore_eos": True, "n": 2, "cache_salt": "counts"}
    assert api.post("/v1/completions", body).status_code == 200

    def grown() -> dict[str, float]:
        return {name: value - before[name] for name, value in values(scrape(api)).items() if value != before[name]}

    until(lambda: grown().get("e2e_request_latency_seconds_count") == 1)  # metrics come four times a second
    more = grown()
    assert (more["prompt_tokens_total"], more["generation_tokens_total"]) == (40, 24)
    assert more["request_success_total length"] == 2 and "request_success_total stop" not in more
    assert (more["request_prompt_tokens_sum"], more["request_generation_tokens_sum"]) == (40, 24)
    assert more["request_prompt_tokens_bucket 50"] == 1 and "request_prompt_tokens_bucket 20" not in more
    assert (more["request_max_num_generation_tokens_sum"], more["request_params_max_tokens_sum"]) == (12, 12)
    assert more["request_params_n_sum"] == 2
    assert more["iteration_tokens_total_sum"] >= 40 + 22, "the prompt, and all tokens but the last of each answer"
    phases = [more[f"request_{phase}_time_seconds_sum"] for phase in ("queue", "prefill", "decode")]
    assert sum(phases[1:]) == pytest.approx(more["request_inference_time_seconds_sum"])
    assert phases[0] + phases[1] == pytest.approx(more["time_to_first_token_seconds_sum"], abs=1e-6)
    assert more["request_time_per_output_token_seconds_sum"] == pytest.approx(phases[2] / 11, abs=1e-6)
    assert more["inter_token_latency_seconds_count"] == 22


def test_openmetrics_with_exemplars(api: Api) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 2}
    api.post("/v1/completions", body, headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"})
    answer = api.http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")
    shown = [line for line in answer.text.splitlines() if trace in line]
    assert shown and shown[0].startswith('lmworks:http_request_duration_seconds_bucket{le="')
    plain = api.http.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain") and trace not in plain.text


def test_the_list() -> None:
    assert len(METRICS) == len(ENGINE) + len(SERVER) + sum(one.process == "gateway" for one in METRICS.values())
    for spec in METRICS.values():
        assert bool(spec.buckets) == (spec.kind == "histogram") and not spec.help.endswith(".")
        # Prometheus: base units in the name. vLLM's names are as they are.
        if not spec.vllm and spec.unit in ("seconds", "bytes", "watts"):
            assert spec.name.endswith(spec.unit), spec.name

"""The Grafana dashboard of a fleet, made from the list of metrics."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from .catalog import METRICS

TITLE = "LMWorks fleet"
NAME = re.compile(r"\{(\w+)\}")
WIDTH, HEIGHT, COLUMNS = 8, 8, 24  # of a panel, and of the page, in Grafana's units
SOURCE = {"type": "prometheus", "uid": "${source}"}
RATE = "[$__rate_interval]"


@dataclass(frozen=True)
class Panel:
    title: str
    queries: dict[str, str]  # legend → PromQL; `{metric}` is its series
    unit: str = "short"  # Grafana's name
    optional: bool = False  # there is data only where there are such devices, files or events


def quantiles(metric: str, by: str, *shares: float) -> dict[str, str]:
    """Of a histogram, for each value of a label."""
    return {
        f"p{100 * share:g} {{{{{by}}}}}": f"histogram_quantile({share:g}, sum by (le, {by})"
        f" (rate({{{metric}}}_bucket{RATE})))"
        for share in shares
    }


def per_second(metric: str, by: str, legend: str = "") -> dict[str, str]:
    return {f"{legend} {{{{{by}}}}}".strip(): f"sum by ({by}) (rate({{{metric}}}{RATE}))"}


def now(metric: str, legend: str) -> dict[str, str]:
    return {legend: f"{{{metric}}}"}


AT, SERVER = "{{model_name}} {{instance}}", "{{server}}"
ROWS: dict[str, tuple[Panel, ...]] = {
    "Users": (
        Panel("Requests by status", per_second("gateway_requests", "status"), "reqps"),
        Panel("Requests by tenant", per_second("gateway_requests", "tenant"), "reqps"),
        Panel("Under way", {"requests": "sum({gateway_requests_open})"}),
        Panel("Time to first token", quantiles("gateway_time_to_first_token_seconds", "model_name", 0.5, 0.95, 0.99),
              "s"),
        Panel("Time per output token",
              quantiles("gateway_time_per_output_token_seconds", "model_name", 0.5, 0.95, 0.99), "s"),
        Panel("Whole request", quantiles("gateway_e2e_request_latency_seconds", "model_name", 0.5, 0.95, 0.99), "s"),
        Panel("Time to first token by tenant", quantiles("gateway_time_to_first_token_seconds", "tenant", 0.95), "s"),
        Panel("Time to first token by tier", quantiles("gateway_time_to_first_token_seconds", "tier", 0.95), "s"),
        Panel("Errors by code", per_second("gateway_request_failures", "code"), "reqps"),
        Panel("Tokens", per_second("gateway_prompt_tokens", "model_name", "prompt")
              | per_second("gateway_generation_tokens", "model_name", "generated")),
        Panel("Generated tokens by tenant", per_second("gateway_generation_tokens", "tenant")),
        Panel("Prompt tokens found in caches", {
            "{{tenant}}": f"sum by (tenant) (rate({{gateway_cached_tokens}}{RATE}))"
                          f" / sum by (tenant) (rate({{gateway_prompt_tokens}}{RATE}))"}, "percentunit"),
    ),
    "Objectives": (
        Panel("Attainment", now("gateway_slo_attainment", "{{slo}} {{window}}"), "percentunit"),
        Panel("Burn rate of the error budget", now("gateway_slo_burn_rate", "{{slo}} {{window}}")),
        Panel("Missed, by reason", {
            "{{slo}} {{reason}}": f"sum by (slo, reason) (rate({{gateway_slo_missed}}{RATE}))"}, "reqps"),
    ),
    "Servers, as the gateway sees them": (
        Panel("Up", now("gateway_server_up", SERVER)),
        Panel("Requests to do", now("gateway_server_queue", SERVER)),
        Panel("KV cache in use", now("gateway_server_kv_cache_usage_perc", SERVER), "percentunit"),
        Panel("Time to first token by server", quantiles("gateway_server_time_to_first_token_seconds", "server", 0.95),
              "s"),
        Panel("Retries and migrations", per_second("gateway_retries", "model_name", "retries")
              | per_second("gateway_migrations", "model_name", "migrations")),
        Panel("Hedged requests, by which server began first", per_second("gateway_hedges", "winner"), "reqps"),
        Panel("Prompts, by who computed them", per_second("gateway_prefills", "where"), "reqps", optional=True),
        Panel("Requests to new versions", now("gateway_rollout_share", "{{model_name}} {{candidate}}"), "percentunit"),
        Panel("Shadow requests", per_second("gateway_rollout_shadow_requests", "outcome"), "reqps"),
        Panel("Tries that failed", {
            "{{server}} {{reason}}": f"sum by (server, reason) (rate({{gateway_try_failures}}{RATE}))"},
              optional=True),
        Panel("Quality checks passed", now("gateway_quality_score", "{{model_name}} {{server}}"), "percentunit"),
        Panel("Clock skew", now("gateway_server_clock_skew_seconds", SERVER), "s"),
        Panel("Stores", now("gateway_store_up", "{{store}}"), optional=True),
    ),
    "Engines": (
        Panel("Sequences", now("num_requests_running", f"running {AT}") | now("num_requests_waiting", f"waiting {AT}")),
        Panel("KV cache in use, by engine", now("kv_cache_usage_perc", AT), "percentunit"),
        Panel("Prefix cache hits", {
            "{{model_name}}": f"sum by (model_name) (rate({{prefix_cache_hits}}{RATE}))"
                              f" / sum by (model_name) (rate({{prefix_cache_queries}}{RATE}))"}, "percentunit"),
        Panel("Generated tokens", per_second("generation_tokens", "instance")),
        Panel("Tokens of a step", {
            "{{instance}}": f"sum by (instance) (rate({{iteration_tokens_total}}_sum{RATE}))"
                            f" / sum by (instance) (rate({{iteration_tokens_total}}_count{RATE}))"}),
        Panel("Between two tokens", quantiles("inter_token_latency_seconds", "model_name", 0.5, 0.95, 0.99), "s"),
        Panel("Queue, prefill, decode: p95", {
            legend: f"histogram_quantile(0.95, sum by (le) (rate({{request_{legend}_time_seconds}}_bucket{RATE})))"
            for legend in ("queue", "prefill", "decode")}, "s"),
        Panel("Preemptions", per_second("num_preemptions", "instance")),
        Panel("Up, stalled", now("engine_up", f"up {AT}") | now("engine_stalled_seconds", f"stalled {AT}")),
        Panel("Restarts, out of memory", {
            f"restarts {AT}": "increase({engine_restarts}[1h])", f"out of memory {AT}": "increase({engine_ooms}[1h])"}),
    ),
    "Machines": (
        Panel("GPU utilisation", now("gpu_utilization_ratio", "{{instance}} {{gpu}}"), "percentunit", True),
        Panel("GPU power", now("gpu_power_watts", "{{instance}} {{gpu}}"), "watt", True),
        Panel("GPU memory", {"{{instance}} {{gpu}}": "{gpu_memory_used_bytes} / {gpu_memory_total_bytes}"},
              "percentunit", True),
        Panel("Memory of processes", {"{{instance}}": "process_resident_memory_bytes"}, "bytes"),
        Panel("Open files", {"{{instance}}": "process_open_fds / process_max_fds"}, "percentunit"),
        Panel("Certificates end in", {
            "{{instance}} {{file}}":
                "{gateway_tls_certificate_expiry_timestamp_seconds} - time() or"
                " {tls_certificate_expiry_timestamp_seconds} - time()"}, "s", True),
    ),
}  # fmt: skip


def query(text: str) -> str:
    """PromQL with the names of the list."""
    return NAME.sub(lambda found: METRICS[found[1]].series, text)


def dashboard() -> dict[str, Any]:
    """As Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append({"type": "row", "title": title, "collapsed": False, "panels": [],
                       "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1}})  # fmt: skip
        y += 1
        for place, panel in enumerate(row):
            down, across = divmod(place, COLUMNS // WIDTH)
            panels.append(drawn(panel, across * WIDTH, y + down * HEIGHT))
        y += HEIGHT * -(-len(row) // (COLUMNS // WIDTH))
    source = {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return {
        "title": TITLE,
        "uid": "lmworks-fleet",
        "schemaVersion": 39,
        "tags": ["lmworks"],
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "templating": {"list": [source]},
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, 1)],
    }


def drawn(panel: Panel, x: int, y: int) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + place), "datasource": SOURCE, "expr": query(text), "legendFormat": legend}
        for place, (legend, text) in enumerate(panel.queries.items())
    ]
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": targets,
    }

"""Prometheus' own tools read the alert rules: each fires where it should, and stays quiet where it should not."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lmworks.launch import to_yaml
from lmworks.observability.alerts import ALERTS, rule, rules
from lmworks.observability.catalog import METRICS
from lmworks.observability.prometheus import RULES_FILE, prometheus_config

promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian's prometheus package)"
)


def run(*command: str, folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@promtool
def test_check(tmp_path: Path) -> None:
    (tmp_path / RULES_FILE).parent.mkdir()
    (tmp_path / RULES_FILE).write_text(to_yaml([rules()]), encoding="utf-8")
    (tmp_path / "fast.yml").write_text(to_yaml([rules(faster=60)]), encoding="utf-8")
    config = prometheus_config(["127.0.0.1:8080"], ["127.0.0.1:8001", "127.0.0.1:8002"])
    (tmp_path / "prometheus.yml").write_text(to_yaml([config]), encoding="utf-8")
    found = run("promtool", "check", "config", "prometheus.yml", folder=tmp_path)
    assert f"SUCCESS: {len(ALERTS)} rules found" in found
    assert f"SUCCESS: {len(ALERTS)} rules found" in run("promtool", "check", "rules", "fast.yml", folder=tmp_path)


WHO = 'model_name="m",tenant="a",tier="gold"'
AT = 'model_name="m",instance="s:1"'
PLACE = 'pool="p",server="http://s:1/v1"'
SLO = 'slo="chat",tenant="a",tier="gold"'
HUNDRED = {f"gateway_slo_requests{{{SLO}}}": "0+100x5000", 'gateway_slo_objective{slo="chat"}': "0.99x5000"}
HITS, QUERIES = 'prefix_cache_hits{model_name="m"}', 'prefix_cache_queries{model_name="m"}'
REFUSED, ANSWERED = (f'gateway_requests{{tenant="a",status="{status}"}}' for status in (429, 200))
DAY = 1440

# Alert → (series when it fires, minute, series when it does not). A sample a minute; labels of `up` are a job's.
Series = dict[str, str]
CASES: dict[str, tuple[Series, int, Series]] = {
    "ErrorBudgetBurnFast": (
        HUNDRED | {f'gateway_slo_missed{{{SLO},reason="ttft"}}': "0+15x70"}, 65,
        # an hour burned, and it is over: the short window is quiet
        HUNDRED | {f'gateway_slo_missed{{{SLO},reason="ttft"}}': "0+20x55 1100x20"},
    ),
    "ErrorBudgetBurn": (
        HUNDRED | {f'gateway_slo_missed{{{SLO},reason="error"}}': "0+7x400"}, 370,
        HUNDRED | {f'gateway_slo_missed{{{SLO},reason="error"}}': "0+5x400"},
    ),
    "ErrorBudgetBurnSlow": (
        HUNDRED | {f'gateway_slo_missed{{{SLO},reason="error"}}': "0+2x4400"}, 4330,
        HUNDRED | {f'gateway_slo_missed{{{SLO},reason="error"}}': "0+0.9x4400"},
    ),
    "StreamsLost": (
        {f'gateway_request_failures{{{WHO},code="upstream_lost"}}': "0 0 1 1 1"}, 4,
        {f'gateway_request_failures{{{WHO},code="client_left"}}': "0 0 1 1 1"},
    ),
    "StreamsMigrated": ({'gateway_migrations{model_name="m"}': "0 0 2 2 2"}, 4,
                        {'gateway_migrations{model_name="m"}': "2x10"}),
    "RolloutRolledBack": ({'gateway_rollout_rollbacks{model_name="m"}': "0 0 1 1 1"}, 4,
                          {'gateway_rollout_rollbacks{model_name="m"}': "1x10"}),
    "TenantThrottled": (
        {REFUSED: "0+60x20", ANSWERED: "0+40x20"}, 10,
        {REFUSED: "0+40x20", ANSWERED: "0+60x20"},
    ),
    "AuthenticationFailures": ({'gateway_requests{tenant="",status="401"}': "0+90x20"}, 10,
                               {'gateway_requests{tenant="",status="401"}': "0+30x20"}),
    "QualityDrift": ({'gateway_quality_score{model_name="m",server="s"}': "1 1 0.5 0 0 0 0 0 0 0 0 0"}, 10,
                     {'gateway_quality_score{model_name="m",server="s"}': "1 1 1 0 1 1 1 1 1 1 1 1"}),
    "QueueSaturated": (
        {f'request_queue_time_seconds_bucket{{{AT},le="5"}}': "0+1x20",
         f'request_queue_time_seconds_bucket{{{AT},le="10"}}': "0+30x20",
         f'request_queue_time_seconds_bucket{{{AT},le="+Inf"}}': "0+30x20",
         f"num_requests_waiting{{{AT}}}": "4x20"}, 10,
        {f'request_queue_time_seconds_bucket{{{AT},le="5"}}': "0+30x20",
         f'request_queue_time_seconds_bucket{{{AT},le="10"}}': "0+30x20",
         f'request_queue_time_seconds_bucket{{{AT},le="+Inf"}}': "0+30x20", f"num_requests_waiting{{{AT}}}": "4x20"},
    ),
    "KVCacheSaturated": ({f"kv_cache_usage_perc{{{AT}}}": "0.5 0.99x20"}, 12,
                         {f"kv_cache_usage_perc{{{AT}}}": "0.99 0.99 0.99 0.9 0.99 0.99 0.99 0.99 0.9 0.99 0.99 0.99"}),
    "PreemptionsHigh": (
        {f"num_preemptions{{{AT}}}": "0+30x20", f'request_success{{{AT},finished_reason="stop"}}': "0+100x20"}, 10,
        {f"num_preemptions{{{AT}}}": "0+10x20", f'request_success{{{AT},finished_reason="stop"}}': "0+100x20"},
    ),
    "PrefixCacheCollapse": (
        {QUERIES: f"0+10000x{DAY + 60}", HITS: f"0+6000x{DAY} {6000 * DAY}+1000x60"}, DAY + 30,
        {QUERIES: f"0+10000x{DAY + 60}", HITS: f"0+6000x{DAY} {6000 * DAY}+4000x60"},
    ),
    "KVCacheCorrupt": ({f'kv_tier_errors{{{AT},error="disk corrupt"}}': "0 0 2 2"}, 3,
                       {f'kv_tier_errors{{{AT},error="disk failed"}}': "0 0 2 2"}),
    "RetriesHigh": (
        {'gateway_retries{model_name="m"}': "0+18x20", 'gateway_requests{status="200"}': "0+100x20"}, 10,
        {'gateway_retries{model_name="m"}': "0+10x20", 'gateway_requests{status="200"}': "0+100x20"},
    ),
    "FileDescriptorsLow": ({"process_open_fds": "950x20", "process_max_fds": "1000x20"}, 5,
                           {"process_open_fds": "800x20", "process_max_fds": "1000x20"}),
    "ServerDown": ({f"gateway_server_up{{{PLACE}}}": "1 1 0 0 0"}, 4, {f"gateway_server_up{{{PLACE}}}": "1 1 0 1 1"}),
    "PoolDown": (
        {f"gateway_server_up{{{PLACE}}}": "0x5", 'gateway_server_up{pool="p",server="b"}': "1 0 0 0 0"}, 4,
        {f"gateway_server_up{{{PLACE}}}": "0x5", 'gateway_server_up{pool="p",server="b"}': "1x5"},
    ),
    "ServerSlow": (
        {f'gateway_server_time_to_first_token_seconds_{part}{{pool="p",server="{name}"}}': f"0+{step}x20"
         for name, total in (("a", 2), ("b", 20)) for part, step in (("sum", total), ("count", 10))}, 10,
        {f'gateway_server_time_to_first_token_seconds_{part}{{pool="p",server="{name}"}}': f"0+{step}x20"
         for name, total in (("a", 2), ("b", 2), ("c", 5)) for part, step in (("sum", total), ("count", 10))},
    ),
    "EngineDown": ({f"engine_up{{{AT}}}": "1 0 0 0"}, 3, {f"engine_up{{{AT}}}": "1 0 1 0"}),
    "EngineRestarted": ({f"engine_restarts{{{AT}}}": "0 0 1 1"}, 3, {f"engine_restarts{{{AT}}}": "3x5"}),
    "EngineStalled": ({f"engine_stalled_seconds{{{AT}}}": "0 12"}, 1, {f"engine_stalled_seconds{{{AT}}}": "0 8"}),
    "EngineOutOfMemory": ({f"engine_ooms{{{AT}}}": "0 0 1 1"}, 3, {f"engine_ooms{{{AT}}}": "1x5"}),
    "GatewayDown": ({'up{job="lmworks-gateway",instance="g:1"}': "1 0 0"}, 2,
                    {'up{job="lmworks-gateway",instance="g:1"}': "1 0 1", 'up{job="other"}': "0x5"}),
    "MetricsMissing": ({'up{job="lmworks-server",instance="s:1"}': "1 0 0 0 0"}, 4,
                       {'up{job="lmworks-server",instance="s:1"}': "1x5"}),
    "StoreDown": ({'gateway_store_up{store="rates"}': "1 0 0"}, 2, {'gateway_store_up{store="rates"}': "1x3"}),
    "ConfigReloadFailed": ({"gateway_config_reload_success": "1 0 0 0"}, 3, {"gateway_config_reload_success": "1x4"}),
    "ClockSkew": ({f"gateway_server_clock_skew_seconds{{{PLACE}}}": "0 -30 -30 -30"}, 3,
                  {f"gateway_server_clock_skew_seconds{{{PLACE}}}": "-1x4"}),
    "CertificateExpiresSoon": ({'tls_certificate_expiry_timestamp_seconds{file="c.pem"}': "1000000x3"}, 2,
                               {'tls_certificate_expiry_timestamp_seconds{file="c.pem"}': "1500000x3"}),
    "CertificateExpired": ({'gateway_tls_certificate_expiry_timestamp_seconds{file="c.pem"}': "60x5"}, 3,
                           {'gateway_tls_certificate_expiry_timestamp_seconds{file="c.pem"}': "6000x5"}),
}  # fmt: skip


def series_of(key: str) -> str:
    """`name{labels}` of the list → as Prometheus stores it."""
    name, brace, labels = key.partition("{")
    if name in METRICS:
        return METRICS[name].series + brace + labels
    base, _, part = name.rpartition("_")
    return METRICS[base].exported + f"_{part}" + brace + labels if base in METRICS else key


def case(alert: str, series: Series, minute: int, fires: bool) -> dict[str, Any]:
    inputs = [{"series": series_of(key), "values": values} for key, values in series.items()]
    return {
        "name": f"{alert}: {'fires' if fires else 'quiet'}",
        "interval": "1m",
        "input_series": inputs,
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})',
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
            }
        ],
    }


@promtool
def test_firing(tmp_path: Path) -> None:
    assert set(CASES) == {alert.name for alert in ALERTS}, "every alert has a case"
    alert_rules = {one["alert"]: one for one in rules()["groups"][0]["rules"]}
    for name, (firing, minute, quiet) in CASES.items():
        (tmp_path / f"{name}.rules").write_text(to_yaml([{"groups": [{"name": "g", "rules": [alert_rules[name]]}]}]))
        content = {
            "rule_files": [f"{name}.rules"],
            "evaluation_interval": "1m" if minute < 100 else "10m",
            "tests": [case(name, firing, minute, True), case(name, quiet, minute, False)],
        }
        (tmp_path / f"{name}.test").write_text(json.dumps(content))  # JSON is YAML
    run("promtool", "test", "rules", *(f"{name}.test" for name in CASES), folder=tmp_path)


def test_runbooks_and_durations() -> None:
    assert {alert.page for alert in ALERTS} >= {"kv-cache-saturated", "server-down", "error-budget-burn"}
    for alert in ALERTS:
        found = rule(alert, 1)
        assert found["annotations"]["runbook_url"].endswith(f"/docs/runbooks/{alert.page}.md")
    down = next(alert for alert in ALERTS if alert.name == "ServerDown")
    assert rule(down, 1)["for"] == "30s" and rule(down, 20)["for"] == "1s"
    burn = next(alert for alert in ALERTS if alert.name == "ErrorBudgetBurnFast")
    assert "[180s]" in rule(burn, 20)["expr"] and "[15s]" in rule(burn, 20)["expr"]

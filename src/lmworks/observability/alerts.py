"""Alert rules of a fleet, for Prometheus. Each has a runbook in docs/runbooks/.

Error budgets: multi-window, multi-burn-rate alerts as in Google's SRE workbook (chapter 5): a long window says that it
matters, a short one that it is still going on. Burn rate 14.4 for an hour uses 2% of the budget of 30 days, 6 for six
hours 5%, 1 for three days 10%.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from .catalog import METRICS

RUNBOOKS = "https://github.com/lmworks/lmworks/blob/main/docs/runbooks"
GATEWAY_JOB, SERVER_JOB = "lmworks-gateway", "lmworks-server"  # of `prometheus.scrape_config`
NAME = re.compile(r"\{(\w+)\}")
DURATION = re.compile(r"(\d+)s\b")


@dataclass(frozen=True)
class Alert:
    name: str
    summary: str
    expr: str  # `{metric}` is its series; durations are in seconds, so that drills can shorten them
    seconds: int = 0  # that it must hold
    severity: str = "warning"  # page, or warning
    runbook: str = ""  # page of docs/runbooks; empty: its own

    @property
    def page(self) -> str:
        """Name of its runbook: ServerDown → server-down."""
        return self.runbook or re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", self.name).lower()


def burn(long: int, short: int, rate: float) -> str:
    """Both windows burn faster than `rate`."""
    share = (
        "sum by (slo) (rate({gateway_slo_missed}[%ds])) / sum by (slo) (rate({gateway_slo_requests}[%ds]))"
        " > on (slo) %g * (1 - max by (slo) ({gateway_slo_objective}))"
    )
    return f"({share % (long, long, rate)}) and on (slo) ({share % (short, short, rate)})"


HOUR, DAY = 3600, 86400
SERVER_TTFT = "rate({gateway_server_time_to_first_token_seconds}_%s[300s])"
MEAN_TTFT = (
    f"sum by (pool, server) ({SERVER_TTFT % 'sum'}) / (sum by (pool, server) ({SERVER_TTFT % 'count'}) > 0)"
)  # fmt: skip
# A median of the pool would be no measure: of two servers it is the mean of both, so neither is three times as slow.
OTHERS_TTFT = (
    f"((sum by (pool) ({MEAN_TTFT})) - on (pool) group_right () ({MEAN_TTFT}))"
    f" / on (pool) group_left () (count by (pool) ({MEAN_TTFT}) - 1)"
)
HITS = "sum by (model_name) (rate({prefix_cache_hits}[%ds])) / sum by (model_name) (rate({prefix_cache_queries}[%ds]))"
CERTIFICATE_END = (
    "min by (instance, file)"
    " ({tls_certificate_expiry_timestamp_seconds} or {gateway_tls_certificate_expiry_timestamp_seconds})"
)

ALERTS = (
    # --- users
    Alert("ErrorBudgetBurnFast", "SLO {{ $labels.slo }}: 2% of its 30-day error budget in an hour",
          burn(HOUR, 300, 14.4), severity="page", runbook="error-budget-burn"),
    Alert("ErrorBudgetBurn", "SLO {{ $labels.slo }}: 5% of its 30-day error budget in six hours",
          burn(6 * HOUR, 1800, 6), severity="page"),
    Alert("ErrorBudgetBurnSlow", "SLO {{ $labels.slo }}: 10% of its 30-day error budget in three days",
          burn(3 * DAY, 6 * HOUR, 1), runbook="error-budget-burn"),
    Alert("StreamsLost", "streams of {{ $labels.model_name }} were cut off and no server could go on with them",
          'sum by (model_name) (increase({gateway_request_failures}{code="upstream_lost"}[300s])) > 0',
          severity="page"),
    Alert("StreamsMigrated", "streams of {{ $labels.model_name }} had to change servers",
          "sum by (model_name) (increase({gateway_migrations}[300s])) > 0"),
    Alert("RolloutRolledBack", "the candidate of {{ $labels.model_name }} was worse, and is rolled back",
          "sum by (model_name) (increase({gateway_rollout_rollbacks}[300s])) > 0"),
    Alert("TenantThrottled", "more than half of the requests of {{ $labels.tenant }} are refused with 429",
          'sum by (tenant) (rate({gateway_requests}{status="429"}[300s]))'
          " / sum by (tenant) (rate({gateway_requests}[300s])) > 0.5", 60),
    Alert("AuthenticationFailures", "more than one request a second has no valid key",
          'sum(rate({gateway_requests}{status="401"}[300s])) > 1', 60),
    Alert("QualityDrift", "{{ $labels.server }} answers quality checks of {{ $labels.model_name }} wrongly",
          "min by (model_name, server) (avg_over_time({gateway_quality_score}[600s])) < 0.8", 60, "page"),
    # --- saturation
    Alert("QueueSaturated", "{{ $labels.model_name }} at {{ $labels.instance }}: requests wait for 5 s and more",
          "(histogram_quantile(0.9, sum by (model_name, instance, le)"
          " (rate({request_queue_time_seconds}_bucket[300s]))) > 5) and on (model_name, instance)"
          " ({num_requests_waiting} > 0)", 120),
    Alert("KVCacheSaturated", "{{ $labels.model_name }} at {{ $labels.instance }}: its KV cache is full",
          "min_over_time({kv_cache_usage_perc}[300s]) > 0.95", 60),
    Alert("PreemptionsHigh", "{{ $labels.model_name }} at {{ $labels.instance }} preempts one sequence for every five",
          "sum by (model_name, instance) (rate({num_preemptions}[300s]))"
          " / (sum by (model_name, instance) (rate({request_success}[300s])) > 0) > 0.2", 120),
    Alert("PrefixCacheCollapse", "{{ $labels.model_name }}: hits of the prefix cache fell below half of the day's",
          f"({HITS % (900, 900)}) < 0.5 * ({HITS % (DAY, DAY)})"
          " and (sum by (model_name) (rate({prefix_cache_queries}[900s])) > 100)"
          f" and ({HITS % (DAY, DAY)} > 0.2)", 300),
    Alert("KVCacheCorrupt", "{{ $labels.model_name }} at {{ $labels.instance }}: blocks below its KV cache are damaged",
          'sum by (model_name, instance) (increase({kv_tier_errors}{error=~".* corrupt"}[600s])) > 0'),
    Alert("RetriesHigh", "more than 15% of requests are tried again: the retry budget is nearly used up",
          "sum(rate({gateway_retries}[300s])) / sum(rate({gateway_requests}[300s])) > 0.15", 120),
    Alert("FileDescriptorsLow", "{{ $labels.instance }} has more than 90% of its file descriptors open",
          "process_open_fds / process_max_fds > 0.9", 60),
    # --- servers and engines
    Alert("ServerDown", "{{ $labels.server }} of pool {{ $labels.pool }} gets no requests",
          "max by (pool, server) ({gateway_server_up}) == 0", 30),
    Alert("PoolDown", "no server of pool {{ $labels.pool }} gets requests",
          "max by (pool) ({gateway_server_up}) == 0", 10, "page"),
    Alert("ServerSlow", "{{ $labels.server }}: mean time to the first token is three times the pool's other servers'",
          f"({MEAN_TTFT}) > on (pool, server) 3 * ({OTHERS_TTFT})", 120),
    Alert("EngineDown", "the engine of {{ $labels.model_name }} at {{ $labels.instance }} is down",
          "{engine_up} == 0", 60, "page"),
    Alert("EngineRestarted", "the engine of {{ $labels.model_name }} at {{ $labels.instance }} was restarted",
          "increase({engine_restarts}[600s]) > 0"),
    Alert("EngineStalled", "the engine of {{ $labels.model_name }} at {{ $labels.instance }} works and takes no step",
          "{engine_stalled_seconds} > 10", severity="page"),
    Alert("EngineOutOfMemory", "the engine of {{ $labels.model_name }} at {{ $labels.instance }} ran out of memory",
          "increase({engine_ooms}[600s]) > 0", severity="page"),
    # --- gateway
    Alert("GatewayDown", "{{ $labels.instance }} does not answer", f'up{{job="{GATEWAY_JOB}"}} == 0', 30, "page"),
    Alert("MetricsMissing", "{{ $labels.instance }} gives no metrics", f'up{{job="{SERVER_JOB}"}} == 0', 120),
    Alert("StoreDown", "the store {{ $labels.store }} does not answer",
          "min by (store) ({gateway_store_up}) == 0", 10, "page"),
    Alert("ConfigReloadFailed", "{{ $labels.instance }}: its file is invalid, the one before it is in use",
          "{gateway_config_reload_success} == 0", 60),
    Alert("ClockSkew", "the clocks of {{ $labels.server }} and the gateway differ by {{ printf \"%.0f\" $value }} s",
          "max by (server) (abs({gateway_server_clock_skew_seconds})) > 5", 60),
    Alert("CertificateExpiresSoon", "{{ $labels.file }} ends within 14 days",
          f"{CERTIFICATE_END} - time() < {14 * DAY}", runbook="certificate-expiry"),
    Alert("CertificateExpired", "{{ $labels.file }} is not valid any more",
          f"{CERTIFICATE_END} - time() <= 0", severity="page", runbook="certificate-expiry"),
)  # fmt: skip


def rules(faster: int = 1) -> dict[str, Any]:
    """A rule file, as data. `faster`: all durations divided by it, for drills."""
    return {
        "groups": [{"name": "lmworks", "rules": [rule(alert, faster) for alert in ALERTS]}],
    }


def rule(alert: Alert, faster: int) -> dict[str, Any]:
    expr = NAME.sub(lambda found: METRICS[found[1]].series, alert.expr)
    return {
        "alert": alert.name,
        "expr": DURATION.sub(lambda found: shortened(int(found[1]), faster), expr),
        **({"for": shortened(alert.seconds, faster)} if alert.seconds else {}),
        "labels": {"severity": alert.severity},
        "annotations": {"summary": alert.summary, "runbook_url": f"{RUNBOOKS}/{alert.page}.md"},
    }


def shortened(seconds: int, faster: int) -> str:
    return f"{max(seconds // faster, 1)}s"

"""What the gateway's own page shows, for those without Grafana: servers, objectives, tenants, latency, alerts."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import Counter, Histogram

from .attainment import SLOs
from .http_client import ConnectionPool, UpstreamError, fetch
from .metrics import Metrics

SECONDS = 2.0  # that Prometheus may take
SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def latencies(metrics: Metrics, label: str) -> list[dict[str, Any]]:
    """Of each model or tenant, since the gateway started: requests' quantiles in seconds, and tokens."""
    found: dict[str, dict[str, Any]] = {}
    for name, histogram in (("ttft", metrics.first_token), ("tpot", metrics.per_token), ("e2e", metrics.seconds)):
        for value, buckets in buckets_by(histogram, label).items():
            row = found.setdefault(value, {label: value})
            row[name] = {share: quantile(at, buckets) for share, at in SHARES.items()}
    counters = {"prompt_tokens": metrics.prompt_tokens, "generated_tokens": metrics.generation_tokens}
    for name, counter in {**counters, "cached_tokens": metrics.cached_tokens, "requests": metrics.requests}.items():
        for value, total in totals_by(counter, label).items():
            if value in found:
                found[value][name] = int(total)
    return [found[value] for value in sorted(found)]


def buckets_by(histogram: Histogram, label: str) -> dict[str, dict[float, float]]:
    """Counts below each edge, by the values of a label."""
    found: dict[str, dict[float, float]] = {}
    for sample in next(iter(histogram.collect())).samples:
        if sample.name.endswith("_bucket"):
            edges = found.setdefault(sample.labels[label], {})
            edge = float(sample.labels["le"])
            edges[edge] = edges.get(edge, 0.0) + sample.value
    return found


def totals_by(counter: Counter, label: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for sample in next(iter(counter.collect())).samples:
        found[sample.labels[label]] = found.get(sample.labels[label], 0.0) + sample.value
    return found


def quantile(share: float, buckets: Mapping[float, float]) -> float | None:
    """As Prometheus' histogram_quantile: linear within a bucket; in the last one its lower edge."""
    edges = sorted(buckets)
    total = buckets[edges[-1]] if edges else 0.0
    if not total:
        return None
    below, count = 0.0, 0.0
    for edge in edges:
        if buckets[edge] >= share * total:
            inside = buckets[edge] - count
            return below if edge == float("inf") else below + (edge - below) * (share * total - count) / inside
        below, count = edge, buckets[edge]
    return below


def objectives(slos: SLOs) -> list[dict[str, Any]]:
    found = []
    for slo in slos.objectives():
        attained = slos.attainment(slo)
        burning = {window: (1 - share) / (1 - slo.objective) for window, share in attained.items()}
        found.append({"slo": slo.label, "objective": slo.objective, "attainment": attained, "burn_rate": burning})
    return found


async def alerts(prometheus: str) -> dict[str, Any]:
    """Those that Prometheus has; `error`: why they are not known."""
    if not prometheus:
        return {"error": "monitoring.prometheus is not set in the gateway's file", "alerts": []}
    pool = ConnectionPool(prometheus, SECONDS)
    try:
        path = urlsplit(prometheus).path.rstrip("/") + "/api/v1/alerts"
        answer = await fetch(pool, "GET", path, [], SECONDS)
        return {"error": None, "alerts": [shown(one) for one in json.loads(answer.body)["data"]["alerts"]]}
    except (UpstreamError, ValueError, KeyError, TypeError) as error:
        return {"error": f"Prometheus: {error}", "alerts": []}
    finally:
        pool.close()


def shown(alert: Mapping[str, Any]) -> dict[str, Any]:
    labels, notes = alert["labels"], alert["annotations"]
    return {
        "alert": labels["alertname"],
        "state": alert["state"],
        "severity": labels.get("severity", ""),
        "since": alert["activeAt"],
        "summary": notes.get("summary", ""),
        "runbook_url": notes.get("runbook_url", ""),
    }


@cache
def page() -> tuple[bytes, Sequence[tuple[bytes, bytes]]]:
    """The page and its headers: nothing of it comes from elsewhere."""
    html = (files(__package__) / "page.html").read_text(encoding="utf-8")
    policy = [
        "default-src 'none'",
        f"script-src {hashes(re.findall('<script>(.*?)</script>', html, re.DOTALL))}",
        f"style-src {hashes(re.findall('<style>(.*?)</style>', html, re.DOTALL))}",
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ]
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-security-policy": "; ".join(policy),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return html.encode(), [(name.encode(), value.encode()) for name, value in headers.items()]


def hashes(texts: Iterable[str]) -> str:
    made = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{one}'" for one in made)

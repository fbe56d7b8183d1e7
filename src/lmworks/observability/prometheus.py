"""What Prometheus is started with: whom to scrape, and the alert rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .alerts import GATEWAY_JOB, SERVER_JOB

RULES_FILE = "alerts/lmworks.yml"  # beside the configuration


def prometheus_config(gateways: Sequence[str], servers: Sequence[str], interval: str = "15s") -> dict[str, Any]:
    """Addresses as HOST:PORT. Exemplars are scraped where Prometheus runs with `--enable-feature=exemplar-storage`."""
    jobs = {GATEWAY_JOB: gateways, SERVER_JOB: servers}
    return {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": [RULES_FILE],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": list(targets)}]} for job, targets in jobs.items()
        ],
    }

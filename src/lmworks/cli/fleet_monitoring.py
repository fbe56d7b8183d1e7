"""`lmworks fleet monitoring`: what Prometheus and Grafana need to watch a fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .output import write_file


def monitoring(
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write.")],
    gateways: Annotated[
        list[str] | None, typer.Option("--gateway", metavar="HOST:PORT", help="A gateway to scrape. Repeatable.")
    ] = None,
    servers: Annotated[
        list[str] | None, typer.Option("--server", metavar="HOST:PORT", help="A server to scrape. Repeatable.")
    ] = None,
) -> None:
    """Write alert rules, a Prometheus configuration, a dashboard.

    Each alert has a runbook in docs/runbooks (docs/observability.md).

    \b
    Examples:
      lmworks fleet monitoring --out monitoring --gateway 127.0.0.1:8080 --server 127.0.0.1:8001
    """
    import json

    from ..launch import to_yaml
    from ..observability.alerts import rules
    from ..observability.dashboard import dashboard
    from ..observability.prometheus import RULES_FILE, prometheus_config

    config = prometheus_config(gateways or ["127.0.0.1:8080"], servers or [])
    files = {
        RULES_FILE: to_yaml([rules()]),
        "prometheus.yml": to_yaml([config]),
        "dashboards/lmworks.json": json.dumps(dashboard(), indent=2) + "\n",
    }
    for name, text in files.items():
        write_file(out / name, text, "--out")
        typer.echo(f"wrote {out / name}")

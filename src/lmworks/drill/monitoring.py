"""Real Prometheus and Alertmanager beside a drill's fleet: which alert fired, and when it was delivered.

The alert rules are the ones of production. Their time windows are divided by `FASTER`, so that five minutes are five
seconds; thresholds stay as they are. Alerts are taken where an operator gets them: from Alertmanager's webhook.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ..observability.alerts import rules
from ..spec import LMWorksError
from .leftovers import environment
from .local_fleet import free_ports

FASTER = 60
SCRAPE_S = 1.0
PROMETHEUS, ALERTMANAGER = ("prometheus",), ("prometheus-alertmanager", "alertmanager")  # Debian's name, upstream's


def installed(names: Sequence[str]) -> str | None:
    return next((found for name in names if (found := shutil.which(name))), None)


def alert_rules() -> dict[str, Any] | None:
    """The rules of drills; None where nothing could evaluate and deliver them."""
    return rules(FASTER) if installed(PROMETHEUS) and installed(ALERTMANAGER) else None


@dataclass
class Alert:
    name: str
    labels: dict[str, str]
    fired: float  # seconds of the drill
    resolved: float | None = None


@dataclass
class Monitoring:
    """`targets`: job → addresses with /metrics, http://HOST:PORT."""

    folder: Path
    rules: Mapping[str, Any]
    targets: Mapping[str, Sequence[str]]
    clock: Callable[[], float]
    alerts: list[Alert] = field(default_factory=list)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    receiver: ThreadingHTTPServer | None = None
    port: int = 0

    def __post_init__(self) -> None:
        self.folder = self.folder.resolve()  # its processes run in it

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        prometheus, alertmanager = installed(PROMETHEUS), installed(ALERTMANAGER)
        if not prometheus or not alertmanager:
            raise LMWorksError("alerts need prometheus and alertmanager: apt-get install prometheus-alertmanager")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = free_ports(2)
        self.receiver = ThreadingHTTPServer(("127.0.0.1", 0), receiver_of(self.receive))
        threading.Thread(target=self.receiver.serve_forever, daemon=True).start()
        self.write_files(self.receiver.server_address[1])
        self.spawn("alertmanager", [
            alertmanager, f"--config.file={self.folder}/alertmanager.yml", f"--storage.path={self.folder}/alertmanager",
            f"--web.listen-address=127.0.0.1:{self.port + 1}", "--cluster.listen-address=",
        ])  # fmt: skip
        self.spawn("prometheus", [
            prometheus, f"--config.file={self.folder}/prometheus.yml", f"--storage.tsdb.path={self.folder}/tsdb",
            f"--web.listen-address=127.0.0.1:{self.port}", "--log.level=warn",
        ])  # fmt: skip
        self.wait_ready()

    def write_files(self, receiver_port: int) -> None:
        jobs = [
            {
                "job_name": job,
                "scheme": addresses[0].partition("://")[0],
                "tls_config": {"insecure_skip_verify": True},  # an expired certificate is not to hide the metrics
                "static_configs": [{"targets": [one.partition("://")[2] for one in addresses]}],
            }
            for job, addresses in self.targets.items()
        ]
        prometheus = {
            "global": {"scrape_interval": f"{SCRAPE_S:g}s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(self.folder / "rules.yml")],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{self.port + 1}"]}]}]},
            "scrape_configs": jobs,
        }
        alertmanager = {
            "route": {
                "receiver": "drill", "group_by": ["..."], "group_wait": "0s", "group_interval": "1s",
                "repeat_interval": "1h",
            },
            "receivers": [{
                "name": "drill",
                "webhook_configs": [{"url": f"http://127.0.0.1:{receiver_port}/", "send_resolved": True}],
            }],
        }  # fmt: skip
        # JSON is YAML.
        for name, content in (
            ("prometheus.yml", prometheus), ("alertmanager.yml", alertmanager), ("rules.yml", self.rules),
        ):  # fmt: skip
            (self.folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")

    def spawn(self, name: str, words: list[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes.append(
                subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder, env=environment()
                )
            )

    def wait_ready(self, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            ended = next((one for one in self.processes if one.poll() is not None), None)
            if ended is not None:
                raise LMWorksError(f"a process of {self.folder} ended with {ended.returncode}; see its log there")
            with suppress(OSError):
                urllib.request.urlopen(f"{self.url}/-/ready", timeout=2.0).close()
                urllib.request.urlopen(f"http://127.0.0.1:{self.port + 1}/-/ready", timeout=2.0).close()
                if len(self.query("up")) == sum(map(len, self.targets.values())):
                    return  # scraped, 5 s after it says that it is ready: else what happens meanwhile is no increase
            time.sleep(0.1)
        raise LMWorksError(f"Prometheus was not ready after {seconds:.0f} s; see {self.folder}")

    def receive(self, content: Mapping[str, Any]) -> None:
        """What Alertmanager delivers: each alert once when it fires, and once when it is over."""
        now = self.clock()
        for one in content["alerts"]:
            labels = dict(one["labels"])
            known = next((a for a in self.alerts if a.labels == labels and a.resolved is None), None)
            if one["status"] == "firing" and known is None:
                self.alerts.append(Alert(labels["alertname"], labels, now))
            elif one["status"] == "resolved" and known is not None:
                known.resolved = now

    def firing(self) -> set[str]:
        return {one.name for one in self.alerts if one.resolved is None}

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        with urllib.request.urlopen(
            f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}", timeout=10.0
        ) as answer:
            found = json.load(answer)["data"]["result"]
        return [(one["metric"], float(one["value"][1])) for one in found]

    def stop(self) -> None:
        for one in self.processes:
            one.terminate()
        for one in self.processes:
            with suppress(subprocess.TimeoutExpired):
                one.wait(15)
            one.kill()
            one.wait()
        self.processes.clear()
        if self.receiver is not None:
            self.receiver.shutdown()
            self.receiver.server_close()
            self.receiver = None


def receiver_of(receive: Callable[[Mapping[str, Any]], None]) -> type[BaseHTTPRequestHandler]:
    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receive(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    return Receiver

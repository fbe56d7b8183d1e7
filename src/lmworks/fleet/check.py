"""What a deployment folder lacks before it is ready for production: read from its files; no cluster is asked."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from ..spec import SpecError

Manifest = Mapping[str, Any]
READINESS = "readiness.toml"
FRESH_DAYS = 90  # a drill, a rollback or a restored backup counts for so long
WORKLOADS = ("Deployment", "StatefulSet", "LeaderWorkerSet")
DATED = {"rollback": "a rollback that was tried", "backup": "a backup that was restored"}
DRILLS = "drills/report.json"


@dataclass(frozen=True)
class Finding:
    area: str
    where: str
    missing: str  # what is missing; "" if nothing is

    @property
    def ok(self) -> bool:
        return not self.missing


@dataclass(frozen=True)
class Deployed:
    """A folder: its manifests, and its other files."""

    folder: Path
    manifests: tuple[Manifest, ...]

    def of(self, *kinds: str) -> list[Manifest]:
        return [one for one in self.manifests if one.get("kind") in kinds]

    @property
    def workloads(self) -> list[Manifest]:
        return self.of(*WORKLOADS)


def read_folder(folder: Path) -> Deployed:
    if not folder.exists():
        raise SpecError(f"{folder}: there is no such file or folder")
    files = sorted(folder.rglob("*.yaml")) if folder.is_dir() else [folder]
    manifests: list[Manifest] = []
    for path in files:
        manifests += [one for one in read_yaml(path) if isinstance(one, dict) and one.get("kind") != "Kustomization"]
    found = Deployed(folder if folder.is_dir() else folder.parent, tuple(manifests))
    if not found.workloads:
        raise SpecError(f"{folder}: no {', '.join(WORKLOADS)} is in it; name a folder that `fleet manifests` wrote")
    return found


def check(found: Deployed, today: date) -> list[Finding]:
    return [finding for rule in RULES for finding in rule(found)] + [*dated(found, today), *drills(found, today)]


def name_of(one: Manifest) -> str:
    return f"{one['kind']}/{one['metadata']['name']}"


def templates(one: Manifest) -> list[Manifest]:
    spec = one["spec"]
    if one["kind"] == "LeaderWorkerSet":
        both = spec["leaderWorkerTemplate"]
        return [both[key] for key in ("leaderTemplate", "workerTemplate") if key in both]
    return [spec["template"]]


def containers(found: Deployed) -> Iterator[tuple[str, Manifest, Manifest]]:
    """(where, pod, container)"""
    for workload in found.workloads:
        for template in templates(workload):
            for container in template["spec"]["containers"]:
                yield f"{name_of(workload)} {container['name']}", template["spec"], container


def selects(selector: Manifest, workload: Manifest) -> bool:
    labels = templates(workload)[0].get("metadata", {}).get("labels", {})
    return all(labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items())


# --- rules -----------------------------------------------------------------------------------------------


def limits(found: Deployed) -> Iterator[Finding]:
    for where, _, container in containers(found):
        resources = container.get("resources") or {}
        lacking = [
            word for word, there in (
                ("requests.cpu", "cpu" in resources.get("requests", {})),
                ("limits.memory", "memory" in resources.get("limits", {})),
            ) if not there
        ]  # fmt: skip
        yield Finding("limits", where, ", ".join(lacking))


def probes(found: Deployed) -> Iterator[Finding]:
    for where, _, container in containers(found):
        if container.get("ports"):
            wanted = ("startupProbe", "readinessProbe", "livenessProbe")
            yield Finding("probes", where, ", ".join(one for one in wanted if one not in container))


def quotas(found: Deployed) -> Iterator[Finding]:
    yield Finding("quotas", "namespace", "" if found.of("ResourceQuota") else "a ResourceQuota")


def disruption(found: Deployed) -> Iterator[Finding]:
    budgets = found.of("PodDisruptionBudget")
    for one in found.workloads:
        there = any(selects(budget["spec"].get("selector", {}), one) for budget in budgets)
        yield Finding("disruption", name_of(one), "" if there else "a PodDisruptionBudget")


def scaling(found: Deployed) -> Iterator[Finding]:
    scalers = found.of("HorizontalPodAutoscaler", "ScaledObject")
    for one in found.workloads:
        own = [s for s in scalers if s["spec"]["scaleTargetRef"]["name"] == one["metadata"]["name"]]
        yield Finding("scaling", name_of(one), "" if own else "a HorizontalPodAutoscaler or a ScaledObject")
        least = own[0]["spec"].get("minReplicas", own[0]["spec"].get("minReplicaCount", 1)) if own else None
        count = one["spec"].get("replicas", 1) if least is None else least
        yield Finding("redundancy", name_of(one), "" if count >= 2 else f"a second replica ({count} at least now)")


def network(found: Deployed) -> Iterator[Finding]:
    policies = found.of("NetworkPolicy")
    closed = any(not one["spec"].get("podSelector") and not one["spec"].get("ingress") for one in policies)
    yield Finding("network", "namespace", "" if closed else "a NetworkPolicy that denies what no other allows")
    named = [one["spec"]["podSelector"] for one in policies if one["spec"].get("podSelector")]
    for one in found.workloads:
        there = any(selects(selector, one) for selector in named)
        yield Finding("network", name_of(one), "" if there else "a NetworkPolicy of its own")


def security(found: Deployed) -> Iterator[Finding]:
    for where, pod, container in containers(found):
        own = container.get("securityContext") or {}
        whole = {**(pod.get("securityContext") or {}), **own}
        lacking = [
            word for word, there in (
                ("runAsNonRoot", whole.get("runAsNonRoot") is True),
                ("readOnlyRootFilesystem", own.get("readOnlyRootFilesystem") is True),
                ("allowPrivilegeEscalation: false", own.get("allowPrivilegeEscalation") is False),
                ("capabilities.drop ALL", "ALL" in (own.get("capabilities") or {}).get("drop", [])),
            ) if not there
        ]  # fmt: skip
        yield Finding("security", where, ", ".join(lacking))


def images(found: Deployed) -> Iterator[Finding]:
    for where, _, container in containers(found):
        image = str(container.get("image", ""))
        tag = image.rpartition("/")[2].partition(":")[2]
        pinned = "@sha256:" in image or tag not in ("", "latest")
        yield Finding("images", where, "" if pinned else f"a version or digest of {image or 'the image'}")


def dashboards(found: Deployed) -> Iterator[Finding]:
    files = sorted((found.folder / "dashboards").glob("*.json"))
    yield Finding("dashboards", "dashboards/*.json", "" if files else "a dashboard")
    for path in files:
        panels = read_json(path).get("panels")
        yield Finding("dashboards", path.name, "" if panels else "panels")


def alerts(found: Deployed) -> Iterator[Finding]:
    """Rules in files or manifests; each says how urgent it is, and names its runbook."""
    groups = [group for one in found.of("PrometheusRule") for group in one["spec"].get("groups", [])]
    for path in sorted((found.folder / "alerts").glob("*.y*ml")):
        groups += (read_yaml(path)[0] or {}).get("groups", [])
    rules = [rule for group in groups for rule in group.get("rules", []) if "alert" in rule]
    yield Finding("alerts", "PrometheusRule or alerts/*.yml", "" if rules else "alert rules")
    for rule in rules:
        annotations, labels = rule.get("annotations") or {}, rule.get("labels") or {}
        lacking = [
            word for word, there in (
                ("labels.severity", "severity" in labels), ("annotations.runbook_url", "runbook_url" in annotations),
            ) if not there
        ]  # fmt: skip
        yield Finding("alerts", rule["alert"], ", ".join(lacking))


def tenancy(found: Deployed) -> Iterator[Finding]:
    """The gateway's file: who may ask for how much, and how soon it must be answered."""
    files = [
        text
        for one in found.of("ConfigMap")
        for name, text in (one.get("data") or {}).items()
        if name == "gateway.toml"
    ]
    for text in files:
        config = read_toml_text("gateway.toml", text)
        keys = bool(config.get("tenants", {}).get("store") or config.get("tenants", {}).get("store_env"))
        limited = any(set(tier) - {"name", "weight"} for tier in config.get("tiers", []))
        yield Finding(
            "tenants", "gateway.toml", "" if keys else "tenants.store or store_env: without it there are no keys"
        )
        yield Finding(
            "tenants", "gateway.toml tiers", "" if limited else "a tier with limits, e.g. requests_per_minute"
        )
        yield Finding("slos", "gateway.toml", "" if config.get("slos") else "an SLO: nothing can burn its error budget")


RULES: tuple[Callable[[Deployed], Iterator[Finding]], ...] = (
    limits, probes, quotas, disruption, scaling, network, security, images, tenancy, dashboards, alerts,
)  # fmt: skip


def drills(found: Deployed, today: date) -> Iterator[Finding]:
    """As `lmworks drill all --out FOLDER/drills` left them: when, and whether they passed."""
    path = found.folder / DRILLS
    if not path.exists():
        yield Finding("drills", DRILLS, "the report of drills: lmworks drill all --out FOLDER/drills")
        return
    content = read_json(path)
    try:
        old = (today - date.fromisoformat(content["date"])).days
        failed = [one["drill"] for one in content["drills"] if not one["ok"]]
        count = len(content["drills"])
    except (KeyError, TypeError, ValueError):
        raise SpecError(f"{path} is no report of `lmworks drill`") from None
    why = f"drills again: the last were {old} days ago" if old > FRESH_DAYS else "" if count else "a drill"
    yield Finding("drills", DRILLS, why)
    for name in failed:
        yield Finding("drills", name, "a drill that passes: it did not")


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(f"{path}: {error}") from None
    return found if isinstance(found, dict) else {}


def read_yaml(path: Path) -> list[Any]:
    import yaml

    try:
        return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SpecError(f"{path}: {error}") from None


def read_toml_text(where: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise SpecError(f"{where} is not valid TOML: {error}") from None


def dated(found: Deployed, today: date) -> Iterator[Finding]:
    """`readiness.toml`: rollback = 2026-11-01, backup = 2026-10-20."""
    path = found.folder / READINESS
    data = read_toml_text(str(path), path.read_text(encoding="utf-8")) if path.exists() else {}
    for key, what in DATED.items():
        given = data.get(key)
        days = given if isinstance(given, dict) and given else {key: given}
        for name, day in days.items():
            if not isinstance(day, date):
                yield Finding(key, READINESS, f"the date of {what}" if day is None else f"{name} = {day!r} is no date")
            else:
                old = (today - day).days
                why = f"{name} again: the last was {old} days ago" if old > FRESH_DAYS else ""
                yield Finding(key, f"{READINESS} {name}", why)

"""Manifests of a fleet: against the schemas of Kubernetes, through kustomize, and by what they mean; `fleet check`."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from lmworks.fleet.check import check, read_folder
from lmworks.fleet.config import read_fleet
from lmworks.fleet.kubernetes import Cluster, base_files, write_folder
from lmworks.fleet.plan import FleetPlan, plan_fleet
from lmworks.gateway.config import read_config
from lmworks.spec import SpecError

ROOT = Path(__file__).parents[2]
CLUSTER = Cluster("registry.example.com/lmworks:0.1.0", host="llm.example.com")
VERSION = "1.31"
# Kinds of operators: their CustomResourceDefinitions are not in a Python package. LMWORKS_CRDS names a folder of them.
OF_OPERATORS = {"ScaledObject", "Gateway", "HTTPRoute", "LeaderWorkerSet"}
TODAY = date(2026, 11, 18)


@pytest.fixture(scope="module")
def found() -> FleetPlan:
    return plan_fleet(read_fleet(ROOT / "configs/fleet.toml"))


@pytest.fixture(scope="module")
def rack(tmp_path_factory: pytest.TempPathFactory) -> FleetPlan:
    """A server of more ranks than a machine has: GB200 NVL72, four in a machine."""
    text = (ROOT / "configs/fleet.toml").read_text()
    path = tmp_path_factory.mktemp("rack") / "fleet.toml"
    text = text.replace('["h100", "l40s"]', '["gb200"]').replace('"llama3-8b"', '"llama3-405b"\ntp = 8')
    path.write_text(text.replace("ttft=0.5,tpot=0.05", "").replace("ttft=1,tpot=0.03", ""))
    return plan_fleet(read_fleet(path))


def documents(plan: FleetPlan) -> list[dict[str, Any]]:
    return [one for part in base_files(plan, CLUSTER).values() for one in part]


def by_name(plan: FleetPlan, kind: str, name: str) -> dict[str, Any]:
    (one,) = [d for d in documents(plan) if d["kind"] == kind and d["metadata"]["name"] == name]
    return one


def test_schemas_of_kubernetes_accept_it(found: FleetPlan) -> None:
    own = [one for one in documents(found) if one["kind"] not in OF_OPERATORS]
    assert len(own) > 15
    for one in own:
        kubernetes_validate.validate(one, VERSION, strict=True)


def test_the_check_can_fail(found: FleetPlan) -> None:
    wrong = copy.deepcopy(by_name(found, "Deployment", "serve-chat"))
    wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(wrong, VERSION, strict=True)


def test_pods_of_a_rack_are_pods(rack: FleetPlan) -> None:
    one = by_name(rack, "LeaderWorkerSet", "serve-chat")
    template = one["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 2
    for key in ("leaderTemplate", "workerTemplate"):
        inside = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "inside"}, "spec": template[key]["spec"]}
        kubernetes_validate.validate(inside, VERSION, strict=True)
        assert template[key]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "4"


@pytest.mark.skipif("LMWORKS_CRDS" not in os.environ, reason="LMWORKS_CRDS: a folder of CustomResourceDefinitions")
def test_operators_accept_it(found: FleetPlan, rack: FleetPlan) -> None:
    schemas = {}
    for path in Path(os.environ["LMWORKS_CRDS"]).glob("*.yaml"):
        for crd in yaml.safe_load_all(path.read_text()):
            for version in crd["spec"]["versions"]:
                schemas[crd["spec"]["names"]["kind"], version["name"]] = version["schema"]["openAPIV3Schema"]
    seen = set()
    for one in [*documents(found), *documents(rack)]:
        if one["kind"] in OF_OPERATORS:
            schema = closed(schemas[one["kind"], one["apiVersion"].rpartition("/")[2]])
            jsonschema.validate({k: v for k, v in one.items() if k != "metadata"}, schema)
            seen.add(one["kind"])
    assert seen == OF_OPERATORS


def closed(schema: Any) -> Any:
    """No key but those that are named: an API server drops others silently."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    shut = {key: closed(value) for key, value in schema.items() if key != "required" or isinstance(value, list)}
    if shut.pop("x-kubernetes-int-or-string", False):
        return {}
    if isinstance(shut.get("properties"), dict) and "additionalProperties" not in shut:
        shut["additionalProperties"] = False
    return shut


def test_servers_have_the_planned_gpus_and_the_scaler_the_replicas(found: FleetPlan) -> None:
    pool = found.pools[0]
    container = by_name(found, "Deployment", "serve-chat")["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == str(pool.plan.deployment.ranks)
    assert container["args"][:2] == ["serve", "chat=/models/chat"]
    scaler = by_name(found, "ScaledObject", "serve-chat")["spec"]
    assert (scaler["minReplicaCount"], scaler["maxReplicaCount"]) == (pool.plan.replicas, 2 * pool.plan.replicas)
    assert [t["metadata"]["query"].split("{")[0] for t in scaler["triggers"]] == [
        "sum(lmworks:num_requests_waiting", "sum(lmworks:kv_cache_usage_perc",
    ]  # fmt: skip


def test_the_gateway_takes_its_configuration(found: FleetPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read by the gateway itself; each pool's name is that of a headless Service."""
    monkeypatch.setenv("SERVER_KEY", "secret")
    text = by_name(found, "ConfigMap", "gateway")["data"]["gateway.toml"]
    (path := tmp_path / "gateway.toml").write_text(text)
    config = read_config(path)
    services = {one["metadata"]["name"] for one in documents(found) if one["kind"] == "Service"}
    assert {pool.dns.partition(":")[0] for pool in config.pools} <= services


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kustomize_builds_the_overlays(found: FleetPlan, tmp_path: Path) -> None:
    write_folder(found, CLUSTER, tmp_path)
    built = {}
    for name in ("staging", "production"):
        ended = subprocess.run(
            ["kubectl", "kustomize", str(tmp_path / "overlays" / name)], capture_output=True, text=True
        )
        assert ended.returncode == 0, ended.stderr
        built[name] = list(yaml.safe_load_all(ended.stdout))
    assert {len(one) for one in built.values()} == {len(documents(found))}
    (scaler,) = [d for d in built["staging"] if d["kind"] == "ScaledObject" and d["metadata"]["name"] == "serve-chat"]
    assert (scaler["spec"]["minReplicaCount"], scaler["spec"]["maxReplicaCount"]) == (1, 1)
    assert scaler["metadata"]["namespace"] == "assistants-staging"
    for one in built["production"]:
        if one["kind"] not in OF_OPERATORS:
            kubernetes_validate.validate(one, VERSION, strict=True)


def test_images_have_a_version(found: FleetPlan) -> None:
    with pytest.raises(SpecError, match="for rollbacks"):
        base_files(found, Cluster("registry.example.com/lmworks:latest"))


# --- fleet check -----------------------------------------------------------------------------------------


def missing(folder: Path) -> set[tuple[str, str]]:
    return {(one.area, one.where) for one in check(read_folder(folder), TODAY) if not one.ok}


def test_what_is_written_lacks_what_only_people_can_do(found: FleetPlan, tmp_path: Path) -> None:
    write_folder(found, CLUSTER, tmp_path)
    assert {area for area, _ in missing(tmp_path)} == {
        "dashboards", "alerts", "rollback", "backup", "drills", "redundancy", "tenants", "slos"
    }  # fmt: skip
    assert missing(tmp_path) >= {("redundancy", "Deployment/serve-code-editor")}  # the plan has one replica
    (tmp_path / "dashboards").mkdir()
    (tmp_path / "dashboards" / "fleet.json").write_text('{"panels": []}')
    (tmp_path / "alerts").mkdir()
    (tmp_path / "alerts" / "fleet.yml").write_text("groups: []")
    assert {("dashboards", "fleet.json"), ("alerts", "PrometheusRule or alerts/*.yml")} <= missing(tmp_path)  # empty
    (tmp_path / "dashboards" / "fleet.json").write_text('{"panels": [{}]}')
    rule = {"alert": "A", "expr": "up == 0", "labels": {"severity": "page"}, "annotations": {"runbook_url": "u"}}
    for rules, lacking in (([{**rule, "annotations": {}}], {("alerts", "A")}), ([rule], set())):
        (tmp_path / "alerts" / "fleet.yml").write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": rules}]}))
        assert {one for one in missing(tmp_path) if one[0] == "alerts"} == lacking
    (tmp_path / "readiness.toml").write_text("rollback = 2026-11-01\nbackup = 2026-01-01\n")
    (tmp_path / "drills").mkdir()
    drills = [{"drill": "server-killed", "ok": True}, {"drill": "disk-full", "ok": False}]
    (tmp_path / "drills" / "report.json").write_text(json.dumps({"date": "2026-11-02", "drills": drills}))
    assert {one for one in missing(tmp_path) if one[0] == "drills"} == {("drills", "disk-full")}
    (tmp_path / "drills" / "report.json").write_text(json.dumps({"date": "2026-11-02", "drills": drills[:1]}))
    # the backup is too old; keys, limits and SLOs are in no gateway's file
    assert {area for area, _ in missing(tmp_path)} == {"backup", "redundancy", "tenants", "slos"}


def test_keys_limits_and_slos_of_the_gateway_are_asked_for(found: FleetPlan, tmp_path: Path) -> None:
    parts = documents(found)
    config = next(one for one in parts if one["kind"] == "ConfigMap" and "gateway.toml" in one["data"])
    config["data"]["gateway.toml"] += (
        '\n[tenants]\nstore_env = "STORE"\n[[tiers]]\nname = "gold"\nrequests_per_minute = 600\n'
        '[[slos]]\nname = "chat"\n'
    )
    (tmp_path / "all.yaml").write_text(yaml.dump_all(parts))
    assert not {one for one, _ in missing(tmp_path)} & {"tenants", "slos"}
    config["data"]["gateway.toml"] = config["data"]["gateway.toml"].replace("requests_per_minute", "weight")
    (tmp_path / "all.yaml").write_text(yaml.dump_all(parts))
    assert {one for one in missing(tmp_path) if one[0] == "tenants"} == {("tenants", "gateway.toml tiers")}


@pytest.mark.parametrize(
    ("area", "spoil"),
    [
        ("limits", lambda c: c["resources"].pop("limits")),
        ("probes", lambda c: c.pop("livenessProbe")),
        ("security", lambda c: c["securityContext"].pop("readOnlyRootFilesystem")),
        ("images", lambda c: c.update(image="lmworks:latest")),
    ],
)
def test_what_a_container_lacks_is_named(area: str, spoil: Any, found: FleetPlan, tmp_path: Path) -> None:
    parts = documents(found)
    spoiled = next(one for one in parts if one["kind"] == "Deployment" and one["metadata"]["name"] == "serve-chat")
    spoil(spoiled["spec"]["template"]["spec"]["containers"][0])
    (tmp_path / "all.yaml").write_text(yaml.dump_all(parts))
    assert (area, "Deployment/serve-chat server") in missing(tmp_path)


@pytest.mark.parametrize(
    ("area", "kind"),
    [
        ("quotas", "ResourceQuota"),
        ("disruption", "PodDisruptionBudget"),
        ("scaling", "ScaledObject"),
        ("network", "NetworkPolicy"),
    ],
)
def test_what_a_namespace_lacks_is_named(area: str, kind: str, found: FleetPlan, tmp_path: Path) -> None:
    (tmp_path / "all.yaml").write_text(yaml.dump_all([one for one in documents(found) if one["kind"] != kind]))
    assert area in {one for one, _ in missing(tmp_path)}


def test_a_folder_without_a_deployment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no Deployment"):
        read_folder(tmp_path)

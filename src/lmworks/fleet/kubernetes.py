"""Kubernetes manifests of a planned fleet: a kustomize base and overlays.

A pool is a Deployment of `lmworks serve` behind a headless Service, with a KEDA ScaledObject on queue and KV use, a
PodDisruptionBudget and NetworkPolicies; in front of all pools the gateway, with a HorizontalPodAutoscaler, a Gateway
and an HTTPRoute of the Gateway API. Pods run as a user without rights on a root file system that they cannot write.

`lmworks serve` is a server of one machine. A pool whose ranks are more than a machine has (a rack) becomes a
LeaderWorkerSet of vLLM, which can do it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..launch.kubernetes import Manifest, to_yaml
from ..spec import SpecError, dump_toml
from .plan import FleetPlan, Pool

SERVER_PORT, GATEWAY_PORT = 8000, 8080
USER = 10_001
MODELS, CONFIG = "/models", "/etc/lmworks"
DRAIN_S, GRACE_S = 90, 120  # for requests that are under way; then the pod is killed
STARTUP_S = 1200  # that weights may take to load
QUEUE, KV_USE = 4, 0.7  # of a server: more, and another one is started


@dataclass(frozen=True)
class Cluster:
    """What the cluster has."""

    image: str
    claim: str = "models"  # a PersistentVolumeClaim with a folder a model
    storage_class: str = ""
    storage: str = "500Gi"
    gateway_class: str = "istio"
    host: str = ""  # that clients ask for; empty: any
    prometheus: str = "http://prometheus.monitoring:9090"
    monitoring: str = "monitoring"  # the namespace that may read metrics


def label(name: str) -> str:
    """A DNS label (RFC 1035)."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return (plain if plain[:1].isalpha() else f"m-{plain}")[:50].rstrip("-")


def write_folder(found: FleetPlan, cluster: Cluster, folder: Path) -> list[Path]:
    """base/ and overlays/staging, overlays/production; `kubectl apply -k folder/overlays/production`."""
    base = base_files(found, cluster)
    files = {f"base/{name}": to_yaml(documents) for name, documents in base.items()}
    files["base/kustomization.yaml"] = to_yaml(
        [kustomization(resources=sorted(base), namespace=label(found.fleet.name))]
    )
    files |= {f"overlays/{name}/kustomization.yaml": to_yaml([one]) for name, one in overlays(found, cluster).items()}
    written = []
    for name, text in files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise SpecError(f"--out {path}: {error.strerror}") from None
        written.append(path)
    return written


def base_files(found: FleetPlan, cluster: Cluster) -> dict[str, list[Manifest]]:
    """File → documents."""
    check_image(cluster.image)
    pools = {f"pool-{label(pool.name)}.yaml": pool_manifests(pool, cluster) for pool in found.pools}
    return {
        "namespace.yaml": [namespace(found), quota(found), service_account(), deny_all()],
        "models.yaml": [model_claim(cluster)],
        "gateway.yaml": gateway_manifests(found, cluster),
        **pools,
    }


def check_image(image: str) -> None:
    tag = image.rpartition("/")[2].partition(":")[2]
    if "@sha256:" not in image and tag in ("", "latest"):
        raise SpecError(f"--image {image}: name a version (…:1.2.3) or a digest (…@sha256:…), for rollbacks")


def overlays(found: FleetPlan, cluster: Cluster) -> dict[str, Manifest]:
    """Staging has one server a pool and one gateway; production is the plan."""
    one = [
        {"target": {"kind": "ScaledObject"}, "patch": json_patch("/spec/minReplicaCount", 1)},
        {"target": {"kind": "ScaledObject"}, "patch": json_patch("/spec/maxReplicaCount", 1)},
        {"target": {"kind": "HorizontalPodAutoscaler"}, "patch": json_patch("/spec/minReplicas", 1)},
        {"target": {"kind": "ResourceQuota"}, "patch": json_patch("/spec/hard", {"count/pods": "40"})},
    ]
    name = label(found.fleet.name)
    return {
        "staging": kustomization(resources=["../../base"], namespace=f"{name}-staging", patches=one),
        "production": kustomization(resources=["../../base"], namespace=name),
    }


def json_patch(path: str, value: Any) -> str:
    return to_yaml([[{"op": "replace", "path": path, "value": value}]])  # type: ignore[list-item]


def kustomization(**keys: Any) -> Manifest:
    return {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", **keys}


def manifest(api: str, kind: str, name: str, spec: Any = None, **more: Any) -> Manifest:
    found = {"apiVersion": api, "kind": kind, "metadata": {"name": name}, **more}
    return {**found, "spec": spec} if spec is not None else found


# --- the namespace ---------------------------------------------------------------------------------------


def namespace(found: FleetPlan) -> Manifest:
    one = manifest("v1", "Namespace", label(found.fleet.name))
    one["metadata"]["labels"] = {"pod-security.kubernetes.io/enforce": "restricted"}
    return one


def quota(found: FleetPlan) -> Manifest:
    """Twice the plan's GPUs: what the autoscalers may reach, and no more."""
    hard: dict[str, int] = {}
    for pool in found.pools:
        resource, count = accelerator(pool)
        hard[f"requests.{resource}"] = hard.get(f"requests.{resource}", 0) + 2 * pool.plan.replicas * count
    return manifest("v1", "ResourceQuota", "accelerators", {"hard": {name: str(count) for name, count in hard.items()}})


def service_account() -> Manifest:
    return manifest("v1", "ServiceAccount", "lmworks", automountServiceAccountToken=False)


def deny_all() -> Manifest:
    return manifest(
        "networking.k8s.io/v1", "NetworkPolicy", "deny-all", {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    )


def model_claim(cluster: Cluster) -> Manifest:
    spec: dict[str, Any] = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": cluster.storage}},
        **({"storageClassName": cluster.storage_class} if cluster.storage_class else {}),
    }
    return manifest("v1", "PersistentVolumeClaim", cluster.claim, spec)


# --- pods ------------------------------------------------------------------------------------------------


def pod(container: Manifest, volumes: list[Manifest], grace: int) -> Manifest:
    return {
        "serviceAccountName": "lmworks",
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": grace,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": USER, "runAsGroup": USER, "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                **container,
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": [*container.get("volumeMounts", []), {"name": "tmp", "mountPath": "/tmp"}],
            }
        ],
        "volumes": [*volumes, {"name": "tmp", "emptyDir": {}}],
    }  # fmt: skip


def probe(path: str, port: int, period: int, failures: int) -> Manifest:
    return {"httpGet": {"path": path, "port": port}, "periodSeconds": period, "failureThreshold": failures}


def probes(port: int, startup: int) -> Manifest:
    """Ready when requests may come; alive while the process answers and the engine advances (/health)."""
    return {
        "startupProbe": probe("/ready", port, 5, max(1, startup // 5)),
        "readinessProbe": probe("/ready", port, 2, 2),
        "livenessProbe": probe("/health", port, 10, 6),
    }


def pod_labels(component: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "lmworks", "app.kubernetes.io/component": component}


def template(component: str, spec: Manifest, port: int) -> Manifest:
    scraped = {"prometheus.io/scrape": "true", "prometheus.io/port": str(port), "prometheus.io/path": "/metrics"}
    return {"metadata": {"labels": pod_labels(component), "annotations": scraped}, "spec": spec}


def budget(name: str, component: str) -> Manifest:
    return manifest(
        "policy/v1", "PodDisruptionBudget", name,
        {"maxUnavailable": 1, "selector": {"matchLabels": pod_labels(component)}},
    )  # fmt: skip


def allow(name: str, component: str, port: int, sources: list[Manifest], targets: list[Manifest]) -> Manifest:
    """Connections to its port from `sources`, and from it to `targets` and to DNS; nothing else."""
    dns = {"ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]}
    spec = {
        "podSelector": {"matchLabels": pod_labels(component)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{**({"from": sources} if sources else {}), "ports": [{"protocol": "TCP", "port": port}]}],
        "egress": [dns, *targets],
    }
    return manifest("networking.k8s.io/v1", "NetworkPolicy", name, spec)


# --- a pool ----------------------------------------------------------------------------------------------


def accelerator(pool: Pool) -> tuple[str, int]:
    """The resource that a server asks for, and how many of it."""
    gpu = pool.plan.deployment.gpu
    if pool.slices > 1:
        return f"nvidia.com/mig-{gpu.name.rpartition(' ')[2]}", 1
    return "nvidia.com/gpu", pool.plan.deployment.ranks


def pool_manifests(pool: Pool, cluster: Cluster) -> list[Manifest]:
    name = f"serve-{label(pool.name)}"
    component = name
    nodes = -(-pool.plan.deployment.ranks // pool.plan.deployment.gpu.per_node)
    workload = deployment(pool, cluster, name) if nodes == 1 else leader_worker_set(pool, cluster, name, nodes)
    service = manifest(
        "v1", "Service", name,
        {"clusterIP": "None", "selector": pod_labels(component), "ports": [{"name": "http", "port": SERVER_PORT}]},
    )  # fmt: skip
    sources: list[Manifest] = [
        {"podSelector": {"matchLabels": pod_labels("gateway")}},
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": cluster.monitoring}}},
    ]
    own = {"podSelector": {"matchLabels": pod_labels(component)}}
    targets: list[Manifest] = [{"to": [own]}] if nodes > 1 else []  # ranks on other machines
    policy = allow(name, component, SERVER_PORT, sources, targets)
    if nodes > 1:
        policy["spec"]["ingress"].append({"from": [own]})
    return [workload, service, scaled(pool, cluster, workload), budget(name, component), policy]


def server_container(pool: Pool, cluster: Cluster, gpus: int, command: list[str]) -> Manifest:
    resource, count = accelerator(pool)
    memory = max(16, round(1.5 * pool.plan.serving_memory.weights * pool.plan.deployment.ranks / 2**30))
    amount = {"memory": f"{memory}Gi", resource: str(min(count, gpus))}
    return {
        "name": "server",
        "image": cluster.image,
        "args": command,
        "env": [
            {"name": "HF_HUB_OFFLINE", "value": "1"},
            {"name": "HOME", "value": "/tmp"},
            {"name": "LMWORKS_API_KEY", "valueFrom": {"secretKeyRef": {"name": "fleet-keys", "key": "servers"}}},
        ],
        "ports": [{"name": "http", "containerPort": SERVER_PORT}],
        "resources": {"requests": {"cpu": str(4 * min(count, gpus)), **amount}, "limits": amount},
        **probes(SERVER_PORT, STARTUP_S),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "5"]}}},  # until routers have seen that it goes
        "volumeMounts": [
            {"name": "models", "mountPath": MODELS, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def server_volumes(cluster: Cluster) -> list[Manifest]:
    return [
        {"name": "models", "persistentVolumeClaim": {"claimName": cluster.claim, "readOnly": True}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}},
    ]


def weights_path(pool: Pool) -> str:
    return pool.model.path or f"{MODELS}/{pool.model.name}"


def deployment(pool: Pool, cluster: Cluster, name: str) -> Manifest:
    """Without `replicas`: the ScaledObject has them, and an apply would set them back."""
    ranks = pool.plan.deployment.ranks
    command = ["serve", f"{pool.model.name}={weights_path(pool)}", "--host", "0.0.0.0", "--port", str(SERVER_PORT)]
    command += ["--drain-seconds", str(DRAIN_S), *([f"engine.tp={ranks}"] if ranks > 1 else []), *pool.model.options]
    container = server_container(pool, cluster, ranks, command)
    spec = {
        "selector": {"matchLabels": pod_labels(name)},
        "strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "revisionHistoryLimit": 5,
        "template": template(name, pod(container, server_volumes(cluster), GRACE_S), SERVER_PORT),
    }
    return manifest("apps/v1", "Deployment", name, spec)


def leader_worker_set(pool: Pool, cluster: Cluster, name: str, nodes: int) -> Manifest:
    """vLLM over several machines: the leader serves, the others are its ranks."""
    gpu = pool.plan.deployment.gpu
    common = ["vllm", "serve", weights_path(pool), "--served-model-name", pool.model.name]
    common += ["--tensor-parallel-size", str(pool.plan.deployment.ranks), "--nnodes", str(nodes)]
    common += ["--node-rank", "$(LWS_WORKER_INDEX)", "--master-addr", "$(LWS_LEADER_ADDRESS)"]
    leader = server_container(pool, cluster, gpu.per_node, [*common, "--host", "0.0.0.0", "--port", str(SERVER_PORT)])
    worker = server_container(pool, cluster, gpu.per_node, [*common, "--headless"])
    for key in ("startupProbe", "readinessProbe", "livenessProbe", "ports"):
        del worker[key]
    volumes = server_volumes(cluster)
    spec = {
        "replicas": pool.plan.replicas,
        "leaderWorkerTemplate": {
            "size": nodes,
            "restartPolicy": "RecreateGroupOnPodRestart",
            "leaderTemplate": template(name, pod(leader, volumes, GRACE_S), SERVER_PORT),
            "workerTemplate": template(f"{name}-worker", pod(worker, volumes, GRACE_S), SERVER_PORT),
        },
    }
    return manifest("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", name, spec)


def scaled(pool: Pool, cluster: Cluster, workload: Manifest) -> Manifest:
    """From the planned number of servers to twice as many."""
    name = workload["metadata"]["name"]
    pods = f'pod=~"{name}-.*"'

    def trigger(query: str, threshold: float) -> Manifest:
        metadata = {"serverAddress": cluster.prometheus, "query": query, "threshold": str(threshold)}
        return {"type": "prometheus", "metricType": "AverageValue", "metadata": metadata}

    target = {"apiVersion": workload["apiVersion"], "kind": workload["kind"], "name": name}
    spec = {
        "scaleTargetRef": target,
        "minReplicaCount": pool.plan.replicas,
        "maxReplicaCount": 2 * pool.plan.replicas,
        "pollingInterval": 15,
        "cooldownPeriod": 300,
        "fallback": {"failureThreshold": 4, "replicas": 2 * pool.plan.replicas},  # without metrics: all there is
        "triggers": [
            trigger(f"sum(lmworks:num_requests_waiting{{{pods}}})", QUEUE),
            trigger(f"sum(lmworks:kv_cache_usage_perc{{{pods}}})", KV_USE),
        ],
    }
    return manifest("keda.sh/v1alpha1", "ScaledObject", name, spec)


# --- the gateway -----------------------------------------------------------------------------------------


def gateway_manifests(found: FleetPlan, cluster: Cluster) -> list[Manifest]:
    name = "gateway"
    targets = [
        {"to": [{"podSelector": {"matchLabels": pod_labels(f"serve-{label(pool.name)}")}}],
         "ports": [{"protocol": "TCP", "port": SERVER_PORT}]}
        for pool in found.pools
    ]  # fmt: skip
    cpu = {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 60}}
    scaler = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
        "minReplicas": 2,
        "maxReplicas": 8,
        "metrics": [{"type": "Resource", "resource": cpu}],
    }
    backend = {"name": name, "port": GATEWAY_PORT}
    parent = manifest(
        "gateway.networking.k8s.io/v1", "Gateway", "lmworks",
        {"gatewayClassName": cluster.gateway_class, "listeners": [{"name": "http", "port": 80, "protocol": "HTTP"}]},
    )  # fmt: skip
    route = {
        "parentRefs": [{"name": "lmworks"}],
        **({"hostnames": [cluster.host]} if cluster.host else {}),
        "rules": [
            {
                "matches": [{"path": {"type": "PathPrefix", "value": "/v1"}}],
                "timeouts": {"request": "600s"},
                "backendRefs": [backend],
            }
        ],
    }
    config = manifest("v1", "ConfigMap", "gateway", data={"gateway.toml": dump_toml(gateway_config(found))})
    service = {"selector": pod_labels(name), "ports": [{"name": "http", "port": GATEWAY_PORT}]}
    return [
        config,
        gateway_deployment(cluster, name),
        manifest("v1", "Service", name, service),
        manifest("autoscaling/v2", "HorizontalPodAutoscaler", name, scaler),
        budget(name, name),
        allow(name, name, GATEWAY_PORT, [], targets),
        parent,
        manifest("gateway.networking.k8s.io/v1", "HTTPRoute", "lmworks", route),
    ]


def gateway_config(found: FleetPlan) -> dict[str, Any]:
    """A pool of the gateway for each of the fleet's, found by the DNS of its headless Service."""
    pools = [
        {"name": pool.name, "dns": f"serve-{label(pool.name)}:{SERVER_PORT}", "key_env": "SERVER_KEY"}
        for pool in found.pools
    ]
    return {"listen": {"host": "0.0.0.0", "port": GATEWAY_PORT}, "pools": pools}


def gateway_deployment(cluster: Cluster, name: str) -> Manifest:
    container = {
        "name": "gateway",
        "image": cluster.image,
        "args": ["gateway", f"{CONFIG}/gateway.toml"],
        "env": [{"name": "SERVER_KEY", "valueFrom": {"secretKeyRef": {"name": "fleet-keys", "key": "servers"}}}],
        "ports": [{"name": "http", "containerPort": GATEWAY_PORT}],
        "resources": {"requests": {"cpu": "2", "memory": "1Gi"}, "limits": {"memory": "1Gi"}},
        **probes(GATEWAY_PORT, 60),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "5"]}}},
        "volumeMounts": [{"name": "config", "mountPath": CONFIG, "readOnly": True}],
    }
    volumes = [{"name": "config", "configMap": {"name": "gateway"}}]
    spec = {
        "selector": {"matchLabels": pod_labels(name)},
        "strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "revisionHistoryLimit": 5,
        "template": template(name, pod(container, volumes, GRACE_S), GATEWAY_PORT),
    }
    return manifest("apps/v1", "Deployment", name, spec)

"""Manifests for Kubernetes: through Kubeflow's operators, or with nothing but what every cluster has.

All kinds run the same `start.sh` in the same pod; torchrun finds its place in PET_MASTER_ADDR, PET_MASTER_PORT and
PET_NODE_RANK. Both operators set these; for a plain Job the pod's completion index and a headless Service do.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..spec import SpecError, dump_toml
from ..spec.errors import PREEMPTED
from .job import Job, check_no_spaces, trap_signal, wait_for_child

Manifest = dict[str, Any]
FILES = "/etc/lmworks"  # the spec and start.sh, from a ConfigMap
PORT = 29500
LIMIT = 1_000_000  # bytes that etcd takes in one object, less some room


@dataclass(frozen=True)
class Pods:
    """What every pod of the job has."""

    image: str
    claim: str  # a PersistentVolumeClaim that all nodes can write (ReadWriteMany): data and runs
    mount: str = "/work"
    grace: int = 300  # seconds between SIGTERM and SIGKILL: time for a checkpoint
    retries: int = 3  # how often pods that failed are started again; the run resumes from its last checkpoint


def manifests(job: Job, pods: Pods, kind: str) -> list[Manifest]:
    """What to apply, in order."""
    check_no_spaces("--image", pods.image)
    check_no_spaces("--claim", pods.claim)
    return [config_map(job), *KINDS[kind](job, pods)]


def config_map(job: Job) -> Manifest:
    data = {"spec.toml": dump_toml(job.spec.to_dict()), "start.sh": start_script(job)}
    size = sum(len(text.encode()) for text in data.values())
    if size > LIMIT:
        raise SpecError(f"the spec is {size:,} bytes; a ConfigMap holds {LIMIT:,}")
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": job.label}, "data": data}


def start_script(job: Job) -> str:
    run = shlex.quote(job.run_dir)
    before, after = "\n".join(trap_signal("TERM", "agent")), "\n".join(wait_for_child("agent"))
    return f"""\
# Every node looks before it meets the others, and the run folder is made after they met: all see the same.
if [[ -e {run}/spec.toml ]]; then
  work=(lmworks resume {run})
else
  work=(lmworks.train {FILES}/spec.toml --run-dir {run})
fi
{before}
torchrun --nnodes {job.nodes} --nproc-per-node {job.per_node} -m "${{work[@]}}" &
{after}
exit "$status"
"""


def pod(job: Job, pods: Pods, name: str, **more: Any) -> Manifest:
    """The pod of one node. `name` is what the operator expects its container to be called."""
    variables = {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(max(pods.grace - 30, 30)),
    }
    container = {
        "name": name,
        "image": pods.image,
        "command": ["bash", f"{FILES}/start.sh"],
        "workingDir": pods.mount,
        "env": [{"name": key, "value": value} for key, value in variables.items()],
        "resources": resources(job),
        "volumeMounts": [
            {"name": "files", "mountPath": FILES},
            {"name": "work", "mountPath": pods.mount},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    volumes = [
        {"name": "files", "configMap": {"name": job.label}},
        {"name": "work", "persistentVolumeClaim": {"claimName": pods.claim}},
        # NCCL and data workers pass tensors through shared memory; a container has 64 MiB of it unless told.
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    return {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": pods.grace, **more}


def resources(job: Job) -> Manifest:
    return (
        {"limits": {"nvidia.com/gpu": str(job.per_node)}} if job.on_gpus else {"requests": {"cpu": str(job.per_node)}}
    )


def preemption() -> Manifest:
    """A pod that was taken away is started again and is no failure: `backoffLimit` does not count it."""
    left = {"containerName": "node", "operator": "In", "values": [PREEMPTED]}
    taken = {"type": "DisruptionTarget", "status": "True"}
    return {"rules": [{"action": "Ignore", "onExitCodes": left}, {"action": "Ignore", "onPodConditions": [taken]}]}


def plain_job(job: Job, pods: Pods) -> list[Manifest]:
    """An Indexed Job: pod i is called NAME-i, and the Service without an address of its own makes that a DNS name."""
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.label},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # the nodes look for one another before they are ready
            "selector": {"batch.kubernetes.io/job-name": job.label},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    node = pod(job, pods, "node", subdomain=job.label, restartPolicy="Never")
    node["containers"][0]["env"] += [
        {"name": "PET_MASTER_ADDR", "value": f"{job.label}-0.{job.label}"},
        {"name": "PET_MASTER_PORT", "value": str(PORT)},
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": index}}},
    ]
    return [
        service,
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": job.label},
            "spec": {
                "completionMode": "Indexed",
                "completions": job.nodes,
                "parallelism": job.nodes,
                "backoffLimit": pods.retries * job.nodes,
                "podFailurePolicy": preemption(),
                "template": {"spec": node},
            },
        },
    ]


def pytorch_job(job: Job, pods: Pods) -> list[Manifest]:
    """For Kubeflow's training-operator (v1): the master is node 0, workers are the others."""

    def replicas(count: int) -> Manifest:
        template = {"spec": pod(job, pods, "pytorch")}
        return {"replicas": count, "restartPolicy": "OnFailure", "template": template}

    others = {"Worker": replicas(job.nodes - 1)} if job.nodes > 1 else {}
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": job.label},
            "spec": {
                "nprocPerNode": str(job.per_node),
                "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": pods.retries},
                "pytorchReplicaSpecs": {"Master": replicas(1), **others},
            },
        }
    ]


def train_job(job: Job, pods: Pods) -> list[Manifest]:
    """For Kubeflow Trainer (v2). The volumes are in a runtime of our own: how a TrainJob itself may add some
    (podTemplateOverrides, runtimePatches) has changed between releases.
    """
    node = {"template": {"spec": pod(job, pods, "node", restartPolicy="Never")}, "backoffLimit": pods.retries}
    node["podFailurePolicy"] = preemption()
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": job.label, "labels": {"trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": job.nodes, "torch": {}},
            "template": {
                "spec": {
                    "replicatedJobs": [{"name": "node", "template": {"metadata": {"labels": labels}, "spec": node}}]
                }
            },
        },
    }
    trainer = {"numNodes": job.nodes, "numProcPerNode": job.per_node, "resourcesPerNode": resources(job)}
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.label}
    return [
        runtime,
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": job.label},
            "spec": {"runtimeRef": reference, "trainer": trainer},
        },
    ]


KINDS: dict[str, Callable[[Job, Pods], list[Manifest]]] = {
    "pytorchjob": pytorch_job,
    "trainjob": train_job,
    "job": plain_job,
}


def to_yaml(documents: Sequence[Manifest]) -> str:
    """One stream of documents, keys in the order they were written, long texts as blocks that can be read."""
    try:
        import yaml
    except ImportError:
        raise SpecError(
            "manifests are written with PyYAML, which is not there: pip install 'lmworks[kubernetes]'"
        ) from None

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True  # a reader should not have to follow &id001

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)

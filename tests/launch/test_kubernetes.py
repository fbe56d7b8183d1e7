"""Manifests, against the schemas of Kubernetes itself and (crds.json) of the operators, and by what they mean."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from lmworks.cli.main import main
from lmworks.launch import KINDS, Job, Pods, manifests, to_yaml
from lmworks.spec import RunSpec, SpecError, load_run

CRDS = json.loads(Path(__file__).with_name("crds.json").read_text())
PODS = Pods("registry/lmworks:1", "shared")
VERSION = "1.31"  # new enough for all that is used; the package carries the schemas of many


def job(*overrides: str, nodes: int = 2, name: str = "tiny") -> Job:
    spec = load_run("tiny", ["parallel.dp=8", *overrides]).replace(name=name)
    return Job.of(spec, "tiny", nodes=nodes)


def applied(kind: str, what: Job | None = None) -> dict[str, dict[str, Any]]:
    """By kind: what kubectl would read from the file."""
    return {found["kind"]: found for found in yaml.safe_load_all(to_yaml(manifests(what or job(), PODS, kind)))}


def check(manifest: dict[str, Any]) -> None:
    """Against the operators' schema or Kubernetes' own, which also judges the pods and jobs inside the former."""
    schema = CRDS.get(manifest["kind"])
    if schema is None:
        kubernetes_validate.validate(manifest, VERSION, strict=True)
        return
    jsonschema.validate(manifest, {**schema, "definitions": CRDS["definitions"]})
    named = {"metadata": {"name": "inside"}}
    for replica in manifest["spec"].get("pytorchReplicaSpecs", {}).values():
        pod = {"apiVersion": "v1", "kind": "Pod", **named, "spec": replica["template"]["spec"]}
        kubernetes_validate.validate(pod, VERSION, strict=True)
    for each in manifest["spec"].get("template", {}).get("spec", {}).get("replicatedJobs", []):
        inside = {"apiVersion": "batch/v1", "kind": "Job", **named, "spec": each["template"]["spec"]}
        kubernetes_validate.validate(inside, VERSION, strict=True)


@pytest.mark.parametrize("device", ["auto", "cpu"])
@pytest.mark.parametrize("nodes", [1, 2, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_schemas_accept_it(kind: str, nodes: int, device: str) -> None:
    for manifest in applied(kind, job(f"cluster.device={device}", nodes=nodes)).values():
        check(manifest)


def test_the_check_can_fail() -> None:
    wrong = applied("pytorchjob")["PyTorchJob"]
    wrong["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["comand"] = ["bash"]
    with pytest.raises(kubernetes_validate.ValidationError, match="comand"):
        check(wrong)
    wrong = applied("trainjob")["TrainJob"]
    wrong["spec"]["trainer"]["numProcPerNode"] = "4"
    with pytest.raises(jsonschema.ValidationError, match="'4' is not of type 'integer'"):
        check(wrong)


def pods_of(kind: str) -> list[dict[str, Any]]:
    found = applied(kind)
    if kind == "pytorchjob":
        return [each["template"]["spec"] for each in found["PyTorchJob"]["spec"]["pytorchReplicaSpecs"].values()]
    if kind == "trainjob":
        (each,) = found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
        return [each["template"]["spec"]["template"]["spec"]]
    return [found["Job"]["spec"]["template"]["spec"]]


@pytest.mark.parametrize("kind", KINDS)
def test_every_pod_has_gpus_shared_memory_the_claim_and_the_spec(kind: str) -> None:
    for pod in pods_of(kind):
        (container,) = pod["containers"]
        assert container["resources"] == {"limits": {"nvidia.com/gpu": "4"}}
        places = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        volumes = {places[volume.pop("name")]: volume for volume in pod["volumes"]}
        assert volumes["/dev/shm"] == {"emptyDir": {"medium": "Memory"}}
        assert volumes["/work"] == {"persistentVolumeClaim": {"claimName": "shared"}}
        assert volumes["/etc/lmworks"] == {"configMap": {"name": applied(kind)["ConfigMap"]["metadata"]["name"]}}
        assert container["command"] == ["bash", "/etc/lmworks/start.sh"]


@pytest.mark.parametrize(("grace", "shutdown"), [(300, "270"), (61, "31"), (45, "30"), (10, "30")])
def test_ranks_have_time_to_save_before_the_pod_is_killed(grace: int, shutdown: str) -> None:
    """torchrun kills its ranks half a minute before Kubernetes kills the pod, but leaves them that much at least."""
    (_, _, manifest) = manifests(job(), Pods("image", "claim", grace=grace), "job")
    pod = manifest["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == grace
    assert {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": shutdown} in pod["containers"][0]["env"]


def test_pods_have_five_minutes_to_save_and_start_again_three_times() -> None:
    assert {pod["terminationGracePeriodSeconds"] for kind in KINDS for pod in pods_of(kind)} == {300}
    (node,) = applied("trainjob")["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    assert node["template"]["spec"]["backoffLimit"] == 3
    assert applied("pytorchjob")["PyTorchJob"]["spec"]["runPolicy"]["backoffLimit"] == 3
    assert applied("job")["Job"]["spec"]["backoffLimit"] == 6  # counts pods: three for each of the two nodes


def test_a_spec_too_large_for_a_config_map_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {f"/data/{number:060}": 1.0 for number in range(20_000)}
    with pytest.raises(SpecError, match=r"the spec is 1,\d{3},\d{3} bytes; a ConfigMap holds 1,000,000"):
        manifests(Job.of(load_run("tiny").replace(data={"mix": sources}), "tiny"), PODS, "job")
    size = sum(len(text.encode()) for text in applied("job")["ConfigMap"]["data"].values())
    monkeypatch.setattr("lmworks.launch.kubernetes.LIMIT", size)
    assert applied("job")["ConfigMap"]
    monkeypatch.setattr("lmworks.launch.kubernetes.LIMIT", size - 1)
    with pytest.raises(SpecError, match="a ConfigMap holds"):
        manifests(job(), PODS, "job")


def test_scripts_can_be_read_in_the_manifest() -> None:
    what = manifests(job(), PODS, "job")
    script = what[0]["data"]["start.sh"]
    text = to_yaml(what)
    assert "\n  start.sh: |\n" in text
    for line in script.splitlines():
        assert f"\n    {line}\n" in text


def test_the_operators_find_what_they_look_for() -> None:
    replicas = applied("pytorchjob")["PyTorchJob"]["spec"]["pytorchReplicaSpecs"]
    assert {name: each["replicas"] for name, each in replicas.items()} == {"Master": 1, "Worker": 1}
    assert {each["template"]["spec"]["containers"][0]["name"] for each in replicas.values()} == {"pytorch"}
    found = applied("trainjob")
    (node,) = found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    assert node["name"] == node["template"]["spec"]["template"]["spec"]["containers"][0]["name"] == "node"
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert found["TrainJob"]["spec"]["runtimeRef"]["name"] == found["TrainingRuntime"]["metadata"]["name"]
    assert (
        found["TrainJob"]["spec"]["trainer"]["numNodes"],
        found["TrainJob"]["spec"]["trainer"]["numProcPerNode"],
    ) == (2, 4)


def test_a_plain_job_finds_node_0_through_the_service() -> None:
    found = applied("job", job(name="Llama 3"))
    spec, service = found["Job"]["spec"], found["Service"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    variables = {each["name"]: each for each in spec["template"]["spec"]["containers"][0]["env"]}
    # Pod i of an Indexed Job is called NAME-i, and a headless Service makes HOSTNAME.SUBDOMAIN a name.
    assert variables["PET_MASTER_ADDR"]["value"] == f"llama-3-0.{service['metadata']['name']}"
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True  # nodes meet before any of them is ready
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": found["Job"]["metadata"]["name"]}
    assert variables["PET_MASTER_PORT"]["value"] == str(service["spec"]["ports"][0]["port"])
    assert "job-completion-index" in variables["PET_NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]


def test_a_pod_that_was_taken_away_is_no_failure() -> None:
    """Kubernetes has such rules for pods that it does not start again itself (`Never`): the Job makes new ones."""
    plain = applied("job")["Job"]["spec"]
    (inside,) = applied("trainjob")["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    for found in (plain, inside["template"]["spec"]):
        assert found["template"]["spec"]["restartPolicy"] == "Never"
        ignored = [rule for rule in found["podFailurePolicy"]["rules"] if rule["action"] == "Ignore"]
        (name,) = {container["name"] for container in found["template"]["spec"]["containers"]}
        assert {"containerName": name, "operator": "In", "values": [75]} in [
            rule.get("onExitCodes") for rule in ignored
        ]


def test_the_spec_travels_unchanged() -> None:
    import tomllib

    what = job("optim.lr=1e-5", name='ünï "code"')
    text = applied("job", what)["ConfigMap"]["data"]["spec.toml"]
    assert RunSpec.from_dict(tomllib.loads(text)).to_dict() == what.spec.to_dict()


def test_shellcheck_accepts_the_start_script(shellcheck: str, tmp_path: Path) -> None:
    script = tmp_path / "start.sh"
    what = Job.of(load_run("tiny"), "tiny", run_dir="runs/it's here")
    script.write_text(applied("job", what)["ConfigMap"]["data"]["start.sh"])
    result = subprocess.run([shellcheck, "--shell=bash", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--image", "a b", "--claim", "c"], "--image 'a b'"),
        (["--image", "a", "--claim", ""], "--claim ''"),
        (["--image", "a", "--claim", "c", "--kind", "pytorch"], "did you mean 'pytorchjob'"),
        (["--image", "a", "--claim", "c", "--nodes", "2"], "the layout has 1 ranks"),
    ],
)
def test_bad_options_give_one_line(
    options: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lmworks", "launch", "kubernetes", "tiny", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert words in error
    assert error.count("\n") == 1


def test_without_pyyaml_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(SpecError, match=r"lmworks\[kubernetes\]"):
        to_yaml([])

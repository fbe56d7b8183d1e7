"""The first sheet: its JSON, its sums, what it says without a machine."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from lmworks.plan.case import Case
from lmworks.plan.devices.machine import Machine, Rate
from lmworks.plan.memory.reserve import reserved, safe_bytes
from lmworks.plan.ops import Kernel
from lmworks.plan.policies import policies, saved_bytes_by_policy
from lmworks.plan.predict import predict
from lmworks.plan.step.one_device import step_time
from lmworks.spec import RunSpec, SpecError, catalogue, load_run
from tracker import make_run

KINDS = ("stream", "strided", "exp", "tanh", "optimizer")


def make_machine(rate: float = 1e12, bandwidth: float = 1e11, launch: float = 0.0, device: str = "cpu") -> Machine:
    rates = {kind: (Rate((1.0,), bandwidth),) for kind in KINDS}
    rates |= {f"{kind}.fp32": (Rate((1.0,), rate),) for kind in ("gemm", "attention", "attention_backward")}
    return Machine(
        "a machine", device, "measured", rates, launch_s=launch, launch_backward_s=launch, memory_bytes=10**9
    )


def test_json_shape() -> None:
    spec = make_run(accumulation=2)
    result = json.loads(json.dumps(predict(spec, make_machine()).to_dict(), allow_nan=False))
    assert result["params"] == spec.model.params
    assert result["tokens_per_step"] == spec.tokens_per_step
    assert result["memory_bytes"] == sum(row["bytes"] for row in result["memory"])
    assert {"name", "bytes", "how"} == set(result["memory"][0])
    assert result["step_s"] == pytest.approx(sum(result["step_parts"].values()))
    assert result["tokens_per_s"] == pytest.approx(spec.tokens_per_step / result["step_s"])
    assert set(result["step_parts"]) <= set(result["tags"])
    assert set(result["tags"].values()) <= {"measured", "modelled"}


def test_a_range_reaches_from_a_machine_alone_to_one_as_busy_as_it_was() -> None:
    quiet, busy = make_machine(), replace(make_machine(), noise=8.0)
    told, range_told = (predict(make_run(), machine).to_dict() for machine in (quiet, busy))
    step = told["step_s"]
    assert range_told["step_s"] == step  # rates are of the machine alone
    assert told["interval"] == pytest.approx([0.85 * step, 1.3 * step]) and told["quiet"] is True
    assert range_told["interval"] == pytest.approx([0.65 * step, 8 * 1.3 * step]) and range_told["quiet"] is False
    assert (told["noise"], range_told["noise"]) == (1.0, 8.0)
    named = predict(load_run("tiny", ["cluster.gpu=h100"]), Machine.of(catalogue()["H100-SXM-80GB"])).to_dict()
    assert named["interval"] and named["quiet"] is named["noise"] is None
    mixed = load_run("tiny", ["parallel.recompute=budget", "parallel.recompute_budget=0.001"])
    time = predict(mixed, busy).time
    assert time and time.interval == pytest.approx((0.65 * time.total, 8 * 1.3 * time.total))


def test_without_a_machine_no_time_is_made_up() -> None:
    result = predict(make_run()).to_dict()
    assert result["memory_bytes"] > 0
    assert result["step_s"] is result["tokens_per_s"] is result["step_parts"] is result["machine"] is None


def test_a_precision_that_was_not_measured_has_no_time() -> None:
    spec = make_run(dtype="bf16")
    assert predict(spec, make_machine()).time is None
    with pytest.raises(SpecError, match=r"precision\.dtype = 'bf16': the rate of a machine for it is not known"):
        step_time(spec, make_machine())


def test_time_follows_the_work() -> None:
    machine = make_machine()
    once, thrice = (step_time(make_run(accumulation=n), machine).parts for n in (1, 3))
    assert thrice["matmul"] == pytest.approx(3 * once["matmul"])
    assert thrice["optimizer"] == once["optimizer"]
    none, full, mlp, selective = (
        step_time(make_run(recompute=name), machine).parts for name in ("none", "full", "mlp", "selective")
    )
    assert full["matmul"] > mlp["matmul"] > selective["matmul"] == none["matmul"]
    assert full["attention"] > mlp["attention"] == none["attention"]
    assert selective["norms"] > none["norms"]


def test_a_gpu_hides_copies_to_the_host_behind_work_and_a_cpu_does_not() -> None:
    spec = make_run(layers=4, micro_batch=64, seq=512)
    away = spec.replace(parallel=spec.parallel.replace(offload_activations=4 / 1024))
    assert step_time(spec, make_machine()).parts.get("offload", 0.0) == 0.0
    assert step_time(away, make_machine()).parts["offload"] > 0.0
    named = away.replace(cluster=away.cluster.replace(gpu="H200-SXM-141GB", device="cuda"))
    assert step_time(named, make_machine(device="cuda")).parts["offload"] == 0.0


def test_a_gpu_hides_launches_behind_work_and_a_cpu_does_not() -> None:
    spec = make_run(norm="layer")
    assert step_time(spec, make_machine(launch=1e-9, device="cuda")).parts["launches"] == 0
    assert step_time(spec, make_machine(launch=1e-9)).parts["launches"] > 0
    slow, slower = (step_time(spec, make_machine(launch=launch, device="cuda")) for launch in (1e-2, 2e-2))
    assert slower.total == pytest.approx(2 * slow.total)  # all of it is the host's


def test_a_rate_lies_between_its_neighbours() -> None:
    rates = {"gemm.fp32": (Rate((64, 64, 64), 1e9), Rate((1024, 1024, 1024), 4e9))}
    machine = Machine("a machine", "cpu", "measured", rates)
    between = 1 / machine.seconds(Kernel("gemm", flops=1, shape=(256, 256, 256)), "fp32")
    assert 1e9 < between < 4e9
    assert machine.seconds(Kernel("gemm", flops=1, shape=(64, 64, 64)), "fp32") == pytest.approx(1e-9, rel=1e-3)


def test_a_gpu_of_the_catalogue_says_what_its_time_rests_on() -> None:
    gpu = catalogue()["H200-SXM-141GB"]
    prediction = predict(make_run(dtype="bf16"), Machine.of(gpu))
    assert prediction.time is not None
    assert prediction.time.tags["matmul"] == "fitted"
    assert prediction.time.tags["attention"] == "modelled"
    # No step is faster than its model FLOPs at the peak.
    assert prediction.time.total >= prediction.flops.model / (gpu.bf16_tflops * 1e12)


def test_machines_that_are_not_described_are_the_usual_ones() -> None:
    """1,024 ranks on H100 named alone: 128 machines of eight, not one rank to a machine."""
    words = ["cluster.gpu=h100", "precision.dtype=bf16", "parallel.dp_shard=1024", "parallel.strategy=fsdp2"]
    alone, told = (
        Case.of(load_run("llama3-8b", [*words, *more])).cluster
        for more in ([], ["cluster.nodes=128", "cluster.gpus_per_node=8"])
    )
    assert alone == told
    assert Case.of(load_run("llama3-8b", words[:2])).cluster.gpus == 1


def test_an_accelerator_without_a_bandwidth_is_refused() -> None:
    unknown = next(iter(catalogue().values())).replace(name="mine", bandwidth_gbs=0.0)
    with pytest.raises(SpecError, match="mine: bandwidth_gbs is not in the catalogue"):
        Machine.of(unknown)


def test_the_device_of_a_spec_decides_whose_kernels_run() -> None:
    cuda = RunSpec.from_dict({"cluster": {"device": "cuda"}})
    named = RunSpec.from_dict({"cluster": {"gpu": "H200-SXM-141GB"}})
    assert predict(cuda).memory == predict(named).memory != predict(RunSpec()).memory


def test_planning_loads_no_torch() -> None:
    code = (
        "import sys, lmworks.plan.predict as p, lmworks.spec as s; p.predict(s.RunSpec()); exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_budget_takes_the_time_of_what_its_blocks_do() -> None:
    machine = make_machine()

    def seconds(**layout: object) -> float:
        spec = make_run()
        time = predict(spec.replace(parallel=spec.parallel.replace(**layout)), machine).time
        assert time is not None
        return time.total

    none, full = seconds(recompute="none"), seconds(recompute="full")
    assert seconds(recompute="budget", recompute_budget=1000.0) == pytest.approx(none)
    spec = make_run()
    each = saved_bytes_by_policy(spec)
    layers = spec.model.layers
    assert layers >= 2
    one_of_them = (each["full"] + (layers - 1) * each["mlp"]) / 2**30 * 1.0001
    mixed = seconds(recompute="budget", recompute_budget=one_of_them)
    mlp = seconds(recompute="mlp")
    assert mixed == pytest.approx((full + (layers - 1) * mlp) / layers)
    assert none < mlp < mixed < full


def test_without_a_figure_a_budget_fills_the_memory_of_the_gpu() -> None:
    half = ("precision.dtype=bf16", "precision.weights=bf16", "precision.states=bf16", "precision.master=false")
    base = ["data.micro_batch=2", "parallel.compile=true", "data.seq=8192", "parallel.recompute=budget", *half]
    recomputed = {}
    for name in ("H100-SXM-80GB", "H200-SXM-141GB"):
        spec, gpu = load_run("llama3-8b", [*base, f"cluster.gpu={name}"]), catalogue()[name]
        chosen = policies(spec, range(spec.model.layers))
        recomputed[name] = sum(policy != "none" for policy in chosen)
        assert 0.85 < float(reserved(predict(spec).memory.total)) / safe_bytes(gpu) <= 1
    assert recomputed["H200-SXM-141GB"] < recomputed["H100-SXM-80GB"]
    least = load_run("llama3-8b", [*base, "cluster.gpu=H100-SXM-80GB", "precision.states=fp32"])
    with pytest.raises(SpecError, match="with every block recomputed the run still takes"):
        policies(least, range(32))
    with pytest.raises(SpecError, match=r"name it with cluster\.gpu, or give the GiB"):
        policies(load_run("tiny", ["parallel.recompute=budget"]), range(2))

"""Profiles of machines: read back as they were written, used by plans, refused with a reason where they are broken."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmworks.plan.case import Case
from lmworks.plan.devices.links import Fabric
from lmworks.plan.devices.machine import FORMAT, Machine, Rate
from lmworks.plan.devices.profile import Profile, load_profile, profile_of
from lmworks.plan.ops import Kernel, gemm
from lmworks.plan.predict import predict
from lmworks.plan.search.candidates import problem_of
from lmworks.plan.software import EAGER
from lmworks.plan.step.price import price
from lmworks.spec import Cluster, ModelSpec, RunSpec, SpecError, catalogue, dump_toml, parse_cluster
from tracker import make_run

PASSES = ("stream", "strided", "exp", "tanh", "optimizer")
LINKS = {
    "gpus": ["H100-SXM-80GB"],
    "link_gbs": 300.0,
    "fabric": "nvswitch",
    "sizes": [1024, 1048576, 268435456],
    "tag": "measured",
    "all-reduce": {"2": [10.0, 20.0, 1000.0], "8": [20.0, 40.0, 1600.0]},
    "send": {"2": [5.0, 10.0, 900.0]},
}


def make_machine(name: str = "a CPU, 2 threads", device: str = "cpu", dtype: str = "fp32") -> Machine:
    rates = {kind: (Rate((1e4,), 1e10), Rate((1e8,), 2e10)) for kind in PASSES}
    rates[f"gemm.{dtype}"] = (Rate((512, 128, 128), 1e11), Rate((1024, 1024, 1024), 3e11))
    rates |= {f"{kind}.{dtype}": (Rate((128, 32), 5e10),) for kind in ("attention", "attention_backward")}
    return Machine(name, device, "measured", rates, 1.5e-6, 2.5e-6, 2**34, 1.03)


def write(path: Path, profile: Profile) -> Path:
    path.write_text(profile.to_toml())
    return path


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = {"date": "2026-11-15T00:00:00+00:00", "torch": "2.11", "seconds": 61.5}
    profile = Profile(make_machine(), LINKS, made)
    read = load_profile(write(tmp_path / "profile.toml", profile))
    assert read == profile
    alone = load_profile(write(tmp_path / "alone.toml", Profile(make_machine(), made=made)))
    assert alone.curve is None and alone.machine == profile.machine


def test_predictions_are_those_of_the_measured_machine(tmp_path: Path) -> None:
    spec, path = make_run(accumulation=2), write(tmp_path / "profile.toml", Profile(make_machine()))
    prediction = predict(spec, profile_of(Cluster(profile=str(path))).machine).to_dict()
    assert prediction == predict(spec, make_machine()).to_dict()
    assert prediction["tags"]["matmul"] == prediction["machine"]["tag"] == "measured"


def test_collectives_are_those_that_were_measured(tmp_path: Path) -> None:
    machine = make_machine("NVIDIA H100 80GB HBM3", "cuda", "bf16")
    curve = load_profile(write(tmp_path / "profile.toml", Profile(machine, LINKS))).curve
    links = Fabric.of(parse_cluster("8xh100"), catalogue()["H100-SXM-80GB"], curve)
    # whatever the catalogue says of the link: these are times of this machine
    assert links.seconds("all-reduce", 2**20, 8) == pytest.approx(40e-6)
    assert links.seconds("send", 2**20, 2) == pytest.approx(10e-6)
    assert links.tag("all-reduce", 8) == links.tag("send", 2) == "measured"
    assert links.tag("all-gather", 8) == "modelled"  # priced like an all-reduce of as many bytes on the wire
    assert links.seconds("all-gather", 2**21, 8) == pytest.approx(40e-6)


def test_of_a_known_gpu_the_law_is_corrected_by_what_was_measured(tmp_path: Path) -> None:
    """A machine that is 20% slower than the catalogue thinks, at each measured size, is so between and beyond them."""
    law = Machine.of(catalogue()["H100-SXM-80GB"])
    shapes = [(2048, 1024, 4096), (4096, 4096, 4096), (8192, 4096, 14336)]
    points = tuple(Rate(shape, 0.8 * rate_of(law, gemm(*shape))) for shape in shapes)
    sizes = (2.0**20, 2.0**26)
    passes = tuple(Rate((size,), 0.8 * rate_of(law, Kernel("stream", bytes=size))) for size in sizes)
    machine = dataclasses.replace(
        make_machine("NVIDIA H100 80GB HBM3", "cuda", "bf16"), rates={"gemm.bf16": points, "stream": passes}
    )
    read = load_profile(write(tmp_path / "profile.toml", Profile(machine))).machine
    for kernel in (gemm(16384, 8192, 28672), gemm(512, 512, 512), gemm(3000, 2000, 1000, count=8)):
        assert read.seconds(kernel, "bf16") == pytest.approx(law.seconds(kernel, "bf16") / 0.8)
    many = Kernel("stream", bytes=np.array([1e3, 1e6, 1e9]))
    assert read.seconds(many, "bf16") == pytest.approx(law.seconds(many, "bf16") / 0.8)
    unmeasured = Kernel("attention", flops=1e12, shape=(4096, 128))
    assert read.seconds(unmeasured, "bf16") == law.seconds(unmeasured, "bf16")
    assert read.tags["gemm.bf16"] == "measured" and read.tags["attention"] == "modelled"


def rate_of(machine: Machine, kernel: Kernel) -> float:
    return float((kernel.flops or kernel.bytes) / machine.seconds(kernel, "bf16"))


def test_a_profile_of_something_else_is_refused(tmp_path: Path) -> None:
    cpu = str(write(tmp_path / "cpu.toml", Profile(make_machine())))
    gpu = str(write(tmp_path / "gpu.toml", Profile(make_machine("NVIDIA H200", "cuda", "bf16"))))
    with pytest.raises(SpecError, match=r"was measured on a CPU, 2 threads, but cluster\.device = 'cuda'"):
        profile_of(Cluster(profile=cpu, device="cuda"))
    with pytest.raises(SpecError, match=r"was measured on NVIDIA H200, but cluster\.gpu = 'H100-SXM-80GB'"):
        profile_of(Cluster(profile=gpu, gpu="H100-SXM-80GB"))
    assert profile_of(Cluster(profile=gpu, gpu="H200-SXM-141GB")).machine.name == "NVIDIA H200"


def broken(**changes: Any) -> dict[str, Any]:
    return {**Profile(make_machine(), LINKS).to_dict(), **changes}


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (broken(format=FORMAT + 1), f"its format is {FORMAT + 1}, and this version of LMWorks reads {FORMAT}"),
        ({"name": "a run"}, "its format is None"),
        (broken(machine={}), "machine.name is missing"),
        (broken(machine=3), r"\[machine\] is missing"),
        (broken(machine={**broken()["machine"], "device": "tpu"}), "machine.device is 'tpu', not cpu or cuda"),
        (
            broken(machine={**broken()["machine"], "launch_s": "fast"}),
            "launch_s has 'fast', which is no number",
        ),
        (broken(machine={**broken()["machine"], "noise": -1}), "machine.noise has -1, which no machine does"),
        (broken(rates={}), r"it has no matrix products"),
        (broken(rates={"gemm.fp32": {"shapes": [[1, 2]], "rates": [1.0]}}), "should have 3 numbers"),
        (broken(rates={"gemm.fp32": {"shapes": [], "rates": [1.0]}}), "not as many shapes as rates"),
        (broken(rates={"gemm.fp32": {"shapes": [[1, 2, 3]], "rates": [0]}}), "has 0, which no machine does"),
        (broken(rates={"gemm.fp32": {"shapes": [[1, 2, 3]], "rates": [True]}}), "has True, which is no number"),
        (broken(rates={"gemm.fp32": [1]}), r"\[rates.gemm.fp32\] is missing"),
        (broken(links={**LINKS, "sizes": [4, 2, 1]}), "links.sizes must grow"),
        (broken(links={**LINKS, "all-reduce": {"2": [1.0]}}), "links.all-reduce.2 has not as many times"),
        (broken(links={**LINKS, "all-reduce": {"one": [1.0]}}), "'one' is no number of ranks"),
        (broken(links={key: LINKS[key] for key in LINKS if key != "all-reduce"}), "links.all-reduce is missing"),
    ],
)
def test_a_broken_profile_says_what_is_wrong(tmp_path: Path, table: dict[str, Any], words: str) -> None:
    path = tmp_path / "profile.toml"
    path.write_text(dump_toml(table))
    with pytest.raises(SpecError, match=words) as error:
        load_profile(path)
    assert str(error.value).startswith(f"cluster.profile: {path}")
    assert "lmworks plan calibrate" in str(error.value)


def test_a_file_that_is_not_there_or_no_toml(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"cluster\.profile: cannot read .*nowhere\.toml: No such file"):
        load_profile(tmp_path / "nowhere.toml")
    (tmp_path / "text.toml").write_text("measured: fast")
    with pytest.raises(SpecError, match="is not valid TOML"):
        load_profile(tmp_path / "text.toml")


def test_layouts_are_priced_with_the_profile(tmp_path: Path) -> None:
    """Measured products at half the law's rate, and links ten times slower: both lengthen a step, nothing else does."""
    h100 = catalogue()["H100-SXM-80GB"]
    law = Machine.of(h100)
    shapes = [(2048, 1024, 4096), (8192, 4096, 4096), (8192, 8192, 28672)]
    points = tuple(Rate(shape, 0.5 * rate_of(law, gemm(*shape))) for shape in shapes)
    machine = dataclasses.replace(make_machine("NVIDIA H100 80GB HBM3", "cuda"), rates={"gemm.bf16": points})
    slow = {**LINKS, "all-gather": {"8": [200.0, 400.0, 16000.0]}, "reduce-scatter": {"8": [200.0, 400.0, 16000.0]}}
    path = str(write(tmp_path / "profile.toml", Profile(machine, slow)))
    case = Case(ModelSpec.from_preset("llama3-8b"), h100, EAGER, 4096, tp=8, sp=True)
    usual, measured = price(case), price(case.replace(cluster=Cluster(gpus_per_node=8, profile=path)))
    assert 1.8 < measured.parts["matmul"] / usual.parts["matmul"] < 2  # casts, which are in it, take what they took
    assert measured.parts["attention"] == usual.parts["attention"]
    assert measured.parts["tp"] > 5 * usual.parts["tp"]
    with pytest.raises(SpecError, match="was measured on NVIDIA H100 80GB HBM3, and this plan is for A100-SXM-80GB"):
        price(case.replace(cluster=Cluster(gpus_per_node=8, profile=path), gpu=catalogue()["A100-SXM-80GB"]))
    question = problem_of(RunSpec.from_dict({"cluster": {"profile": path}}), "8xh100", compile=False)
    assert question.cluster.profile == path

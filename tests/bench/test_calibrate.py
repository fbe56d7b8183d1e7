"""Calibration: every kernel and collective of a plan gets a figure, and nothing is left behind that is not whole."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lmworks.bench import calibrate, collectives
from lmworks.bench import calibrate as calibrating
from lmworks.bench.kernel_timing import FULL, QUICK
from lmworks.plan.devices.links import Curve, Fabric
from lmworks.plan.devices.profile import Profile, load_profile
from lmworks.plan.predict import predict
from lmworks.spec import Cluster, Gpu, LMWorksError, RunSpec, SpecError, load_run
from lmworks.spec.files import with_absolute_paths
from typed import lmworks

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def profile() -> Profile:
    return calibrating.calibrate(CPU, seconds=0.4, ranks=2, quick=True)


@pytest.fixture
def saved(profile: Profile, tmp_path: Path) -> Path:
    calibrating.save(profile, tmp_path / "profile.toml")
    return tmp_path / "profile.toml"


def test_a_profile_of_this_machine_predicts_as_what_was_measured(profile: Profile, saved: Path) -> None:
    read = load_profile(saved)
    assert read == profile
    spec = RunSpec()
    assert predict(spec, read.machine).to_dict() == predict(spec, profile.machine).to_dict()
    assert set(read.machine.rates) == {
        *(f"{kind}.{dtype}" for kind in ("gemm", "attention", "attention_backward") for dtype in ("fp32", "bf16")),
        *("stream", "strided", "exp", "tanh", "optimizer"),
    }
    assert read.made and read.made["torch"] == torch.__version__ and read.made["seconds"] > 0


def test_collectives_of_two_ranks(profile: Profile) -> None:
    curve = profile.curve
    assert isinstance(curve, Curve) and curve.tag == "measured"
    assert set(curve.seconds_at) == {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "send"}
    for kind, by_ranks in curve.seconds_at.items():
        assert list(by_ranks) == [2], kind
        assert len(by_ranks[2]) == len(QUICK["cpu"].messages)
        assert all(later >= earlier > 1e-7 for earlier, later in zip(by_ranks[2], by_ranks[2][1:], strict=False)), kind
        assert curve.sizes[-1] / by_ranks[2][-1] < 1e12, kind  # bytes a second
    small, large = (sum(times[2][i] for times in curve.seconds_at.values()) for i in (0, -1))
    assert large > small  # 4 MiB against 4 KiB
    machine = Gpu(name=profile.machine.name, link_gbs=1.0)
    links = Fabric.of(Cluster(gpus_per_node=2), machine, curve)
    assert links.seconds("all-reduce", curve.sizes[1], 2) == pytest.approx(curve.seconds_at["all-reduce"][2][1])
    assert links.tag("all-reduce", 2) == "measured"


def test_the_groups_that_are_measured() -> None:
    assert [collectives.group_sizes(ranks) for ranks in (1, 2, 3, 6, 8)] == [[], [2], [2, 3], [2, 4, 6], [2, 4, 8]]


def test_noise_never_makes_a_larger_message_quicker() -> None:
    assert collectives.monotone([5.0, 900.0, 30.0, 20.0, 100.0]) == [5.0, 20.0, 20.0, 20.0, 100.0]


def test_sizes_are_in_order_and_a_quick_form_is_smaller() -> None:
    for device in ("cpu", "cuda"):
        quick, full = QUICK[device], FULL[device]
        for sizes in (quick, full):
            assert all(list(each) == sorted(each) for each in (sizes.elementwise, sizes.optimizer, sizes.messages))
            assert all(size % 2**20 == 0 for size in sizes.optimizer)
        assert len(full.matmuls) > 2 * len(quick.matmuls) and len(full.attentions) > 2 * len(quick.attentions)


def test_a_failing_rank_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no such link")

    monkeypatch.setattr(collectives, "make_call", fail)  # forked ranks have it too
    with pytest.raises(LMWorksError, match="a rank failed while collectives were measured: ValueError: no such link"):
        collectives.measure(collectives.Sweep("cpu", (1024, 4096)), 2)


@pytest.mark.parametrize("ranks", [0, -1, 10_000])
def test_a_number_of_ranks_that_is_not_here(ranks: int) -> None:
    with pytest.raises(SpecError, match=rf"--ranks {ranks}: this machine takes 1 to \d+"):
        calibrating.calibrate(CPU, seconds=0.1, ranks=ranks, quick=True)


def test_what_is_somebody_elses_is_not_replaced(saved: Path, tmp_path: Path) -> None:
    calibrating.check_output_path(saved)
    calibrating.check_output_path(tmp_path / "new" / "profile.toml")
    assert not (tmp_path / "new").exists()
    (tmp_path / "spec.toml").write_text("name = 'mine'\n")
    with pytest.raises(SpecError, match=r"--out .*spec\.toml: this file exists and is not a profile"):
        calibrating.check_output_path(tmp_path / "spec.toml")
    with pytest.raises(SpecError, match=r"is a folder; name a file in it, e\.g\. .*profile\.toml"):
        calibrating.check_output_path(tmp_path)
    with pytest.raises(SpecError, match="nothing can be written in"):
        calibrating.check_output_path(tmp_path / "spec.toml" / "profile.toml")


def test_a_run_here_takes_the_profile_of_its_spec(profile: Profile, saved: Path) -> None:
    cluster = Cluster(device="cpu", profile=str(saved))
    assert calibrate.cached_machine(cluster) == calibrate.this_machine(cluster) == profile.machine


def test_the_resolved_spec_finds_its_profile_from_any_folder() -> None:
    spec = RunSpec.from_dict({"cluster": {"profile": "profile.toml"}})
    assert with_absolute_paths(spec).cluster.profile == str(Path("profile.toml").absolute())
    assert with_absolute_paths(RunSpec()).cluster.profile == ""


def test_a_run_here_refuses_the_profile_of_another_machine(profile: Profile, tmp_path: Path) -> None:
    other = dataclasses.replace(profile.machine, name="another CPU, 64 threads")
    calibrating.save(Profile(other), tmp_path / "other.toml")
    with pytest.raises(SpecError, match="was measured on 'another CPU, 64 threads', and this machine is"):
        calibrate.cached_machine(Cluster(device="cpu", profile=str(tmp_path / "other.toml")))


def test_the_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(calibrating, "calibrate", lambda *given: asked.append(given[:4]) or profile)
    out = tmp_path / "profiles" / "lab.toml"
    words = ("plan", "calibrate", "--device", "cpu", "--ranks", "2", "--minutes", "0.5", "--quick", "--out", str(out))
    code, text, err = lmworks(capsys, *words)
    assert code == 0, err
    assert asked == [(CPU, 30.0, 2, True)]
    assert "gemm.fp32" in text and "reduce-scatter" in text and f"cluster.profile={out}" in text
    code, text, _ = lmworks(capsys, *words, "--json")
    assert json.loads(text) == {"profile": str(out), **profile.to_dict()}
    code, text, _ = lmworks(capsys, "plan", "tiny", f"cluster.profile={out}", "--no-probe", "--json")
    result = json.loads(text)
    assert code == 0 and result["step_s"] == predict(load_run("tiny"), profile.machine).to_dict()["step_s"]
    assert result["machine"] == {"name": profile.machine.name, "device": "cpu", "tag": "measured"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--device", "tpu"), "cluster.device = 'tpu' is not one of"),
        (("--ranks", "0"), "--ranks 0: this machine takes 1 to"),
    ],
)
def test_bad_usage(capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    code, _, err = lmworks(capsys, "plan", "calibrate", "--out", str(tmp_path / "p.toml"), *words)
    assert code == 2 and said in err and len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow  # tests/train/test_ranks_cli.py interrupts ranks that train
def test_stopped_in_the_middle_it_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C goes to the whole group of processes, as a terminal sends it."""
    command = [sys.executable, "-m", "lmworks", "plan", "calibrate", "--device", "cpu", "--ranks", "2"]
    with subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:  # fmt: skip
        assert process.stderr
        assert process.stderr.readline().startswith("collectives: ")
        os.killpg(process.pid, signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(timeout=60) == 130
    assert "Traceback" not in rest
    assert not list(tmp_path.iterdir())
    give_up = time.monotonic() + 20
    with pytest.raises(ProcessLookupError):  # soon no rank is left
        while time.monotonic() < give_up:
            os.killpg(process.pid, 0)
            time.sleep(0.02)

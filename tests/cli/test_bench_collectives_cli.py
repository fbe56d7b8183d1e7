"""`lmworks bench collectives`: rows for programs, a profile and a picture; each bad request is one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lmworks.bench import calibrate
from lmworks.bench.kernel_timing import device_name
from lmworks.cli.collective_request import parse_groups, parse_sizes
from lmworks.plan.devices.machine import Machine, Rate
from lmworks.plan.devices.profile import Profile, load_profile
from typed import lmworks

QUICK = ["--seconds", "0", "--rounds", "3"]


def blank_profile(path: Path, name: str) -> Path:
    rates = {"gemm.fp32": (Rate((64, 64, 64), 1e9),)}
    machine = Machine(name, "cpu", "measured", rates, 1e-5, 1e-5, 2**30)
    calibrate.save(Profile(machine, made={}), path)
    return path


def test_rows_fits_a_profile_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = blank_profile(tmp_path / "profile.toml", device_name(torch.device("cpu")))
    picture, out = tmp_path / "wire.svg", tmp_path / "wire.json"
    options = ["--sizes", "1K:64K", "--ops", "all_reduce,sendrecv", "--profile", str(profile), "--plot", str(picture)]
    code, stdout, stderr = lmworks(capsys, "bench", "collectives", *QUICK, *options, "--out", str(out), "--json")
    assert code == 0, stderr
    facts = json.loads(stdout)
    assert facts == json.loads(out.read_text())
    assert [row["op"] for row in facts["rows"]] == 8 * ["all-reduce"] + 4 * ["send"]
    for row in facts["rows"]:
        assert row["wrong"] == 0 and row["algbw"] == pytest.approx(row["bytes"] / row["time_us"] / 1e3, rel=1e-3)
    assert facts["backend"] == "gloo" and facts["ranks"] == 2 and facts["link"] is None
    read = load_profile(profile)
    assert read.between is None and read.curve and set(read.curve.fits) == {"all-reduce", "send"}
    fitted = next(one["fit"] for one in facts["fits"] if one["op"] == "all-reduce" and one["in_place"])
    assert read.curve.fits["all-reduce"][2].to_dict() == fitted
    assert "<svg" in picture.read_text()


@pytest.mark.slow  # three processes import PyTorch
def test_ranks_of_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    asked = ["-m", "lmworks", "bench", "collectives", "--sizes", "1K,4K", "--ops", "broadcast", *QUICK, "--json"]
    result = subprocess.run([*command, *asked], capture_output=True, text=True)
    facts = json.loads(result.stdout[result.stdout.index("{") :])
    assert len(facts["rows"]) == 4 and facts["nodes"] == 1 and facts["ranks"] == 2, result.stderr


def test_sizes() -> None:
    assert parse_sizes("1K:1M:4") == parse_sizes("1K:1M") == (1024, 4096, 16384, 65536, 262144, 1048576)
    assert parse_sizes("1k:5KiB:2") == (1024, 2048, 4096)
    assert parse_sizes("1M,1.5K,100") == (100, 1536, 1048576)


def test_groups_by_default() -> None:
    assert parse_groups("", 4, 1) == ("all",)
    assert parse_groups("", 2, 2) == ("inter",)
    assert parse_groups("", 4, 2) == ("intra", "inter", "all")
    assert parse_groups("2,all", 4, 1) == ("2", "all")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--ranks", "1"], "--ranks 1: a collective needs at least 2 ranks"),
        (["--ranks", "1000"], "--ranks 1000: this command starts at most 64"),
        (["--sizes", "1M:1K"], "--sizes 1M:1K: 1M is more than 1K"),
        (["--sizes", "1K:1M:1"], "with a factor from 2"),
        (["--sizes", "lots"], "'lots' is no size; write e.g. 1K:1G"),
        (["--sizes", "1K:900G"], "are free; use smaller messages"),
        (["--ops", "allreduce,reduce"], "--ops: there is no 'reduce'; did you mean 'reduce-scatter'?"),
        (["--dtypes", "fp8"], "--dtypes: there is no 'fp8'"),
        (["--backend", "mpi"], "--backend mpi: choose gloo or nccl"),
        (["--groups", "inter"], "--groups inter: all ranks are on one node"),
        (["--groups", "9"], "--groups 9: use all, intra, inter, or a number of ranks from 2 to 2"),
        (["--link", "fast"], "--link fast: 'fast' is no bandwidth, delay or loss; e.g. 1gbit,2ms"),
        (["--link", "5ms"], "a bandwidth is missing"),
        (["--link", "1gbit", "--ranks", "3"], "use an even number"),
        (["--profile", "none.toml"], "write it with `lmworks plan calibrate --out none.toml`"),
        (["--plot", "wire.gif"], "name a file that ends in .png, .svg, .pdf"),
    ],
)
def test_a_bad_request_is_one_line(
    options: list[str],
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, stderr = lmworks(capsys, "bench", "collectives", *QUICK, *options)
    assert code == 2 and error in stderr and len(stderr.splitlines()) == 1, stderr


def test_nccl_wants_a_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    code, _, stderr = lmworks(capsys, "bench", "collectives", "--backend", "nccl", "--ranks", "2")
    assert code == 2 and "NCCL wants a GPU for each rank: 2 ranks, and this machine has 1" in stderr


def test_the_profile_of_another_machine_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = blank_profile(tmp_path / "profile.toml", "another, 9 threads")
    before = profile.read_text()
    code, _, stderr = lmworks(capsys, "bench", "collectives", *QUICK, "--sizes", "1K,2K", "--profile", str(profile))
    assert code == 2 and "--profile was measured on 'another, 9 threads', and this machine is" in stderr
    assert profile.read_text() == before

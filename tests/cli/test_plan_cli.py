"""`lmworks plan` and `lmworks plan hardware` as they are typed."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from lmworks.bench import calibrate as probing
from lmworks.plan.devices.machine import Machine, Rate
from lmworks.record.formatting import duration
from lmworks.spec import catalogue
from typed import lmworks


def test_plan_prints_a_sheet(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = lmworks(capsys, "plan", "tiny", "data.micro_batch=4", "--no-probe")
    assert code == 0
    assert "parameters" in out and "optimizer states" in out and "peak" in out and "GB)" in out
    assert "step time: not predicted" in out


def test_plan_for_a_named_accelerator(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["plan", "llama3-8b", "cluster.gpu=H200-SXM-141GB", "data.seq=4096", "precision.dtype=bf16"]
    code, out, _ = lmworks(capsys, *args)
    assert code == 0
    assert "does NOT fit" in out  # 8 sequences of 4096 beside 16 bytes a parameter
    assert "was not measured" in out
    code, out, _ = lmworks(capsys, *args, "data.micro_batch=1", "parallel.recompute=full", "--json")
    result = json.loads(out)
    assert result["fits"] is True
    assert result["machine"] == {"name": "H200-SXM-141GB", "device": "cuda", "tag": "fitted"}
    assert result["step_s"] > 0


STAGES = """
[model]
preset = "llama3-1b"
context = 32768
[data]
seq = 32768
micro_batch = 1
global_batch = 8
[parallel]
dp = 8
strategy = "fsdp2"
recompute = "full"
[precision]
dtype = "bf16"
[cluster]
gpu = "h200"
gpus_per_node = 8
[[stages]]
steps = 300
data.seq = 8192
data.global_batch = 64
model.rope_theta = 1e5
[[stages]]
steps = 20
"""


def test_each_stage_is_priced_as_a_run_of_its_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "staged.toml").write_text(STAGES)
    (tmp_path / "alone.toml").write_text(STAGES.partition("[[stages]]")[0])
    _, out, _ = lmworks(capsys, "plan", str(tmp_path / "staged.toml"), "--json")
    first, last = json.loads(out)["stages"]
    for stage, changes in ((first, ["data.seq=8192", "data.global_batch=64"]), (last, [])):
        _, out, _ = lmworks(capsys, "plan", str(tmp_path / "alone.toml"), *changes, "--json")
        alone = json.loads(out)
        assert (stage["step_s"], stage["memory_bytes"]) == (alone["step_s"], alone["memory_bytes"])
        assert stage["hours"] == pytest.approx(alone["step_s"] * stage["steps"] / 3600)
        assert stage["tokens"] == alone["tokens_per_step"] * stage["steps"]
    assert (first["seq"], first["rope_theta"], last["seq"], last["rope_theta"]) == (8192, 1e5, 32768, 5e5)
    code, out, _ = lmworks(capsys, "plan", str(tmp_path / "staged.toml"))
    assert code == 0 and f"{first['hours'] + last['hours']:.3g} hours" in out


def test_the_fullest_stage_decides_what_fits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The first of these stages holds more than the last one, of longer sequences: it recomputes nothing."""
    first = 'data.micro_batch = 32\nparallel.recompute = "none"\ndata.seq = 8192'
    (tmp_path / "staged.toml").write_text(
        STAGES.replace("data.seq = 8192\ndata.global_batch = 64", f"{first}\ndata.global_batch = 256")
    )
    (tmp_path / "alone.toml").write_text(STAGES.partition("[[stages]]")[0])
    changes = ["data.seq=8192", "data.micro_batch=32", "data.global_batch=256", "parallel.recompute=none"]
    alone, last = (
        json.loads(lmworks(capsys, "plan", "memory", str(tmp_path / "alone.toml"), *given, "--json")[1])
        for given in (changes, [])
    )
    _, out, _ = lmworks(capsys, "plan", "memory", str(tmp_path / "staged.toml"), "--json")
    found = json.loads(out)
    assert not alone["fits"] and last["fits"]
    assert found["run_stages"] == {"fullest": 0, "reserved": [alone["reserved"], last["reserved"]]}
    assert {key: found[key] for key in alone} == {**alone, "name": found["name"]}
    _, out, _ = lmworks(capsys, "plan", "memory", str(tmp_path / "staged.toml"))
    assert "stages[0] needs most" in out and "does NOT fit" in out
    _, out, _ = lmworks(capsys, "plan", str(tmp_path / "staged.toml"), "--json")
    assert json.loads(out)["fits"] is False
    assert [stage["fits"] for stage in json.loads(out)["stages"]] == [False, True]


def test_a_table_by_a_busy_machine_says_so_and_shows_the_range(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path))
    kinds = ("stream", "strided", "exp", "tanh", "optimizer", "gemm.fp32", "attention.fp32", "attention_backward.fp32")
    shapes = {"gemm.fp32": (1.0,) * 3, "attention.fp32": (1.0,) * 2, "attention_backward.fp32": (1.0,) * 2}
    rates = {kind: (Rate(shapes.get(kind, (1.0,)), 1e11),) for kind in kinds}
    machine = Machine("a machine", "cpu", "measured", rates, 1e-6, 1e-6, 10**9)
    for noise in (1.0, 8.0):
        monkeypatch.setattr(probing, "probe", lambda _, progress, noise=noise: replace(machine, noise=noise))
        probing.cache_path(torch.device("cpu")).unlink(missing_ok=True)
        _, out, _ = lmworks(capsys, "plan", "tiny", "cluster.device=cpu")
        low, high = json.loads(lmworks(capsys, "plan", "tiny", "cluster.device=cpu", "--json")[1])["interval"]
        span = f"{duration(low)} to {duration(high)}"
        assert f"nine in ten such predictions lie within {span}" in out
        assert (f", busy while it was measured: {span}" in out) == (noise > 1)
        assert ("runs took 8.0 × what they take alone" in out) == (noise > 1)
    _, out, _ = lmworks(capsys, "hardware", "--probe")
    assert "runs took 8.0 × what they take alone" in out


def test_plan_measures_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path))
    monkeypatch.setattr(probing, "probe", partial(probing.probe, seconds=0.1))
    code, out, _ = lmworks(capsys, "plan", "tiny", "cluster.device=cpu", "--json")
    result = json.loads(out)
    assert code == 0
    assert result["machine"]["tag"] == "measured"
    assert result["step_s"] == pytest.approx(sum(result["step_parts"].values()))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["plan", "tiny", "parallel.tp=3"], "parallel.tp = 3 does not divide"),
        (["plan", "tiny", "cluster.gpu=H1000"], "did you mean"),
        (["plan", "tinny"], "did you mean 'tiny'"),
        (["hardware", "H1000"], "did you mean"),
        (["hardware", "T4", "--probe"], "--probe measures this machine"),
    ],
)
def test_bad_usage(capsys: pytest.CaptureFixture[str], args: list[str], words: str) -> None:
    code, _, err = lmworks(capsys, *args)
    assert code == 2
    assert words in err
    assert len(err.splitlines()) == 1


def test_hardware_lists_the_catalogue_with_sources(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = lmworks(capsys, "hardware", "--json")
    listed = json.loads(out)
    assert [gpu["name"] for gpu in listed] == list(catalogue())
    assert all(gpu["source"] for gpu in listed)
    _, out, _ = lmworks(capsys, "hardware", "A100-SXM-80GB")
    assert "source" in out and "2039" in out
    assert lmworks(capsys, "hardware")[0] == 0

"""From a search to a run: the written spec is what was priced, and train and launch take it, or say what it lacks."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lmworks.bench.train import with_default_data
from lmworks.cli import launch
from lmworks.data import prepare
from lmworks.plan.cluster_request import ClusterRequest
from lmworks.plan.devices.machine import Machine
from lmworks.plan.memory.sheet import run_budget
from lmworks.plan.predict import predict
from lmworks.plan.search.candidates import problem_of
from lmworks.plan.search.request import read_request
from lmworks.plan.search.search import search
from lmworks.spec import Cluster, RunSpec, load_run
from typed import lmworks

DENSE = ["llama3-8b", "--cluster", "8xh100", "--seq", "4096", "--global-batch", "64"]
EXPERTS = ["mixtral-8x7b", "model.layers=8", *DENSE[1:]]
QUICK = ["--fix", "schedule=1f1b", "--fix", "offload=none", "--fix", "recompute=full", "--fix", "pp=1"]
QUICK += ["--fix", "offload_activations=0"]
ONE = ["--fix", "tp=1", "--fix", "cp=1", "--fix", "zero=3", "--fix", "dp_shard=8", "--fix", "micro_batch=2"]


def searched(capsys: pytest.CaptureFixture[str], out: Path, *args: str) -> tuple[dict[str, Any], RunSpec]:
    code, text, err = lmworks(capsys, "plan", "search", *args, *QUICK, "--out", str(out), "--json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(text)
    return found, load_run(out)


@pytest.mark.parametrize(
    "words",
    [
        DENSE,
        [*DENSE, "precision.dtype=fp8"],
        [*DENSE, "precision.weights=bf16", "precision.states=bf16", "precision.reduce=bf16"],
        [*DENSE, "parallel.reshard=false", "--fix", "zero=3"],
        [*DENSE, "parallel.cp_method=ulysses", "parallel.cp=2"],
        [*DENSE, "optim.optimizer=sgd", "--eager"],
        EXPERTS,
        [*EXPERTS, "precision.dtype=fp8"],
    ],
    ids=["bf16", "fp8", "bf16 weights", "no reshard", "ulysses", "sgd eager", "experts", "experts fp8"],
)
def test_the_first_row_is_what_the_planner_says_of_the_written_spec(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str]
) -> None:
    found, spec = searched(capsys, tmp_path / "best.toml", *words)
    best, gpu = found["front"][0], spec.cluster.accelerator
    assert gpu
    told = predict(spec, Machine.of(gpu))
    assert told.time and told.time.total == pytest.approx(best["step_s"], rel=1e-9)
    assert told.time.parts == pytest.approx(best["parts"], rel=1e-9)
    exact = run_budget(spec).to_dict()
    assert exact["allocated"] == pytest.approx(best["memory"]["allocated"], abs=40)
    states = ("parameters", "gradients", "optimizer", "master")
    assert [exact[name] for name in states] == [best["memory"][name] for name in states]


def test_a_layout_has_the_bytes_of_its_run() -> None:
    """What is found among thousands of candidates is what the memory sheet of the written run says."""
    asked = read_request("llama3-8b", [], ClusterRequest(seq=8192, global_batch=32), {}, clusters=["8xh100"])
    question = problem_of(asked.base, "8xh100", own=asked.cluster)
    front = search([replace(question, pinned={"tp": 2, "micro_batch": 2, "recompute": "none"})]).front
    assert len(front) > 1
    for found in front:
        assert float(run_budget(found.spec(asked.base)).reserved) == pytest.approx(found.reserved, abs=40)


def test_the_commands_say_the_same_of_the_written_spec(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found, _ = searched(capsys, tmp_path / "best.toml", *EXPERTS, "precision.dtype=fp8")
    best = found["front"][0]
    run = json.loads(lmworks(capsys, "plan", str(tmp_path / "best.toml"), "--json")[1])
    memory = json.loads(lmworks(capsys, "plan", "memory", str(tmp_path / "best.toml"), "--json")[1])
    assert run["step_s"] == pytest.approx(best["step_s"], rel=1e-9)
    assert memory["reserved"] == pytest.approx(best["memory"]["reserved"], abs=40)
    assert memory["layout"] == best["text"] and memory["fits"]


@pytest.mark.parametrize("words", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_a_search_is_in_the_precision_that_is_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str]
) -> None:
    _, plain = searched(capsys, tmp_path / "plain.toml", *words)
    typed, spec = searched(capsys, tmp_path / "typed.toml", *words, "precision.dtype=fp8")
    option, _ = searched(capsys, tmp_path / "option.toml", *words, "--dtype", "fp8")
    assert (plain.precision.dtype, spec.precision.dtype) == ("bf16", "fp8")
    assert typed["front"] == option["front"]
    assert all(one["layout"]["tp"] == 1 for one in typed["front"])  # which fp8 does not combine with
    alone, _ = searched(capsys, tmp_path / "alone.toml", *words, "parallel.tp=1")
    fast, slow = typed["front"][0], alone["front"][0]
    assert fast["layout"] == slow["layout"]
    assert fast["step_s"] < 0.99 * slow["step_s"] and fast["memory"]["activations"] < slow["memory"]["activations"]
    file = tmp_path / "own.toml"
    file.write_text('[model]\npreset = "llama3-8b"\n[precision]\ndtype = "fp16"\n')
    assert searched(capsys, tmp_path / "file.toml", str(file), *DENSE[1:])[1].precision.dtype == "fp16"


def test_a_typed_part_of_a_layout_is_kept_and_a_written_one_is_searched(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found, _ = searched(capsys, tmp_path / "a.toml", *DENSE, "parallel.tp=4", "data.micro_batch=2")
    assert {(one["layout"]["tp"], one["layout"]["micro_batch"]) for one in found["front"]} == {(4, 2)}
    assert (
        found["front"]
        == searched(capsys, tmp_path / "b.toml", *DENSE, "--fix", "tp=4", "--fix", "micro_batch=2")[0]["front"]
    )
    again, _ = searched(capsys, tmp_path / "c.toml", str(tmp_path / "a.toml"))  # a layout and a cluster of its own
    free, _ = searched(capsys, tmp_path / "d.toml", *DENSE)
    assert [one["step_s"] for one in again["front"]] == [one["step_s"] for one in free["front"]]
    machines = ["llama3-8b", "cluster.gpu=h100", "cluster.nodes=1", "cluster.gpus_per_node=8", *DENSE[3:]]
    assert searched(capsys, tmp_path / "e.toml", *machines)[0]["front"] == free["front"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["parallel.strategy=fsdp1"],
            "parallel.strategy is what the search decides: use --fix zero=0 (ddp), 1, 2 or 3",
        ),
        (["parallel.zero=1"], "parallel.zero is what the search decides"),
        (["parallel.dp=4"], "parallel.dp is what the search decides"),
        (["parallel.async_tp=true"], "parallel.async_tp = true is not supported"),
        (["parallel.recompute_every=2"], "parallel.recompute_every is what the search decides"),
        (["parallel.recompute=budget"], "recompute = 'budget': it can be none, selective, mlp, full"),
        (["parallel.engine=deepspeed"], "parallel.engine = 'deepspeed' is not searched"),
        (["parallel.tp=4", "--fix", "tp=2"], "--fix tp=2 contradicts the override tp=4"),
        (["cluster.nodes=2"], "--cluster and cluster.nodes both say what it runs on"),
        (["optim.steps=10", "--tokens", "1e9"], "--tokens and optim.steps both say how long it trains"),
        (["precision.dtype=fp9"], "precision.dtype = 'fp9' is not one of: fp32, bf16, fp16, fp8"),
        (["parallel.tb=4"], "unknown key 'parallel.tb'"),
    ],
)
def test_what_a_search_cannot_keep_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    code, out, err = lmworks(capsys, "plan", "search", *DENSE, *words)
    assert (code, out) == (2, "") and said in err and len(err.splitlines()) == 1


def test_the_written_run_is_as_long_as_what_was_quoted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found, spec = searched(capsys, tmp_path / "a.toml", *DENSE, *ONE, "--tokens", "1e11")
    bill = found["front"][0]["bill"]
    assert bill["tokens"] == 1e11 and spec.tokens_per_step == 64 * 4096
    assert spec.optim.steps == 381_470  # 1e11 / 262,144 = 381,469.7
    assert spec.optim.warmup == 2000
    assert spec.checkpoint.every == round(bill["save_every_s"] / found["front"][0]["step_s"])
    assert found["written"] == {"path": str(tmp_path / "a.toml"), "row": 0, "data": [""], "steps": 381_470}
    found, spec = searched(
        capsys, tmp_path / "b.toml", *DENSE, "--tokens", "1e8", "optim.warmup=7", "checkpoint.every=9"
    )
    assert (spec.optim.steps, spec.optim.warmup, spec.checkpoint.every) == (382, 7, 9)
    found, spec = searched(capsys, tmp_path / "c.toml", *DENSE, *ONE, "optim.steps=5000")
    assert spec.optim.steps == 5000 and found["front"][0]["bill"]["tokens"] == 5000 * 64 * 4096
    assert spec.optim.warmup == 500
    found, spec = searched(capsys, tmp_path / "d.toml", *DENSE)
    assert found["front"][0]["bill"]["tokens"] == 1e12 and spec.optim.steps == 3_814_698


LAUNCHERS = [
    ["launch", "slurm"],
    ["launch", "kubernetes", "--image", "registry/lmworks", "--claim", "shared"],
    ["launch", "ray"],
    ["train"],
]


@pytest.mark.parametrize("words", LAUNCHERS, ids=["slurm", "kubernetes", "ray", "train"])
def test_a_plan_without_data_is_not_started(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _, spec = searched(capsys, Path("best.toml"), *DENSE, *ONE)
    assert spec.data.path == "" and 'path = ""' in Path("best.toml").read_text()
    code, out, err = lmworks(capsys, *words, "best.toml")
    assert (code, out) == (2, "") and len(err.splitlines()) == 1
    assert 'data.path = "" names no data' in err and "lmworks data prepare" in err
    assert [path.name for path in tmp_path.iterdir()] == ["best.toml"]
    assert with_default_data(spec).data.path == "stdlib:bytes"  # a benchmark's figures do not depend on them
    assert with_default_data(spec.replace(data=spec.data.replace(path="x"))).data.path == "x"


def test_the_line_that_is_printed_works_as_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["plan", "search", *DENSE, *QUICK, *ONE, "--out", "best.toml", "--tokens", "1e11"]
    _, out, _ = lmworks(capsys, *words, "--data", "data/mine")
    assert "wrote best.toml: 381,470 steps of 262,144 tokens, 100G in all; 2,000 of them to warm up" in out
    assert "data/mine is not on this machine: neither its vocabulary nor its length was checked" in out
    (line,) = [line for line in out.splitlines() if line.startswith("lmworks ")]
    code, _, err = lmworks(capsys, *shlex.split(line.partition("   (")[0])[1:])
    assert (code, err) == (0, "")
    script = Path("best.sbatch").read_text()
    assert "#SBATCH --gpus-per-node=8" in script and "lmworks.train best.toml" in script
    _, out, _ = lmworks(capsys, *words)
    (line,) = [line for line in out.splitlines() if line.startswith("lmworks ")]
    assert 'it names no data (data.path = "")' in out and "data.path=FOLDER" in line
    command = shlex.split(line.partition("   (")[0].replace("FOLDER", "data/mine"))[1:]
    assert lmworks(capsys, *command)[0] == 0
    assert "lmworks.train best.toml data.path=data/mine" in Path("best.sbatch").read_text()
    monkeypatch.setattr(launch, "is_here", lambda _: True)
    _, out, _ = lmworks(capsys, *words, "--data", "data/mine")
    assert out.splitlines()[-1] == "train it here with: lmworks train best.toml"


def test_a_cluster_is_here_if_all_its_gpus_are(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(gpu="H100-SXM-80GB", gpus_per_node=8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert launch.is_here(cluster)
    assert not launch.is_here(cluster.replace(nodes=2))
    assert not launch.is_here(cluster.replace(gpu="A100-SXM-80GB"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert not launch.is_here(cluster)


def test_data_that_are_here_are_looked_at(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(8):
        Path(f"{number}.txt").write_text(f"{number} many words " * 40)
    prepare([f"{number}.txt" for number in range(8)], Path("data/mine"), "bytes", val_fraction=0)
    Path("raw").mkdir()
    words = ["plan", "search", "llama3-8b", *DENSE[1:], *QUICK, *ONE, "--out", "best.toml"]
    _, out, _ = lmworks(capsys, *words, "--data", "data/mine", "--tokens", "1e9")
    steps, there = -(-(10**9) // 2**18), 8 * (40 * 13 + 1)  # an end of text in each file
    assert f"data/mine has 4.17k tokens to train on: {steps * 2**18 / there:,.1f} epochs" in out
    code, _, err = lmworks(capsys, *words, "--data", "data/mine", "model.vocab=256")
    assert (
        code == 2 and "model.vocab = 256 is less than the tokenizer's 257 tokens (data/mine); use at least 257" in err
    )
    assert "raw" in lmworks(capsys, *words, "--data", "raw")[2]
    for launcher in LAUNCHERS[:3]:
        code, _, err = lmworks(capsys, *launcher, "best.toml", "model.vocab=256", "parallel.tp=1", "parallel.sp=false")
        assert code == 2 and "is less than the tokenizer's 257 tokens" in err


def test_workers_of_ray_find_the_data(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They start in folders of their own."""
    monkeypatch.chdir(tmp_path)
    code, out, _ = lmworks(capsys, "launch", "ray", "tiny", "data.path=data/mine", "cluster.device=cpu")
    assert code == 0 and f'path = "{tmp_path}/data/mine"' in out

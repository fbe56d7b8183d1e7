"""`lmworks train … parallel.dp=2` as it is typed: stopped, killed, taken up, failing on one rank, used."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.run import main as torchrun

from forked import Forked
from layouts import SPARSE, Job, do, layout
from lmworks import checkpoint
from lmworks.cli.main import main
from lmworks.data import prepare
from lmworks.record import RunFolder, read_metrics
from lmworks.train.load_run import load_trained
from tiny import curve, differences, events, resume, saved, start, train, write_documents, write_spec

ENDLESS = ("optim.schedule=constant", "optim.warmup=0", "optim.steps=100000", "checkpoint.every=1000000")
FSDP2 = ("parallel.dp=2", "parallel.strategy=fsdp2")
SOON_S = 120  # on a busy machine; a collective that nobody answers would take watch.timeout_s, half an hour


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str] | Forked, patience_s: float = 300) -> None:
    give_up = time.monotonic() + patience_s
    while True:
        ended = process.poll() is not None  # before the look: it may take this step and end in the meantime
        if (lines := read_metrics(RunFolder(run).metrics_path)) and lines[-1]["step"] >= step:
            return
        assert not ended, process.communicate()
        assert time.monotonic() < give_up, f"no step {step} after {patience_s} s"
        time.sleep(0.02)


def stop(process: subprocess.Popen[str] | Forked, act: Callable[[], None]) -> tuple[int | None, list[str]]:
    """Exit code, and the lines said on standard error."""
    act()
    try:
        _, said = process.communicate(timeout=SOON_S)
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGTERM)  # which ends its ranks too
    return process.returncode, said.splitlines()


def edit(run: Path, old: str, new: str) -> None:
    path = RunFolder(run).spec_path
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def rank_process(process: subprocess.Popen[str], rank: int) -> int:
    """The process id of a rank that the command has started."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            status = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(status[1]) == process.pid and f"RANK={rank}".encode() in environment:
            return int(pid)
    raise AssertionError(f"rank {rank} is not running")


@pytest.mark.usefixtures("forked_python")
def test_ctrl_c_saves_and_resume_is_bitwise_equal(dataset: Path, tmp_path: Path) -> None:
    """As a terminal sends it; ranks have sessions of their own, and the command hands it on to them."""
    run, file = tmp_path / "run", write_spec(layout(dataset, *ENDLESS), tmp_path / "spec.toml")
    process = Forked("train", file, *FSDP2, "--run-dir", run)
    wait_for_step(run, 3, process)
    code, said = stop(process, lambda: os.killpg(process.pid, signal.SIGINT))
    assert code == 130
    step = checkpoint.find(run / "checkpoints", refuse)[1].step  # type: ignore[index]
    assert said == [f"lmworks: stopped by SIGINT after step {step}; continue with: lmworks resume {run}"]
    rest = layout(dataset, *ENDLESS, *FSDP2, f"optim.steps={step + 2}")
    do([Job(tmp_path / "again", rest, run, step), Job(tmp_path / "straight", rest)])
    assert differences(saved(tmp_path / "again"), saved(tmp_path / "straight")) == []
    assert curve(tmp_path / "again") == curve(tmp_path / "straight")


def refuse(path: Path, reason: str) -> None:
    raise AssertionError(reason)


@pytest.mark.slow
def test_killed_rank_is_named_and_run_resumes_in_other_layout(dataset: Path, tmp_path: Path) -> None:
    run, file = tmp_path / "run", write_spec(layout(dataset, *ENDLESS), tmp_path / "spec.toml")
    process = start("train", file, *FSDP2, "--run-dir", run)
    wait_for_step(run, 3, process)
    code, _ = stop(process, process.terminate)  # of the command alone, as a service manager does it
    assert code == 75
    step = checkpoint.find(run / "checkpoints", refuse)[1].step  # type: ignore[index]
    process = start("resume", run)
    wait_for_step(run, step + 2, process)
    code, said = stop(process, lambda: os.kill(rank_process(process, 1), signal.SIGKILL))
    assert code == 137
    # The other rank may say so too, if it notices before it is ended.
    assert said.pop() == "lmworks: error: rank 1 was ended by SIGKILL; the run can be resumed"
    assert not said or (len(said) == 1 and said[0].startswith("lmworks: error: rank 1 is gone"))
    edit(run, "steps = 100000", f"steps = {step + 2}")
    edit(run, "dp_shard = 2", "dp_shard = 1")
    assert resume(run).step == step + 2
    assert [event["step"] for event in events(run, "resume")] == [step, step]


# Rank 1 cannot read its third batch; everything else is `torchrun -m lmworks.train`.
FAILING = """
import os, sys
from lmworks.cli.main import main
from lmworks.data import Batches
from lmworks.spec import DataError

read = Batches.at
def at(self, cursor):
    if cursor == 2 and os.environ["RANK"] == "1":
        raise DataError("tokens-00001 is damaged")
    return read(self, cursor)
Batches.at = at
sys.argv[1:1] = ["train"]
main()
"""


@pytest.mark.usefixtures("forked_python")
def test_error_of_one_rank_is_one_line(dataset: Path, tmp_path: Path) -> None:
    run, script = tmp_path / "run", tmp_path / "failing.py"
    script.write_text(FAILING)
    file = write_spec(layout(dataset, *ENDLESS, "checkpoint.every=1"), tmp_path / "spec.toml")
    command = [script, file, "parallel.tp=1", *FSDP2, "--run-dir", run]
    process = Forked("--standalone", "--nproc-per-node", "2", *command, program=torchrun)
    wait_for_step(run, 2, process)
    code, said = stop(process, lambda: None)
    assert code == 1
    assert [line for line in said if "error: " in line] == ["lmworks: error: rank 1: tokens-00001 is damaged"]
    assert sum(line.startswith("Traceback") for line in said) == 1  # torchrun's own
    assert [event["error"] for event in events(run, "fail")] == ["rank 1: tokens-00001 is damaged"]
    assert checkpoint.find(run / "checkpoints", refuse)[1].step == 2  # type: ignore[index]


# --- what comes after training -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of four ranks, with a tokenizer that is a file."""
    root = tmp_path_factory.mktemp("trained")
    data = prepare([str(write_documents(root / "text.jsonl"))], root / "tokens", "bpe:300", workers=1).folder
    shape = ("model.vocab=304", "log.eval_batches=0", "data.micro_batch=2")
    pp = layout(data, *shape, "parallel.pp=2", *FSDP2, "data.global_batch=8")
    tp = layout(dataset, "parallel.tp=2", "parallel.sp=true", *FSDP2, "data.global_batch=4")
    do([Job(root / "pp", pp), Job(root / "tp", tp)])
    return root


def call(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    with mock.patch.object(sys, "argv", ["lmworks", *map(str, arguments)]):
        try:
            main()
            code: Any = 0
        except SystemExit as ended:
            code = ended.code
    out = capsys.readouterr()
    return code or 0, out.out, out.err


def test_single_process_loads_four_rank_run(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained / "pp"
    code, out, _ = call(capsys, "eval", run, "--json")
    assert code == 0 and json.loads(out)["loss"] == pytest.approx(curve(run)[-1][5], rel=1e-6)
    code, out, _ = call(capsys, "generate", run, "--prompt", "def", "--max-tokens", "5", "--greedy", "--json")
    assert code == 0 and len(json.loads(out)[0]["tokens"]) == 5
    code, out, _ = call(capsys, "report", run, "--json")
    assert code == 0 and Path(json.loads(out)["report"]).stat().st_size > 1000
    code, out, _ = call(capsys, "runs", run, "--json")
    assert code == 0 and [(row["steps"], row["status"]) for row in json.loads(out)] == [(3, "finished")]


@pytest.mark.parametrize("name", ["pp", "tp"])
def test_export_has_same_logits_in_transformers(
    trained: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = tmp_path / "exported"
    code, said, _ = call(capsys, "export", trained / name, out, "--step", "2", "--json")
    assert code == 0 and json.loads(said)["step"] == 2 and json.loads(said)["tokenizer"] == (name == "pp")
    ours = load_trained(trained / name, step=2)
    text = "def x in y"
    tokens = torch.tensor([ours.tokenizer.encode(text)])
    with torch.no_grad():
        expected = ours.model(tokens)
        found = AutoModelForCausalLM.from_pretrained(out)(tokens).logits
    assert torch.allclose(found, expected, atol=1e-5)
    if name == "pp":
        tokenizer = AutoTokenizer.from_pretrained(out)
        assert tokenizer(text)["input_ids"] == tokens[0].tolist() and tokenizer.eos_token_id == ours.tokenizer.eot
    assert call(capsys, "export", trained / name, out)[0] == 0  # over itself, with the newest step
    assert json.loads((out / "lmworks_export.json").read_text())["step"] == 3


def test_export_does_not_overwrite_other_folders(
    trained: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, file = tmp_path / "theirs", tmp_path / "file"
    theirs.mkdir()
    (theirs / "config.json").write_text("{}")
    file.write_text("")
    for out, said in {theirs: "is not empty and not an earlier export", file: "is a file"}.items():
        code, _, error = call(capsys, "export", trained / "tp", out)
        assert code == 2 and said in error and len(error.splitlines()) == 1
    assert [path.name for path in theirs.iterdir()] == ["config.json"]
    code, _, error = call(capsys, "export", trained / "tp", tmp_path / "new", "--step", "7")
    assert code == 2 and "no checkpoint of step 7" in error and not (tmp_path / "new").exists()
    train(layout(dataset, *SPARSE), tmp_path / "sparse")
    code, _, error = call(capsys, "export", tmp_path / "sparse", tmp_path / "new")
    assert code == 2 and len(error.splitlines()) == 1 and not (tmp_path / "new").exists(), error

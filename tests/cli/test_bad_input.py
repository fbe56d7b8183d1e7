"""Bad input gives one line that names the culprit, exit code 2, no traceback, and leaves nothing behind."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forked import Forked
from typed import lmworks

FILES = {
    "good.toml": '[model]\npreset = "tiny"\n[optim]\nsteps = 2\n[log]\neval_batches = 1',
    "broken.toml": "[optim\nlr = 1",
    "twice.toml": "seed = 1\nseed = 2",
    "section.toml": "[optimizer]\nlr = 1e-3",
    "flat.toml": "lr = 1e-3",
    "text.toml": '[optim]\nlr = "fast"',
    "list.toml": "[data]\nseq = [128]",
    "scalar.toml": "model = 3",
    "orphan.toml": 'extends = "nowhere.toml"',
    "circle.toml": 'extends = "circle2.toml"',
    "circle2.toml": 'extends = "circle.toml"',
    "catalogue.toml": '[cluster]\ncatalogue = "chips.toml"',
}

# what is typed after `lmworks train`, and what the one line must say
WRONG: dict[str, tuple[list[str], list[str]]] = {
    # files and names
    "no such file": (["nowhere.toml"], ["nowhere.toml", "does not exist"]),
    "no such preset": (["gpt2-smal"], ["gpt2-smal", "did you mean 'gpt2-small'"]),
    "a folder that is no run": (["."], ["spec.toml", "does not exist"]),
    "broken TOML": (["broken.toml"], ["broken.toml", "not valid TOML", "line 1"]),
    "a key twice": (["twice.toml"], ["twice.toml", "not valid TOML"]),
    "binary": (["binary.toml"], ["binary.toml", "not valid TOML"]),
    "extends nothing": (["orphan.toml"], ["nowhere.toml", "orphan.toml"]),
    "extends in a circle": (["circle.toml"], ["circle.toml → circle2.toml → circle.toml"]),
    "no such catalogue": (["catalogue.toml"], ["cluster.catalogue", "chips.toml", "No such file"]),
    # keys
    "unknown section": (["section.toml"], ["unknown key 'optimizer'", "did you mean 'optim'"]),
    "unknown key at the top": (["flat.toml"], ["unknown key 'lr'", "did you mean 'optim.lr'?"]),
    "a key without its section": (["tiny", "lr=1"], ["unknown key 'lr'", "did you mean 'optim.lr'?"]),
    "a key as an option": (["tiny", "--lr", "1"], ["there is no option --lr", "did you mean 'optim.lr=1'?"]),
    "a long one": (["tiny", "--learning-rate=3e-4"], ["no option --learning-rate", "did you mean 'optim.lr=3e-4'?"]),
    "with its section": (["tiny", "--optim.lr", "1"], ["no option --optim.lr", "did you mean 'optim.lr=1'?"]),
    "without a value": (["--global-batch", "--json"], ["did you mean 'data.global_batch=VALUE'?"]),
    "a name that leaves its folder": (["tiny", 'name="../x"'], ["name = '../x'"]),
    "an empty name": (["tiny", "name="], ["name = ''"]),
    "an engine that does not train yet": (["tiny", "parallel.engine=deepspeed"], ["parallel.engine = 'deepspeed'"]),
    "offload that does not train yet": (["tiny", "parallel.offload=full"], ["parallel.offload = 'full'"]),
    "more machines than are used": (["tiny", "cluster.nodes=4"], ["cluster.nodes = 4", "4 ranks"]),
    "unknown key": (["tiny", "optim.learning_rate=1"], ["unknown key 'optim.learning_rate'", "lr"]),
    "unknown nested key": (["tiny", "model.rope_scaling.fctor=2"], ["model.rope_scaling.fctor", "factor"]),
    "not an override": (["tiny", "optim.lr"], ["'optim.lr' is not an override", "section.key=value"]),
    # types
    "a word for a number": (["text.toml"], ["optim.lr must be a number, got 'fast'"]),
    "a list for a number": (["list.toml"], ["data.seq must be a whole number, got [128]"]),
    "a fraction for a count": (["tiny", "model.layers=2.5"], ["model.layers must be a whole number, got 2.5"]),
    "a number for a switch": (["tiny", "data.shuffle=1"], ["data.shuffle must be true or false, got 1"]),
    "a number for a section": (["scalar.toml"], ["model: expected a table, got 3"]),
    # ranges
    "a rate of zero": (["tiny", "optim.lr=0"], ["optim.lr = 0.0", "more than 0 and at most 10"]),
    "not finite": (["tiny", "optim.weight_decay=nan"], ["optim.weight_decay = nan is not a finite number"]),
    "negative": (["tiny", "checkpoint.every=-1"], ["checkpoint.every = -1", "at least 0"]),
    "no layers": (["tiny", "model.layers=0"], ["model.layers = 0", "at least 1"]),
    "too large": (["tiny", f"seed={2**63}"], ["seed", "out of range"]),
    "no such choice": (["tiny", "precision.dtype=fp61"], ["precision.dtype = 'fp61'", "fp32, bf16, fp16"]),
    "no such accelerator": (["tiny", "cluster.gpu=H1000"], ["cluster.gpu: 'H1000'", "did you mean 'h100'"]),
    # contradictions
    "heads and kv heads": (["tiny", "model.kv_heads=3"], ["model.heads = 4", "model.kv_heads = 3", "1, 2, 4"]),
    "hidden and heads": (["tiny", "model.heads=6"], ["model.hidden = 64", "model.heads = 6", "hidden = 66"]),
    "sequence and context": (["tiny", "data.seq=256"], ["data.seq = 256", "model.context = 128"]),
    "batches": (["tiny", "data.global_batch=12"], ["data.global_batch = 12", "8 × 1 = 8", "8 or 16 would fit"]),
    "warm-up and steps": (["tiny", "optim.steps=5", "optim.warmup=6"], ["optim.warmup = 6", "optim.steps = 5"]),
    "zero without its strategy": (["tiny", "parallel.zero=1"], ["parallel.zero = 1", "parallel.strategy = 'zero'"]),
    "dp twice": (
        ["tiny", "parallel.dp=3", "parallel.dp_shard=2", "parallel.strategy=fsdp2"],
        ["parallel.dp = 3", "1 × 2"],
    ),
    "more experts than there are": (["tiny", "model.experts=1"], ["model.top_k = 2", "model.experts = 1"]),
    "experts of a dense model": (["tiny", "parallel.ep=2"], ["parallel.ep = 2", "dense"]),
    "a weight of zero": (["tiny", "data.mix.a=0"], ["data.mix", "'a'", "more than 0"]),
    "a degree that divides nothing": (["tiny", "parallel.tp=3"], ["parallel.tp = 3", "model.heads = 4", "dp=3"]),
    "several machines": (
        ["tiny", "parallel.dp=8", "cluster.nodes=4", "cluster.gpus_per_node=2"],
        ["cluster.nodes = 4", "torchrun"],
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary.toml").write_bytes(b"\x80\x81\x00")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(code: int, stderr: str, parts: list[str]) -> None:
    assert code == 2, stderr
    assert stderr.startswith("lmworks: error: ") and stderr.count("\n") == 1, stderr
    assert "Traceback" not in stderr
    for part in parts:
        assert part in stderr, f"{part!r} is not in {stderr!r}"


@pytest.mark.parametrize("case", WRONG)
def test_train(folder: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    arguments, parts = WRONG[case]
    code, out, err = lmworks(capsys, "train", *arguments, "--run-dir", "run")
    check(code, err, parts)
    assert out == ""
    assert not (folder / "run").exists()


def test_train_in_a_process_of_its_own(folder: Path) -> None:
    """The installed command, as a user runs it."""
    arguments, parts = WRONG["batches"]
    line = [sys.executable, "-m", "lmworks", "train", *arguments, "--run-dir", "run"]
    result = subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=120)
    check(result.returncode, result.stderr, parts)
    assert not (folder / "run").exists()


def prepare_corpus() -> None:
    """The embedded corpus, made on first use with lines of progress that are not this test's."""
    from lmworks.data import resolve

    resolve("stdlib:bytes")


def test_a_run_folder_that_is_taken(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "spec.toml").write_text("seed = 1")
    code, _, err = lmworks(capsys, "train", "good.toml", "--run-dir", "run")
    check(code, err, ["run already holds a run", "lmworks resume run"])
    assert (folder / "run" / "spec.toml").read_text() == "seed = 1"
    assert [path.name for path in (folder / "run").iterdir()] == ["spec.toml"]


def test_a_run_folder_that_cannot_be(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Below a file: nobody may create it, not even root."""
    prepare_corpus()
    code, _, err = lmworks(capsys, "train", "good.toml", "--run-dir", "good.toml/run")
    check(code, err, ["good.toml/run", "Not a directory"])


def test_a_full_disk_during_a_save(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real limit on the size of files, above all that a run writes but its checkpoint. Nothing is lost by it."""
    prepare_corpus()  # without the limit

    def limit_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    limited = Forked("train", "good.toml", "--run-dir", "run", first=limit_files)
    _, stderr = limited.communicate()
    assert limited.returncode == 1 and stderr.count("\n") == 1, stderr
    assert stderr.startswith("lmworks: error: cannot save run/checkpoints/step-000002: File too large"), stderr
    assert list((folder / "run" / "checkpoints").iterdir()) == []
    code, _, stderr = lmworks(capsys, "resume", "run")
    assert code == 0, stderr
    assert [path.name for path in (folder / "run" / "checkpoints").iterdir()] == ["step-000002"]


def test_a_misspelt_option_is_no_key(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = lmworks(capsys, "train", "tiny", "--max-restart", "3")
    assert code == 2 and "--max-restarts" in err and "fault.max_restarts" not in err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["generate", "tiny", "--prompt", "x", "--dtype", "bf16"], ["did you mean 'engine.dtype=bf16'?"]),
        (["generate", "tiny", "--prompt", "x", "dtype=bf16"], ["did you mean 'engine.dtype'?"]),
        (["plan", "search", "llama3-8b", "--cluster", "h100x256"], ["did you mean '256xh100'?"]),
        (["resume", "nowhere"], ["nowhere", "does not exist"]),
        (["resume", "good.toml"], ["good.toml", "it is a file"]),
        (["resume", "."], ["spec.toml"]),
        (["generate", "nowhere", "--prompt", "x"], ["nowhere"]),
        (["eval", "nowhere"], ["nowhere"]),
    ],
)
def test_other_commands(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], parts: list[str]
) -> None:
    code, _, err = lmworks(capsys, *arguments)
    check(code, err, parts)

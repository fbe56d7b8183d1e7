"""`lmworks checkpoint` as a user types it: what is there, what is wrong with it, what goes; one-line errors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import typed
from lmworks import checkpoint
from lmworks.checkpoint.format.folders import work_folder
from lmworks.cli.checkpoint import progress_unless
from lmworks.parallel.local_ranks import on_ranks
from lmworks.record import RunFolder
from tiny import events, flip_a_bit, make_spec, train

Run = Callable[..., tuple[int, str, str]]
SHARD = "rank-00000.safetensors"


@pytest.fixture
def lmworks(capsys: pytest.CaptureFixture[str]) -> Run:
    return lambda *arguments: typed.lmworks(capsys, *map(str, arguments))


@pytest.fixture(scope="module")
def trained(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 10, 20 and 30."""
    run = tmp_path_factory.mktemp("runs") / "trained"
    train(make_spec(dataset, "optim.steps=30", "checkpoint.every=10", "checkpoint.keep=0"), run)
    return run


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:06d}"


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def steps(run: Path) -> list[int]:
    return [checkpoint.step_of(one) for one in checkpoint.committed(run / "checkpoints")]


def answer(result: tuple[int, str, str], code: int = 0) -> Any:
    assert result[0] == code and result[2] == "", result
    return json.loads(result[1])


def refusal(result: tuple[int, str, str], code: int) -> str:
    (line,) = result[2].splitlines()
    assert result[0] == code and result[1] == "" and line.startswith("lmworks: error: ")
    return line


# --- ls ---------------------------------------------------------------------------------------------------


def test_ls_tells_committed_from_the_rest(lmworks: Run, run: Path) -> None:
    root = run / "checkpoints"
    gone = subprocess.Popen(["true"])
    gone.wait()
    shutil.copytree(folder(run, 20), root / "step-000020.replaced-7")
    shutil.copytree(folder(run, 30), folder(run, 40))
    (folder(run, 40) / "COMMITTED").unlink()
    work_folder(folder(run, 50), gone.pid, 1).mkdir()
    work_folder(folder(run, 60), os.getppid(), 1).mkdir()
    os.truncate(folder(run, 10) / SHARD, 100)
    (folder(run, 30) / "notes").write_bytes(b"12345")
    found = answer(lmworks("checkpoint", "ls", run, "--json"))
    assert [(one["step"], one["status"]) for one in found] == [
        (40, "unfinished"),
        (30, "committed"),
        (20, "committed"),
        (20, "replaced"),
        (10, "damaged"),
        (50, "leftover"),
        (60, "writing"),
    ]
    assert (found[1]["bytes"], found[1]["files"], found[1]["ranks"]) == (size(folder(run, 30)), 5, 1)
    assert (found[2]["bytes"], found[2]["files"]) == (size(folder(run, 20)), 4)
    assert found[4]["reason"].endswith(f"{SHARD} (rank 0) has 100 bytes instead of {found[4]['reason'].split()[-1]}")
    code, out, err = lmworks("checkpoint", "ls", root)
    assert code == 0 and "step-000020.replaced-7" in out and err.splitlines() == [f"step-000010: {found[4]['reason']}"]


# --- show -------------------------------------------------------------------------------------------------


def test_show_gives_layout_cursor_and_tensors(lmworks: Run, run: Path) -> None:
    held = answer(lmworks("checkpoint", "show", run, "--json"))
    assert (held["step"], held["cursor"], held["ranks"], held["parallel"]["tp"]) == (30, 30, 1, 1)
    assert "tensors" not in held and set(held["sections"]) == {"model", "optim", "rng"}
    full = answer(lmworks("checkpoint", "show", folder(run, 10), "--tensors", "--json"))
    assert full["step"] == 10
    state: dict[str, Any] = {"model": None}
    checkpoint.load(run / "checkpoints", state, refused=lambda *_: None, step=10)
    model = state["model"]
    listed = {one["name"].removeprefix("model."): one for one in full["tensors"] if one["name"].startswith("model.")}
    assert {name: (tuple(one["shape"]), one["bytes"], one["dtype"]) for name, one in listed.items()} == {
        name: (tuple(tensor.shape), tensor.nbytes, "F32") for name, tensor in model.items()
    }
    assert full["sections"]["model"] == {"tensors": len(model), "bytes": sum(t.nbytes for t in model.values())}
    code, out, err = lmworks("checkpoint", "show", run, "--step", "20", "--tensors")
    assert (code, err) == (0, "") and "step 20" in out and "layout: one rank; data cursor: 20" in out
    rows = [line.split() for line in out.splitlines() if line.startswith(" model.embed.weight")]
    assert rows == [
        ["model.embed.weight", "F32", *" × ".join(map(str, model["embed.weight"].shape)).split(), *rows[0][5:]]
    ]


def save_two(rank: int, root: Path, meta: dict[str, Any]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    rows = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Shard(0)])
    columns = distribute_tensor(torch.arange(8.0).reshape(2, 4), mesh, [Shard(1)])
    checkpoint.save(root, 1, {"model": {"rows": rows, "columns": columns, "whole": torch.ones(2)}}, meta)


def test_several_ranks_are_told_apart(lmworks: Run, tmp_path: Path) -> None:
    """Pieces of two ranks are counted, put together again, and each damaged file is laid to the rank that wrote it."""
    from lmworks.checkpoint.format.index import read_index
    from lmworks.train.saved_weights import read_tensor

    root = tmp_path / "checkpoints"
    on_ranks(2, save_two, root, {"spec": {"parallel": {"pp": 1, "tp": 2}}, "cursor": 1})
    held = answer(lmworks("checkpoint", "show", root, "--tensors", "--json"))
    assert held["ranks"] == 2
    assert {one["name"]: one["pieces"] for one in held["tensors"]} == {
        "model.rows": 2,
        "model.columns": 2,
        "model.whole": 1,
    }
    assert "by 2 ranks\nlayout: tp=2;" in lmworks("checkpoint", "show", root)[1]
    step = root / "step-000001"
    index = read_index(step, checkpoint.verify(step))
    assert torch.equal(read_tensor(step, index["model.rows"]), torch.arange(12.0).reshape(4, 3))
    assert torch.equal(read_tensor(step, index["model.columns"]), torch.arange(8.0).reshape(2, 4))
    flip_a_bit(step / "rank-00001.safetensors")
    (step / SHARD).unlink()
    found = answer(lmworks("checkpoint", "verify", root, "--json"), code=1)
    wrong = found["checkpoints"][0]["wrong"]
    assert {(one["file"], one["rank"]) for one in wrong} == {(SHARD, 0), ("rank-00001.safetensors", 1)}


# --- verify -----------------------------------------------------------------------------------------------


def test_verify_names_every_wrong_file_and_what_a_resume_would_use(lmworks: Run, run: Path) -> None:
    whole = answer(lmworks("checkpoint", "verify", run, "--json"))
    assert whole["ok"] and whole["resume"] == 30
    assert [one["status"] for one in whole["checkpoints"]] == ["intact"] * 3
    flip_a_bit(folder(run, 30) / SHARD)
    flip_a_bit(folder(run, 30) / "index.json")
    (folder(run, 20) / "manifest.json").unlink()
    code, out, err = lmworks("checkpoint", "verify", run)
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert len(lines) == 5 and lines[-1] == "a run would resume from step 10"
    assert sum("step-000030: " in line and "(rank 0) is damaged" in line for line in lines) == 2
    assert "manifest.json is missing" in lines[2] and lines[3].startswith("step-000010: intact (2 files")
    one = answer(lmworks("checkpoint", "verify", run, "--step", "30", "--json"), code=1)
    assert [(x["step"], x["status"]) for x in one["checkpoints"]] == [(30, "damaged")]
    assert answer(lmworks("checkpoint", "verify", folder(run, 10), "--json"))["ok"]


def test_what_was_never_finished_is_not_damage(lmworks: Run, run: Path) -> None:
    (folder(run, 30) / "COMMITTED").unlink()
    code, out, _ = lmworks("checkpoint", "verify", run)
    assert code == 0 and out.splitlines()[0] == "step-000030: never finished; nothing loads it"
    assert out.endswith("a run would resume from step 20\n")


def test_nothing_to_resume_from(lmworks: Run, run: Path) -> None:
    for step in (10, 20, 30):
        flip_a_bit(folder(run, step) / SHARD)
    code, out, _ = lmworks("checkpoint", "verify", run)
    assert code == 1 and out.endswith("there is no step to resume from\n")


def test_long_work_shows_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    for silent, said in ((False, "verify (MB): 0 of 2000\nverify (MB): 1000 of 2000\n"), (True, "")):
        with progress_unless(silent) as progress:
            for done in (0, 10**9):
                progress("verify", done, 2 * 10**9)
            progress("export", 10**6, 10**6)  # a moment
        assert capsys.readouterr().err == said


# --- prune ------------------------------------------------------------------------------------------------


def test_prune_says_what_it_frees_and_does_it(lmworks: Run, run: Path) -> None:
    space = size(folder(run, 20))
    planned = answer(lmworks("checkpoint", "prune", run, "--keep", "1", "--keep-every", "10", "--dry-run", "--json"))
    assert planned["removed"] == [] and steps(run) == [30, 20, 10]
    code, out, _ = lmworks("checkpoint", "prune", run, "--keep", "1", "--dry-run")
    assert code == 0 and "would remove step-000020 (" in out and steps(run) == [30, 20, 10]
    done = answer(lmworks("checkpoint", "prune", run, "--keep", "2", "--json"))
    assert [Path(one["folder"]).name for one in done["removed"]] == ["step-000010"]
    assert done["kept"] == ["step-000030", "step-000020"] and steps(run) == [30, 20]
    done = answer(lmworks("checkpoint", "prune", run, "--keep", "1", "--json"))
    assert done["freed"] == space and steps(run) == [30]


def test_prune_keeps_the_newest_that_is_intact(lmworks: Run, run: Path) -> None:
    for step in (20, 30):
        flip_a_bit(folder(run, step) / SHARD)
    code, out, _ = lmworks("checkpoint", "prune", run, "--keep", "1")
    assert code == 0 and out.splitlines()[-1].endswith("kept: step-000030, step-000010")
    assert steps(run) == [30, 10]


def test_prune_leaves_all_where_none_is_intact(lmworks: Run, run: Path) -> None:
    for step in (10, 20, 30):
        flip_a_bit(folder(run, step) / SHARD)
    code, out, _ = lmworks("checkpoint", "prune", run, "--keep", "1")
    assert code == 0 and out.startswith("removed 0 folders") and steps(run) == [30, 20, 10]


def test_prune_leaves_a_run_a_run_alone_that_is_being_trained(lmworks: Run, run: Path) -> None:
    with RunFolder(run).locked():
        assert "is being trained" in refusal(lmworks("checkpoint", "prune", run, "--keep", "1"), 2)
    assert "is one checkpoint" in refusal(lmworks("checkpoint", "prune", folder(run, 10), "--keep", "1"), 2)
    assert steps(run) == [30, 20, 10]
    assert lmworks("checkpoint", "prune", run)[0] == 2  # how many to keep is never guessed


def test_nobody_takes_a_run_up_while_it_is_pruned(lmworks: Run, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[bool] = []
    monkeypatch.setattr(
        "lmworks.checkpoint.format.folders.discard", lambda folder: held.append(RunFolder(run).is_locked())
    )
    assert "cannot remove" in refusal(lmworks("checkpoint", "prune", run, "--keep", "1"), 1)
    assert held == [True] and not RunFolder(run).is_locked()


# --- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["ls", "show", "verify", "prune", "export"])
def test_what_is_no_checkpoint_is_said_in_one_line(lmworks: Run, run: Path, tmp_path: Path, command: str) -> None:
    more = {"prune": ["--keep", "1"], "export": [str(tmp_path / "out")]}.get(command, [])
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    said = refusal(lmworks("checkpoint", command, tmp_path / "nowhere", *more), 2)
    assert "nowhere does not exist" in said
    assert "is a file" in refusal(lmworks("checkpoint", command, tmp_path / "file", *more), 2)
    said = refusal(lmworks("checkpoint", command, tmp_path / "empty", *more), 2)
    assert "is neither a run folder (no spec.toml) nor a folder of checkpoints" in said
    shutil.rmtree(run / "checkpoints")
    assert "has no checkpoint yet" in refusal(lmworks("checkpoint", command, run, *more), 1)
    assert not (tmp_path / "out").exists()


def test_only_leftovers(lmworks: Run, run: Path, tmp_path: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    work_folder(folder(run, 50), os.getppid(), 1).mkdir(parents=True)
    assert [one["status"] for one in answer(lmworks("checkpoint", "ls", run, "--json"))] == ["writing"]
    assert "has no checkpoint" in refusal(lmworks("checkpoint", "show", run), 1)
    assert answer(lmworks("checkpoint", "verify", run, "--json")) == {"ok": True, "resume": None, "checkpoints": []}
    assert "has no committed checkpoint" in refusal(lmworks("export", run, tmp_path / "out"), 1)
    assert not (tmp_path / "out").exists()


def test_places_are_known_from_within(lmworks: Run, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`.` in a run, among its checkpoints or in one of them: it is the same run."""
    monkeypatch.chdir(run)
    assert [one["step"] for one in answer(lmworks("checkpoint", "ls", ".", "--json"))] == [30, 20, 10]
    monkeypatch.chdir(folder(run, 10))
    assert answer(lmworks("checkpoint", "show", ".", "--json"))["step"] == 10
    assert answer(lmworks("checkpoint", "show", "../step-000020", "--json"))["step"] == 20
    monkeypatch.chdir(run / "checkpoints")
    assert answer(lmworks("checkpoint", "verify", "step-000010", "--json"))["ok"]
    with RunFolder(run).locked():
        assert "is being trained" in refusal(lmworks("checkpoint", "prune", ".", "--keep", "1"), 2)


@pytest.mark.parametrize("command", ["show", "verify", "export"])
def test_an_unknown_step_is_told_which_there_are(lmworks: Run, run: Path, tmp_path: Path, command: str) -> None:
    more = [str(tmp_path / "out")] if command == "export" else []
    said = refusal(lmworks("checkpoint", command, run, *more, "--step", "7"), 2)
    assert said.endswith("has no checkpoint of step 7; steps there: 30, 20, 10")


@pytest.mark.parametrize("size", ["", "big", "0", "5XB", "-1GB", "1e9"])
def test_a_size_that_is_none(lmworks: Run, run: Path, tmp_path: Path, size: str) -> None:
    said = refusal(lmworks("checkpoint", "export", run, tmp_path / "out", "--max-shard-size", size), 2)
    assert "is not a size; write it like 5GB, 500MB or 2GiB" in said and not (tmp_path / "out").exists()


def test_export_is_one_command_under_two_names(lmworks: Run, run: Path, tmp_path: Path) -> None:
    one = answer(lmworks("checkpoint", "export", run, tmp_path / "a", "--max-shard-size", "20KB", "--json"))
    other = answer(lmworks("export", run, tmp_path / "b", "--json"))
    assert len(one["files"]) > 2 and other["files"] == ["model.safetensors"]
    assert {**one, "out": 0, "files": 0} == {**other, "out": 0, "files": 0}
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(one["files"])


# --- a damaged newest checkpoint, everywhere ---------------------------------------------------------------


@pytest.mark.parametrize("command", ["generate", "export"])  # eval: test_train_cli.py
def test_readers_say_which_file_and_use_the_step_before(lmworks: Run, run: Path, tmp_path: Path, command: str) -> None:
    flip_a_bit(folder(run, 30) / SHARD)
    more = {"generate": ["--prompt", "def", "--max-tokens", "2"], "export": [str(tmp_path / "out")]}.get(command, [])
    before = RunFolder(run).events_path.read_bytes()
    code, out, err = lmworks(command, run, *more, "--json")
    assert code == 0 and f"step-000030/{SHARD} (rank 0) is damaged" in err
    assert err.splitlines()[-1] == "using step 20 instead"
    if command != "generate":
        assert json.loads(out)["step"] == 20
    assert RunFolder(run).events_path.read_bytes() == before  # whoever reads a run writes nothing into it


def test_a_resume_records_what_it_refused_and_what_it_took(lmworks: Run, run: Path) -> None:
    flip_a_bit(folder(run, 30) / SHARD)
    code, _, err = lmworks("resume", run, "--json")
    assert code == 0 and f"{SHARD} (rank 0) is damaged" in err
    (refused,) = events(run, "refused")
    assert refused["step"] == 30 and refused["path"] == "step-000030" and f"{SHARD} (rank 0)" in refused["reason"]
    assert events(run, "resume")[-1]["step"] == 20 and steps(run)[0] == 30
    assert answer(lmworks("checkpoint", "verify", run, "--json"))["ok"]  # saved anew

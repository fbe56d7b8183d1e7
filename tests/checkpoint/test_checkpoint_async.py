"""Training goes on while a process writes what was copied, and whatever happens to that process costs one save."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch

from layouts import Job, do, layout, with_meshes
from lmworks import checkpoint
from lmworks.checkpoint.async_save import AsyncSaver, SaveResult
from lmworks.checkpoint.format import writer_client
from lmworks.checkpoint.format.folders import work_folder
from lmworks.diagnose.hang import from_heartbeats
from lmworks.parallel.local_ranks import on_ranks
from lmworks.record import RunFolder, phase
from lmworks.record.heartbeat import process_state, read_writer_heartbeats
from lmworks.spec import CheckpointError, RunSpec
from lmworks.train import Trainer
from tiny import curve, differences, events, saved
from writer_faults import die_at, failing, hang

ASYNC = ("checkpoint.asynchronous=true",)
NOW = torch.device("cpu")


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((300, 70), float(step)), "half": torch.full((5,), step, dtype=torch.bfloat16)}}


def background(root: Path, **keep: int) -> AsyncSaver:
    return AsyncSaver(root, checkpoint.RetentionPolicy(**keep), state_of(0), NOW)


def committed(root: Path) -> list[int]:
    """Steps, having read all that is in them."""
    steps = []
    for folder in checkpoint.committed(root):
        state: dict[str, Any] = {"model": None}
        step = checkpoint.step_of(folder)
        assert checkpoint.load(root, state, refused=lambda folder, why: pytest.fail(why), step=step)
        assert all(bool((value == step).all()) for value in state["model"].values())
        steps.append(step)
    return steps


def test_what_is_saved_is_what_was_copied_though_training_goes_on(tmp_path: Path) -> None:
    saves = background(tmp_path)
    state = state_of(1)
    saves.save(1, state, {"cursor": 1})
    for value in state["model"].values():
        value.fill_(99)  # the next step changes the weights while they are being written
    ended = saves.wait()
    assert ended is not None and (ended.step, ended.error) == (1, "")
    assert ended.bytes == sum(path.stat().st_size for path in ended.path.iterdir() if path.name[0] in "ri")
    saves.save(2, state_of(2), {})
    with pytest.raises(CheckpointError, match="step 2 is still being saved"):
        saves.save(3, state_of(3), {})
    saves.wait()
    saves.close()
    assert committed(tmp_path) == [2, 1]
    assert checkpoint.verify(tmp_path / "step-000001").meta == {"cursor": 1}


def test_the_writer_is_small_named_and_ends_with_its_rank(tmp_path: Path) -> None:
    """Killed with -9, the rank cannot tell it; nor may it hold on to what the rank had open."""
    ready, tell = os.pipe()
    pid = os.fork()
    if not pid:
        saves = background(tmp_path)
        saves.save(1, state_of(1), {})
        saves.wait()
        os.write(tell, str(saves.writer.process.pid).encode())
        time.sleep(600)
    writer = int(os.read(ready, 100))
    assert Path(f"/proc/{writer}/comm").read_text().strip() == "lmworks-writer"
    assert not any("libtorch" in line for line in Path(f"/proc/{writer}/maps").read_text().splitlines())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + 60
    with suppress(OSError):  # it is gone, maybe while its state is read
        while ") Z" not in Path(f"/proc/{writer}/stat").read_text():
            assert time.monotonic() < deadline, "the writer outlived its rank"
            time.sleep(0.01)


def test_a_rank_enters_the_phases_of_its_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []
    monkeypatch.setattr(phase, "listeners", [lambda name, step: entered.append(name)])
    checkpoint.save(tmp_path, 1, state_of(1), {})
    stages = ["save.stage", "save.write", "save.seal", "save.commit", "save.prune"]
    assert entered == stages
    saves = background(tmp_path)
    entered.clear()
    saves.save(2, state_of(2), {})
    saves.wait()
    saves.close()
    assert entered == ["save.stage", "save.write", *stages[1:]]  # handed over, and begun
    entered.clear()
    committed(tmp_path)
    assert set(entered) == {"load.find", "load.read"}


# --- a writer in trouble ------------------------------------------------------------------------------


def test_a_stopped_writer_is_given_up_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs that save alone: the next one has a new writer."""
    monkeypatch.setattr(writer_client, "STOPPED_TIMEOUT_S", 0.5)
    root = tmp_path / "checkpoints"
    saves = background(root)
    pid = saves.writer.process.pid
    os.kill(pid, signal.SIGSTOP)
    while process_state(saves.writer.heartbeat) != "stopped":
        time.sleep(0.01)
    saves.save(2, state_of(2), {})
    assert saves.poll() is None
    (writer,) = from_heartbeats(RunFolder(tmp_path), {}).writers
    assert (writer.rank, writer.pid, writer.state, writer.checkpoint) == (0, pid, "stopped", "step-000002")
    ended = saves.wait()
    assert ended is not None
    assert ended.error == f"its writer process (pid {pid}) is stopped (by SIGSTOP or a debugger)"
    assert not read_writer_heartbeats(tmp_path)
    saves.save(3, state_of(3), {})
    assert saves.wait() == SaveResult(3, root / "step-000003", ANY, ANY, "")
    saves.close()
    assert committed(root) == [3]


def test_a_writer_whose_file_system_hangs_is_given_up_and_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe that nobody reads: to open it waits for ever, as a server that does not answer makes it."""
    root = tmp_path / "checkpoints"
    saves = AsyncSaver(root, checkpoint.RetentionPolicy(), state_of(0), NOW, timeout_s=2.0)
    pid = saves.writer.process.pid
    work = work_folder(root / "step-000002", os.getpid(), 1)
    work.mkdir(parents=True)
    os.mkfifo(work / "rank-00000.safetensors")
    saves.save(2, state_of(2), {})
    ended = saves.wait()
    assert ended is not None
    assert ended.error == f"its writer process (pid {pid}) has made no progress for 2 s: does the file system hang?"
    said = capsys.readouterr().err
    assert f"the writer process of rank 0 (pid {pid}) has made no progress for 1 s in step-000002; it is killed" in said
    saves.save(3, state_of(3), {})
    assert saves.wait() == SaveResult(3, root / "step-000003", ANY, ANY, "")
    saves.close()


@pytest.fixture
def at_start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return lambda *acts: monkeypatch.setattr(writer_client, "startup", list(acts))


@pytest.mark.parametrize(
    ("call", "code", "first"),
    [("writev", errno.ENOSPC, 1), ("fsync", errno.EIO, 1), ("fsync", errno.EIO, 4), ("fsync", errno.EIO, 6)],
)
def test_a_disk_that_refuses_costs_one_save(
    tmp_path: Path, at_start: Callable[..., None], call: str, code: int, first: int
) -> None:
    """At the first byte, at the first sync, while it is sealed, and after the rename."""
    checkpoint.save(tmp_path, 1, state_of(1), {})
    at_start(partial(failing, call, code, first, first))
    saves = background(tmp_path)
    saves.save(2, state_of(2), {})
    ended = saves.wait()
    assert ended is not None and ended.error == os.strerror(code)
    assert committed(tmp_path) == [1]
    saves.save(3, state_of(3), {})
    ended = saves.wait()
    assert ended is not None and not ended.error
    saves.close()
    assert committed(tmp_path) == [3, 1]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(("stage", "kept"), [("save.seal", False), ("save.commit", False), ("save.prune", True)])
def test_a_writer_that_is_killed_while_it_commits(
    tmp_path: Path, at_start: Callable[..., None], stage: str, kept: bool
) -> None:
    """A step that exists is saved again: before the commit the old one stays, after it the new one counts."""
    checkpoint.save(tmp_path, 1, state_of(1), {"which": "old"})
    at_start(partial(die_at, stage))
    saves = background(tmp_path)
    at_start()
    saves.save(1, state_of(1), {"which": "new"})
    ended = saves.wait()
    assert ended is not None and ended.error == ("" if kept else "its writer process was killed by signal 9")
    (folder,) = checkpoint.committed(tmp_path)
    assert checkpoint.verify(folder).meta == {"which": "new" if kept else "old"}
    saves.save(2, state_of(2), {})
    saves.wait()
    saves.close()
    assert committed(tmp_path) == [2, 1] and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("first", [4, 6])
def test_a_save_that_fails_is_not_taken_for_the_older_one_of_its_step(
    tmp_path: Path, at_start: Callable[..., None], first: int
) -> None:
    """While it is sealed, and after the rename: what is committed is then the one that was to be replaced."""
    checkpoint.save(tmp_path, 1, state_of(1), {"cursor": 1})
    at_start(partial(failing, "fsync", errno.EIO, first, first))
    saves = background(tmp_path)
    saves.save(1, state_of(1), {"cursor": 5})
    ended = saves.wait()
    saves.close()
    assert ended is not None and ended.error == "Input/output error"
    assert checkpoint.verify(tmp_path / "step-000001").meta == {"cursor": 1}


def test_files_that_another_rank_wrote_elsewhere_make_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on machines that do not share the run folder."""
    saves = background(tmp_path)
    elsewhere = {"rank-00001.safetensors": {"bytes": 5, "rank": 1, "digests": [""]}}
    take = saves.mailbox.take
    monkeypatch.setattr(saves.mailbox, "take", lambda number: [*take(number), json.dumps([elsewhere, ""])])
    saves.save(1, state_of(1), {})
    ended = saves.wait()
    saves.close()
    assert ended is not None
    assert "rank-00001.safetensors (rank 1) is missing where rank 0 looks: all ranks must save to one" in ended.error
    assert committed(tmp_path) == [] and not list(tmp_path.iterdir())


def test_what_a_process_of_the_same_number_left_is_swept_away(tmp_path: Path) -> None:
    """In a container every start has the same numbers, so that a leftover looks like a save under way."""
    work_folder(tmp_path / "step-000007", os.getpid(), 3).mkdir()
    saves = background(tmp_path)
    saves.save(1, state_of(1), {})
    saves.wait()
    saves.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_a_writer_that_is_killed_is_replaced(tmp_path: Path, at_start: Callable[..., None]) -> None:
    at_start(hang)
    saves = background(tmp_path)
    saves.save(1, state_of(1), {})
    assert saves.poll() is None  # and training goes on
    at_start()
    saves.writer.process.kill()
    ended = saves.wait()
    assert ended is not None and ended.error == "its writer process was killed by signal 9"
    saves.writer.process.kill()  # and again, with nothing to do
    saves.writer.process.wait()
    saves.save(2, state_of(2), {})
    ended = saves.wait()
    assert ended is not None and not ended.error
    saves.close()
    assert committed(tmp_path) == [2] and not list(tmp_path.glob(".*"))


# --- a run ------------------------------------------------------------------------------------------


def test_a_run_that_saves_in_the_background_is_the_same_run(dataset: Path, tmp_path: Path) -> None:
    spec = layout(dataset, "optim.steps=5", "checkpoint.every=1", "parallel.dp=2", "parallel.strategy=fsdp2")
    later = layout(dataset, "optim.steps=5", "checkpoint.every=1", "parallel.dp=2", "parallel.strategy=fsdp2", *ASYNC)
    do(
        [
            Job(tmp_path / "plain", spec),
            Job(tmp_path / "async", later),
            Job(tmp_path / "again", later, tmp_path / "plain", 2),
        ]
    )
    for name in ("async", "again"):
        assert differences(saved(tmp_path / name), saved(tmp_path / "plain")) == []
        assert curve(tmp_path / name) == curve(tmp_path / "plain")
    recorded = events(tmp_path / "async", "save")
    assert [event["step"] for event in recorded] == [1, 2, 3, 4, 5]
    assert all(event["write_s"] > 0 and event["bytes"] > 1000 for event in recorded)
    for step in (1, 4):  # each holds its own step, not a later one
        assert differences(saved(tmp_path / "async", step), saved(tmp_path / "plain", step)) == []
    names = {path.name for path in (tmp_path / "async/checkpoints/step-000003").iterdir()}
    assert names == {"rank-00000.safetensors", "rank-00001.safetensors", "index.json", "manifest.json", "COMMITTED"}


def test_a_last_save_that_fails_is_made_again_in_the_open(
    dataset: Path, tmp_path: Path, at_start: Callable[..., None]
) -> None:
    """There is no later save to make up for it, and the state is still there."""
    at_start(partial(failing, "fsync", errno.EIO, 1, 10**6))
    Trainer(layout(dataset, "checkpoint.every=0", *ASYNC), tmp_path / "run", quiet=True).run()
    assert [event["error"] for event in events(tmp_path / "run", "save_failed")] == ["Input/output error"]
    assert [(event["step"], event["write_s"]) for event in events(tmp_path / "run", "save")] == [(3, 0.0)]
    assert [folder.name for folder in checkpoint.committed(tmp_path / "run" / "checkpoints")] == ["step-000003"]


@with_meshes
def trouble(rank: int, once: RunSpec, ever: RunSpec, folder: Path) -> list[str]:
    """Rank 1's disk refuses one save; then every one, and the run must end."""
    said = []
    for name, spec, last in (("once", once, 1), ("ever", ever, 10**6)):
        writer_client.startup[:] = [partial(failing, "writev", errno.ENOSPC, 1, last)] if rank == 1 else []
        trainer = Trainer(spec, folder / name, quiet=True)
        try:
            trainer.run()
            said.append("finished")
        except Exception as error:
            said.append(str(error))
    return said


def test_one_ranks_full_disk_costs_a_save_and_two_in_a_row_the_run(dataset: Path, tmp_path: Path) -> None:
    fsdp2 = ("optim.steps=6", "checkpoint.every=2", "parallel.dp=2", "parallel.strategy=fsdp2", *ASYNC)
    spec = layout(dataset, *fsdp2)
    first, second = on_ranks(2, trouble, spec, spec, tmp_path)
    assert first[0] == second[0] == "finished"
    failed = events(tmp_path / "once", "save_failed")
    assert [(event["step"], event["error"]) for event in failed] == [(2, "No space left on device on rank 1")]
    assert [event["step"] for event in events(tmp_path / "once", "save")] == [4, 6]
    assert "No space left on device on rank 1; the save before failed too" in first[1]
    assert not checkpoint.committed(tmp_path / "ever" / "checkpoints")


def test_no_room_for_the_copy_is_said_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, size: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(CheckpointError, match=r"no memory .*use checkpoint.asynchronous = false"):
        background(tmp_path)

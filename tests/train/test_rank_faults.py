"""What goes wrong on one rank alone is known to all of them at once, and costs nothing that was saved.

Also: what all of them must find the same (a held-out loss, a skipped step, a run done twice).
"""

from __future__ import annotations

import errno
import multiprocessing as mp
import os
import resource
import signal
import socket
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from layouts import Job, do, layout, with_meshes
from lmworks import checkpoint
from lmworks.data import prepare
from lmworks.parallel.local_ranks import init_gloo_group, on_ranks
from lmworks.record import RunFolder
from lmworks.spec import LMWorksError, RunSpec
from lmworks.train import Trainer
from lmworks.train.evaluate import evaluate
from tiny import before_step, built, curve, differences, events, saved, write_documents

FSDP2 = ("parallel.dp=2", "parallel.strategy=fsdp2")


def refuse_writing() -> None:
    """As a full disk does: the system refuses every byte past the limit."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def spoil_gradient(trainer: Trainer, steps: tuple[int, ...], value: float) -> None:
    """One element of the last shard's whole gradient, on this rank alone, in some steps."""
    finish = trainer.parallel_model.finish

    def spoiled() -> None:
        finish()
        if trainer.step + 1 in steps:
            trainer.parallel_model.shards[-1].leaf.grad.view(-1)[-1] = value

    trainer.parallel_model.finish = spoiled  # type: ignore[method-assign]


@with_meshes
def fail_alone(rank: int, spec: RunSpec, full: Path, broken: Path) -> list[tuple[str, bool, int]]:
    """What every rank raises where the second rank's disk is full, then where its gradient is NaN."""
    found = []
    trainer = Trainer(spec, full, quiet=True)
    if rank == 1:
        before_step(trainer, 4, refuse_writing)
    found.append(raised(trainer))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    trainer = Trainer(spec, broken, quiet=True)
    if rank == 1:
        before_step(trainer, 4, lambda: spoil_gradient(trainer, (4,), float("nan")))
    found.append(raised(trainer))
    return found


def raised(trainer: Trainer) -> tuple[str, bool, int]:
    with pytest.raises(LMWorksError) as caught:
        trainer.run()
    return str(caught.value), caught.value.collective, caught.value.exit_code


def test_full_disk_or_nan_on_one_rank_ends_all_and_keeps_checkpoint(dataset: Path, tmp_path: Path) -> None:
    spec = layout(dataset, *FSDP2, "optim.steps=5")
    runs = tmp_path / "full", tmp_path / "broken"
    do([Job(tmp_path / "straight", spec)])
    # Long before watch.timeout_s, half an hour, in which ranks that did not know would wait for one another.
    first, second = on_ranks(2, fail_alone, spec, *runs)
    for (said, collective, code), (other, other_agreed, other_code) in zip(first, second, strict=True):
        assert "\n" not in said and collective and other_agreed and code == other_code == 1
        assert other == said
    assert first[0][0].startswith("cannot save") and "File too large on rank 1" in first[0][0]
    assert "step 4: gradient norm nan, first in the gradient of head.weight" in first[1][0]
    for run in runs:
        assert [folder.name for folder in checkpoint.committed(run / "checkpoints")] == ["step-000002"]
        assert [event["error"] for event in events(run, "fail")] == [first[runs.index(run)][0]]
        assert not list((run / "checkpoints").glob(".*"))
    assert [event["parameter"] for event in events(runs[1], "fault")] == ["head.weight"]
    do([Job(tmp_path / "again", spec, runs[0], 2)])
    assert differences(saved(tmp_path / "again"), saved(tmp_path / "straight")) == []


def fail_before_the_first_step(server: socket.socket, rank: int, spec: RunSpec, run: Path) -> None:
    """The second rank has no room for its optimizer, says so, and ends; what the first raises is in a file."""
    init_gloo_group(server, 2, rank)
    trainer = Trainer(spec, run, quiet=True)
    if rank == 1:
        with mock.patch("lmworks.train.trainer.make_optimizer", side_effect=MemoryError("no room")):
            trainer.run()
    try:
        trainer.run()
    except Exception as error:
        run.with_name("said").write_text(f"{type(error).__name__}: {error}")


def test_early_failure_of_one_rank_reaches_all(
    dataset: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    context = mp.get_context("fork")
    arguments = layout(dataset, *FSDP2), tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as server:
        ranks = [context.Process(target=fail_before_the_first_step, args=(server, r, *arguments)) for r in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120)
    assert [process.exitcode for process in ranks] == [0, 1]
    assert (tmp_path / "said").read_text().startswith("RemoteRankError: rank 1: out of memory in init")
    assert not (tmp_path / "run" / "hangs").exists()
    assert "MemoryError: no room" in capfd.readouterr().err


@with_meshes
def overflow(rank: int, specs: dict[Path, RunSpec]) -> None:
    for folder, spec in specs.items():
        trainer = Trainer(spec, folder, quiet=True)
        owner = rank == spec.parallel.world - 1
        before_step(trainer, 1, lambda t=trainer, o=owner: spoil_gradient(t, (2, 3) if o else (), float("inf")))
        trainer.run()


def test_overflow_on_one_rank_is_skipped_by_all(dataset: Path, tmp_path: Path) -> None:
    fp16 = ("precision.dtype=fp16", "precision.loss_scale=1024", "precision.loss_scale_window=2", "optim.steps=6")
    layouts = {"zero": ("parallel.dp=2", "parallel.strategy=zero", "parallel.zero=2"), "pp": ("parallel.pp=2",)}
    overflow(0, {tmp_path / "one": layout(dataset, *fp16)})
    on_ranks(2, overflow, {tmp_path / name: layout(dataset, *keys, *fp16) for name, keys in layouts.items()})

    def story(run: Path) -> Any:
        skipped = [(event["step"], event["next_scale"]) for event in events(run, "overflow")]
        return skipped, [line[6] for line in curve(run)]  # and the scale of every step

    expected = [(2, 512.0), (3, 256.0)], [1024.0, 1024.0, 512.0, 256.0, 256.0, 512.0]
    assert story(tmp_path / "one") == expected
    for name in layouts:
        assert story(tmp_path / name) == expected
        for one, many in zip(curve(tmp_path / "one"), curve(tmp_path / name), strict=True):
            assert many[1] == pytest.approx(one[1], rel=2e-3)  # fp16 rounds differently where sums are cut


@with_meshes
def losses(rank: int, cases: dict[Path, RunSpec]) -> list[tuple[float, int]]:
    """Of all held-out data, and of the first three micro-batches."""
    found = []
    for folder, spec in cases.items():
        trainer = built(spec, folder)
        for limit in (0, 3):
            result = evaluate(trainer.parallel_model, trainer.held_out, spec, limit)
            found.append((result.loss, result.tokens))
    return found


def test_held_out_loss_is_equal_under_every_layout(tmp_path: Path) -> None:
    """Ranks that have no micro-batch left take part all the same, and a short last one counts as what it holds."""
    source = write_documents(tmp_path / "text.jsonl")
    source.write_text("".join(source.read_text().splitlines(keepends=True)[:100]))
    data = prepare([str(source)], tmp_path / "tokens", workers=1).folder
    shape = ("model.layers=4", "data.micro_batch=3", "data.global_batch=12")
    layouts = {
        "1f1b": ("parallel.pp=2",),
        "zbv": ("parallel.pp=2", "parallel.schedule=zbv"),
        "fsdp2": FSDP2,
        "tp": ("parallel.tp=2", "parallel.sp=true"),
        "cp": ("parallel.cp=2",),
    }
    (every, tokens), (some, three) = losses(0, {tmp_path / "one": layout(data, *shape)})
    assert (tokens, three) == (32 * 16, 9 * 16)  # 11 micro-batches, of which the last is short
    two = on_ranks(2, losses, {tmp_path / name: layout(data, *shape, *keys) for name, keys in layouts.items()})
    both = layout(data, *shape, "parallel.pp=2", *FSDP2)
    for found in [*two, *on_ranks(4, losses, {tmp_path / "both": both})]:
        assert found[::2] == [(pytest.approx(every, rel=1e-6), tokens)] * (len(found) // 2)
        assert found[1::2] == [(pytest.approx(some, rel=1e-6), three)] * (len(found) // 2)


def test_deterministic_run_repeats_bitwise(dataset: Path, tmp_path: Path) -> None:
    layouts = {"ddp-tp-sp": ("parallel.dp=2", "parallel.tp=2", "parallel.sp=true")}
    specs = {name: layout(dataset, "deterministic=true", *keys) for name, keys in layouts.items()}
    do([Job(tmp_path / f"{name}-{again}", spec) for name, spec in specs.items() for again in (1, 2)])
    for name in layouts:
        one, other = tmp_path / f"{name}-1", tmp_path / f"{name}-2"
        assert differences(saved(one), saved(other)) == []
        assert curve(one) == curve(other)
        assert RunFolder(one).spec().deterministic


@with_meshes
def begin_on_a_full_disk(rank: int, spec: RunSpec, run: Path) -> tuple[str, bool]:
    """The second rank cannot write where the others look for its signs of life."""
    trainer = Trainer(spec, run, quiet=True)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    broken = mock.patch("lmworks.train.watch.watchdog.write_whole", side_effect=full)
    with broken if rank == 1 else nullcontext(), pytest.raises(LMWorksError) as caught:
        trainer.run()
    alive = any(thread.name == "watchdog" for thread in threading.enumerate())
    return str(caught.value), alive


def test_full_disk_before_first_step_is_one_line_error(dataset: Path, tmp_path: Path) -> None:
    first, second = on_ranks(2, begin_on_a_full_disk, layout(dataset, *FSDP2), tmp_path / "run")
    place = tmp_path / "run" / "watch" / "rank-1.life"
    assert first == (f"rank 1: cannot write {place}: No space left on device", False)
    assert second == (f"cannot write {place}: No space left on device", False)

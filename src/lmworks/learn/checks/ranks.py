"""Checks on two real ranks: this process, and a fork of it."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from ..checking.expect import Mismatch, expect_equal, shown

RANKS = 2
PATIENCE = timedelta(seconds=6)  # of a collective that another rank does not enter
WAITS = "one waits for ever"  # what a check got where ranks do not enter the same collectives
WRITING_S = 0.3  # a file takes so long to write: who does not wait for it finds none


def on_two_ranks(function: Callable[[Path], None]) -> None:
    """Raises what rank 0 finds wrong, or else what rank 1 does. `function` gets a folder of its own."""
    root = Path.cwd() / f"ranks-{time.monotonic_ns()}"
    root.mkdir()
    os.environ.update(WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1")
    other = os.fork()
    os.environ["RANK"] = "0" if other else "1"
    store = FileStore(str(root / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=RANKS, timeout=PATIENCE)
    if not other:
        try:
            function(root)
        except Mismatch as found:
            inputs = {name: shown(value) for name, value in found.inputs.items()}
            said = (found.case, shown(found.expected), shown(found.got), inputs, found.remark)
            (root / "mismatch").write_text(json.dumps(said))
        except Exception as error:
            (root / "error").write_text(f"{type(error).__name__}: {error}")
        finally:
            os._exit(0)
    wrong: Exception | None = None
    try:
        function(root)
    except Exception as error:
        wrong = error
    finally:
        dist.destroy_process_group()
    if wrong is None or lost_rank(str(wrong)):  # else the other rank may wait for this one, and has nothing to add
        wait_for(other, root)
    os.kill(other, signal.SIGKILL)  # also where it has ended: it is still to be waited for
    os.waitpid(other, 0)
    if wrong is None or lost_rank(str(wrong)):
        raise_other(root)
    if wrong is not None and lost_rank(str(wrong)):
        remark = "a collective waited for a rank that never came: all ranks gather, and rank 0 alone writes"
        raise Mismatch("two ranks save", "both get through", WAITS, remark=remark)
    if wrong is not None:
        raise wrong


def wait_for(process: int, root: Path) -> None:
    """Until it has ended, or said what is wrong; not for one that waits itself."""
    deadline = time.monotonic() + PATIENCE.total_seconds()
    while time.monotonic() < deadline:
        ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None or (root / "mismatch").exists():
            return
        time.sleep(0.02)


def lost_rank(error: str) -> bool:
    return "imed out" in error or "onnection" in error


def raise_other(root: Path) -> None:
    """What rank 1 found wrong."""
    if (root / "mismatch").exists():
        raise Mismatch(*json.loads((root / "mismatch").read_text()))
    text = (root / "error").read_text() if (root / "error").exists() else ""
    if text and not lost_rank(text):
        raise RuntimeError(f"rank 1: {text}")


def saved_by_rank_zero(trainer: Any, path: Path) -> Any:
    """What the file holds. Rank 0 alone writes it, slowly, and both ranks find it as soon as they go on."""
    calls: list[object] = []
    original = torch.save

    def save(obj: object, f: Any, *arguments: Any, **options: Any) -> None:
        if not isinstance(f, io.BytesIO):  # PyTorch copies objects between ranks through these
            calls.append(f)
            time.sleep(WRITING_S)
        original(obj, f, *arguments, **options)

    with patch.object(torch, "save", save):
        trainer.save_checkpoint(path)
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, (len(calls), path.exists()))
    remark = "every rank has the same weights; two that write one file break it"
    expect_equal("files that ranks 0 and 1 write", [count for count, _ in found], [1, 0], remark=remark)
    remark = "rank 0 writes, in folders that it makes, and the others wait until it has: dist.barrier()"
    expect_equal(
        "the file is there when ranks 0 and 1 go on", [there for _, there in found], [True, True], remark=remark
    )
    state = torch.load(path, weights_only=True)
    kind = sorted(state) if isinstance(state, dict) else type(state).__name__
    expect_equal("what the file holds", kind, ["model", "optimizer", "step"])
    return state

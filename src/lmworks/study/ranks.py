"""The ranks of a small experiment: forked from this process, so that a case takes a second and not ten.

A forked rank has what its parent had (imported modules, data, functions that a test has replaced), and finds in its
environment who it is, as under torchrun, so everything below this room runs as it does in a real job.
"""

from __future__ import annotations

import faulthandler
import io
import os
import socket
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C._distributed_c10d import TCPStore

from ..spec import LMWorksError, TrainingError


class RankFailed(TrainingError):
    """A rank raised, died, or never answered; its traceback is a note of the error."""


def on_ranks(world: int, work: Callable[..., Any], *arguments: Any, launched: bool = True, timeout: float = 120) -> Any:
    """Call `work(rank, *arguments)` on every rank and return what each returned, in order.

    The first failure of any rank is raised here, and the others are ended. With `launched` False the one process is
    what a plain `lmworks train` is: no rank of anything.
    """
    context = mp.get_context("fork")
    processes, answers = [], {}
    # Rank 0 inherits the socket of the store: no port is chosen before it is taken, and no thread of a store runs here,
    # whose locks a fork might copy while they are held.
    with socket.create_server(("127.0.0.1", 0)) as server:
        meet = partial(join_group, server, world) if launched else None
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=enter, args=(theirs, timeout, meet, rank, work, arguments), daemon=True)
            process.start()
            theirs.close()  # else the end of the process would not end the pipe
            processes.append(process)
            answers[ours] = rank
        try:
            return collect(answers, time.monotonic() + timeout, timeout)
        finally:
            for process in processes:
                process.kill()  # those that have answered have nothing left to do
                process.join()


def join_group(server: socket.socket, world: int, rank: int) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({key: str(value) for key, value in place.items()})
    host, port = server.getsockname()
    lead: dict[str, Any] = {"is_master": True, "master_listen_fd": server.detach()} if rank == 0 else {}
    store = TCPStore(host, port, world, **lead)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def collect(answers: dict[Connection, int], deadline: float, timeout: float) -> list[Any]:
    found: dict[int, Any] = {}
    open_ends = dict(answers)
    while open_ends:
        ready = wait(list(open_ends), max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = ", ".join(str(rank) for rank in sorted(open_ends.values()))
            raise RankFailed(f"rank {missing} did not answer within {timeout:g} s: ranks wait for one another")
        for end in ready:
            assert isinstance(end, Connection)
            rank = open_ends.pop(end)
            try:
                ok, content = end.recv()
            except EOFError:
                raise RankFailed(f"rank {rank} died without a word") from None
            if not ok:
                message, details = content
                error = RankFailed(f"rank {rank}: {message}")
                error.add_note(details)
                raise error
            found[rank] = torch.load(io.BytesIO(content), weights_only=False)
    return [found[rank] for rank in sorted(found)]


def enter(
    answer: Connection,
    timeout: float,
    meet: Callable[[int], None] | None,
    rank: int,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    if timeout > 2:  # a rank that never answers leaves behind where each of its threads waits
        faulthandler.dump_traceback_later(timeout - 1, file=2)
    try:
        torch.set_num_threads(1)
        if meet is not None:
            meet(rank)
        value = work(rank, *arguments)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        content = io.BytesIO()
        torch.save(value, content)  # as bytes: a tensor that is sent lives only as long as its sender
        answer.send((True, content.getvalue()))
    except BaseException as error:
        message = str(error) if isinstance(error, LMWorksError) else f"{type(error).__name__}: {error}"
        answer.send((False, (message, traceback.format_exc())))

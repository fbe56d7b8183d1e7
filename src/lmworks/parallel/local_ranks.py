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
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C._distributed_c10d import TCPStore

from ..spec import TrainingError
from .world import told

MEET_S = 30.0  # ranks of one machine meet within a second; on a loaded one within a few


class RankFailed(TrainingError):
    """A rank raised, died, or never answered; its traceback is a note of the error."""


class NeverMet(RankFailed):
    """A rank hung before its work began: a fork copies the locks that other threads hold at that moment."""


def on_ranks(world: int, work: Callable[..., Any], *arguments: Any, launched: bool = True, timeout: float = 300) -> Any:
    """Call `work(rank, *arguments)` on every rank and return what each returned, in order.

    The first failure of any rank is raised here, and the others are ended. With `launched` False the one process is
    what a plain `lmworks train` is: no rank of anything. `timeout` ends ranks that wait for one another for ever, and
    no work that a busy machine only makes slow.
    """
    for _ in range(2):
        with suppress(NeverMet):
            return on_forks(world, work, arguments, launched, timeout)
    return on_forks(world, work, arguments, launched, timeout)


def on_forks(world: int, work: Callable[..., Any], arguments: tuple[Any, ...], launched: bool, timeout: float) -> Any:
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
            collect(answers, MEET_S, NeverMet, "did not meet the others")
            found = collect(answers, timeout, RankFailed, "did not answer")
            return [torch.load(io.BytesIO(content), weights_only=False) for content in found]
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


def collect(answers: dict[Connection, int], timeout: float, late: type[RankFailed], what: str) -> list[Any]:
    """One message of every rank, in order."""
    found: dict[int, Any] = {}
    open_ends = dict(answers)
    deadline = time.monotonic() + timeout
    while open_ends:
        ready = wait(list(open_ends), max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = ", ".join(str(rank) for rank in sorted(open_ends.values()))
            raise late(f"rank {missing} {what} within {timeout:g} s: ranks wait for one another")
        for end in ready:
            assert isinstance(end, Connection)
            rank = open_ends.pop(end)
            try:
                ok, content = end.recv()
            except EOFError:
                raise RankFailed(f"rank {rank} died without a word") from None
            if not ok:
                message, details = content
                own = f"rank {rank}: "
                error = RankFailed(message if message.startswith(own) else own + message)
                error.add_note(details)
                raise error
            found[rank] = content
    return [found[rank] for rank in sorted(found)]


def enter(
    answer: Connection,
    timeout: float,
    meet: Callable[[int], None] | None,
    rank: int,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    try:
        torch.set_num_threads(1)
        if meet is not None:
            say_where_it_hangs(MEET_S)
            meet(rank)
        answer.send((True, None))
        say_where_it_hangs(timeout)
        value = work(rank, *arguments)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        content = io.BytesIO()
        torch.save(value, content)  # as bytes: a tensor that is sent lives only as long as its sender
        answer.send((True, content.getvalue()))
    except BaseException as error:
        answer.send((False, (told(error), traceback.format_exc())))


def say_where_it_hangs(timeout: float) -> None:
    """A rank that is ended because it never answered leaves behind where each of its threads waited."""
    faulthandler.cancel_dump_traceback_later()
    if timeout > 2:
        faulthandler.dump_traceback_later(timeout - 1, file=2)

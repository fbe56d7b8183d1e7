"""Ranks forked from this process, for small experiments: a case takes a second instead of ten.

A forked rank inherits imported modules, data and monkeypatched functions. Its environment has RANK and WORLD_SIZE as
under torchrun, so all other code runs as in a real job.
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
from .world import error_text

stores: list[TCPStore] = []  # of this rank: one ends with its last reference
RENDEZVOUS_TIMEOUT_S = 30.0  # it takes a second on one machine, a few on a loaded one


class RankFailed(TrainingError):
    """A rank raised, died, or timed out; its traceback is a note of the error."""


class RendezvousTimeout(RankFailed):
    """A rank hung before its work began: a fork copies locks that other threads hold at that moment."""


def on_ranks(
    world: int,
    work: Callable[..., Any],
    *arguments: Any,
    launched: bool = True,
    group: bool = True,
    timeout: float = 300,
) -> Any:
    """Call `work(rank, *arguments)` on every rank and return what each returned, in order.

    The first failure of any rank is raised here, and the others are killed. `launched` False: one process without
    RANK and WORLD_SIZE, like a plain `lmworks train`. `group` False: as under torchrun, ranks find the store of an
    agent, and make their process groups themselves. `timeout` is for deadlocks; set it well above the time that the
    work takes on a busy machine.
    """
    for _ in range(2):
        with suppress(RendezvousTimeout):
            return run_forked(world, work, arguments, launched, group, timeout)
    return run_forked(world, work, arguments, launched, group, timeout)


def run_forked(
    world: int, work: Callable[..., Any], arguments: tuple[Any, ...], launched: bool, group: bool, timeout: float
) -> Any:
    context = mp.get_context("fork")
    processes, answers = [], {}
    # Rank 0 inherits the listening socket of the store: the port cannot be taken meanwhile, and no store thread runs
    # in this process, whose locks a fork might copy while they are held.
    with socket.create_server(("127.0.0.1", 0)) as server:
        init_group = partial(init_gloo_group if group else find_agent_store, server, world) if launched else None
        for rank in range(world):
            parent, child = context.Pipe(duplex=False)
            process = context.Process(
                target=rank_main, args=(child, timeout, init_group, rank, work, arguments), daemon=True
            )
            process.start()
            child.close()  # otherwise the pipe would stay open after the process ends
            processes.append(process)
            answers[parent] = rank
        try:
            collect(answers, RENDEZVOUS_TIMEOUT_S, RendezvousTimeout, "did not reach the rendezvous")
            found = collect(answers, timeout, RankFailed, "did not answer")
            return [torch.load(io.BytesIO(content), weights_only=False) for content in found]
        finally:
            for process in processes:
                process.kill()  # those that have answered are done
                process.join()


def init_gloo_group(server: socket.socket, world: int, rank: int) -> None:
    dist.init_process_group("gloo", store=connect(server, world, rank), rank=rank, world_size=world)


def find_agent_store(server: socket.socket, world: int, rank: int) -> None:
    """As under torchrun, whose agent hosts a store; here rank 0 does."""
    stores.append(connect(server, world, rank))
    host, port = stores[0].host, stores[0].port
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def connect(server: socket.socket, world: int, rank: int) -> TCPStore:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({key: str(value) for key, value in place.items()})
    host, port = server.getsockname()
    master: dict[str, Any] = {"is_master": True, "master_listen_fd": server.detach()} if rank == 0 else {}
    return TCPStore(host, port, world, **master)


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
                raise RankFailed(f"rank {rank} died without an error message") from None
            if not ok:
                message, details = content
                own = f"rank {rank}: "
                error = RankFailed(message if message.startswith(own) else own + message)
                error.add_note(details)
                raise error
            found[rank] = content
    return [found[rank] for rank in sorted(found)]


def rank_main(
    answer: Connection,
    timeout: float,
    init_group: Callable[[int], None] | None,
    rank: int,
    work: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    try:
        torch.set_num_threads(1)
        if init_group is not None:
            dump_stacks_after(RENDEZVOUS_TIMEOUT_S)
            init_group(rank)
        answer.send((True, None))
        dump_stacks_after(timeout)
        value = work(rank, *arguments)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        content = io.BytesIO()
        torch.save(value, content)  # as bytes: a shared tensor lives only as long as its sender
        answer.send((True, content.getvalue()))
    except BaseException as error:
        answer.send((False, (error_text(error), traceback.format_exc())))


def dump_stacks_after(timeout: float) -> None:
    """A rank that times out prints the stacks of its threads before it is killed."""
    faulthandler.cancel_dump_traceback_later()
    if timeout > 2:
        faulthandler.dump_traceback_later(timeout - 1, file=2)

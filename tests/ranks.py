"""Several gloo ranks for a test: forked processes, so that a case takes a second or two."""

from __future__ import annotations

import io
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_ranks(world: int, work: Callable[..., Any], *arguments: Any, timeout: float = 120) -> list[Any]:
    """Run `work(rank, *arguments)` on `world` ranks with a process group, and return what each returned.

    The first error of any rank is raised here with its traceback; the other ranks are ended.
    """
    context = mp.get_context("fork")
    results: Any = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [context.Process(target=enter, args=(r, world, port, results, work, arguments)) for r in range(world)]
    for process in processes:
        process.start()
    try:
        outcomes: dict[int, Any] = {}
        for _ in range(world):
            rank, ok, value = results.get(timeout=timeout)
            assert ok, f"rank {rank}:\n{value}"
            outcomes[rank] = torch.load(io.BytesIO(value), weights_only=False)
        return [outcomes[rank] for rank in range(world)]
    finally:
        for process in processes:
            process.join(timeout=5)
            process.kill()


def enter(rank: int, world: int, port: int, results: Any, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        torch.set_num_threads(1)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}  # as torchrun says it
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
        value = work(rank, *arguments)
        dist.barrier()
        dist.destroy_process_group()
        content = io.BytesIO()
        torch.save(value, content)  # as bytes: a tensor in a queue lives only as long as its sender
        results.put((rank, True, content.getvalue()))
    except BaseException:
        results.put((rank, False, traceback.format_exc()))

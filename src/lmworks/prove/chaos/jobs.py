"""Two ways to run a job under test: ranks forked from this process, or the real command with torchrun's agent.

Forked ranks start in a fraction of a second and have no agent: when one dies, the others must detect it and exit within
the timeout of a collective. The real command has an agent that stops and restarts ranks.
"""

from __future__ import annotations

import faulthandler
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C._distributed_c10d import TCPStore

from ...parallel.world import TIMEOUT_MARGIN_S
from .faults import TIMEOUT_S
from .instrumented_rank import run_rank

GRACE_S = 60.0  # beyond a collective's timeout, for a loaded machine; a rank that still runs then is hung
COMMAND_TIMEOUT_S = 400.0  # for a whole job of the command, restarts included


@dataclass(frozen=True)
class JobResult:
    """The result of one attempt of the job, or of one run of the command."""

    codes: tuple[int, ...]  # exit codes of the ranks or of the command; negative: the signal that killed it
    hung: bool  # some ranks had to be killed, though no SIGSTOP was injected
    output: str  # stdout and stderr

    @property
    def succeeded(self) -> bool:
        return not any(self.codes) and not self.hung


# --- forked ranks ---------------------------------------------------------------------------------------


def run_forked(folder: Path, world: int, arguments: list[str], log: Path, distributed: bool) -> JobResult:
    """`lmworks …arguments` on `world` ranks; without `distributed`, a plain process without a process group."""
    context = mp.get_context("fork")
    with socket.create_server(("127.0.0.1", 0)) as server:
        ranks = [
            context.Process(
                target=rank_main, args=(server if distributed else None, world, rank, folder, arguments, log)
            )
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
    hung = not wait_for_all(ranks)
    for process in ranks:
        process.kill()
        process.join()
    codes = tuple(process.exitcode or 0 for process in ranks)
    return JobResult(codes, hung, log.read_text(encoding="utf-8", errors="replace"))


def wait_for_all(ranks: Sequence[BaseProcess]) -> bool:
    """Whether all ranks exited by themselves; ranks stopped by SIGSTOP need not."""
    end = time.monotonic() + TIMEOUT_S + GRACE_S * 2
    failed = False
    while alive := [process for process in ranks if process.is_alive()]:
        if not failed and any(process.exitcode for process in ranks):
            failed, end = True, time.monotonic() + TIMEOUT_S + GRACE_S
        if failed and all(is_stopped(process.pid) for process in alive):
            return True
        if time.monotonic() > end:
            return False
        multiprocessing.connection.wait([process.sentinel for process in alive], 0.2)
    return True


def is_stopped(pid: int | None) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    except OSError:
        return False


def rank_main(
    server: socket.socket | None, world: int, rank: int, folder: Path, arguments: list[str], log: Path
) -> None:
    """Entry point of a forked rank."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    faulthandler.enable(sys.stderr)  # gloo calls abort()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    if server is not None:
        init_process_group(server, world, rank)
    run_rank(folder, arguments)


def init_process_group(server: socket.socket, world: int, rank: int) -> None:
    """Rank 0 inherits the listening socket of the store, so no other process can take its port."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({key: str(value) for key, value in variables.items()})
    host, port = server.getsockname()
    lead: dict[str, Any] = {"is_master": True, "master_listen_fd": server.detach()} if rank == 0 else {}
    if rank:
        server.close()
    store = TCPStore(host, port, world, timeout=timedelta(seconds=GRACE_S), **lead)
    timeout = timedelta(seconds=1.5 * TIMEOUT_S + TIMEOUT_MARGIN_S)  # as in a run: the watchdog fires first
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)


# --- the command ----------------------------------------------------------------------------------------


def run_command(folder: Path, arguments: list[str], log: Path) -> JobResult:
    """`lmworks …arguments` as a user runs it, in its own session."""
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-m", "lmworks.prove.chaos", str(folder), *arguments]
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
        try:
            process.wait(COMMAND_TIMEOUT_S)
            hung = not wait_for_ranks_to_exit(folder)
        except subprocess.TimeoutExpired:
            hung = True
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        finally:
            kill_ranks(folder)
    return JobResult((process.returncode,), hung, log.read_text(encoding="utf-8", errors="replace"))


def wait_for_ranks_to_exit(folder: Path) -> bool:
    """Ranks must exit after their agent, however it ended; they may save first."""
    end = time.monotonic() + GRACE_S
    while live_rank_pids(folder):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def kill_ranks(folder: Path) -> None:
    for pid in live_rank_pids(folder):
        os.kill(pid, signal.SIGKILL)


def live_rank_pids(folder: Path) -> list[int]:
    """Processes of this job's ranks that are still alive."""
    found = []
    for path in folder.glob("rank-*.pid"):
        pid = int(path.read_text() or 0)
        try:
            mine = os.fsencode(folder) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if mine:
            found.append(pid)
    return found

"""Tensor-parallel serving: an executor (rank 0) and worker processes on one machine.

Rank 0 is the engine itself: it schedules, packs batches and samples. It starts a worker process for every other rank
(`python -m lmworks.engine`), each with its shard of the weights and the KV cache of its heads:

    rank 0    pack ── pipe: packed batch ──▶ layers ◀─ all-reduce ─▶ logits (all-gather) ─▶ sampler ─ broadcast tokens
    workers   wait ◀───────────────────────  layers ◀─ all-reduce ─▶ logits                 last_token_ids ◀──────┘

Every rank loads adapters; the request goes through the same pipe, and a worker replies through a second one. So do
copies of KV blocks between each rank's device and host memory (`engine.kv_tiers`). A worker exits when its pipe closes:
rank 0 has closed it or is gone (on Linux the kernel then ends one that is stopped, too). An error on a worker comes
back through the second pipe and is raised on rank 0.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from ...parallel.mesh import Mesh
from ...parallel.world import BACKENDS
from ...spec import EngineSpec, Grid, LMWorksError, SpecError
from ..kv_tiers.device_copies import Done
from ..kv_tiers.rank_copies import CopyBlocks, HostMapping
from .tp_rank import TensorParallelRank

HOST = "127.0.0.1"
COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # of a collective: the first step of a kind may have kernels to compile
WORKER_ERROR_TIMEOUT_S = 5.0  # how long rank 0 waits for a worker's error after a failure
SHUTDOWN_TIMEOUT_S = 5.0  # before a worker is killed
REPLYING = threading.Lock()  # on a worker: copies finish in a thread


class WorkerConfig(NamedTuple):
    """What a worker needs before the first step."""

    rank: int
    parent_pid: int  # process of rank 0
    port: int
    source: str  # as `LLM` was given it
    spec: dict[str, Any]
    step: int | None
    seed: int
    threads: int


class AddAdapter(NamedTuple):
    """Load an adapter; workers reply."""

    name: str
    folder: Path


class RemoveAdapter(NamedTuple):
    """Unload an adapter that another rank could not load."""

    name: str


class Executor(TensorParallelRank):
    """Rank 0, and the worker processes of the other ranks."""

    def __init__(self, source: str | Path, spec: EngineSpec, step: int | None, seed: int, device: torch.device) -> None:
        if dist.is_initialized():
            raise SpecError(f"engine.tp = {spec.tp}: torch.distributed is in use already in this process")
        if spec.batch_invariant and device.type != "cpu":
            raise SpecError(
                f"engine.batch_invariant = true with engine.tp = {spec.tp} is for CPUs: it was never tried on several "
                "GPUs; use engine.tp = 1, or engine.batch_invariant = false"
            )
        if device.type == "cuda" and num_gpus() < spec.tp:
            raise SpecError(f"engine.tp = {spec.tp}, but there are {num_gpus()} CUDA devices")
        server = socket.create_server((HOST, 0))
        port: int = server.getsockname()[1]
        store = TCPStore(HOST, port, is_master=True, master_listen_fd=server.detach(), wait_for_workers=False)
        worker_spec = spec.replace(device=device.type).to_dict()
        threads = max(1, torch.get_num_threads() // spec.tp)
        self.workers: list[subprocess.Popen[bytes]] = []
        self.shutdown = weakref.finalize(self, shutdown_workers, self.workers)
        self.replies: dict[int, WorkerReplies] = {}
        self.copies = CopiesUnderWay(spec.tp)
        self.exits = WorkerExits()
        try:
            for rank in range(1, spec.tp):
                self.replies[rank] = WorkerReplies(rank, start_worker, self.exits, self.copies)
                self.workers.append(self.replies[rank].process)
                with suppress(OSError):  # it has exited: its reply has the error
                    config = WorkerConfig(rank, os.getpid(), port, str(source), worker_spec, step, seed, threads)
                    self.send(rank, config)
            for rank, replies in self.replies.items():
                if (error := replies.answers.get()) is not None:
                    raise LMWorksError(f"rank {rank}: {error}")
            device = rank_device(device, 0)
            super().__init__(init_group(0, spec, device, store), device, spec.batch_invariant)
        except BaseException:
            self.close()
            raise

    def send(self, rank: int, message: Any) -> None:
        pipe = self.workers[rank - 1].stdin
        assert pipe is not None
        pickle.dump(message, pipe, protocol=pickle.HIGHEST_PROTOCOL)
        pipe.flush()

    def send_to_workers(self, message: Any) -> None:
        for rank in range(1, self.tp):
            self.send(rank, message)

    def add_adapter(self, name: str, folder: Path) -> None:
        """On all workers, or on none."""
        try:
            self.send_to_workers(AddAdapter(name, folder.absolute()))
        except OSError as error:
            raise self.root_cause(error) from error
        answers = {rank: replies.answers.get() for rank, replies in self.replies.items()}
        wrong = [f"rank {rank}: {answer}" for rank, answer in answers.items() if answer is not None]
        if wrong:
            for rank, answer in answers.items():
                if answer is None:
                    with suppress(OSError):  # it has exited: the next step reports it
                        self.send(rank, RemoveAdapter(name))
            raise LMWorksError(wrong[0])

    def remove_adapter(self, name: str) -> None:
        """On all workers, which take messages in order."""
        try:
            self.send_to_workers(RemoveAdapter(name))
        except OSError as error:
            raise self.root_cause(error) from error

    def map_host_memory(self, mappings: Sequence[HostMapping]) -> None:
        """`mappings`: of ranks 1, 2, …"""
        for rank, mapping in enumerate(mappings, 1):
            self.send(rank, mapping)
        for rank, replies in self.replies.items():
            if (error := replies.answers.get()) is not None:
                raise LMWorksError(f"rank {rank}: {error}")

    def copy_blocks(self, load: bool, blocks: Sequence[int], slots: Sequence[int], done: Done) -> Done:
        """Have workers copy their shards of these blocks. What it returns is called when rank 0 has copied its own."""
        number = self.copies.begin(done)
        try:
            self.send_to_workers(CopyBlocks(number, load, list(blocks), list(slots)))
        except OSError as error:
            raise self.root_cause(error) from error
        return lambda: self.copies.finished(number)

    def wait_for_copies(self) -> None:
        self.copies.wait(SHUTDOWN_TIMEOUT_S)

    def failed_worker(self) -> str:
        return self.exits.first

    def close(self) -> None:
        self.shutdown()

    def root_cause(self, error: Exception) -> Exception:
        """The error of the first worker that exited, if one did; else `error`."""
        return LMWorksError(self.exits.first) if self.exits.any.wait(WORKER_ERROR_TIMEOUT_S) else error


class WorkerExits:
    """Workers that have exited. The first is the cause; later errors are of the lost connection."""

    def __init__(self) -> None:
        self.first, self.any = "", threading.Event()

    def note(self, rank: int, error: str) -> None:
        self.first = self.first or f"rank {rank}: {error}"
        self.any.set()


class CopiesUnderWay:
    """Copies of KV blocks on all ranks, by number. `done` of each is called when the last rank has finished."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.number = ranks, 0
        self.changed = threading.Condition()  # guards what follows; notified when copies are done
        self.unfinished: dict[int, tuple[int, Done]] = {}  # ranks that have not finished
        self.rank_failed = False

    def begin(self, done: Done) -> int:
        with self.changed:
            self.number += 1
            self.unfinished[self.number] = self.ranks, done
            return self.number

    def finished(self, number: int) -> None:
        """By one rank. Called by any thread."""
        with self.changed:
            ranks, done = self.unfinished[number]
            self.unfinished[number] = ranks - 1, done
        if ranks == 1:
            done()
            with self.changed:
                del self.unfinished[number]
                self.changed.notify_all()

    def fail(self) -> None:
        """A rank has ended: nobody needs to wait."""
        with self.changed:
            self.rank_failed = True
            self.changed.notify_all()

    def wait(self, seconds: float) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.rank_failed or not self.unfinished, seconds)


class WorkerReplies:
    """Starts a worker and reads its replies: ready, adapter loaded or not, blocks copied, and its final error.

    Both in one thread, which lives as long as the worker: the kernel ends a worker with the thread that started it
    (`kill_with_parent`), and who made the engine may be a thread that ends long before.
    """

    def __init__(
        self, rank: int, start: Callable[[], subprocess.Popen[bytes]], exits: WorkerExits, copies: CopiesUnderWay
    ) -> None:
        self.rank, self.exits, self.copies = rank, exits, copies
        self.answers: SimpleQueue[str | None] = SimpleQueue()  # None: success; else the error
        started: Future[subprocess.Popen[bytes]] = Future()
        threading.Thread(target=self.run, args=(start, started), daemon=True).start()
        self.process = started.result()

    def run(self, start: Callable[[], subprocess.Popen[bytes]], started: Future[subprocess.Popen[bytes]]) -> None:
        try:
            process = start()
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(process)
        self.listen(process)
        process.wait()

    def listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            reply = json.loads(line)
            if (number := reply.get("copied")) is not None:
                self.copies.finished(number)
                continue
            if reply["last"]:
                self.end(reply["error"])
                return
            self.answers.put(reply["error"])
        self.end(f"it ended with exit code {process.wait()}")

    def end(self, error: str) -> None:
        self.exits.note(self.rank, error)
        self.copies.fail()
        self.answers.put(error)


def num_gpus() -> int:
    return torch.cuda.device_count()


def rank_device(device: torch.device, rank: int) -> torch.device:
    return torch.device("cuda", rank) if device.type == "cuda" else device


def start_worker() -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C goes to rank 0, which then shuts it down."""
    command = [sys.executable, "-m", "lmworks.engine"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, env=os.environ.copy(), start_new_session=True)


def shutdown_workers(workers: list[subprocess.Popen[bytes]]) -> None:
    """Close the pipes, upon which workers exit; kill those that do not."""
    for process in workers:
        with suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
    for process in workers:
        try:
            process.wait(SHUTDOWN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if dist.is_initialized():
        dist.destroy_process_group()


def join_group(config: WorkerConfig, replies: IO[str]) -> TensorParallelRank:
    """Join the process group, on a worker."""
    torch.set_num_threads(config.threads)
    spec = EngineSpec.from_dict(config.spec)
    store = TCPStore(HOST, config.port, is_master=False)
    reply(replies, None)
    device = rank_device(torch.device(spec.device), config.rank)
    return TensorParallelRank(init_group(config.rank, spec, device, store), device, spec.batch_invariant)


def init_group(rank: int, spec: EngineSpec, device: torch.device, store: Store) -> Mesh:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = BACKENDS[device.type]
    dist.init_process_group(backend, store=store, rank=rank, world_size=spec.tp, timeout=COLLECTIVE_TIMEOUT)
    return Mesh(Grid(tp=spec.tp), device.type)


def reply(replies: IO[str], error: str | None, last: bool = False) -> None:
    """Reply to rank 0: done, or the error. `last`: the worker exits."""
    send_reply(replies, {"error": error, "last": last})


def acknowledge(replies: IO[str], number: int) -> None:
    """Tell rank 0 that blocks were copied."""
    send_reply(replies, {"copied": number})


def send_reply(replies: IO[str], message: dict[str, Any]) -> None:
    with REPLYING:
        replies.write(json.dumps(message) + "\n")
        replies.flush()


def describe_error(error: Exception) -> str:
    return str(error) if isinstance(error, LMWorksError) else f"{type(error).__name__}: {error}"

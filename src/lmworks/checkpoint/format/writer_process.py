"""The process that writes a rank's checkpoints while the rank trains on.

It reads the rank's staging buffer, which both have in memory, and knows nothing of tensors or other ranks. It does one
job after the other, and ends when the rank does: at the latest when the kernel kills it with its parent, which is no
worse for a checkpoint than any other kill.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import time
from contextlib import suppress
from multiprocessing.connection import Connection

from ...record import phase
from ...spec.errors import LMWorksError
from .digest import write_file
from .folders import discard, prune, put_in_place
from .manifest import INDEX, Files, seal, shard_name
from .writer_messages import Abandon, Answer, Copy, Done, Entered, Failed, Job, Seal, Setup, Write

PROCESS_NAME = b"lmworks-writer"
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


def main(channel: int, buffer: int, parent: int) -> None:
    """`channel`: a socket to the rank; `buffer`: the staging memory (-1: none); `parent`: the rank's process."""
    follow(parent)
    with Connection(channel) as rank:
        setup = rank.recv()
        for act in setup.startup:
            act()
        phase.listeners.append(lambda name, step: rank.send(Entered(name)))
        staged = mmap.mmap(buffer, 0) if buffer >= 0 else None
        with suppress(EOFError, ConnectionError):  # the rank is gone, and nobody wants to hear of it
            while (job := rank.recv()) is not None:
                rank.send(answer(job, setup, staged))


def follow(parent: int) -> None:
    """End with the parent, and only with it: Ctrl-C and a preemption are the rank's to handle."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_NAME, PROCESS_NAME)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before we could ask
        os._exit(1)


def answer(job: Job, setup: Setup, staged: mmap.mmap | None) -> Answer:
    began = time.perf_counter()
    try:
        files = do(job, setup, staged)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        return Failed(f"{error.strerror or error}{where}")
    except LMWorksError as error:
        return Failed(str(error))
    except Exception as error:  # whatever it is, the rank must hear of it
        return Failed(f"{type(error).__name__}: {error}")
    return Done(files, time.perf_counter() - began)


def do(job: Job, setup: Setup, staged: mmap.mmap | None) -> Files:
    if isinstance(job, Write):
        return write(job, setup, staged)
    if isinstance(job, Seal):
        commit(job)
    elif isinstance(job, Copy):
        from .remote import upload  # fsspec is slow to import, and most runs copy nothing

        upload(job.folder, job.remote, job.keep)
    elif isinstance(job, Abandon):
        discard(job.work)
    return {}


def write(job: Write, setup: Setup, staged: mmap.mmap | None) -> Files:
    phase.enter("save.write", job.step)
    if staged is None:
        raise RuntimeError("there is no staging buffer to write from")
    job.work.mkdir(parents=True, exist_ok=True)  # by whichever rank comes first
    name, data = shard_name(setup.rank), memoryview(staged)[: setup.size]
    files = {name: {**write_file(job.work / name, [memoryview(setup.header), data], setup.hash), "rank": setup.rank}}
    if setup.index:
        files[INDEX] = {**write_file(job.work / INDEX, [memoryview(setup.index)], setup.hash), "rank": setup.rank}
    return files


def commit(job: Seal) -> None:
    try:
        phase.enter("save.seal", job.step)
        seal(job.work, job.step, job.meta, job.files, job.torch, job.hash)
        phase.enter("save.commit", job.step)
        put_in_place(job.work, job.final)
    finally:
        discard(job.work)
    phase.enter("save.prune", job.step)
    prune(job.final.parent, job.keep, saved=job.final)

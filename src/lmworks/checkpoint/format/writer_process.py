"""The process that writes a rank's checkpoints while the rank trains.

It reads the rank's staging buffer from shared memory, without tensors or other ranks. It runs one job at a time, and
ends with the rank: at the latest when the kernel kills it with its parent, which is as safe as any other kill.
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
from .folders import discard, prune, rename_and_commit
from .manifest import Files, os_error_text, write_files, write_manifest
from .writer_client import (
    AbandonJob,
    Answer,
    CopyJob,
    Job,
    JobDone,
    JobFailed,
    PhaseEntered,
    SealJob,
    WriteJob,
    WriterSetup,
)

PROCESS_NAME = b"lmworks-writer"
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


def main(channel: int, buffer: int, parent: int) -> None:
    """`channel`: a socket to the rank; `buffer`: the staging memory (-1: none); `parent`: the rank's process."""
    die_with_parent(parent)
    with Connection(channel) as rank:
        setup = rank.recv()
        for act in setup.startup:
            act()
        phase.listeners.append(lambda name, step: rank.send(PhaseEntered(name)))
        staged = mmap.mmap(buffer, 0) if buffer >= 0 else None
        with suppress(EOFError, ConnectionError):  # the rank has ended
            while (job := rank.recv()) is not None:
                rank.send(run_job(job, setup, staged))


def die_with_parent(parent: int) -> None:
    """End with the parent, and only with it: the rank handles Ctrl-C and preemption."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_NAME, PROCESS_NAME)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before prctl
        os._exit(1)


def run_job(job: Job, setup: WriterSetup, staged: mmap.mmap | None) -> Answer:
    began = time.perf_counter()
    try:
        files = execute(job, setup, staged)
    except OSError as error:
        return JobFailed(os_error_text(error))
    except LMWorksError as error:
        return JobFailed(str(error))
    except Exception as error:  # reported to the rank
        return JobFailed(f"{type(error).__name__}: {error}")
    return JobDone(files, time.perf_counter() - began)


def execute(job: Job, setup: WriterSetup, staged: mmap.mmap | None) -> Files:
    if isinstance(job, WriteJob):
        return write(job, setup, staged)
    if isinstance(job, SealJob):
        commit(job)
    elif isinstance(job, CopyJob):
        from .remote import upload  # fsspec is slow to import, and rarely needed

        upload(job.folder, job.remote, job.keep)
    elif isinstance(job, AbandonJob):
        discard(job.work)
    return {}


def write(job: WriteJob, setup: WriterSetup, staged: mmap.mmap | None) -> Files:
    phase.enter("save.write", job.step)
    if staged is None:
        raise RuntimeError("there is no staging buffer to write from")
    job.work.mkdir(parents=True, exist_ok=True)  # by the first rank
    contents = [memoryview(setup.header), memoryview(staged)[: setup.size]]
    return write_files(job.work, setup.rank, contents, setup.index, setup.hash)


def commit(job: SealJob) -> None:
    try:
        phase.enter("save.seal", job.step)
        write_manifest(job.work, job.step, job.meta, job.files, job.torch, job.hash)
        phase.enter("save.commit", job.step)
        rename_and_commit(job.work, job.final)
    finally:
        discard(job.work)
    phase.enter("save.prune", job.step)
    prune(job.final.parent, job.keep, saved=job.final)

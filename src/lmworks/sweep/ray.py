"""Workers as actors of a Ray cluster, which finds machines with free cores and GPUs for them.

`ray.init` connects to the cluster that RAY_ADDRESS names, or else starts a local one. Every machine sees the folder of
the sweep and the data under the same path.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

from ..record.parent_death import until_this_process_ends
from ..spec import SpecError
from .folder import Sweep
from .pool import Process, Workers

GONE = -int(signal.SIGKILL)  # the exit code of a worker whose machine or actor is no more


def connect(cores: int, gpus: int) -> Any:
    """Ray, connected. A trial that no machine has room for is refused: its actor would wait for ever."""
    try:
        import ray
    except ImportError:
        raise SpecError("--ray needs Ray: pip install 'lmworks[ray]'") from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    if not free_slots(cores, gpus):
        need = f"{cores} cores" + (f" and {gpus} GPUs" if gpus else "")
        raise SpecError(
            f"--ray: a trial needs {need}, and no machine of the Ray cluster has them"
            + ("; cluster.device=cpu trains on CPUs" if gpus else "")
        )
    return ray


def free_slots(cores: int, gpus: int) -> int:
    """How many trials fit into the cluster at once."""
    import ray

    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return sum(
        int(min(have.get("CPU", 0) // cores, have.get("GPU", 0) // gpus if gpus else float("inf"))) for have in machines
    )


class RayWorkers(Workers):
    """As `Workers`, each in an actor with `cores` CPUs and `gpus` GPUs."""

    def __init__(self, sweep: Sweep, count: int, cores: int, gpus: int) -> None:
        super().__init__(sweep, count, ["--allocated"])
        self.ray = connect(cores, gpus)
        actor = self.ray.remote(num_cpus=cores, num_gpus=gpus, max_concurrency=2)(WorkerActor)
        self.make = lambda: actor.remote()

    def start(self) -> Process:
        actor = self.make()
        path = self.sweep.path.absolute()
        words = [sys.executable, "-m", "lmworks", "sweep", "worker", str(path), *self.options]
        log = str(path / "workers.log")
        return RayProcess(self.ray, actor, actor.run.remote(words, os.getcwd(), log, self.sweep.threads))


class WorkerActor:
    """In a process of Ray: runs one worker; `stop` is called beside `run`."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, words: list[str], folder: str, log: str, threads: int) -> int:
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), **until_this_process_ends()}
        with open(log, "ab") as file:
            self.process = subprocess.Popen(words, env=env, cwd=folder, stdout=file, stderr=file)
        return self.process.wait()

    def stop(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)


class RayProcess:
    """A worker in an actor, as a `Popen`."""

    def __init__(self, ray: Any, actor: Any, result: Any) -> None:
        self.ray, self.actor, self.result = ray, actor, result
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.collect(timeout=0)

    def wait(self) -> int:
        while (code := self.collect(timeout=1)) is None:
            pass
        return code

    def collect(self, timeout: float) -> int | None:
        if self.code is None and self.ray.wait([self.result], timeout=timeout)[0]:
            try:
                self.code = self.ray.get(self.result)
            except self.ray.exceptions.RayError:
                self.code = GONE
            self.ray.kill(self.actor)  # its cores are free for the next one
        return self.code

    def send_signal(self, number: int) -> None:
        self.actor.stop.remote(number)

    def kill(self) -> None:
        self.ray.kill(self.actor)

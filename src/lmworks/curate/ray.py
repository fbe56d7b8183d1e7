"""Workers as tasks of a Ray cluster, which finds machines with free cores for them.

`ray.init` connects to the cluster that RAY_ADDRESS names, or else starts a local one. Every machine sees the sources
and the folder of the run under the same path.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from ..data.progress import Progress
from ..spec.errors import DataError, SpecError
from .curate import join, show
from .pipeline import Pipeline
from .run import Run

POLL_S = 0.5


def in_ray(pipeline: Pipeline, run: Run, count: int, progress: Progress) -> None:
    """`count` workers; one whose machine is lost is started again, and the others do its work meanwhile."""
    ray = connect()
    start = ray.remote(num_cpus=1, max_retries=-1)(work_in)
    waiting = [start.remote(pipeline, os.getcwd(), [path for path in sys.path if path]) for _ in range(count)]
    failed: list[DataError] = []
    while waiting:
        ended, waiting = ray.wait(waiting, num_returns=1, timeout=POLL_S)
        show(run, progress)
        for result in ended:
            try:
                ray.get(result)
            except ray.exceptions.RayTaskError as error:  # the others see it in the folder of the run, and end too
                known = isinstance(error.cause, DataError)
                failed.append(error.cause if known else DataError(str(error).splitlines()[-1]))
    if failed:
        raise failed[0]


def connect() -> Any:
    try:
        import ray
    except ImportError:
        raise SpecError("--ray needs Ray: pip install 'lmworks[ray]'") from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    return ray


def work_in(pipeline: Pipeline, folder: str, path: list[str]) -> None:
    """In a process of Ray, which starts in a folder of its own."""
    os.chdir(folder)
    sys.path[:] = [*sys.path, *(one for one in path if one not in sys.path)]
    join(pipeline)

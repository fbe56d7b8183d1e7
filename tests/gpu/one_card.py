"""Ranks of an engine that share one GPU. NCCL wants a card for each, so these meet over gloo, through the host.

As a program: a worker, as `python -m lmworks.engine` is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lmworks.engine.tensor_parallel import executor, tp_rank
from lmworks.parallel.collectives import all_gather


def over_host(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """gloo cannot gather into one tensor of a GPU."""
    return all_gather(x.cpu(), dim, group).to(x.device)


def start_worker() -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, start_new_session=True)


def arrange(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    replace(executor, "BACKENDS", {"cuda": "cpu:gloo,cuda:gloo"})
    replace(executor, "num_gpus", lambda: 2)
    replace(executor, "rank_device", lambda _device, _rank: torch.device("cuda", 0))
    replace(executor, "start_worker", start_worker)
    replace(tp_rank, "all_gather", over_host)


if __name__ == "__main__":
    from lmworks.engine import __main__ as program

    arrange()
    os._exit(program.main())

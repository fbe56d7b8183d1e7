"""Work for worker processes, in a module that they import in no time."""

from __future__ import annotations

import os
import time


def nap(_: object, seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def lost(_: object) -> None:
    os._exit(3)

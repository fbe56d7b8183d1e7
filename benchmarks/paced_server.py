"""`lmworks serve` whose steps take at least a given time: an accelerator slower than this machine's processor.

python benchmarks/paced_server.py MODEL --port 8001 …    # the arguments of `lmworks serve`

Scheduler, KV cache, API, sockets and processes are those of the product, and the model is computed; after that the
engine sleeps until the step has lasted `seconds(step)`. So steps do not depend on who else is busy on this machine, as
those of a GPU would not. Nothing but the time of a step is emulated.
"""

from __future__ import annotations

import time
from typing import Any

import lmworks.cli.serve as command
from lmworks.cli.main import main
from lmworks.engine.core.scheduler import Step
from lmworks.serve.channel import LoadedEngine

load_engine_process = command.load_engine_process


def seconds(step: Step) -> float:
    """40 ms, 1 ms a decoding sequence, 5 µs a cached token that it reads, 0.3 ms a token of a prompt."""
    decoding = [chunk for chunk in step.chunks if chunk.count == 1]
    keys = sum(chunk.start + 1 for chunk in decoding)
    return 0.040 + 1e-3 * len(decoding) + 5e-6 * keys + 3e-4 * (step.tokens - len(decoding))


def load_paced(*words: Any) -> LoadedEngine:
    """The factory of the engine process, which imports this file by its name."""
    loaded = load_engine_process(*words)
    runner = loaded.engine.runner
    launch = runner.launch

    def paced(step: Step) -> Any:
        end = time.monotonic() + seconds(step)
        output = launch(step)
        time.sleep(max(0.0, end - time.monotonic()))
        return output

    runner.launch = paced
    return loaded


if __name__ == "__main__":
    import paced_server  # by the name that the engine process knows, not __main__

    command.load_engine_process = paced_server.load_paced
    main()

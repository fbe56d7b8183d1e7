"""`python -m lmworks.engine`: a tensor-parallel worker process, started by the executor."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
import traceback

from ..record.parent_death import kill_with_parent


def exit_with_parent(parent: int) -> None:
    """Exit when rank 0 is gone, as a collective with it would wait until its timeout. `kill_with_parent` is for Linux
    alone, and misses a rank 0 that was killed before."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> int:
    from ..loading import load_shard, make_runner
    from ..spec import EngineSpec, LMWorksError
    from .tensor_parallel.executor import WorkerConfig, describe_error, join_group, reply
    from .tensor_parallel.tp_worker import run_worker

    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with replies
    try:
        config: WorkerConfig = pickle.load(sys.stdin.buffer)
    except EOFError:
        return 0  # rank 0 has exited
    threading.Thread(target=exit_with_parent, args=(config.parent_pid,), daemon=True).start()
    try:
        tp_rank = join_group(config, replies)
        spec = EngineSpec.from_dict(config.spec)
        loaded = load_shard(config.source, spec, config.step, config.seed, tp_rank)
        run_worker(make_runner(loaded, spec, None, tp_rank), sys.stdin.buffer, replies)
    except Exception as error:
        if os.getppid() != config.parent_pid:
            return 1  # rank 0 is gone: nobody to report to
        if not isinstance(error, LMWorksError):
            traceback.print_exc()
        reply(replies, describe_error(error), last=True)
        return 1
    return 0


if __name__ == "__main__":
    kill_with_parent()  # one that is stopped does not see its pipe close; before the imports, which take seconds
    code = main()
    sys.stderr.flush()
    os._exit(code)  # no teardown of groups with ranks that may be gone

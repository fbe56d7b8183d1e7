"""How long training stands still for an asynchronous save of a state on a GPU, beside a save that is waited for.

The state of a small model in training (weights, two moments, fp32) as one rank holds it. Each round: one synchronous
save, one asynchronous one, whose writer is waited for before the next. The copy's own speed is given beside the bus.

    python benchmarks/checkpoint_gpu.py --save
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import write_result

from lmworks import checkpoint
from lmworks.checkpoint.async_save import AsyncSaver
from lmworks.checkpoint.format.folders import RetentionPolicy

LIMIT = 0.05
LAYERS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to save to")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/checkpoint_gpu.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this measures a GPU, and there is none")
    with tempfile.TemporaryDirectory(prefix=".checkpoint-bench-", dir=options.folder) as folder:
        result = measure(Path(folder), options.gib, options.rounds)
    print(json.dumps(result, indent=1))
    print(f"stall {result['ratio']:.4f} of a synchronous save (limit {LIMIT})")
    if options.save:
        print(write_result("checkpoint_gpu", {"gib": options.gib, "limit": LIMIT, **result}))


def measure(folder: Path, gib: float, rounds: int) -> dict[str, Any]:
    device = torch.device("cuda")
    size = int(gib * 2**30 / 3 / LAYERS / 4)
    names = [f"{kind}{layer}" for layer in range(LAYERS) for kind in ("weight", "exp_avg", "exp_avg_sq")]
    state = {"model": {name: torch.randn(size, device=device) for name in names}}
    saves = AsyncSaver(folder / "async", RetentionPolicy(newest=1), state, device)
    times = []
    for step in range(1, rounds + 2):
        shutil.rmtree(folder / "sync", ignore_errors=True)
        torch.cuda.synchronize()
        began = time.perf_counter()
        checkpoint.save(folder / "sync", step, state, {})
        waited = time.perf_counter()
        saves.save(step, state, {})
        times.append((waited - began, time.perf_counter() - waited))
        ended = saves.wait()
        if ended is None or ended.error:
            raise SystemExit(f"the save failed: {ended}")
    saves.close()
    times = times[1:]  # the first warms both
    sync_s, stall_s = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "ratio": statistics.median(stall / sync for sync, stall in times),
        "sync_s": sync_s,
        "stall_s": stall_s,
        "copy_gib_s": gib / stall_s,
        "sync_gib_s": gib / sync_s,
    }


if __name__ == "__main__":
    main()

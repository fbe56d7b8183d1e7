"""Tokens per second of the loader with and without fill-in-the-middle: one process, the standard library.

    python benchmarks/fim_loader.py [--seq 2048] [--rows 64] [--rounds 5]

Rounds alternate between the kinds; the median of each is given.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from common import write_result

from lmworks.data import Batches
from lmworks.spec import DataSpec

KINDS: dict[str, dict[str, Any]] = {
    "none": {},
    "token": {"rate": 0.5, "split": "token"},
    "character": {"rate": 0.5},
    "line": {"rate": 0.5, "split": "line"},
    "syntax": {"rate": 0.5, "split": "syntax"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("seq", 2048), ("rows", 64), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    loaders = {
        kind: Batches(
            DataSpec(
                path="stdlib:bpe:4096+code",
                seq=given.seq,
                micro_batch=given.rows,
                document_mask=True,
                verify=False,
                fim=fim,
            ),
            seed=0,
        )
        for kind, fim in KINDS.items()
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for cursor in range(given.rounds + 1):
        for kind, loader in loaders.items():
            began = time.perf_counter()
            loader.at(cursor)
            if cursor:  # the first round reads the files
                seconds[kind].append(time.perf_counter() - began)
    tokens = given.rows * given.seq
    rates = {
        kind: [round(tokens / of(times)) for of in (statistics.median, max, min)] for kind, times in seconds.items()
    }
    print(*rates.items(), sep="\n")
    write_result("fim_loader", {**vars(given), "tokens_per_s": rates, "figures": ["median", "slowest", "fastest"]})


if __name__ == "__main__":
    main()

"""Fit what PyTorch's allocator reserves beyond what tensors need, and write src/lmworks/plan/memory/memory.toml.

    python validation/fit_memory.py --data DIR

What tensors need (`allocated`) has no fitted constant: it follows from what each code base holds and keeps. Reserved
bytes are that, times 1 + slack. One slack for all runs, the one with the least mean error when every source weighs the
same however many rows it has; runs that differ in micro-batches alone are one run. The spread is that of the errors.
Then once more for each source without it: a blind prediction. What a GPU had in use in sources that nothing is fitted
to gives the spread for code bases without a run in the fit.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lmworks.plan.memory.reserve import CONSTANTS
from lmworks.plan.memory.sheet import budget
from lmworks_validation.sources import SOURCES, Measured

Array = NDArray[np.float64]
CONTEXT = 1.5e9  # bytes: a CUDA context with its kernels is about 0.5 GB, NCCL's channels about 1 GB


def distinct(rows: list[Measured]) -> list[Measured]:
    """Without repetitions: memory is the same for any number of micro-batches that fills the pipeline."""
    seen: dict[tuple[float | None, str], Measured] = {}
    for row in rows:
        seen.setdefault((row.reserved, str(row.case.replace(accumulation=0))), row)
    return list(seen.values())


def figures(rows: list[Measured]) -> tuple[Array, Array, Array]:
    """Of every run with a reserved figure: allocated and left over as predicted, reserved as measured."""
    known = [row for row in rows if row.reserved is not None]
    found = [budget(row.case) for row in known]
    columns = ([one.allocated for one in found], [one.left for one in found], [row.reserved for row in known])
    return tuple(np.array(column, dtype=float) for column in columns)  # type: ignore[return-value]


def errors(slack: float, source: tuple[Array, Array, Array]) -> Array:
    allocated, left, measured = source
    return np.asarray(np.log(((1 + slack) * allocated + left) / measured))


def fit(sources: list[tuple[Array, Array, Array]]) -> float:
    grid = np.arange(0.0, 0.2001, 0.001)
    return float(min(grid, key=lambda slack: sum(np.abs(errors(slack, one)).mean() for one in sources)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the bulk tables")
    data = parser.parse_args().data
    sources, software, lines, blind = {}, {"lmworks", "lmworks-compile"}, [], []
    for name in ("simumax", "torchtitan"):
        rows = SOURCES[name].rows(data)
        assert rows, f"{SOURCES[name].file} is not in {data}"
        sources[name] = figures(distinct(rows))
        software |= {row.case.software.name for row in rows}
        known = [(float(budget(row.case).allocated), row.allocated) for row in rows if row.allocated]
        if known:
            error = 100 * np.mean([abs(said / real - 1) for said, real in known])
            lines.append(f"# {name}: allocated {error:.2f} % off in the mean of {len(known)} rows, nothing fitted")
    slack = fit(list(sources.values()))
    spread = float(np.sqrt(np.mean([np.mean(errors(slack, one) ** 2) for one in sources.values()])))
    others = [row for source in SOURCES.values() if not source.fitted for row in source.rows(data) or () if row.in_use]
    off = [
        np.log(((1 + slack) * found.allocated + found.left + CONTEXT) / row.in_use)
        for row in others
        for found in [budget(row.case)]
    ]
    wide = float(np.sqrt(np.mean(np.square(off))))
    for name, one in sources.items():
        without = fit([other for key, other in sources.items() if key != name])
        seen, unseen = (100 * np.abs(np.expm1(errors(value, one))).mean() for value in (slack, without))
        lines.append(
            f"# {name}: reserved {seen:.1f} % off in the mean of {len(one[0])} distinct runs; "
            f"{unseen:.1f} % with the slack of the others"
        )
        blind += ["", f"[reserve.without.{name}]  # fitted to the others", f"slack = {without:.3f}"]
    text = [
        "# What a GPU needs beyond its tensors. Written by validation/fit_memory.py from SimuMax's runs of Megatron on",
        "# B200 (MooreThreads/SimuMax, docs/b200) and torchtitan's published figures.",
        *lines,
        "",
        "[reserve]",
        f"slack = {slack:.3f}  # fitted: reserved / allocated − 1",
        f"spread = {spread:.3f}  # fitted: of log(measured / predicted)",
        f"unseen = {wide:.3f}  # the same of {len(off)} runs of code bases that nothing is fitted to",
        f"seen = {json.dumps(sorted(software))}  # code bases of the fit, and our own, whose bytes are exact",
        f"context_bytes = {CONTEXT:.2g}  # modelled: context, kernels, NCCL: the allocator does not count them",
        *blind,
    ]
    CONSTANTS.write_text("\n".join(text) + "\n", encoding="utf-8")
    print("\n".join(text))


if __name__ == "__main__":
    main()

"""Fit the constants of a step's time to what others measured, and write src/lmworks/plan/step/fitted.toml.

    python validation/fit_time.py --data DIR

Least squares on log(predicted / measured), with a prior for every constant, every source weighing the same however
many rows it has. Rows that are suspect, or whose layout is inferred, are left out; so are whole runs of our own trainer
with bf16 weights, whose products have a factor of their own from profiles (`DENSE` in plan/software.py): fitted to them
as well, a dozen figures of other sources get worse, by up to 0.1 %. Then the same once more for each source, without
it: those constants make a blind prediction of that source. Blind in its constants, that is: formulas were chosen with
all sources in view.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmworks.plan.case import Case
from lmworks.plan.software import SOFTWARE
from lmworks.plan.step.constants import FITTED, Constants, Seen, chip_family
from lmworks.plan.step.price import price_uncalibrated
from lmworks.plan.step.uncalibrated import Uncalibrated
from lmworks.plan.tables.rows import Job
from lmworks.spec import ModelSpec, catalogue
from lmworks_validation.sources import SOURCES, Measured

Array = NDArray[np.float64]
NUMBERS = {entry.name for entry in fields(Case) if "Number" in str(entry.type)}
EVIDENCE = 30.0  # rows that a source counts for
NOISE = 0.06  # of log(predicted / measured) in a good fit
OUTLIER = 0.15  # of log(predicted / measured): beyond it a row pulls no harder


@dataclass(frozen=True)
class Prior:
    """A constant before any run was seen: its logarithm is normal around log(value), or around that of its kin.

    What a source alone would tell of a GPU or a code base falls back to what the others say of its kin, and that of
    something nobody has seen to the root of them all ("*"). A blind figure rests on these, so none of them may be
    moved after looking at what a fit made of it.
    """

    name: str  # of a field of Constants, with a key after a dot where that is a table
    sigma: float
    value: float = 0.0
    kin: str = ""


def tree(table: str, root: float, sure: float, sigma: float, members: dict[str, str]) -> list[Prior]:
    """The constants of a table: each member differs by about `sigma` from the one that it is told from."""
    first = Prior(f"{table}.*", sure, root)
    return [first, *(Prior(f"{table}.{name}", sigma, kin=f"{table}.{kin}") for name, kin in members.items())]


PRIORS = (
    # From the GPU of the generation before, or of the same.
    *tree("gemm", 1.0, 0.1, 0.1, {"A100": "*", "H100": "*", "H200": "H100", "B200": "H100"}),
    *tree("attention", 1.1, 0.15, 0.15, {
        "A100": "*", "H100": "*", "H100-fa1": "*", "H100-fa2": "*", "H200": "H100", "B200": "H100",
    }),
    *tree("software", 1.0, 0.05, 0.05, {
        "llm-foundry": "*", "torchtitan": "*", "torchtitan-compile": "torchtitan", "torchtitan-2025": "torchtitan",
        "megatron": "*", "megatron-2021": "megatron", "megatron-deepspeed": "megatron",
        "lmworks": "*", "lmworks-compile": "lmworks",
    }),
    Prior("launch_s.compiled", 0.5, 10e-6),
    Prior("launch_s.eager", 0.5, 20e-6),
    Prior("launch_s.megatron-deepspeed", 0.5, kin="launch_s.eager"),
    # Our list of an eager block has every launch in it, as a compiled block's has.
    Prior("launch_s.lmworks", 0.5, kin="launch_s.compiled"),
    Prior("launch_s.lmworks-compile", 0.5, kin="launch_s.compiled"),
    Prior("single_gpu", 0.05, 0.95),
    Prior("power", 0.4, 0.5),
    Prior("memory", 0.2, 1.15),
    Prior("casts", 0.4, 1.0),
    Prior("host_skew", 0.5, 0.1),
    *tree("step_s", 5e-3, 0.7, 0.7, {"lmworks": "*"}),
    Prior("contention", 0.7, 0.15),
    Prior("async_tp_contention", 0.4, 0.5),
    Prior("links", 0.2, 1.1),
    Prior("network", 0.3, kin="links"),
    Prior("stragglers", 0.7, 0.005),
)  # fmt: skip


def beliefs() -> tuple[Array, Array]:
    """What a fit is held to before it sees a run, as normal equations: a matrix, and what it gives at the priors."""
    place = {prior.name: i for i, prior in enumerate(PRIORS)}
    rows, centre = np.eye(len(PRIORS)), np.zeros(len(PRIORS))
    for i, prior in enumerate(PRIORS):
        if prior.kin:
            rows[i, place[prior.kin]] = -1.0
        else:
            centre[i] = np.log(prior.value)
    weight = np.array([prior.sigma**-2 for prior in PRIORS])
    return rows.T @ (weight[:, None] * rows), rows.T @ (weight * centre)


@dataclass(frozen=True)
class Table:
    """Rows of one source, those with the same model and words together, so that they are priced in one go."""

    rows: list[Measured]
    groups: list[tuple[NDArray[np.int64], Uncalibrated]]

    @classmethod
    def of(cls, rows: Iterable[Measured]) -> Table:
        rows = [row for row in rows if row.step_s and not row.suspect and not row.inferred]
        rows = [row for row in rows if row.case.software.gemm_slowdown == 1.0]
        places: dict[str, list[int]] = {}
        for place, row in enumerate(rows):
            words = {name: value for name, value in vars(row.case).items() if name not in NUMBERS}
            places.setdefault(repr(words), []).append(place)
        return cls(
            rows,
            [(np.array(found), Uncalibrated.of(stacked([rows[i].case for i in found]))) for found in places.values()],
        )

    def seconds(self, given: Constants) -> Array:
        result = np.zeros(len(self.rows))
        for places, bare in self.groups:
            result[places] = price_uncalibrated(bare, given).seconds
        return result

    @property
    def measured(self) -> Array:
        return np.array([row.step_s for row in self.rows])


def stacked(cases: list[Case]) -> Case:
    arrays = {name: np.array([getattr(case, name) for case in cases]) for name in NUMBERS}
    return replace(cases[0], **arrays)


def anchors() -> list[Measured]:
    """Peers on one H200 (torch 2.11): tokens/s of a step, quoted and not run again here."""
    gpu = catalogue()["H200-SXM-141GB"]
    gpt2 = ModelSpec.from_preset("gpt2-small", vocab=50304, bias=False)
    small = ModelSpec.from_preset("llama3-1b", context=8192)
    untied = ModelSpec.from_preset("llama3-1b", tie_embeddings=False)
    llama = ModelSpec.from_preset("llama3-8b")
    runs = [
        *(
            ("nanoGPT", gpt2, "nanogpt", 1024, batch, {}, rate)
            for batch, rate in ((64, 529683), (32, 514641), (16, 483793))
        ),
        ("HF Llama", small, "huggingface", 4096, 4, {}, 49236),
        ("torchtitan 1.5B", untied, "torchtitan-2025", 4096, 4, {}, 60446),
        ("torchtitan 1.5B", untied, "torchtitan-2025", 4096, 8, {"recompute": "selective"}, 59486),
        ("torchtitan 8B", llama, "torchtitan-2025", 8192, 2, {"recompute": "selective"}, 10570),
        ("torchtitan 8B", llama, "torchtitan-2025", 8192, 2, {"recompute": "selective", "dtype": "fp8"}, 14255),
    ]
    found = []
    for name, model, software, seq, batch, words, rate in runs:
        ran = replace(SOFTWARE[software], flash="")  # cuDNN's attention: torchtitan 0.2.2 of 2026, PyTorch's default
        case = Case(model, gpu, ran, seq, batch, **words)
        label = f"{name} {batch}×{seq} {words}"
        found.append(Measured("anchors", Job(case, label), "", batch * seq / rate))
    return found


def unpack(logs: Array) -> Constants:
    tables: dict[str, Any] = {}
    for prior, log in zip(PRIORS, logs, strict=True):
        name, dot, key = prior.name.partition(".")
        if dot:
            tables.setdefault(name, {})[key] = float(np.exp(log))
        else:
            tables[name] = float(np.exp(log))
    return Constants(**tables)


def fit(tables: dict[str, Table], start: Array | None = None, rounds: int = 6) -> Array:
    """Gauss-Newton; `start` is where another fit ended."""
    held, towards = beliefs()
    logs = np.linalg.solve(held, towards) if start is None else start.copy()
    weights = np.concatenate([np.full(len(t.rows), EVIDENCE / len(t.rows)) for t in tables.values()])
    targets = np.log(np.concatenate([table.measured for table in tables.values()]))

    def residuals(at: Array) -> Array:
        given = unpack(at)
        return np.log(np.concatenate([table.seconds(given) for table in tables.values()])) - targets

    for _ in range(rounds):
        here = residuals(logs)
        slopes = np.stack([(residuals(logs + step) - here) / 0.01 for step in 0.01 * np.eye(len(logs))], axis=1)
        pull = weights / NOISE**2 / np.maximum(1, np.abs(here) / OUTLIER)
        normal = slopes.T @ (pull[:, None] * slopes) + held
        gradient = slopes.T @ (pull * here) + held @ logs - towards
        move = np.clip(np.linalg.solve(normal, -gradient), -0.5, 0.5)
        logs = logs + move
        if np.abs(move).max() < 2e-3:
            break
    return logs


def errors(table: Table, given: Constants) -> Array:
    return table.seconds(given) / table.measured - 1


def summary(error: Array) -> dict[str, float]:
    """In percent."""
    figures = {"mape": np.abs(error).mean(), "p90": np.quantile(np.abs(error), 0.9), "bias": error.mean()}
    return {name: round(100 * float(value), 1) for name, value in figures.items()}


def section(name: str, given: Constants) -> list[str]:
    """A table of TOML; only what was fitted."""
    lines = [f"[{name}]"]
    for entry in fields(Constants):
        if entry.name == "seen":
            continue
        value = getattr(given, entry.name)
        lines.append(f"{entry.name} = {inline(value) if isinstance(value, dict) else format(value, '.4g')}")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with the bulk tables", required=True)
    parser.add_argument("--show", nargs="*", default=[], help="sources whose rows are printed; nothing is written")
    options = parser.parse_args()
    tables = {
        name: Table.of(rows)
        for name, source in SOURCES.items()
        if source.fitted and (rows := source.rows(options.data))
    }
    tables["anchors"] = Table.of(anchors())
    logs = fit(tables)
    given = unpack(logs)
    found_logs = {prior.name: log for prior, log in zip(PRIORS, logs, strict=True)}
    for prior, log in zip(PRIORS, logs, strict=True):
        centre = found_logs[prior.kin] if prior.kin else np.log(prior.value)
        print(f"{prior.name:30s} {np.exp(centre):9.4g} → {np.exp(log):9.4g}  {(log - centre) / prior.sigma:+.1f}σ")
    found = {name: errors(table, given) for name, table in tables.items()}
    for name, error in found.items():
        print(f"{name:12s} {len(error):5d} {summary(error)}", flush=True)
    for name in options.show:
        for row, error in zip(tables[name].rows, found[name], strict=True):
            print(f"{error:+.3f} {row.step_s:9.3f} {row.group:20s} {row.label}")
    if not options.show:
        write(tables, logs)


def write(tables: dict[str, Table], logs: Array) -> None:
    """Fit once more without each source, and keep all of it with the errors."""
    everything = unpack(logs)
    lines = HEADER.splitlines()
    sections, off = [], {True: [], False: []}
    seen_by = {name: seen_in(table) for name, table in tables.items()}
    lines.append(
        "[errors]  # percent: `fitted` to all sources, and `blind`, with constants that have never seen this one"
    )
    for name, table in tables.items():
        blind = unpack(fit({other: t for other, t in tables.items() if other != name}, logs, rounds=3))
        seen, unseen = summary(errors(table, everything)), summary(errors(table, blind))
        print(f"{name:12s} fitted {seen} blind {unseen}", flush=True)
        both = ", ".join(f"{kind} = {inline(found)}" for kind, found in (("fitted", seen), ("blind", unseen)))
        lines.append(f"{name} = {{ rows = {len(table.rows)}, {both} }}")
        others = functools.reduce(Seen.union, (found for other, found in seen_by.items() if other != name))
        known = np.array([others.knows(row.case) for row in table.rows])
        squares = np.log1p(errors(table, blind)) ** 2
        for which, found in off.items():
            if np.any(known == which):
                found.append(squares[known == which].mean())
        sections.append((name, blind))
    widths = {"spread": float(np.sqrt(np.mean(off[True]))), "unseen": float(np.sqrt(np.mean(off[False])))}
    lines += ["", *section("all", replace(everything, **widths))]
    for name, blind in sections:
        lines += section(f"without.{name}", replace(blind, **widths))
    for name, found in seen_by.items():
        lines += seen_section(name, found)
    FITTED.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def seen_in(table: Table) -> Seen:
    cases = [row.case for row in table.rows]
    return Seen(
        frozenset(case.software.name for case in cases),
        frozenset(chip_family(case.gpu) for case in cases),
        frozenset(case.dtype for case in cases),
        any(case.model.experts for case in cases),
    )


def seen_section(source: str, found: Seen) -> list[str]:
    """What runs of a source had, which decides how wide the interval of another run is."""
    names = {key: sorted(getattr(found, key)) for key in ("software", "gpus", "dtypes")}
    lines = [f"{key} = {json.dumps(value)}" for key, value in {**names, "experts": found.experts}.items()]
    return [f"[seen.{source}]", *lines, ""]


def inline(figures: dict[str, float]) -> str:
    keys = {name: '"*"' if name == "*" else name for name in figures}
    return "{ " + ", ".join(f"{keys[name]} = {value:.4g}" for name, value in figures.items()) + " }"


HEADER = """\
# Constants of a step's time: what they mean is in constants.py. Written by validation/fit_time.py from published runs
# (published/*.csv), the tables of vTrain (github:VIA-Research/vTrain@f8dda8473a) and SimuMax
# (github:MooreThreads/SimuMax@4dcaae513b), and eight runs of nanoGPT, HF and torchtitan on one H200 (anchors).
#
# `blind` leaves a source out of these constants. The formulas, and which facts of a code base they ask for, were chosen
# with all sources in view, so a table that nobody here has seen may be predicted worse than `blind` says.

"""


if __name__ == "__main__":
    main()

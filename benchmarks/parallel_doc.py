"""The figures and pictures of docs/parallelism.md: collectives counted in real steps, beside their formulas.

    python benchmarks/parallel_doc.py [--case NAME …] [--write]

Each case trains a small model on CPU ranks (gloo) with the trainer of `lmworks train` and counts every collective of
its third step. A formula is written once, as the text that the page shows; it is evaluated here and must give what was
counted, to the byte. `--write` puts the tables into the page and draws its pictures.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from common import write_result
from parallel_cases import CASES, DENSE, MOE, Case, symbols, value

from lmworks.data import resolve
from lmworks.parallel.comm_counter import CommCounter
from lmworks.parallel.local_ranks import on_ranks
from lmworks.plan.pipelines.bubble import ideal_idle, in_flight
from lmworks.plan.pipelines.schedule import actions, durations, idle_shares, simulate, stage_times
from lmworks.spec import RunSpec
from lmworks.spec.run import SCHEDULES
from lmworks.train import Trainer

PAGE = Path(__file__).parent.parent / "docs" / "parallelism.md"
STEP = 2  # the third: DDP has found its buckets, optimizer states are there

PIPELINE = {"ranks": 4, "micro_batches": 8}  # of the table of schedules


# --- a real step ----------------------------------------------------------------------------------------


def count(rank: int, spec: RunSpec, folder: str) -> list[tuple[str, str, int]]:
    """(kind, group, bytes) of every collective of one step on this rank."""
    trainer = Trainer(spec, folder, quiet=True)
    trainer.build()
    for step in range(STEP):
        trainer.train_step(trainer.batches.at(step))
    with CommCounter(trainer.mesh) as seen:
        trainer.train_step(trainer.batches.at(STEP))
    return [(call.kind, call.group, call.bytes) for call in seen.calls]


def counted(case: Case) -> dict[tuple[str, str], tuple[float, float]]:
    """(kind, group) → (calls, bytes), the mean over ranks, without the one exchange of figures that every step has."""
    spec = case.spec()
    world = spec.parallel.world
    with tempfile.TemporaryDirectory() as folder:
        ranks = on_ranks(world, count, spec, f"{folder}/run")
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for calls in ranks:
        figures = next(call for call in reversed(calls) if call[0] == "all-reduce" and call[2] == 16 * (1 + world))
        calls.remove(figures)
        for kind, group, size in calls:
            calls_before, bytes_before = found.get((kind, group), (0.0, 0.0))
            found[kind, group] = calls_before + 1 / world, bytes_before + size / world
    return found


def compare(case: Case) -> list[dict[str, Any]]:
    known, found = symbols(case.spec()), counted(case)
    found = {key: figures for key, figures in found.items() if key[0] != "recv"}  # every send is one
    rows = []
    for kind, group, what, calls, size in case.rows:
        got = found.pop((kind, group), (0.0, 0.0))
        rows.append(
            {
                "kind": kind, "group": group, "what": what, "calls": round(got[0], 6), "bytes": round(got[1], 6),
                "calls_formula": calls, "bytes_formula": size,
                "calls_expected": value(calls, known), "bytes_expected": value(size, known),
            }
        )  # fmt: skip
    rows += [
        {"kind": kind, "group": group, "what": "?", "calls": calls, "bytes": size}
        for (kind, group), (calls, size) in found.items()
    ]
    return rows


def agrees(row: dict[str, Any]) -> bool:
    return all(abs(row[key] - row.get(f"{key}_expected", -1)) < 1e-3 for key in ("calls", "bytes"))


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| kind | group | what travels | calls | by formula | bytes | by formula |",
        "|---|---|---|--:|---|--:|---|",
    ]
    for row in rows:
        cells = [row["kind"], f"`{row['group']}`", row["what"], f"{row['calls']:,.0f}"]
        cells += [equation(row["calls_formula"], row["calls_expected"]), f"{row['bytes']:,.0f}"]
        cells += [equation(row["bytes_formula"], row["bytes_expected"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def equation(formula: str, result: float) -> str:
    """As it is printed: 4·ψ is 4ψ, and a number needs no second one beside it."""
    if formula.isdigit():
        return formula
    return f"{re.sub(r'(?<=[0-9])·(?=[A-Za-zψ(])', '', formula).replace('-', '−')} = {result:,.0f}"


# --- schedules ------------------------------------------------------------------------------------------


def schedules() -> str:
    ranks, micro_batches = PIPELINE["ranks"], PIPELINE["micro_batches"]
    lines = [
        "| `schedule` | stages a rank | idle share | of p = 4, m = 8 | simulated | activations held, at most |",
        "|---|--:|---|--:|--:|--:|",
    ]
    for name in SCHEDULES:
        virtual = 1 if name in ("gpipe", "1f1b") else 2
        shape, times = (name, ranks, virtual, micro_batches), durations()
        share, formula = ideal_idle(*shape, times)
        simulated = max(idle_shares(simulate(actions(*shape), stage_times(times, [1.0] * ranks * virtual))))
        most = max(in_flight(*shape, rank) for rank in range(ranks)) / virtual
        lines.append(f"| `{name}` | {virtual} | {formula} | {share:.1%} | {simulated:.1%} | {most:g} |")
    return "\n".join(lines)


# --- the page -------------------------------------------------------------------------------------------


def put(page: str, name: str, text: str) -> str:
    """Replace what stands between <!-- made: NAME --> and <!-- end -->."""
    pattern = re.compile(rf"(<!-- made: {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not pattern.search(page):
        raise SystemExit(f"{PAGE.name} has no place for {name}")
    return pattern.sub(lambda found: f"{found.group(1)}{text}\n{found.group(2)}", page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="only this one")
    parser.add_argument("--write", action="store_true", help="write tables, pictures and benchmarks/results")
    arguments = parser.parse_args()
    resolve("stdlib:bytes")
    made, wrong = {}, []
    for case in CASES:
        if arguments.case and case.name not in arguments.case:
            continue
        made[case.name] = rows = compare(case)
        for row in rows:
            print(f"{case.name:18} {'=' if agrees(row) else '≠'} {row}", flush=True)
        wrong += [case.name for row in rows if not agrees(row)]
    print(schedules())
    if wrong:
        raise SystemExit(f"counted and formula differ: {', '.join(sorted(set(wrong)))}")
    if arguments.write:
        from parallel_pictures import draw_all

        page = PAGE.read_text(encoding="utf-8")
        for name, rows in made.items():
            page = put(page, name, table(rows))
        PAGE.write_text(put(page, "schedules", schedules()), encoding="utf-8")
        draw_all(PAGE.parent / "images")
        if not arguments.case:
            print(write_result("parallel_doc", {"model": DENSE, "moe": MOE, "cases": made}))


if __name__ == "__main__":
    main()

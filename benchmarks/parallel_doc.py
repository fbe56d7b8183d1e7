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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from common import write_result

from lmworks.data import resolve
from lmworks.parallel.timeline import Action, actions_of, durations, ideal_idle, idle_shares, simulate
from lmworks.parallel.traffic import Traffic
from lmworks.spec import RunSpec
from lmworks.spec.run import SCHEDULES
from lmworks.study.ranks import on_ranks
from lmworks.train import Trainer

PAGE = Path(__file__).parent.parent / "docs" / "parallelism.md"
STEP = 2  # the third: DDP has found its buckets, optimizer states are there

DENSE = {"layers": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 192, "vocab": 320, "context": 64}
MOE = {**DENSE, "experts": 4, "top_k": 2, "expert_ffn": 48}
PIPELINE = {"ranks": 4, "micro_batches": 8}  # of the table of schedules


@dataclass(frozen=True)
class Case:
    """`rows`: (kind, group, what travels, calls, bytes); the last two are formulas in the symbols of the page."""

    name: str
    parallel: dict[str, Any]
    rows: tuple[tuple[str, str, str, str, str], ...]
    model: tuple[tuple[str, Any], ...] = tuple(DENSE.items())
    precision: tuple[tuple[str, Any], ...] = ()

    def spec(self) -> RunSpec:
        return RunSpec.from_dict(
            {
                "name": self.name,
                "model": dict(self.model),
                "data": {"seq": 64, "micro_batch": 1, "global_batch": 8},
                "parallel": self.parallel,
                "precision": dict(self.precision),
                "cluster": {"device": "cpu"},
            }
        )


def sharded(group: str) -> tuple[tuple[str, str, str, str, str], ...]:
    return (
        ("all-gather", group, "weights", "m·(2·L+1)", "m·4·(ψ+ψ_b)"),
        ("reduce-scatter", group, "gradients", "L+1", "4·ψ"),
    )


CASES = [
    Case("ddp", {"dp": 2}, (("all-reduce", "dp_replicate", "gradients", "1", "4·ψ"),)),
    Case("fsdp1", {"dp": 2, "strategy": "fsdp1"}, sharded("dp_shard")),
    Case("fsdp2", {"dp": 2, "strategy": "fsdp2"}, sharded("dp_shard")),
    Case(
        "fsdp2-no-reshard",
        {"dp": 2, "strategy": "fsdp2", "reshard": False},
        (
            ("all-gather", "dp_shard", "weights", "m·(L+1)", "m·4·ψ"),
            ("reduce-scatter", "dp_shard", "gradients", "L+1", "4·ψ"),
        ),
    ),
    Case(
        "hsdp",
        {"dp_replicate": 2, "dp_shard": 2, "strategy": "fsdp2"},
        (*sharded("shard"), ("all-reduce", "dp_replicate", "shards of gradients", "L+1", "4·ψ/n_shard")),
    ),
    Case(
        "zero-1",
        {"dp": 2, "strategy": "zero", "zero": 1},
        (
            ("reduce-scatter", "dp_shard", "gradients", "1", "4·ψ"),
            ("all-gather", "dp_shard", "updated weights", "1", "4·ψ"),
        ),
    ),
    Case(
        "zero-2",
        {"dp": 2, "strategy": "zero", "zero": 2},
        (
            ("reduce-scatter", "dp_shard", "gradients", "m", "m·4·ψ"),
            ("all-gather", "dp_shard", "updated weights", "1", "4·ψ"),
        ),
    ),
    Case(
        "tensor",
        {"tp": 2},
        (
            ("all-reduce", "tp", "hidden states and their gradients", "m·(4·L+2)", "m·(4·L+2)·4·b·s·h"),
            ("all-gather", "tp", "two numbers a token, for the loss", "m", "m·t·2·4·b·s"),
        ),
    ),
    Case(
        "sequence",
        {"tp": 2, "sp": True},
        (
            ("all-gather", "tp", "hidden states; two numbers a token", "m·(4·L+3)", "m·((4·L+2)·4·b·s·h + t·2·4·b·s)"),
            ("reduce-scatter", "tp", "hidden states", "m·(4·L+2)", "m·(4·L+2)·4·b·s·h"),
            ("all-reduce", "tp", "gradients of the norms", "1", "4·(2·L+1)·h"),
        ),
    ),
    Case(
        "ring",
        {"cp": 2},
        (
            ("send", "cp", "keys and values, twice; their gradients", "m·L·3·(c-1)", "m·L·3·(c-1)·2·4·b·(s/c)·kv"),
            ("all-reduce", "cp", "gradients (DDP over dp × cp)", "1", "4·ψ"),
        ),
    ),
    Case(
        "ulysses",
        {"cp": 2, "cp_method": "ulysses"},
        (
            ("all-to-all", "cp", "queries, keys, values; outputs", "m·L·4", "m·L·2·4·b·(s/c)·(2·q+2·kv)"),
            ("all-reduce", "cp", "gradients (DDP over dp × cp)", "1", "4·ψ"),
        ),
    ),
    Case(
        "1f1b",
        {"pp": 2, "schedule": "1f1b"},
        (("send", "pp", "hidden states; their gradients", "2·m·(p-1)/p", "2·m·(p-1)/p·4·b·s·h"),),
    ),
    Case(
        "interleaved",
        {"pp": 2, "schedule": "interleaved"},
        (("send", "pp", "hidden states; their gradients", "2·m·(p·v-1)/p", "2·m·(p·v-1)/p·4·b·s·h"),),
    ),
    Case(
        "zbv",
        {"pp": 2, "schedule": "zbv"},
        (("send", "pp", "hidden states; their gradients", "2·m·(2·p-2)/p", "2·m·(2·p-2)/p·4·b·s·h"),),
    ),
    Case(
        "expert",
        {"dp": 4, "ep": 2},
        (
            ("all-to-all", "ep", "tokens there and back; counts", "m·L·5", "m·L·(4·4·b·s·k·h + 8·E)"),
            ("all-reduce", "edp", "gradients of experts", "1", "4·ψ_e/n_ep"),
            ("all-reduce", "dp_replicate", "other gradients; visits of experts", "2", "4·(ψ-ψ_e) + 8·L·E"),
        ),
        tuple(MOE.items()),
    ),
    Case(
        "recompute",
        {"tp": 2, "recompute": "full"},
        (
            ("all-reduce", "tp", "hidden states and their gradients", "m·(5·L+2)", "m·(5·L+2)·4·b·s·h"),
            ("all-gather", "tp", "two numbers a token, for the loss", "m", "m·t·2·4·b·s"),
        ),
    ),
    Case("recompute-fsdp2", {"dp": 2, "strategy": "fsdp2", "recompute": "full"}, sharded("dp_shard")),
    Case(
        "reduce-bf16",
        {"dp": 2},
        (("all-reduce", "dp_replicate", "gradients", "1", "2·ψ"),),
        precision=(("reduce", "bf16"),),
    ),
    Case(
        "product",
        {"pp": 2, "dp": 2, "tp": 2, "strategy": "fsdp2"},
        (
            ("all-gather", "shard", "weights", "(m+1)·L/p + 1", "4·(m·ψ_bt + ψ_t)/p"),
            ("reduce-scatter", "shard", "gradients", "L/p + 1", "4·ψ_t/p"),
            ("all-reduce", "tp", "hidden states and their gradients", "m·(4·L+2)/p", "m·(4·L+2)/p·4·b·s·h"),
            ("all-gather", "tp", "two numbers a token, for the loss", "m/p", "m/p·t·2·4·b·s"),
            ("send", "pp", "hidden states; their gradients", "2·m·(p-1)/p", "2·m·(p-1)/p·4·b·s·h"),
        ),
    ),
]


def symbols(spec: RunSpec) -> dict[str, float]:
    model, layout = spec.model, spec.parallel
    experts = model.layers * model.experts * model.mlp_matrix(model.expert_ffn) if model.experts else 0
    inner, outer = (
        2 * model.layers * model.norm_params,
        model.norm_params,
    )  # norms, which tensor parallelism leaves whole
    cut = (model.params - model.layers * model.block_params - outer) / layout.tp + outer
    blocks = (model.layers * model.block_params - inner) / layout.tp + inner
    return {
        "ψ": model.params, "ψ_b": model.layers * model.block_params, "ψ_e": experts,
        "ψ_t": cut + blocks, "ψ_bt": blocks,
        "L": model.layers, "h": model.hidden, "q": model.q_dim, "kv": model.kv_dim,
        "E": model.experts, "k": model.top_k,
        "s": spec.data.seq, "b": spec.data.micro_batch, "m": spec.accumulation,
        "p": layout.pp, "v": layout.virtual_stages, "t": layout.tp, "c": layout.cp,
        "n_shard": layout.dp_shard, "n_ep": layout.ep,
    }  # fmt: skip


def value(formula: str, known: dict[str, float]) -> float:
    return float(eval(formula.replace("·", "*"), {"__builtins__": {}}, dict(known)))


# --- a real step ----------------------------------------------------------------------------------------


def count(rank: int, spec: RunSpec, folder: str) -> list[tuple[str, str, int]]:
    """(kind, group, bytes) of every collective of one step on this rank."""
    trainer = Trainer(spec, folder, quiet=True)
    trainer.build()
    for step in range(STEP):
        trainer.train_step(trainer.batches.at(step))
    with Traffic(trainer.mesh) as seen:
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
        orders, times = actions_of(name, ranks, virtual, micro_batches), durations()
        share, formula = ideal_idle(name, ranks, virtual, micro_batches, times)
        simulated = max(idle_shares(simulate(orders, times)))
        most = max(held(order) for order in orders) / virtual
        lines.append(f"| `{name}` | {virtual} | {formula} | {share:.1%} | {simulated:.1%} | {most:g} |")
    return "\n".join(lines)


def held(order: list[Action]) -> int:
    """Stages' activations that one rank keeps at its highest: from a forward pass to the end of its backward pass."""
    now = most = 0
    for action in order:
        now += {"F": 1, "B": -1, "W": -1, "I": 0}[action.kind]
        most = max(most, now)
    return most


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

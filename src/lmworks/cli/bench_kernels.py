"""`lmworks bench kernels`: what the operations of a training step take here, beside what they must take."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import Annotated, Any

import typer

from ..record.figures import binary_bytes, duration, short
from ..spec.files import refuse_unwritable
from . import complete
from .output import Json, print_json, print_table, write_file

Models = Annotated[
    list[str] | None,
    typer.Option("--model", help="A preset whose shapes are taken; may be repeated.", autocompletion=complete.sources),
]
Only = Annotated[list[str] | None, typer.Option("--only", metavar="OP", help="One op; may be repeated.")]
Batch = Annotated[int | None, typer.Option("--batch", min=1, help="Sequences (each model's own).")]
Seq = Annotated[int | None, typer.Option("--seq", min=2, help="Their length (each model's own).")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Turns of every implementation; the median counts.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Record = Annotated[bool, typer.Option("--record", help="Let training here use what was fastest from now on.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the result as JSON, too.")]


def kernels(
    model: Models = None,
    only: Only = None,
    batch: Batch = None,
    seq: Seq = None,
    rounds: Rounds = 11,
    device: Device = "auto",
    record: Record = False,
    out: Out = None,
    json: Json = False,
) -> None:
    """Time all implementations of each op, beside its limit.

    The floor is bytes over the rate of a copy or FLOPs over the rate of a product, whichever takes longer; both rates
    are measured here first. Implementations take turns. --out and --record are written after every op.

    \b
    Examples:
      lmworks bench kernels
      lmworks bench kernels --only linear_cross_entropy --model llama3-8b --json
      lmworks bench kernels --record --out kernels.json
      lmworks bench kernels --device cpu --only rms_norm --model tiny
    """
    from ..bench import kernels
    from ..bench.probe import local_device
    from ..data.progress import console_progress
    from ..kernels import dispatch
    from ..spec import Cluster, SpecError

    try:
        place = local_device(Cluster(device=device))
    except SpecError as error:
        raise SpecError(f"--device {device}: {error}") from None
    if record:
        kernels.check_record(place)
    if out is not None:
        refuse_unwritable(out, "--out")

    def keep(facts: dict[str, Any]) -> None:
        if out is not None:
            write_file(out, json_text.dumps(facts, indent=2, allow_nan=False) + "\n", "--out")
        if record:
            kernels.record(facts)

    with console_progress() as progress:
        facts = kernels.bench_kernels(place, model or (), only or (), rounds, batch, seq, progress, keep)
    if json:
        print_json(facts)
        return
    show(facts)
    if record:
        typer.echo(f"training on {facts['device']} now uses what was fastest: {dispatch.MEASURED}")


def show(facts: dict[str, Any]) -> None:
    typer.echo(
        f"{facts['device']}, {facts['dtype']}: copies {short(facts['copy_bytes_s'])}B/s, "
        f"multiplies at {short(facts['product_flops'])}FLOP/s"
    )
    if not facts["rows"]:
        typer.echo("nothing to time: no model that was asked for has such an op")
    columns = ["", "implementation", "time", "floor", "of floor", "of fastest", "rate", "memory", "differs by"]
    for op in dict.fromkeys(row["op"] for row in facts["rows"]):
        rows = sorted((row for row in facts["rows"] if row["op"] == op), key=case_of)
        best: dict[str, float] = {}
        for row in rows:
            if row["seconds"] and row["seconds"] > 0:
                best[case_of(row)] = min(row["seconds"], best.get(case_of(row), row["seconds"]))
        shown = [cells(row, best.get(case_of(row))) for row in rows]
        print_table(op, columns, shown, drop=("differs by", "memory", "floor", "of fastest"))
    if facts["winners"]:
        print_table(
            "Fastest of what training can choose from",
            ["op", "shape", "implementation"],
            [[op, shape, name] for op, points in facts["winners"].items() for shape, name in points.items()],
        )


def case_of(row: dict[str, Any]) -> str:
    return f"{row['model']} {' '.join(f'{name}={size}' for name, size in row['shape'].items())}, {row['part']}"


def cells(row: dict[str, Any], best: float | None) -> list[str]:
    seconds, start = row["seconds"], [case_of(row), row["implementation"]]
    if seconds is None or seconds <= 0 or best is None:
        return [*start, "-", duration(row["floor_s"]), "-", "-", row["error"] or "too short to tell", "", ""]
    rate = f"{short(row['flops'] / seconds)}FLOP/s" if row["flops"] else f"{short(row['bytes'] / seconds)}B/s"
    memory = "" if row["memory_bytes"] is None else binary_bytes(row["memory_bytes"])
    off = "" if row["off"] is None else f"{row['off']:.1e}"
    shares = [f"{row['floor_s'] / seconds:.0%}", f"{best / seconds:.0%}"]
    return [*start, duration(seconds), duration(row["floor_s"]), *shares, rate, memory, off]

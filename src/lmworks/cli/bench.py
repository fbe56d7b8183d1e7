"""`lmworks bench`: the training step and the kernels of a spec, each figure beside its limit; comparisons of
data-parallel strategies, of precisions and of parametrizations.
"""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import Annotated, Any

import typer

from ..data.progress import activity, console_progress
from ..record.formatting import binary_bytes, duration, short
from ..spec import Cluster, RunSpec, SpecError, TrainingError, load_run
from ..spec.files import check_writable
from . import options
from .bench_collectives import collectives
from .bench_coordinates import coordinate_check
from .bench_inference import offline, serve
from .bench_link import link
from .bench_overlap import overlap
from .groups import CommandGroup
from .options import Force, OnDevice, Overrides, Spec, device_options, on_device
from .output import Json, print_json, print_table, write_file
from .ranks import needs_ranks, start_ranks

Steps = Annotated[int, typer.Option("--steps", min=1, help="Timed steps, after three warm-up steps.")]
Kernels = Annotated[bool, typer.Option("--profile", help="Also record one step: its kernels by time.")]


def train(
    spec: Spec,
    overrides: Overrides = None,
    steps: Steps = 20,
    profile: Kernels = False,
    device: OnDevice = "",
    force: Force = False,
    json: Json = False,
) -> None:
    """Time training steps: tokens/s, MFU, memory, beside limits.

    Nothing is saved. Without data of its own the spec trains on the embedded corpus; the figures are the same.

    \b
    Examples:
      lmworks bench train configs/tiny.toml
      lmworks bench train cpu-10m data.seq=256 --steps 5 --json
      lmworks bench train llama3-1b data.seq=4096 precision.dtype=bf16 parallel.compile=true --profile
      lmworks bench train configs/tiny.toml parallel.dp=2 parallel.strategy=fsdp2
      torchrun --nproc-per-node 8 -m lmworks bench train llama3-8b parallel.dp=8 parallel.strategy=fsdp2
    """
    loaded = load_run(spec, [*(overrides or ()), *on_device(device)])
    if needs_ranks(loaded):
        options = ["--steps", str(steps), *(["--profile"] if profile else []), *(["--json"] if json else [])]
        start_ranks(
            loaded, ["bench", "train", spec, *(overrides or ()), *options, *device_options(device, force)], force
        )
        return
    from ..bench.train import bench_train
    from ..parallel.world import distributed_shutdown

    with distributed_shutdown(), activity() as doing:
        doing(f"preparing {loaded.name}: {loaded.model.params:,} parameters", 0, 0)
        facts = bench_train(loaded, steps, kernels=profile, force=force, progress=doing)
    if facts is None:
        return
    if json:
        print_json(facts)
    else:
        print_step(facts)


def print_step(facts: dict[str, Any]) -> None:
    from ..bench.power import power_text

    memory, predicted = facts["memory"], facts["predicted"]
    typer.echo(
        f"{facts['name']} on {facts['ranks']} × {facts['device']}, {facts['dtype']}: {facts['tokens_per_s']:,.0f} "
        f"tokens/s ({short(facts['params'])} parameters, {facts['tokens_per_step']:,} tokens a step)"
    )
    low, high = facts["step_s_range"]
    products = facts["floors"]["measured"]
    rows = [
        ["step", duration(facts["step_s"]), f"{duration(low)} to {duration(high)} in {facts['steps']} steps"],
        *([f"of the {source} floor", f"{at['reached']:.1%}", floor_text(at)] for source, at in facts["floors"].items()),
        [
            "of one product's pace",
            f"{products['products_reached']:.1%}",
            f"what the model needs takes {duration(products['products_s'])} there",
        ],
        *([name.upper(), f"{facts[name]:.1%}", "of the datasheet's peak"] for name in ("mfu", "hfu") if facts[name]),
        ["model FLOPs", f"{facts['model_tflops']:.4g} TFLOP/s", "on each rank"],
        ["allocated", binary_bytes(memory["allocated_bytes"]), f"of {binary_bytes(memory['device_bytes'])}"],
    ]
    if facts["host_waits"] is not None:
        rows.append(["host", f"{facts['host_waits']:.1%}", "of a step it waits for the device; near 0 it is too slow"])
    if power := facts["power"]:
        rows.append(["clock", f"{power['clock_mhz']:,.0f} MHz", power_text(power)])
        rows.append(["energy", f"{power['joules'] / facts['steps']:,.0f} J", "a step, of the card alone"])
    if memory["reserved_bytes"]:
        rows.append(["reserved", binary_bytes(memory["reserved_bytes"]), "by the allocator"])
    rows += [
        ["warm-up", duration(facts["warm_up_s"]), "building the model and compiling too"],
        *prediction_rows(predicted),
    ]
    print_table("", ["", "measured", ""], rows)
    parts_table(facts)
    if "kernels" in facts:
        kernels_table(facts["kernels"])


def floor_text(floor: dict[str, Any]) -> str:
    rates = f"{floor['matmul_tflops']:.4g} TFLOP/s, {floor['bandwidth_gbs']:,.0f} GB/s"
    return f"{duration(floor['step_s'])}, {floor['tokens_per_s']:,.0f} tokens/s at {rates}"


def prediction_rows(predicted: dict[str, Any]) -> list[list[str]]:
    """The planner's prediction and its error."""
    if "note" in predicted:
        return [["planned", "-", predicted["note"]]]
    rows = []
    if predicted["step_s"]:
        rows.append(
            [
                "step, planned",
                duration(predicted["step_s"]),
                f"{predicted['step_error']:+.1%} ({predicted['by']} rates)",
            ]
        )
        if predicted.get("interval"):  # older results have none
            busy = predicted.get("quiet") is False
            load = f"the machine was busy: runs took {predicted['noise']:.1f} × what they take alone" if busy else ""
            rows.append(["step, expected", " to ".join(map(duration, predicted["interval"])), load])
    off = predicted["allocated_error"]
    rows.append(
        ["allocated, planned", binary_bytes(predicted["allocated_bytes"]), "" if off is None else f"{off:+.1%}"]
    )
    if "reserved_bytes" in predicted:
        rows.append(
            ["reserved, planned", binary_bytes(predicted["reserved_bytes"]), f"{predicted['reserved_error']:+.1%}"]
        )
    return rows


def parts_table(facts: dict[str, Any]) -> None:
    """The roofline and the prediction by part of a step."""
    floors, planned = facts["floors"], facts["predicted"].get("parts") or {}
    names = list(dict.fromkeys([*(part for at in floors.values() for part in at["parts"]), *planned]))
    rows = [
        [
            name,
            *(ms(at["parts"].get(name)) for at in floors.values()),
            ms(planned.get(name)),
        ]
        for name in names
    ]
    print_table("Parts of a step, ms", ["", *(f"{source} floor" for source in floors), "planned"], rows)


def ms(seconds: float | None) -> str:
    return "-" if not seconds else f"{seconds * 1e3:.3f}"


def kernels_table(kernels: dict[str, Any]) -> None:
    share = kernels["busy_share"]
    rows = [
        [row["name"][:90], str(row["count"]), ms(row["seconds"]), f"{row['seconds'] / kernels['busy_s']:.1%}"]
        for row in kernels["rows"]
    ]
    title = f"One step: kernels for {duration(kernels['busy_s'])}, {share:.0%} of a usual one"
    print_table(title, ["kernel", "calls", "ms", "share"], rows)


# --- bench kernels ---------------------------------------------------------------------------------------


Models = Annotated[
    list[str] | None,
    typer.Option("--model", help="A preset whose shapes are taken; may be repeated.", autocompletion=options.sources),
]
Only = Annotated[list[str] | None, typer.Option("--only", metavar="OP", help="One op; may be repeated.")]
Batch = Annotated[int | None, typer.Option("--batch", min=1, help="Sequences (each model's own).")]
Seq = Annotated[int | None, typer.Option("--seq", min=2, help="Their length (each model's own).")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Interleaved rounds; the median is reported.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Record = Annotated[bool, typer.Option("--record", help="Let training on this machine use the fastest implementations.")]
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
    are measured here first. Implementations are interleaved. --out and --record are written after every op.

    \b
    Examples:
      lmworks bench kernels
      lmworks bench kernels --only linear_cross_entropy --model llama3-8b --json
      lmworks bench kernels --record --out kernels.json
      lmworks bench kernels --device cpu --only rms_norm --model tiny
    """
    from ..bench import kernels
    from ..bench.calibrate import local_device
    from ..kernels import dispatch

    try:
        place = local_device(Cluster(device=device))
    except SpecError as error:
        raise SpecError(f"--device {device}: {error}") from None
    if record:
        kernels.check_record(place)
    if out is not None:
        check_writable(out, "--out")

    def save(facts: dict[str, Any]) -> None:
        if out is not None:
            write_file(out, json_text.dumps(facts, indent=2, allow_nan=False) + "\n", "--out")
        if record:
            kernels.record(facts)

    with console_progress() as progress:
        facts = kernels.bench_kernels(place, model or (), only or (), rounds, batch, seq, progress, save)
    if json:
        print_json(facts)
        return
    print_kernels(facts)
    if record:
        typer.echo(f"training on {facts['device']} now uses the fastest implementations: {dispatch.MEASURED}")


def print_kernels(facts: dict[str, Any]) -> None:
    typer.echo(
        f"{facts['device']}, {facts['dtype']}: copies {short(facts['copy_bytes_s'])}B/s, "
        f"multiplies at {short(facts['product_flops'])}FLOP/s"
    )
    if not facts["rows"]:
        typer.echo("nothing to time: none of the models has such an op")
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


# --- bench ddp-fsdp, bench precision ---------------------------------------------------------------------


# Rows of its embedding do not divide, so that padding is seen.
SMALL = ("tiny", ["model.layers=4", "model.hidden=256", "model.heads=4", "model.vocab=259", "data.micro_batch=4"])
# Large enough that formats differ, small enough that all of them train within minutes on a CPU.
SMALLER = ("tiny", ["name=precision", "model.layers=4", "model.hidden=128", "optim.lr=1e-3", "log.eval_batches=8"])

SmallSpec = Annotated[
    str,
    typer.Argument(
        metavar="[SPEC]",
        help="A TOML file, a run folder, or a preset (by default a small model).",
        autocompletion=options.sources,
    ),
]


def ddp_fsdp(
    spec: SmallSpec = "",
    overrides: Overrides = None,
    ranks: Annotated[int, typer.Option("--ranks", min=2, help="Data-parallel ranks, all on this machine.")] = 2,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Timed steps of each strategy.")] = 10,
    out: Annotated[Path, typer.Option("--out", help="Folder of report.md and report.html.")] = Path(
        "runs/study-ddp-fsdp"
    ),
    only: Annotated[
        str, typer.Option("--only", help="Strategies to compare with DDP, e.g. fsdp2-reshard,zero-2 (by default all).")
    ] = "",
    jobs: Annotated[
        bool, typer.Option(help="Also start a real job of each, kill a rank, and resume: about half a minute each.")
    ] = True,
    force: Force = False,
    json: Json = False,
) -> None:
    """Compare DDP, FSDP1, FSDP2, ZeRO and DeepSpeed on a model.

    Throughput, bytes that each rank holds (equal to the arithmetic, to the byte), peak memory, collectives, time to
    start, checkpoint, and what happens when a rank is killed.

    \b
    Examples:
      lmworks bench ddp-fsdp
      lmworks bench ddp-fsdp configs/tiny.toml model.layers=8 --ranks 4 --steps 20
      lmworks bench ddp-fsdp cpu-10m --only fsdp2-reshard,zero-1 --no-jobs --json
    """
    from ..bench.data_parallel import select_strategies, study
    from ..bench.data_parallel_report import overview_table, write_reports
    from ..report.html_page import check_output_folder

    names = split_names(only)
    loaded = load_study_spec(spec, overrides, SMALL)
    select_strategies(names)  # unknown names are refused before a folder is created
    check_output_folder(out)
    found = study(loaded, ranks, steps, names, jobs, print_progress, force)
    markdown, html = write_reports(found, out)
    if json:
        print_json({**found.to_dict(), "report": str(html), "markdown": str(markdown)})
    else:
        less = ("calls", "as worked out", "peak")
        print_table(f"{ranks} ranks, {found.spec.model.params:,} parameters", *overview_table(found), less)
        typer.echo(f"report: {html}   {markdown}")
    wrong = [outcome.name for outcome in found.outcomes if outcome.exact is False]
    if wrong:
        raise TrainingError(f"bytes of {', '.join(wrong)} are not what the arithmetic says; see {markdown}")


def load_study_spec(spec: str, overrides: list[str] | None, default: tuple[str, list[str]], *more: str) -> RunSpec:
    """The spec that was given, or the small default; its place may hold an override."""
    changes = [*(overrides or ()), *more]
    if spec and "=" not in spec:
        return load_run(spec, changes)
    return load_run(default[0], [*default[1], *([spec] if spec else []), *changes])


def split_names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def print_progress(line: str) -> None:
    typer.echo(f"  {line}", err=True)


def precision(
    spec: SmallSpec = "",
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of each training.")] = 200,
    out: Annotated[
        Path, typer.Option("--out", help="Folder of the runs, report.md, report.html and report.png.")
    ] = Path("runs/study-precision"),
    only: Annotated[
        str, typer.Option("--only", help="Precisions to compare with fp32, e.g. bf16,fp8-rowwise (by default all).")
    ] = "",
    device: OnDevice = "",
    force: Force = False,
    json: Json = False,
) -> None:
    """Compare fp32, bf16, fp16 and fp8 training of one model.

    Loss curves and their gap to fp32 beside the noise of two seeds, gradients flushed to zero or overflowing, updates
    lost to rounding, loss scales, gradient norms, speed, memory, and a verdict. Every training is a run under --out;
    the same command continues where it was stopped. What the spec says of number formats is replaced.

    \b
    Examples:
      lmworks bench precision
      lmworks bench precision --only bf16,bf16-nearest --steps 50 --out runs/bf16
      lmworks bench precision configs/small.toml cluster.device=cpu --json
    """
    from ..bench.precision.report import overview_table, write_reports
    from ..bench.precision.study import study

    loaded = load_study_spec(spec, overrides, SMALLER, f"optim.steps={steps}", *on_device(device))
    found = study(loaded, out, split_names(only), print_progress, force)
    markdown, html = write_reports(found)
    if json:
        print_json({**found.to_dict(), "report": str(html), "markdown": str(markdown)})
    else:
        less = ("bytes/parameter", "peak")
        print_table(f"{steps} steps, {found.spec.model.params:,} parameters", *overview_table(found), less)
        typer.echo(f"report: {html}   {markdown}")


# --- the group -------------------------------------------------------------------------------------------


app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, help="Benchmark training, kernels, the engine, or any server."
)
app.command(rich_help_panel="Measure")(train)
app.command(rich_help_panel="Measure")(kernels)
app.command(rich_help_panel="Measure")(collectives)
app.command(rich_help_panel="Measure")(offline)
app.command(rich_help_panel="Measure")(serve)
app.command(rich_help_panel="Measure")(link)
app.command("coordinate-check", rich_help_panel="Compare")(coordinate_check)
app.command("ddp-fsdp", rich_help_panel="Compare")(ddp_fsdp)
app.command(rich_help_panel="Compare")(overlap)
app.command(rich_help_panel="Compare")(precision)

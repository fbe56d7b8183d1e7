"""`lmworks bench train`: a spec's training step on this machine, each figure beside its limit."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..data.progress import activity
from ..record.figures import binary_bytes, duration, short
from .output import Json, Overrides, Spec, print_json, print_table
from .ranks import needs_ranks, start_ranks
from .run_options import Force, OnDevice, device_options, on_device

Steps = Annotated[int, typer.Option("--steps", min=1, help="Steps that are timed, after three to warm up.")]
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
    from ..spec import load_run

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
        show(facts)


def show(facts: dict[str, Any]) -> None:
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
    """What the planner said, and how far off it is."""
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
    """Where the least time goes, and where the planner thinks that the time goes."""
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

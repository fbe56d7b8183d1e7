"""`lmworks plan reliability`: failures of a cluster, the optimal checkpoint interval, and goodput."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..record.formatting import clock, duration
from ..spec import SpecError
from .output import Json, print_json, print_table

if TYPE_CHECKING:
    from ..plan.reliability import Forecast, Recovery


def reliability(
    gpus: Annotated[list[int] | None, typer.Option(help="Size of the cluster; give several (1024 and 16384).")] = None,
    rate: Annotated[str, typer.Option(help="llama3, rsc1, rsc2, or stops in 1,000 days of one GPU.")] = "llama3",
    run: Annotated[
        Path | None,
        typer.Option(help="Take the times of this run, as measured; --stall-s and --write-s replace its own."),
    ] = None,
    params: Annotated[float, typer.Option(help="Parameters of the model.")] = 405e9,
    bytes_per_param: Annotated[float, typer.Option(help="Bytes of a checkpoint for each: fp32, two moments.")] = 12.0,
    copy_gbs: Annotated[float, typer.Option(help="GB/s from one GPU to its host.")] = 25.0,
    gpu_gbs: Annotated[float, typer.Option(help="GB/s into storage, of one GPU.")] = 1.0,
    storage_gbs: Annotated[float, typer.Option(help="GB/s into storage, of all.")] = 2000.0,
    step_s: Annotated[float, typer.Option(help="Seconds of a step.")] = 6.0,
    stall_s: Annotated[float | None, typer.Option(help="Stall of training by a snapshot (from the bytes).")] = None,
    write_s: Annotated[float | None, typer.Option(help="Time until it is committed (from the bytes).")] = None,
    load_s: Annotated[float | None, typer.Option(help="To load one (as long as to write it).")] = None,
    restart_s: Annotated[float, typer.Option(help="To start all ranks again.")] = 300.0,
    detect_s: Annotated[float, typer.Option(help="Until a stop is noticed.")] = 30.0,
    every: Annotated[int, typer.Option(help="An interval in steps to compare with the best.")] = 0,
    days: Annotated[float, typer.Option(help="Days of a simulated run.")] = 54.0,
    trials: Annotated[int, typer.Option(help="Simulated runs.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the simulation.")] = 0,
    json: Json = False,
) -> None:
    """Predict failures, goodput and the best checkpoint interval.

    Whole runs are simulated, failure by failure, and compared with Daly's formula. The rates are published ones: Llama
    3's 419 failures in 54 days on 16,384 GPUs, Meta's RSC-1 and RSC-2 clusters. All times are assumptions until you
    set them.

    \b
    Examples:
      lmworks plan reliability
      lmworks plan reliability --gpus 4096 --rate rsc1 --params 70e9 --storage-gbs 100
      lmworks plan reliability --run runs/tiny --gpus 1024 --json
    """
    from ..plan.reliability import Recovery, Storage, forecast, mtbf, refuse

    sizes = {"params": params, "bytes-per-param": bytes_per_param, "gpus": min(gpus or (1,)), "step-s": step_s}
    speeds = {"copy-gbs": copy_gbs, "gpu-gbs": gpu_gbs, "storage-gbs": storage_gbs}
    for name, value in (sizes | speeds).items():
        refuse(f"--{name}", value, value <= 0, "more than 0")
    refuse("--every", every, every < 0, "0 or more")
    if run is not None and load_s is not None:
        raise SpecError("--load-s with --run: the time to load is in the restarts of a run; leave one of them out")
    stops = stops_per_gpu_hour(rate)
    storage = Storage(copy_gbs * 1e9, gpu_gbs * 1e9, storage_gbs * 1e9)
    step_s, measured_recovery = times_of(run, step_s, restart_s) if run else (step_s, None)
    found: list[Forecast] = []
    for size in gpus or (1024, 16_384):
        stall, write = storage.seconds(params * bytes_per_param / size, size)
        written = write if write_s is None else write_s
        recovery = measured_recovery or Recovery(
            mtbf_s=1.0,
            stall_s=stall if stall_s is None else stall_s,
            write_s=written,
            restart_s=restart_s + (written if load_s is None else load_s),
            detect_s=detect_s,
        )
        given = {name: value for name, value in (("stall_s", stall_s), ("write_s", write_s)) if value is not None}
        recovery = replace(recovery, mtbf_s=mtbf(size, stops), **given)
        ways = {"synchronous": recovery.synchronous()}
        if recovery.write_s:  # else nothing is known of a background: the run saved without one
            ways["asynchronous"] = recovery
        found += [
            forecast(size, saves, way, step_s, days=days, trials=trials, seed=seed, used=every)
            for saves, way in ways.items()
        ]
    if json:
        print_json([as_json(one, every) for one in found])
    else:
        print_forecasts(found, every, days)


def stops_per_gpu_hour(rate: str) -> float:
    from ..plan.reliability import RATES

    if rate in RATES:
        return RATES[rate]
    try:
        stops = float(rate)
    except ValueError:
        stops = -1.0
    if not 0 < stops < float("inf"):
        raise SpecError(f"--rate {rate}: give {', '.join(RATES)}, or stops in 1,000 days of one GPU, e.g. 0.5")
    return stops / 24_000


def times_of(run: Path, step_s: float, restart_s: float) -> tuple[float, Recovery]:
    """A step's and a save's time, and a restart's, as that run had them; what it never did takes what was assumed."""
    from ..diagnose.checkpoint_interval import measured_recovery
    from ..diagnose.goodput import time_breakdown
    from ..record.run_summary import locate, summarize

    folder = locate(run)
    spent = time_breakdown(folder)
    recovery = measured_recovery(folder, spent, mtbf_h=1.0)
    if recovery is None:
        raise SpecError(f"--run {run}: the run has not saved yet, so nothing is known of its saves")
    if len(spent.attempts) == 1:
        recovery = replace(recovery, restart_s=restart_s)
    return summarize(folder).step_s or step_s, recovery


def as_json(one: Forecast, every: int) -> dict[str, Any]:
    used = {"used_every": every, "used_mean": one.curve[every]} if every else {}
    return {**asdict(one), "recovery": {key: float(value) for key, value in vars(one.recovery).items()}, **used}


def print_forecasts(found: list[Forecast], every: int, days: float) -> None:
    rows = []
    for one in found:
        recovery = one.recovery
        rows.append(
            [
                f"{one.gpus:,}",
                clock(float(recovery.mtbf_s)),
                one.saves,
                duration(float(recovery.stall_s)),
                f"{one.every} steps, {duration(one.every * one.step_s)}",
                *(f"{share:.2%}" for share in (one.save, one.replay, one.restart, one.mean, one.worst, one.ettr)),
                *([f"{one.curve[every]:.2%}"] if every else []),
            ]
        )
    columns = ["GPUs", "stops after", "saves", "stall", "best interval", "save", "replay", "restart", "ETTR"]
    columns += ["19 of 20 above", "formula", *([f"every {every} steps"] if every else [])]
    less = ("formula", "save", "replay", "restart", "saves", "stall")
    print_table(f"{days:g} days, simulated; shares of the time", columns, rows, less)

"""Does the best learning rate of a narrow model hold for a wide one? Held-out loss against learning rate, by width.

    python benchmarks/mup_transfer.py                        widths 128 to 1,024, on a GPU: minutes
    python benchmarks/mup_transfer.py --tiny                 widths 32 to 128, on a CPU
    python benchmarks/mup_transfer.py --seeds 2              another seed of each, beside those that are there
    python benchmarks/mup_transfer.py --draw                 the plot of what is there

Llamas of four layers with heads of 32 are trained on bytes of the Python library, each text once, under both
parametrizations; the narrowest is the base of μP. The optimum of a width is the vertex of a parabola through the lowest
losses over log lr. Several trainings run at once, each in a process of its own: small models leave most of a GPU idle.
results/mup_transfer.json is written after each training, and a second start goes on where the first was stopped
(--minutes, or Ctrl-C).
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np
import torch
from common import RESULTS, commit, machine

from lmworks.data import Batch, open_batches
from lmworks.model import GPT
from lmworks.parallel.single_rank import SingleRank
from lmworks.spec import DataSpec, ModelSpec, OptimSpec
from lmworks.spec.files import write_whole
from lmworks.spec.parametrization import resized
from lmworks.train.optim import learning_rate, make_optimizer, set_learning_rate

NAMES = ("standard", "mup")
# Initial weights of the base of μP are 1/√width, which suits a model that narrow; standard ones 0.02 in every width, as
# GPT-2 has them. Learning rates are powers of √2, from and to these exponents (of every, or every second).
WHOLE: dict[str, Any] = {
    "widths": [128, 256, 512, 1024], "layers": 4, "head_dim": 32, "batch": 32, "seq": 256, "steps": 500,
    "init_std": {"standard": 0.02, "mup": 0.09}, "exponents": {"standard": [-24, -10], "mup": [-19, -8]}, "every": 1,
    "weight_decay": 0.1, "held_out": 16,
}  # fmt: skip
TINY: dict[str, Any] = {
    "widths": [32, 64, 128], "layers": 2, "head_dim": 16, "batch": 8, "seq": 64, "steps": 120,
    "init_std": {"standard": 0.02, "mup": 0.15}, "exponents": {"standard": [-20, -8], "mup": [-18, -8]}, "every": 2,
    "weight_decay": 0.1, "held_out": 8,
}  # fmt: skip
NEAR = 2  # learning rates on each side of the lowest that the parabola is fitted to


# --- one training -------------------------------------------------------------------------------------------------


def model_of(settings: dict[str, Any], name: str, width: int) -> ModelSpec:
    base, head_dim = settings["widths"][0], settings["head_dim"]
    shape = {"layers": settings["layers"], "hidden": base, "heads": base // head_dim, "ffn": base * 11 // 4}
    narrow = ModelSpec(**shape, vocab=320, context=settings["seq"], init_std=settings["init_std"][name])
    model = resized(narrow, width, settings["layers"])
    return model.replace(parametrization="mup", mup_base_hidden=base) if name == "mup" else model


def optim_of(settings: dict[str, Any], lr: float) -> OptimSpec:
    steps, decay = settings["steps"], settings["weight_decay"]
    return OptimSpec(steps=steps, lr=lr, warmup=steps // 10, schedule="linear", min_lr_ratio=0.0, weight_decay=decay)


@cache
def batches_of(device: str, batch: int, seq: int, steps: int, held_out: int) -> tuple[list[Batch], list[Batch]]:
    data = DataSpec(path="stdlib:bytes", seq=seq, micro_batch=batch, global_batch=batch)
    source = open_batches(data, seed=0)
    unseen = open_batches(data, seed=0, split="val", shuffle=False)
    train = [source.at(step)[0].to(device) for step in range(steps)]
    return train, [unseen.held_out_batch(index).to(device) for index in range(held_out)]


def train(settings: dict[str, Any], job: dict[str, Any], device: str) -> dict[str, Any]:
    began = time.perf_counter()
    model = model_of(settings, job["parametrization"], job["width"])
    optim = optim_of(settings, job["lr"])
    seen, unseen = batches_of(device, *(settings[key] for key in ("batch", "seq", "steps", "held_out")))
    network = GPT(model, seed=job["seed"]).to(device)
    optimizer = make_optimizer(SingleRank(network).shards(), model, optim)

    def loss_of(batch: Batch) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16) if device == "cuda" else nullcontext():
            return network(batch.tokens, batch.targets, keep_logits=False)[1]

    for step, batch in enumerate(seen):
        optimizer.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), optim.clip)
        set_learning_rate(optimizer, learning_rate(optim, step))
        optimizer.step()
        if step % 50 == 49 and not math.isfinite(float(loss)):
            break
    with torch.no_grad():
        found = float(torch.stack([loss_of(batch).float() for batch in unseen]).mean())
    seconds = round(time.perf_counter() - began, 2)
    return {**job, "loss": found if math.isfinite(found) else None, "seconds": seconds}


def worker(settings: dict[str, Any], device: str, jobs: Any, results: Any) -> None:
    torch.set_num_threads(1)
    while (job := jobs.get()) is not None:
        results.put(train(settings, job, device))


# --- all of them ------------------------------------------------------------------------------------------------------


def all_jobs(settings: dict[str, Any], seeds: int) -> list[dict[str, Any]]:
    """The widest first: the last to end are short."""
    rates = {
        name: [2 ** (exponent / 2) for exponent in range(low, high + 1, settings["every"])]
        for name, (low, high) in settings["exponents"].items()
    }
    return [
        {"parametrization": name, "width": width, "lr": lr, "seed": seed}
        for seed in range(seeds)
        for width in reversed(settings["widths"])
        for name in NAMES
        for lr in rates[name]
    ]


def key_of(run: dict[str, Any]) -> tuple[Any, ...]:
    return run["parametrization"], run["width"], run["lr"], run["seed"]


def measure(settings: dict[str, Any], args: argparse.Namespace, device: str, path: Path) -> None:
    before = json.loads(path.read_text()) if path.exists() else {}
    if before and before["settings"] != settings:
        raise SystemExit(f"{path} has other settings: move it away, or name another --out")
    runs = before.get("runs", [])
    done = {key_of(run) for run in runs}
    left = [job for job in all_jobs(settings, args.seeds) if key_of(job) not in done]
    batches_of("cpu", 1, settings["seq"], 1, 1)  # the corpus is written once, not by each worker
    context = multiprocessing.get_context("spawn")
    jobs, results = context.Queue(), context.Queue()
    workers = min(args.workers, len(left))
    processes = [
        context.Process(target=worker, args=(settings, device, jobs, results), daemon=True) for _ in range(workers)
    ]
    for process in processes:
        process.start()
    until, pending, began = time.monotonic() + 60 * args.minutes, 0, time.monotonic()
    while left or pending:
        while left and pending < workers and time.monotonic() < until:
            jobs.put(left.pop(0))
            pending += 1
        if not pending:
            break
        try:
            run = results.get(timeout=10)
        except Empty:
            if not all(process.is_alive() for process in processes):
                raise SystemExit("a worker has ended: see its error above; what is done is saved") from None
            continue
        pending -= 1
        runs.append(run)
        found = {"settings": settings, "commit": commit(), "machine": machine(), **summary(settings, runs)}
        write_whole(path, json.dumps(found, indent=1) + "\n")
        at = f"{time.monotonic() - began:5.0f} s"
        print(f"{at}  {run['parametrization']:8} {run['width']:5} lr {run['lr']:.2e}  loss {run['loss']}", flush=True)
    for _ in processes:
        jobs.put(None)
    for process in processes:
        process.join(timeout=30)
    if left:
        print(f"{len(left)} trainings are left: the same command goes on")


# --- the optimum of each width -------------------------------------------------------------------------------------


def optimum(points: dict[float, float]) -> tuple[float, float]:
    """Learning rate and loss at the vertex of a parabola over log lr; the lowest point where that is at an edge."""
    rates = sorted(points)
    lowest = min(rates, key=points.__getitem__)
    at = rates.index(lowest)
    near = rates[max(0, at - NEAR) : at + NEAR + 1]
    if at in (0, len(rates) - 1) or len(near) < 3:
        return lowest, points[lowest]
    x = np.log([rate / lowest for rate in near])
    a, b, c = np.polyfit(x, [points[rate] for rate in near], 2)
    vertex = -b / (2 * a) if a > 0 else 0.0
    if not x[0] <= vertex <= x[-1]:
        return lowest, points[lowest]
    return float(lowest * math.exp(vertex)), float(a * vertex**2 + b * vertex + c)


def curves(settings: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, dict[int, dict[float, float]]]:
    """Parametrization → width → learning rate → mean loss over seeds; one that has diverged has none."""
    found: dict[str, dict[int, dict[float, float]]] = {name: {} for name in NAMES}
    for name in NAMES:
        for width in settings["widths"]:
            mine = [r for r in runs if r["width"] == width and r["parametrization"] == name]
            by_rate: dict[float, list[Any]] = {}
            for run in mine:
                by_rate.setdefault(run["lr"], []).append(run["loss"])
            means = {lr: float(np.mean(losses)) for lr, losses in by_rate.items() if None not in losses}
            if means:
                found[name][width] = means
    return found


def summary(settings: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """`drift`: the optimum of the widest over that of the base, or its inverse: at least 1. `cost`: what the base's
    optimum costs the widest model, in loss."""
    result: dict[str, Any] = {"optimum": {}, "drift": {}, "cost": {}}
    for name, by_width in curves(settings, runs).items():
        best = {width: optimum(points) for width, points in by_width.items()}
        result["optimum"][name] = {str(width): {"lr": lr, "loss": loss} for width, (lr, loss) in best.items()}
        narrow, wide = settings["widths"][0], settings["widths"][-1]
        if narrow in best and wide in best:
            ratio = best[wide][0] / best[narrow][0]
            result["drift"][name] = max(ratio, 1 / ratio)
            nearest = min(by_width[wide], key=lambda lr: abs(math.log(lr / best[narrow][0])))
            result["cost"][name] = by_width[wide][nearest] - min(by_width[wide].values())
    return {**result, "runs": sorted(runs, key=key_of)}


def draw(settings: dict[str, Any], found: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    for axes, (name, by_width) in zip(
        figure.subplots(1, 2, sharey=True), curves(settings, found["runs"]).items(), strict=True
    ):
        for color, (width, points) in enumerate(by_width.items()):
            rates = sorted(points)
            axes.plot(rates, [points[rate] for rate in rates], f"C{color}o-", markersize=3, label=f"width {width}")
            best = found["optimum"][name][str(width)]
            axes.plot(best["lr"], best["loss"], f"C{color}*", markersize=13)
        drift = found["drift"].get(name)
        axes.set(title=f"{name}: optimum moves by {drift:.2f} ×" if drift else name, xlabel="learning rate")
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
    lowest = min(best["loss"] for widths in found["optimum"].values() for best in widths.values())
    axes.set_ylim(lowest - 0.05, lowest + 1.0)
    figure.axes[0].set_ylabel("held-out loss, nats a byte")
    figure.axes[0].legend(frameon=False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--workers", type=int, default=6 if torch.cuda.is_available() else 1)
    parser.add_argument("--minutes", type=float, default=5.5, help="no training is started after this")
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not args.tiny else "cpu"
    settings = {**(TINY if args.tiny else WHOLE), **({"steps": args.steps} if args.steps else {})}
    path = args.out or RESULTS / ("mup_transfer_cpu.json" if args.tiny else "mup_transfer.json")
    if not args.draw:
        measure(settings, args, device, path)
    found = json.loads(path.read_text())
    found |= summary(found["settings"], found["runs"])
    write_whole(path, json.dumps(found, indent=1) + "\n")
    for name in NAMES:
        best = {width: f"{one['lr']:.2e} ({one['loss']:.3f})" for width, one in found["optimum"][name].items()}
        moves = found["drift"].get(name, math.nan)
        print(f"{name}: optimum by width {best}; moves by {moves:.2f} ×, costs {found['cost'].get(name, math.nan):.3f}")
    draw(found["settings"], found, path.with_suffix(".png"))
    print(f"drawn: {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()

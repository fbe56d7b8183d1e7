"""Fit the curves of `src/lmworks/plan/devices/links.toml` to measured collectives, and say how far off they are.

    python validation/fit_links.py --data DIR            print errors: held-out rows, whole systems left out
    python validation/fit_links.py --data DIR --save     also write links.toml

DIR holds aiconfigurator_nccl_measured.csv.gz, vtrain_measured_allreduce_lut.csv and nccl_allreduce_8xh200.csv.
A key of the tables (system, collective, ranks, size) was measured several times, by several NCCL versions: the median
counts. Reductions of int8 are left out, since NVSwitch adds up halves but not bytes.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import statistics
import tomllib
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from lmworks.plan.devices.links import LINKS, Curve, wire_share
from lmworks.spec import catalogue
from lmworks_validation.components import SYSTEMS, between_machines

KNOTS = np.arange(9, 29.1, 2)  # log2 of message bytes
SMOOTH = 0.1  # weight of a bend between knots, beside a row's log error
KINDS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
}
GPUS = {**SYSTEMS, "V100": "V100-SXM2-32GB"}
# Accelerators whose links are alike share a curve; the name is the family's.
FAMILIES = {
    "nvlink2": ("V100",),
    "nvlink3": ("a100_sxm",),
    "nvlink4": ("h100_sxm", "h200_sxm"),
    "nvlink5": ("b200_sxm", "b300_sxm", "gb200", "gb300"),
    "pcie4": ("l40s",),
    "pcie5": ("rtx_pro_6000_server",),
}
# Never measured, but the same links: they take the family's curve too.
ALIKE = {"nvlink3": ("A100-SXM-40GB",), "nvlink4": ("H100-SXM-96GB",)}

Key = tuple[str, str, int, int]  # system, collective, ranks, message bytes
Rows = dict[Key, float]  # seconds


def read_aiconfigurator(folder: Path, dtype: str = "half") -> Rows:
    times: dict[Key, list[float]] = defaultdict(list)
    with gzip.open(folder / "aiconfigurator_nccl_measured.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            if row["dtype"] == dtype:
                key = (row["system"], KINDS[row["op"]], int(row["num_gpus"]), int(row["message_bytes"]))
                times[key].append(float(row["latency_ms"]) * 1e-3)
    return {key: statistics.median(several) for key, several in times.items()}


def read_vtrain(folder: Path, gpu: str) -> Rows:
    with open(folder / "vtrain_measured_allreduce_lut.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["gpu"] == gpu]
    keys = [(gpu, "all-reduce", int(row["n_gpus_intranode"]), int(row["size_bytes"])) for row in rows]
    return {key: float(row["time_us_outofplace"]) / 1e6 for key, row in zip(keys, rows, strict=True)}


def read_h200(folder: Path) -> Rows:
    lines = [line for line in (folder / "nccl_allreduce_8xh200.csv").read_text().splitlines() if line[:1].isdigit()]
    rows = [line.split(",") for line in lines]
    return {("h200_sxm", "all-reduce", 8, int(size)): int(size) / float(alg) / 1e9 for size, _, alg in rows}


def is_held_out(key: Key) -> bool:
    """A fifth of the collective-ranks-size keys, the same in every system."""
    return zlib.crc32(repr(key[1:]).encode()) % 5 == 0


def fit_knots(sizes: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Log-seconds at the knots: least absolute log error, with a weak wish to be straight."""
    x, y, count = np.log2(sizes), np.log(seconds), len(KNOTS)
    rows = np.stack([np.interp(x, KNOTS, unit) for unit in np.eye(count)], axis=1)
    bends = np.stack([np.convolve(unit, [1, -2, 1], "valid") for unit in np.eye(count)], axis=1) * np.sqrt(SMOOTH)
    weights = np.ones(len(y))
    for _ in range(30):  # reweighted least squares
        stacked = np.vstack([rows * weights[:, None], bends])
        knots = np.linalg.lstsq(stacked, np.concatenate([y * weights, np.zeros(len(bends))]), rcond=None)[0]
        weights = 1 / np.sqrt(np.maximum(np.abs(rows @ knots - y), 0.01))
    return np.maximum.accumulate(knots)  # a longer message never takes less


def fit_family(family: str, rows: Rows) -> Curve | None:
    groups: dict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
    for (system, kind, ranks, size), seconds in rows.items():
        if system in FAMILIES[family]:
            groups[kind, ranks].append((size, seconds))
    if not groups:
        return None
    times: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    for (kind, ranks), points in sorted(groups.items()):
        sizes, seconds = np.array([point for point in points if point[0] <= 2 ** KNOTS[-1]]).T
        times[kind][ranks] = np.exp(fit_knots(sizes, seconds))
    gpus = [GPUS[system] for system in FAMILIES[family]]
    gpu = catalogue()[gpus[0]]
    names = (*gpus, *ALIKE.get(family, ()))
    return Curve(family, gpu.link_gbs, names, gpu.fabric, 2.0**KNOTS, dict(times))


def fit(rows: Rows) -> dict[str, Curve]:
    """V100 was measured from 1 MiB up; below, it takes the A100's start-up times."""
    fitted = {family: curve for family in FAMILIES if (curve := fit_family(family, rows))}
    if "nvlink2" in fitted and "nvlink3" in fitted:
        keys = [("V100", "all-reduce", ranks, size) for ranks in range(2, 9) for size in (2**9, 2**11, 2**13)]
        pseudo = {key: at(fitted["nvlink3"], key) for key in keys}
        fitted["nvlink2"] = fit_family("nvlink2", pseudo | rows) or fitted["nvlink2"]
    return fitted


def errors(rows: Rows, predict: Callable[[Key], float]) -> np.ndarray:
    return np.array([predict(key) / seconds - 1 for key, seconds in rows.items()])


def summary(error: np.ndarray) -> dict[str, float]:
    size = np.abs(error)
    figures = {"median": np.median(size), "mape": size.mean(), "p90": np.quantile(size, 0.9), "bias": np.median(error)}
    return {"rows": len(error), **{name: round(float(value), 4) for name, value in figures.items()}}


def at(curve: Curve, key: Key, link_gbs: float = 0.0) -> float:
    _, kind, ranks, size = key
    wire = size * wire_share(kind, ranks) * (curve.link_gbs / (link_gbs or curve.link_gbs))
    return float(curve.seconds(kind, wire, ranks))


def family_of(system: str) -> str:
    return next(family for family, systems in FAMILIES.items() if system in systems)


def show(title: str, scored: Iterable[tuple[str, dict[str, float]]]) -> None:
    print(f"\n{title}\n{'':42}{'rows':>6}{'median':>9}{'MAPE':>9}{'p90':>9}{'bias':>9}")
    for name, s in scored:
        print(f"{name:42}{s['rows']:6}{s['median']:9.1%}{s['mape']:9.1%}{s['p90']:9.1%}{s['bias']:+9.1%}")


def score(rows: Rows, folder: Path) -> dict[str, dict[str, float]]:
    """Every error of the report; the returned ones are written beside the constants."""
    kept = fit({key: seconds for key, seconds in rows.items() if not is_held_out(key)})
    held = {key: seconds for key, seconds in rows.items() if is_held_out(key)}

    def predict(key: Key) -> float:
        return at(kept[family_of(key[0])], key)

    result = {"held_out": summary(errors(held, predict))}
    table = [("all", result["held_out"])]
    for system in GPUS:
        for kind in KINDS.values():
            part = {key: seconds for key, seconds in held.items() if key[:2] == (system, kind)}
            if part:
                table.append((f"{system} {kind}", summary(errors(part, predict))))
    show("Held-out keys (a fifth, by hash)", table)

    table = []
    for system in GPUS:
        part = {key: seconds for key, seconds in rows.items() if key[0] == system}
        rest = fit({key: seconds for key, seconds in rows.items() if key[0] != system})
        family = family_of(system)
        if family in rest:
            result[f"without_{system}"] = summary(errors(part, lambda key, c=rest[family]: at(c, key)))  # type: ignore[misc]
            table.append((f"{system} from the rest of {family}", result[f"without_{system}"]))
    show("One system left out, its generation's links known from another", table)

    table = []
    pairs = [("a100_sxm", "nvlink5"), ("a100_sxm", "nvlink4"), ("h100_sxm", "nvlink3"), ("b200_sxm", "nvlink4")]
    for system, base in pairs:
        rest = fit(rows)[base]
        link = catalogue()[GPUS[system]].link_gbs
        for floor, name in ((0, "all sizes"), (2**25, "from 32 MiB")):
            part = {key: seconds for key, seconds in rows.items() if key[0] == system and key[3] >= floor}
            table.append((f"{system} from {base}, {name}", summary(errors(part, lambda key: at(rest, key, link)))))  # noqa: B023
    show("A whole generation left out: another's curve at the datasheet's link speed", table)

    final = fit(rows)
    others = [
        ("int8 rows, not fitted", read_aiconfigurator(folder, "int8")),
        ("A100, vTrain (2 to 8 ranks)", {("a100_sxm", *key[1:]): s for key, s in read_vtrain(folder, "A100").items()}),
        ("8 × H200, PyTorch, all sizes", read_h200(folder)),
        ("8 × H200, PyTorch, from 16 MiB", {key: s for key, s in read_h200(folder).items() if key[3] >= 2**24}),
    ]
    table = []
    for name, part in others:
        table.append((name, summary(errors(part, lambda key: at(final[family_of(key[0])], key)))))
    result["vtrain_a100"] = table[1][1]
    result["h200_pytorch_from_16mib"] = table[3][1]
    show("Other tables, in no fit", table)
    return result


def score_network() -> dict[str, dict[str, float]]:
    """The model of links between machines against published runs; a run that asked for the ring is held against it."""
    groups: dict[str, list[float]] = defaultdict(list)
    for run in between_machines():
        size = "from 32 MiB" if run.nbytes >= 2**25 else "below"
        groups[f"{run.nodes} × 8 {run.gpu.split('-')[0]}, {size}"].append(run.error)
    scored = {name: summary(np.array(error)) for name, error in groups.items()}
    show("Between machines: published runs", scored.items())
    return scored


def write(curves: dict[str, Curve], result: dict[str, dict[str, float]], network: dict[str, dict[str, float]]) -> None:
    """links.toml: the part above the marker is written by hand, the rest by this script."""
    marker = "# Below this line: written by validation/fit_links.py\n"
    hand = LINKS.read_text(encoding="utf-8").split(marker)[0]
    lines = [
        hand + marker,
        "# |predicted / measured − 1|: of rows held out, of whole systems left out, of published runs between machines",
    ]
    for title, scored in (("errors", result), ("network_errors", network)):
        lines.append(f"[{title}]")
        for name, figures in scored.items():
            lines.append(f'"{name}" = {{ {", ".join(f"{key} = {value}" for key, value in figures.items())} }}')
        lines.append("")
    lines.pop()
    for family, curve in curves.items():
        lines += ["", f"[curve.{family}]", f"gpus = {list(curve.gpus)}".replace("'", '"')]
        lines += [f"link_gbs = {curve.link_gbs:g}", f'fabric = "{curve.fabric}"']
        for kind, tables in curve.seconds_at.items():
            lines.append(f"[curve.{family}.{kind}]  # µs by ranks")
            for ranks, seconds in tables.items():
                lines.append(f"{ranks} = [{', '.join(f'{us:.4g}' for us in seconds * 1e6)}]")
    text = "\n".join(lines) + "\n"
    tomllib.loads(text)
    LINKS.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the measured tables")
    parser.add_argument("--save", action="store_true", help="write links.toml")
    options = parser.parse_args()
    rows = read_aiconfigurator(options.data) | read_vtrain(options.data, "V100")
    result = score(rows, options.data)
    network = score_network()  # with the curves in links.toml: save twice after a change of both
    if options.save:
        write(fit(rows), result, network)


if __name__ == "__main__":
    main()

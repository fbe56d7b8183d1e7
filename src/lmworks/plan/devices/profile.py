"""The profile of a machine: what `lmworks plan calibrate` measured there, as a TOML file that later plans read.

    format = 4
    [machine]            its name, device, memory, the cost of a launch, how noisy it was
    [made]               when, and with which versions
    [rates."gemm.bf16"]  FLOP/s (products, attention) or bytes/s (passes) at some shapes
    [links]              message sizes in bytes, and below it µs of each collective for each number of ranks
    [links.fit.….2]      α (µs) and β (ns for each byte) of a collective among 2 ranks, one column a regime
    [network]            the same between nodes, one rank of a group on each (`lmworks bench collectives`)
    [link_factors]       factors on the seconds of collectives, fitted to runs (`lmworks plan calibrate --from-runs`)

A profile may be made on one machine and read on another: that is how a laptop plans for a cluster.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from ...spec import Cluster, Gpu, SpecError, dump_toml, recognise
from .alpha_beta import COLUMNS
from .links import KINDS, Curve
from .machine import FORMAT, Machine, Rate
from .rates import gpu_rates

REMEDY = "measure it again with `lmworks plan calibrate`"
HEADER = '# Written by `lmworks plan calibrate`. Later plans read it with cluster.profile = "THIS FILE".\n'
LINK_FACTORS = ("links", "network")
SHAPES = {"gemm": 3, "attention": 2, "attention_backward": 2}  # numbers that a shape has; a pass has its bytes


@dataclass(frozen=True)
class Profile:
    machine: Machine
    links: Mapping[str, Any] | None = None  # as `Curve.from_dict` reads it, with `sizes`; None: one rank, no links
    made: Mapping[str, Any] | None = None  # date and versions, for people
    network: Mapping[str, Any] | None = None  # as `links`, between nodes
    link_factors: tuple[float, float] = (1.0, 1.0)  # on seconds inside a node and between nodes, fitted to runs

    @functools.cached_property
    def curve(self) -> Curve | None:
        """Inside a node."""
        return self.curve_of(self.links)

    @functools.cached_property
    def between(self) -> Curve | None:
        """Between nodes."""
        return self.curve_of(self.network)

    def curve_of(self, table: Mapping[str, Any] | None) -> Curve | None:
        if table is None:
            return None
        return Curve.from_dict(self.machine.name, table, np.array(table["sizes"], dtype=float))

    def to_dict(self) -> dict[str, Any]:
        machine = asdict(self.machine)
        rates = {
            kind: {"shapes": [list(point.shape) for point in points], "rates": [point.rate for point in points]}
            for kind, points in self.machine.rates.items()
        }
        kept = {key: value for key, value in machine.items() if key not in ("rates", "laws", "gains", "tag")}
        if self.machine.tag != "measured":
            kept["tag"] = self.machine.tag
        table = {"format": FORMAT, "machine": kept, "made": dict(self.made or {}), "rates": rates}
        measured = {"links": self.links, "network": self.network}
        if self.link_factors != (1.0, 1.0):
            table["link_factors"] = dict(zip(LINK_FACTORS, self.link_factors, strict=True))
        return table | {name: dict(links) for name, links in measured.items() if links is not None}

    def to_toml(self) -> str:
        return HEADER + dump_toml(self.to_dict())

    @classmethod
    def from_dict(cls, table: Mapping[str, Any], catalogue: str = "") -> Self:
        """Raises ProfileError with what is wrong. `catalogue` is a user's own, where a GPU is looked up."""
        if table.get("format") != FORMAT:
            raise ProfileError(f"its format is {table.get('format')!r}, and this version of LMWorks reads {FORMAT}")
        known = part(table, "machine", ("name", "device", "memory_bytes", "launch_s", "launch_backward_s", "noise"))
        if known["device"] not in ("cpu", "cuda"):
            raise ProfileError(f"machine.device is {known['device']!r}, not cpu or cuda")
        for name in ("memory_bytes", "launch_s", "launch_backward_s", "noise"):
            number(known[name], f"machine.{name}", least=0.0)
        rates = {kind: read_rates(kind, entry) for kind, entry in part(table, "rates", ()).items()}
        if not any(kind.startswith("gemm.") for kind in rates):
            raise ProfileError('it has no matrix products: [rates."gemm.…"] is missing')
        tag = table["machine"].get("tag", "measured")
        if tag not in ("measured", "fitted"):
            raise ProfileError(f"machine.tag is {tag!r}, not measured or fitted")
        machine = Machine(tag=tag, rates=rates, **known)
        machine = with_laws(machine, catalogue)
        links, network = (read_links(name, table[name]) if name in table else None for name in ("links", "network"))
        slower = part(table, "link_factors", LINK_FACTORS) if "link_factors" in table else {}
        inside, between = (number(slower.get(name, 1.0), f"link_factors.{name}") for name in LINK_FACTORS)
        return cls(machine, links, table.get("made", {}), network, (inside, between))


class ProfileError(ValueError):
    """What is wrong with a profile; whoever knows its file says so."""


def load_profile(path: str | Path, catalogue: str = "") -> Profile:
    try:
        return Profile.from_dict(tomllib.loads(Path(path).read_text(encoding="utf-8")), catalogue)
    except OSError as error:
        raise SpecError(f"cluster.profile: cannot read {path}: {error.strerror}") from None
    except ProfileError as error:
        raise SpecError(f"cluster.profile: {path} is no profile to plan with: {error}; {REMEDY}") from None
    except ValueError as error:  # TOML's, or of text that is not UTF-8
        raise SpecError(f"cluster.profile: {path} is not valid TOML: {error}; {REMEDY}") from None


def profile_of(cluster: Cluster) -> Profile:
    """The one that a spec names. What the spec says of its accelerators must be true of the profile."""
    found = load_profile(cluster.profile, cluster.catalogue)
    machine = found.machine
    measured = f"cluster.profile: {cluster.profile} was {machine.tag} on {machine.name}"
    if machine.tag == "fitted" and cluster.accelerator is None:
        raise SpecError(f"{measured}; name that accelerator: cluster.gpu={machine.name}")
    if cluster.device not in ("auto", machine.device):
        raise SpecError(f"{measured}, but cluster.device = {cluster.device!r}; leave one of them out")
    if cluster.accelerator and not cluster.accelerator.answers_to(machine.name):
        raise SpecError(f"{measured}, but cluster.gpu = {cluster.gpu!r}; leave one of them out")
    return found


@functools.cache
def profile_for(gpu: Gpu, path: str, catalogue: str = "") -> Profile:
    """Of a GPU that a plan is for."""
    found = load_profile(path, catalogue)
    if not gpu.answers_to(found.machine.name):
        raise SpecError(
            f"cluster.profile: {path} was measured on {found.machine.name}, and this plan is for {gpu.name}"
        )
    return found


def with_laws(machine: Machine, catalogue: str) -> Machine:
    """What was not measured of a GPU that the catalogue knows, its catalogue rates answer."""
    gpu = recognise(machine.name, catalogue) if machine.device == "cuda" else None
    return machine.fitted_launch(gpu_rates(gpu)) if gpu and gpu.bandwidth_gbs else machine


# --- reading with care: a profile is a file that people copy and edit ------------------------------------------


def part(table: Mapping[str, Any], name: str, keys: tuple[str, ...]) -> dict[str, Any]:
    found = table.get(name)
    if not isinstance(found, Mapping):
        raise ProfileError(f"[{name}] is missing")
    for key in keys:
        if key not in found:
            raise ProfileError(f"{name}.{key} is missing")
    return {key: found[key] for key in keys} if keys else dict(found)


def number(value: Any, name: str, least: float = 1e-12) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ProfileError(f"{name} has {value!r}, which is no number")
    if value < least:
        raise ProfileError(f"{name} has {value}, which no machine does")
    return value


def numbers(values: Any, name: str) -> list[float]:
    if not isinstance(values, list) or not values:
        raise ProfileError(f"{name} is not a list of numbers")
    return [number(value, name) for value in values]


def read_rates(kind: str, entry: Any) -> tuple[Rate, ...]:
    name = f"rates.{kind}"
    table = part({name: entry}, name, ("shapes", "rates"))
    rates = numbers(table["rates"], f"{name}.rates")
    shapes, size = table["shapes"], SHAPES.get(kind.partition(".")[0], 1)
    if not isinstance(shapes, list) or len(shapes) != len(rates):
        raise ProfileError(f"{name} has not as many shapes as rates")
    points = []
    for shape, rate in zip(shapes, rates, strict=True):
        sizes = numbers(shape, f"{name}.shapes")
        if len(sizes) != size:
            raise ProfileError(f"{name}: the shape {shape} should have {size} numbers")
        points.append(Rate(tuple(sizes), rate))
    return tuple(points)


def read_links(name: str, table: Any) -> dict[str, Any]:
    """`name`: links or network."""
    known = part({name: table}, name, ("gpus", "link_gbs", "fabric", "sizes"))
    sizes = numbers(known["sizes"], f"{name}.sizes")
    if sizes != sorted(set(sizes)) or len(sizes) < 2:
        raise ProfileError(f"{name}.sizes must grow, from at least two")
    measured = {kind: dict(table[kind]) for kind in KINDS if isinstance(table.get(kind), Mapping)}
    if "all-reduce" not in measured:
        raise ProfileError(f"{name}.all-reduce is missing: what was not measured is priced like it")
    for kind, by_ranks in measured.items():
        for ranks, times in by_ranks.items():
            check_ranks(ranks, f"{name}.{kind}")
            if len(numbers(times, f"{name}.{kind}.{ranks}")) != len(sizes):
                raise ProfileError(f"{name}.{kind}.{ranks} has not as many times as there are sizes")
    extra = {"fit": read_fits(f"{name}.fit", table["fit"], measured)} if "fit" in table else {}
    return {**known, "tag": "measured", **measured, **extra}


def check_ranks(ranks: Any, name: str) -> None:
    if not (str(ranks).isascii() and str(ranks).isdecimal()) or int(ranks) < 2:
        raise ProfileError(f"{name}: {ranks!r} is no number of ranks")


def read_fits(name: str, table: Any, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of `alpha_beta.COLUMNS`, a regime in each row."""
    found: dict[str, Any] = {}
    for kind, by_ranks in part({name: table}, name, ()).items():
        if not isinstance(by_ranks, Mapping) or not set(by_ranks) <= set(measured.get(kind, ())):
            raise ProfileError(f"{name}.{kind}: such a collective was not measured among as many ranks")
        for ranks, fit in by_ranks.items():
            columns = part({f"{name}.{kind}.{ranks}": fit}, f"{name}.{kind}.{ranks}", COLUMNS)
            for column, values in columns.items():
                if not isinstance(values, list) or len(values) != len(columns["above"]) or not values:
                    raise ProfileError(f"{name}.{kind}.{ranks}.{column} has not one number a regime")
                for value in values:
                    number(value, f"{name}.{kind}.{ranks}.{column}", least=0.0)
            found.setdefault(kind, {})[ranks] = columns
    return found

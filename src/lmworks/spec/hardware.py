"""Accelerators and clusters: datasheet figures with their source, and room for your own.

`hardware.toml` beside this file is the catalogue. A user's own file has the same form and is named in
`cluster.catalogue`; an entry there wins over one of the same name here.
"""

from __future__ import annotations

import functools
import math
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from .errors import SpecError, did_you_mean
from .schema import Section, opt

CATALOGUE = Path(__file__).with_name("hardware.toml")
# nvswitch: any pair at the full rate; mesh: a link for each pair; bridge: pairs, the rest over PCIe.
FABRICS = ("nvswitch", "mesh", "bridge", "pcie", "torus")
NETWORKS = ("infiniband", "roce", "efa", "ethernet")


@dataclass(frozen=True)
class Gpu(Section):
    """One accelerator. 0 means unknown: a figure nobody published here is never made up. GB = 1e9 bytes."""

    section: ClassVar[str] = "gpu"

    name: str = opt("", "how the catalogue calls it")
    alias: str = opt("", "short names that `parse_cluster` takes too, with spaces between them")
    match: str = opt("", "how the name that the driver reports ends, to recognise it")
    fp32_tflops: float = opt(0.0, "dense peak without tensor cores", ge=0)
    bf16_tflops: float = opt(0.0, "dense peak", ge=0)
    fp16_tflops: float = opt(0.0, "dense peak", ge=0)
    fp8_tflops: float = opt(0.0, "dense peak", ge=0)
    fp4_tflops: float = opt(0.0, "dense peak", ge=0)
    memory_gb: float = opt(0.0, "device memory", ge=0)
    bandwidth_gbs: float = opt(0.0, "device memory bandwidth", ge=0)
    link_gbs: float = opt(0.0, "link to its neighbours in the node, one direction, all its lanes", ge=0)
    fabric: str = opt("pcie", "what joins it to its neighbours", choices=FABRICS)
    nvls: bool = opt(False, "its switches add up and copy to all ranks of an all-reduce (NVLS)")
    per_node: int = opt(8, "accelerators in the usual machine", ge=1)
    domain: int = opt(0, "accelerators that its links join, where that is more than a machine", ge=0)
    nic_gbs: float = opt(0.0, "network between machines for each accelerator, one direction", ge=0)
    host_gbs: float = opt(0.0, "link to the memory of the host, one direction", ge=0)
    tdp_w: float = opt(0.0, "board power", ge=0)
    price_hour: float = opt(0.0, "$ an hour for one", ge=0)
    notes: str = opt("", "where sources disagree, or a figure is derived")
    source: str = opt("", "where the figures come from")

    def peak_flops(self, dtype: str) -> float | None:
        """Dense peak in FLOP/s for fp32, bf16, fp16, fp8 or fp4; None where it is unknown."""
        tflops: float = getattr(self, f"{dtype}_tflops")
        return tflops * 1e12 or None

    def answers_to(self, device_name: str) -> bool:
        """Whether this is what the driver calls a device: whole words at the end of the name; or its own name."""
        if device_name == self.name:
            return True
        return bool(self.match and re.search(rf"(?i)\b{re.escape(self.match)}$", device_name))


@functools.cache
def catalogue(own: str = "") -> dict[str, Gpu]:
    """Every known accelerator by name, the user's own file included."""
    gpus: dict[str, Gpu] = {}
    for path in [CATALOGUE, *([Path(own)] if own else [])]:
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise SpecError(f"cluster.catalogue: cannot read {path}: {error.strerror}") from None
        except ValueError as error:  # TOML's, or of text that is not UTF-8
            raise SpecError(f"cluster.catalogue: {path} is not valid TOML: {error}") from None
        for name, figures in tables.items():
            try:
                gpus[name] = Gpu.from_dict(figures).replace(name=name)
            except SpecError as error:
                raise SpecError(f"cluster.catalogue: {path}, [{name}]: {error}") from None
    return gpus


def recognise(device_name: str, own: str = "") -> Gpu | None:
    """The catalogue's entry for what the driver calls a device, the longest match winning.

    Whole words at the end of the name: an H200 is not an H20, and a laptop's chip or a MIG slice, which say so
    after the name, is not the card. No entry is better than the figures of another one.
    """
    fitting = [gpu for gpu in catalogue(own).values() if gpu.answers_to(device_name)]
    return max(fitting, key=lambda gpu: len(gpu.match), default=None)


@dataclass(frozen=True)
class Cluster(Section):
    """The machines of a run."""

    section: ClassVar[str] = "cluster"

    gpu: str = opt("auto", "an accelerator of the catalogue (auto: recognise the one that is there)")
    nodes: int = opt(1, "machines", ge=1)
    gpus_per_node: int = opt(1, "accelerators in one machine", ge=1)
    device: str = opt("auto", "where to run", choices=("auto", "cpu", "cuda"))
    fabric: str = opt("auto", "what joins accelerators in a machine (auto: as usual)", choices=("auto", *FABRICS))
    domain: int = opt(0, "accelerators that these links join (0: as usual, a machine or a rack)", ge=0)
    network: str = opt("infiniband", "what joins machines", choices=NETWORKS)
    nic_gbs: float = opt(0.0, "network for each accelerator, GB/s in one direction (0: as usual)", ge=0)
    price_hour: float = opt(0.0, "$ an hour for one accelerator (0: the catalogue's)", ge=0)
    catalogue: str = opt("", "a TOML file with accelerators of your own")
    profile: str = opt("", "what `lmworks plan calibrate` measured on such a machine: its TOML file")

    def check(self) -> None:
        known = catalogue(self.catalogue)
        if self.gpu != "auto" and self.gpu not in known:
            try:
                self.derive("gpu", find_gpu_name(self.gpu, self.catalogue))
            except SpecError as error:
                raise SpecError(f"cluster.gpu: {error}") from None

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def accelerator(self) -> Gpu | None:
        """The named accelerator; None for auto, which only a machine can answer."""
        return None if self.gpu == "auto" else catalogue(self.catalogue)[self.gpu]

    def filled(self, ranks: int) -> Cluster:
        """With a place for each rank: machines that are not described have as many accelerators as is usual."""
        gpu = self.accelerator
        if gpu is None or self.gpus != 1 or ranks == 1:
            return self
        each = min(ranks, gpu.per_node)
        return self.replace(nodes=-(-ranks // each), gpus_per_node=each)


def find_gpu_name(text: str, own: str = "") -> str:
    """The catalogue's name for what a user types: any case, spaces or underscores for dashes, or a short name."""
    known = catalogue(own)
    spellings = {spelling(name): name for name in known}
    spellings |= {short: name for name, gpu in known.items() for short in gpu.alias.split()}
    if found := spellings.get(spelling(text)):
        return found
    shortest = [(gpu.alias or spelling(name)).split()[0] for name, gpu in known.items()]
    raise SpecError(f"{text!r} is not in the catalogue of accelerators{did_you_mean(spelling(text), shortest)}")


def spelling(name: str) -> str:
    return re.sub(r"[\s_]+", "-", name.strip().lower())


CLUSTER = re.compile(
    r"(?i)(?:(?P<first>[-+]?[0-9.]+)\s*[x×*]\s*)?(?:(?P<second>[-+]?[0-9.]+)\s*[x×*]\s*)?(?P<gpu>[a-z].*)"
)


def parse_cluster(text: str, own: str = "") -> Cluster:
    """A cluster as people write it: 256xh100, 2x8xa100 (2 machines of 8), h200 (one).

    Machines have as many accelerators as the product usually has; fewer than that are one machine.
    """
    parts = CLUSTER.fullmatch(text.strip())
    if not parts:
        raise SpecError(f"cluster {text!r}: write COUNTxGPU, e.g. 8xh100, or NODESxCOUNTxGPU, e.g. 2x8xh100")
    check_count_first(text, own)
    name = find_gpu_name(parts["gpu"], own)
    counts = [read_count(text, parts[key]) for key in ("first", "second") if parts[key]]
    if len(counts) == 2:
        return Cluster(gpu=name, nodes=counts[0], gpus_per_node=counts[1], catalogue=own)
    count, usual = counts[0] if counts else 1, catalogue(own)[name].per_node
    if count > usual and count % usual:
        gpu, below, even = parts["gpu"].strip(), count - count % usual, math.gcd(count, usual)
        raise SpecError(
            f"cluster {text!r}: {count} do not fill machines of {usual}; {below}x{gpu} or {below + usual}x{gpu} would, "
            f"and {count // even}x{even}x{gpu} are smaller machines"
        )
    per_node = min(count, usual)
    return Cluster(gpu=name, nodes=count // per_node, gpus_per_node=per_node, catalogue=own)


BACKWARDS = re.compile(r"(?P<gpu>.+?)\s*[x×*:]\s*(?P<counts>[0-9]+(?:\s*[x×*:]\s*[0-9]+)?)")


def check_count_first(text: str, own: str) -> None:
    """h100x256: where this is an accelerator and a count, say how it is written."""
    parts = BACKWARDS.fullmatch(text.strip())
    known = {word for name, gpu in catalogue(own).items() for word in (spelling(name), *gpu.alias.split())}
    if parts and spelling(parts["gpu"]) in known and spelling(text) not in known:
        counts = "x".join(re.findall("[0-9]+", parts["counts"]))
        raise SpecError(f"cluster {text!r}: counts come first; did you mean '{counts}x{parts['gpu']}'?")


def read_count(text: str, digits: str) -> int:
    if not digits.isdecimal() or int(digits) == 0:
        raise SpecError(f"cluster {text!r}: {digits} is not a count; it must be a whole number, at least 1")
    return int(digits)

"""Accelerators and clusters: datasheet figures with their source, and room for your own.

`hardware.toml` beside this file is the catalogue. A user's own file has the same form and is named in
`cluster.catalogue`; an entry there wins over one of the same name here.
"""

from __future__ import annotations

import functools
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from .errors import SpecError, did_you_mean
from .schema import Section, opt

CATALOGUE = Path(__file__).with_name("hardware.toml")


@dataclass(frozen=True)
class Gpu(Section):
    """One accelerator. 0 means unknown: a figure nobody published here is never made up. GB = 1e9 bytes."""

    section: ClassVar[str] = "gpu"

    name: str = opt("", "how the catalogue calls it")
    match: str = opt("", "how the name that the driver reports ends, to recognise it")
    fp32_tflops: float = opt(0.0, "dense peak without tensor cores", ge=0)
    bf16_tflops: float = opt(0.0, "dense peak", ge=0)
    fp16_tflops: float = opt(0.0, "dense peak", ge=0)
    fp8_tflops: float = opt(0.0, "dense peak", ge=0)
    fp4_tflops: float = opt(0.0, "dense peak", ge=0)
    memory_gb: float = opt(0.0, "device memory", ge=0)
    bandwidth_gbs: float = opt(0.0, "device memory bandwidth", ge=0)
    link_gbs: float = opt(0.0, "link to its neighbours in the node, one direction", ge=0)
    tdp_w: float = opt(0.0, "board power", ge=0)
    notes: str = opt("", "where sources disagree, or a figure is derived")
    source: str = opt("", "where the figures come from")

    def peak_flops(self, dtype: str) -> float | None:
        """Dense peak in FLOP/s for fp32, bf16, fp16, fp8 or fp4; None where it is unknown."""
        tflops: float = getattr(self, f"{dtype}_tflops")
        return tflops * 1e12 or None


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
    ends = {gpu: rf"(?i)\b{re.escape(gpu.match)}$" for gpu in catalogue(own).values() if gpu.match}
    fitting = [gpu for gpu, end in ends.items() if re.search(end, device_name)]
    return max(fitting, key=lambda gpu: len(gpu.match), default=None)


@dataclass(frozen=True)
class Cluster(Section):
    """The machines of a run."""

    section: ClassVar[str] = "cluster"

    gpu: str = opt("auto", "an accelerator of the catalogue (auto: recognise the one that is there)")
    nodes: int = opt(1, "machines", ge=1)
    gpus_per_node: int = opt(1, "accelerators in one machine", ge=1)
    device: str = opt("auto", "where to run", choices=("auto", "cpu", "cuda"))
    catalogue: str = opt("", "a TOML file with accelerators of your own")

    def check(self) -> None:
        known = catalogue(self.catalogue)
        if self.gpu != "auto" and self.gpu not in known:
            raise SpecError(f"cluster.gpu = {self.gpu!r} is not in the catalogue{did_you_mean(self.gpu, known)}")

    @property
    def accelerator(self) -> Gpu | None:
        """The named accelerator; None for auto, which only a machine can answer."""
        return None if self.gpu == "auto" else catalogue(self.catalogue)[self.gpu]

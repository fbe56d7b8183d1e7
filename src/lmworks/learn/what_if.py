"""What happens if: memory and step time of a layout by the planner, beside its neighbours."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..plan.cluster_request import ClusterRequest, run_on_cluster
from ..plan.devices.machine import Machine
from ..plan.memory.reserve import RISK, oom_probability, usable
from ..plan.memory.sheet import run_budget
from ..plan.predict import time_of
from ..spec.errors import SpecError

GPUS = {"h100": "H100", "a100": "A100 80 GB", "h200": "H200", "b200": "B200"}
CHOICES: dict[str, tuple[str, ...]] = {
    "model": ("gpt2-small", "llama3-1b", "llama3-8b", "llama3-70b"),
    "gpu": tuple(GPUS),
    "ranks": ("1", "2", "4", "8", "16", "32", "64", "128", "256", "512"),
    "zero": ("0", "1", "2", "3"),
    "pp": ("1", "2", "4", "8"),
    "tp": ("1", "2", "4", "8"),
    "micro_batch": ("1", "2", "4", "8", "16"),
    "micro_batches": ("1", "2", "4", "8", "16", "32", "64"),
    "recompute": ("none", "selective", "full"),
}
# What is varied → its title.
VARIED = {"zero": "ZeRO stage", "micro_batches": "Micro-batches of a step", "ranks": "World size"}
SEQ = 2048


@dataclass(frozen=True)
class Setting:
    model: str = "llama3-8b"
    gpu: str = "h100"
    ranks: str = "8"
    zero: str = "1"
    pp: str = "1"
    tp: str = "1"
    micro_batch: str = "1"
    micro_batches: str = "4"  # of a rank in a step
    recompute: str = "none"

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Setting:
        for name, value in given.items():
            if value not in CHOICES.get(name, ()):
                raise SpecError(f"{name} = {value!r} is no choice here")
        return cls(**given)

    def but(self, **changed: str) -> Setting:
        return replace(self, **changed)

    @property
    def data_parallel(self) -> int:
        inner = int(self.tp) * int(self.pp)
        if int(self.ranks) % inner:
            raise SpecError(f"tp × pp = {inner} does not divide {self.ranks} ranks")
        return int(self.ranks) // inner

    @property
    def request(self) -> ClusterRequest:
        batch = int(self.micro_batch) * int(self.micro_batches) * self.data_parallel
        return ClusterRequest(
            cluster=f"{self.ranks}x{self.gpu}", seq=min(SEQ, 1024 if self.model == "gpt2-small" else SEQ),
            micro_batch=int(self.micro_batch), global_batch=batch, zero=int(self.zero), tp=int(self.tp),
            pp=int(self.pp), recompute=self.recompute,
        )  # fmt: skip

    @property
    def command(self) -> str:
        """What prints the same memory."""
        asked = self.request
        return (
            f"lmworks plan memory {self.model} --cluster {asked.cluster} --zero {self.zero} --tp {self.tp} "
            f"--pp {self.pp} --seq {asked.seq} --micro-batch {self.micro_batch} --global-batch {asked.global_batch} "
            f"--recompute {self.recompute}"
        )


@dataclass(frozen=True)
class Answer:
    """Of one rank: bytes and seconds."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    reserved: float  # at the peak, by the allocator
    usable: float
    oom: float  # probability of running out of memory
    step_s: float
    sends_s: float  # of the step
    idle_s: float
    tokens_per_s: float  # all ranks together

    @property
    def fit(self) -> str:
        return "fits" if self.oom <= RISK else "does not fit" if self.oom > 1 - RISK else "may not fit"


@functools.lru_cache(1024)
def answer(setting: Setting) -> Answer:
    run = run_on_cluster(setting.model, (), setting.request)
    gpu = run.cluster.accelerator
    assert gpu is not None
    sheet, time = run_budget(run), time_of(run, Machine.of(gpu))
    if time is None:
        raise SpecError(f"the step time on {gpu.name} is not known")
    return Answer(
        weights=float(sheet.parameters + sheet.master),
        gradients=float(sheet.gradients),
        optimizer=float(sheet.optimizer),
        activations=float(sheet.activations + sheet.logits),
        reserved=float(sheet.reserved),
        usable=float(usable(gpu)),
        oom=float(oom_probability(float(sheet.reserved), gpu)),
        step_s=time.total,
        sends_s=sum(time.parts.get(axis, 0.0) for axis in ("dp", "tp", "cp", "ep", "pp")),
        idle_s=time.parts.get("bubble", 0.0),
        tokens_per_s=time.tokens_per_s,
    )


def around(setting: Setting, varied: str) -> dict[str, Answer | str]:
    """By each value of what is varied; a text where the planner refuses it."""
    found: dict[str, Answer | str] = {}
    for value in CHOICES[varied]:
        try:
            found[value] = answer(setting.but(**{varied: value}))
        except SpecError as error:
            found[value] = str(error)
    return found

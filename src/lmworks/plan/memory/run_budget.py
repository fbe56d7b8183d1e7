"""The budget of a run of our own trainer: the memory sheet's rows by kind, with weights and states to the byte."""

from __future__ import annotations

from ...spec import Grid, RunSpec
from ..exact.residency import resident
from .budget import Budget
from .sheet import MemorySheet, memory

LOGITS = ("loss: chunk of logits",)
BUFFERS = (
    "weight casts", "gathered weights", "messages", "pipeline buffers", "padding", "embedding gradient",
    "gradients that wait", "loss: gradients", "cuBLAS workspaces",
)  # fmt: skip
STATE = ("parameters", "master weights", "optimizer states")


def sheet(spec: RunSpec, stage: int = 0) -> MemorySheet:
    """Rows of a pipeline rank on a GPU: the first of its other axes, which has the most rows of every weight."""
    return memory(spec, "cuda", Grid.of(spec.parallel).rank(pp=stage))


def budget_of(spec: RunSpec, stage: int | None = None) -> Budget:
    """Of one pipeline rank, or of the one that needs most."""
    if stage is None:
        return max((budget_of(spec, rank) for rank in range(spec.parallel.pp)), key=lambda one: float(one.allocated))
    rank = Grid.of(spec.parallel).rank(pp=stage)
    found = sheet(spec, stage)
    rows = found.rows
    there = sum(row.bytes for row in rows if row.name == "gradients")
    state = resident(spec, rank)
    return Budget(
        parameters=state.parameters,
        gradients=state.gradients,
        master=state.master,
        optimizer=state.optimizer,
        activations=sum(row.bytes for row in rows if row.name not in (*LOGITS, *BUFFERS, *STATE, "gradients")),
        logits=sum(row.bytes for row in rows if row.name in LOGITS),
        buffers=sum(row.bytes for row in rows if row.name in BUFFERS) + max(0, there - state.gradients),
        absent=max(0, state.gradients - there),
        left=0,
        host=found.host,
    )

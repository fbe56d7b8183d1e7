"""Which fault may strike in which phase, and what must come of it.

    same      the job ends bitwise where the uninterrupted one ends: weights, optimizer, random generators, losses,
              and the samples that each of its steps was given
    close     as that, on fewer ranks: the same samples, numbers within `TOLERANCE` (sums are added up in another order)
    stopped   the job ends by itself, and says why; once that is mended, `lmworks resume` ends as `same`

`cause` is a pattern that must be found in what the job printed or recorded in events.jsonl, whatever the verdict; in it
{rank}, {step} and {file} are those of the strike.
"""

from __future__ import annotations

from dataclasses import dataclass

TIMEOUT_S = 5.0  # of a collective, in every trial
TOLERANCE = 1e-5  # relative, of every loss, and of every weight tensor by its norm

LAYOUTS: dict[str, tuple[str, ...]] = {
    "one": (),
    "ddp2": ("parallel.dp=2",),
    "ddp3": ("parallel.dp=3", "data.global_batch=6"),
    "fsdp2": ("parallel.dp=2", "parallel.strategy=fsdp2"),
    "tp2": ("parallel.tp=2",),
    "pp2": ("parallel.pp=2",),
    "zero2": ("parallel.dp=2", "parallel.strategy=zero", "parallel.zero=2"),
    "fsdp2-tp2": ("parallel.dp=2", "parallel.strategy=fsdp2", "parallel.tp=2"),
}
SEVERAL = tuple(name for name in LAYOUTS if name != "one")
BESIDE = tuple(name for name in SEVERAL if name != "pp2")  # a rank has another beside it that does the same work
SHRINKING = ("ddp2", "fsdp2")  # to one rank

# Of three copies two are right; of two that differ neither can be told to be.
CORRUPT = r'"corrupt".*("rank": {rank},|"ranks": \[0, 1\])'

# Where the two even meet, gloo itself sees it and ends the process on the spot, with words of its own.
MISMATCH = r"rank {rank} entered all_gather|distributed collective mismatch"

STEP = ("data", "forward", "backward", "reduce", "optimizer")
SAVE = ("save.stage", "save.write", "save.seal", "save.commit", "save.prune")
LOAD = ("load.find", "load.read")


@dataclass(frozen=True)
class Fault:
    name: str
    what: str
    phases: tuple[str, ...]
    verdict: str
    verdict_async: str = ""  # where an asynchronous save makes it another
    cause: str = ""
    named_in: tuple[str, ...] = ()  # the phases in which the cause must be named, if not in all
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    saves: tuple[str, ...] = ("sync", "async")
    keys: tuple[str, ...] = ()  # changes to the spec, for the fault to be looked for
    exit_code: int | None = None  # of every rank, where one is promised
    saves_last: bool = False  # struck in steps it saves the last one that it takes, and says so in plain words
    command: bool = False  # only the real command has what is struck
    lead: bool = False  # rank 0 does it: the others must come to the place later than it
    sudden: bool = False  # strikes from outside, so it may do so in the middle of a phase too
    but: tuple[tuple[str, str], ...] = ()  # layouts and phases in which nothing tells the cause

    def verdict_of(self, saves: str) -> str:
        return self.verdict_async or self.verdict if saves == "async" else self.verdict

    def layouts_in(self, phase: str) -> tuple[str, ...]:
        """A pipeline has no phase of its own for the backward pass: its stages do both in turns."""
        never = (("pp2", "backward"), *self.but)
        return tuple(name for name in self.layouts if (name, phase) not in never)


FAULTS = (
    Fault("kill-rank", "kill -9 of a rank", ("init", *STEP, *SAVE, *LOAD), "same", sudden=True),
    Fault("kill-agent", "kill -9 of the agent", ("forward", "save.write", "save.commit", "load.read"), "same",
          cause=r"the agent that started the ranks was killed", named_in=("forward", "save.write", "save.commit"),
          layouts=("ddp2", "pp2"), command=True, saves_last=True),
    Fault("kill-writer", "kill -9 of the asynchronous writer", ("save.write", "save.seal", "save.commit"), "same",
          cause=r"writer", saves=("async",)),
    Fault("shrink", "kill -9 of a rank, and it does not come back", ("forward", "save.commit"), "close",
          layouts=SHRINKING, keys=("fault.elastic=true",)),
    Fault("sigstop", "SIGSTOP of a rank", ("init", *STEP, "save.write", "save.commit", *LOAD), "stopped",
          cause=r"rank {rank} is stopped", layouts=SEVERAL),
    Fault("sigterm", "SIGTERM, as a preemption sends it", ("init", *STEP, *SAVE, *LOAD), "stopped",
          cause=r"SIGTERM", exit_code=75),
    Fault("sigterm-late", "SIGTERM, and the step does not end in time", ("forward", "optimizer"), "stopped",
          cause=r"SIGTERM", exit_code=75, keys=("fault.deadline_s=1",)),
    Fault("enospc", "no space left on the disk", ("save.write", "save.seal", "save.commit"), "stopped",
          cause=r"No space left on device|File too large"),
    Fault("eio", "an I/O error of the disk", ("save.write", "save.seal", "save.commit"), "stopped",
          verdict_async="same", cause=r"Input/output error"),
    Fault("truncate", "a file of the checkpoint is cut short", ("save.commit", "save.prune", *LOAD), "same",
          cause=r"refused.*{file}", named_in=("save.prune", "load.find"), lead=True),
    Fault("flip", "a bit of a checkpoint flips", ("save.commit", "save.prune", *LOAD), "same",
          cause=r"refused.*{file}", named_in=("save.prune", "load.find"), lead=True),
    Fault("missing", "a file of the checkpoint is gone", ("save.commit", "save.prune", *LOAD), "same",
          cause=r"refused.*{file}", named_in=("save.prune", "load.find"), lead=True),
    Fault("nan-loss", "NaN in the forward pass", ("forward",), "stopped", cause=r"step {step}: loss nan"),
    Fault("nan-gradient", "NaN in a gradient", ("reduce",), "stopped",
          cause=r"step {step}: gradient norm nan, first in the gradient of \w+"),
    Fault("flip-parameter", "a bit of a parameter flips on one replica", ("data", "forward", "optimizer"), "stopped",
          cause=CORRUPT, layouts=("ddp2", "ddp3"), keys=("health.hash_every=1",)),
    Fault("flip-gradient", "a bit of a gradient flips on one replica", ("optimizer",), "stopped",
          cause=CORRUPT, layouts=("ddp2", "ddp3"), keys=("health.hash_every=1",)),
    Fault("flip-optimizer", "a bit of the optimizer's state flips on one replica", ("data", "optimizer"), "stopped",
          cause=CORRUPT, layouts=("ddp2", "ddp3"), keys=("health.hash_every=1",)),
    Fault("slow", "a slow rank", ("data", "forward", "optimizer"), "same", cause=r"straggler.*\brank\W+{rank}\b",
          layouts=BESIDE, keys=("watch.straggler_steps=2",)),
    Fault("mismatch", "a collective that the other ranks do not call", ("forward", "reduce", "optimizer"), "stopped",
          cause=MISMATCH, layouts=SEVERAL, but=(("pp2", "forward"),)),  # gloo keeps no record of a pipeline's messages
    Fault("data-missing", "a shard of tokens is gone", ("start", "data"), "stopped", cause=r"{file} is missing",
          lead=True),
    Fault("data-corrupt", "a bit of a shard of tokens flips", ("start", "data"), "stopped", cause=r"{file} is damaged",
          lead=True),
)  # fmt: skip
BY_NAME = {fault.name: fault for fault in FAULTS}
PAIRS = tuple((fault.name, phase) for fault in FAULTS for phase in fault.phases)

"""The legal (fault, phase) pairs and the expected verdict of each.

    same      the job ends bitwise equal to the reference run: weights, optimizer state, random generators, losses,
              and the samples of every step
    close     the same on fewer ranks: equal samples, numbers within `TOLERANCE` (sums are added in another order)
    stopped   the job exits and reports the cause; after a repair, `lmworks resume` ends as `same`

`cause` is a pattern that must match the output or events.jsonl of the job, whatever the verdict. {rank}, {step} and
{file} stand for those of the injection.

Trial number n of a seed. Sampling is a pure function, so any trial can be repeated alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...spec import RunSpec, SpecError
from ...spec.align import METHODS, ONLINE_METHODS
from ...spec.errors import did_you_mean
from ...spec.load import apply_overrides
from .fault_injection import Injection

TIMEOUT_S = 5.0  # of collectives, in every trial
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
MULTI_RANK = tuple(name for name in LAYOUTS if name != "one")
WITH_PEER = tuple(name for name in MULTI_RANK if name != "pp2")  # every rank has a peer that does the same work
SHRINKING = ("ddp2", "fsdp2")  # to one rank

# Of three replicas a majority is right; of two that differ, either may be the corrupt one.
CORRUPT = r'"corrupt".*("rank": {rank},|"ranks": \[0, 1\])'

# If both collectives meet, gloo detects the mismatch and aborts the process with its own message.
MISMATCH = r"rank {rank} entered all_gather|distributed collective mismatch"

STEP = ("data", "forward", "backward", "reduce", "optimizer")
SAVE = ("save.stage", "save.write", "save.seal", "save.commit", "save.prune")
LOAD = ("load.find", "load.read")
ROUND = ("hand_over", "generate", "reward", "score")  # of online methods, before the first step of a round


@dataclass(frozen=True)
class Fault:
    name: str
    description: str
    phases: tuple[str, ...]
    verdict: str
    verdict_async: str = ""  # with asynchronous saves, if it differs
    cause: str = ""
    reported_in: tuple[str, ...] = ()  # the phases in which the cause must be reported, if not in all
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    saves: tuple[str, ...] = ("sync", "async")
    overrides: tuple[str, ...] = ()  # of the spec: what turns the detection on
    exit_code: int | None = None  # of every rank, where one is specified
    saves_on_exit: bool = False  # injected in a step, the job saves that step before it exits
    command: bool = False  # needs the real command: forked ranks have no agent
    rank0_only: bool = False  # injected by rank 0: the other ranks must reach the phase later
    external: bool = False  # comes from outside the rank, so it may also hit the middle of a phase
    excluded: tuple[tuple[str, str], ...] = ()  # (layout, phase) pairs in which the cause cannot be detected

    def layouts_for(self, phase: str, method: str = "") -> tuple[str, ...]:
        """A pipeline has no phase "backward": its stages interleave forward and backward passes."""
        never = (("pp2", "backward"), *self.excluded)
        possible = [name for name in self.layouts if name != "pp2" or method in ("", "sft")]
        return tuple(name for name in possible if (name, phase) not in never)

    def phases_of(self, method: str) -> tuple[str, ...]:
        """Those of a job of this post-training method. Its examples are read once, at the start: no data faults."""
        if not method:
            return self.phases
        if self.name.startswith("data"):
            return ()
        return (*self.phases, *(ROUND if method in ONLINE_METHODS and self.name in ROUND_FAULTS else ()))


FAULTS = (
    Fault("kill-rank", "kill -9 of a rank", ("init", *STEP, *SAVE, *LOAD), "same", external=True),
    Fault("kill-agent", "kill -9 of the agent", ("forward", "save.write", "save.commit", "load.read"), "same",
          cause=r"the agent that started the ranks was killed", reported_in=("forward", "save.write", "save.commit"),
          layouts=("ddp2", "pp2"), command=True, saves_on_exit=True),
    Fault("kill-writer", "kill -9 of the asynchronous writer", ("save.write", "save.seal", "save.commit"), "same",
          cause=r"writer", saves=("async",)),
    Fault("shrink", "kill -9 of a rank, and it does not come back", ("forward", "save.commit"), "close",
          layouts=SHRINKING, overrides=("fault.elastic=true",)),
    Fault("sigstop", "SIGSTOP of a rank", ("init", *STEP, "save.write", "save.commit", *LOAD), "stopped",
          cause=r"rank {rank} is stopped", layouts=MULTI_RANK),
    Fault("sigterm", "SIGTERM, as a preemption sends it", ("init", *STEP, *SAVE, *LOAD), "stopped",
          cause=r"SIGTERM", exit_code=75),
    Fault("sigterm-late", "SIGTERM, and the step does not end in time", ("forward", "optimizer"), "stopped",
          cause=r"SIGTERM", exit_code=75, overrides=("fault.deadline_s=1",)),
    Fault("enospc", "no space left on the disk", ("save.write", "save.seal", "save.commit"), "stopped",
          cause=r"No space left on device|File too large"),
    Fault("eio", "an I/O error of the disk", ("save.write", "save.seal", "save.commit"), "stopped",
          verdict_async="same", cause=r"Input/output error"),
    Fault("truncate", "a file of the checkpoint is cut short", ("save.commit", "save.prune", *LOAD), "same",
          cause=r"refused.*{file}", reported_in=("save.prune", "load.find"), rank0_only=True),
    Fault("flip", "a bit of a checkpoint flips", ("save.commit", "save.prune", *LOAD), "same",
          cause=r"refused.*{file}", reported_in=("save.prune", "load.find"), rank0_only=True),
    Fault("missing", "a file of the checkpoint is gone", ("save.commit", "save.prune", *LOAD), "same",
          cause=r"refused.*{file}", reported_in=("save.prune", "load.find"), rank0_only=True),
    Fault("nan-loss", "NaN in the forward pass", ("forward",), "stopped", cause=r"step {step}: loss nan"),
    Fault("nan-gradient", "NaN in a gradient", ("reduce",), "stopped",
          cause=r"step {step}: gradient norm nan, first in the gradient of \w+"),
    Fault("flip-parameter", "a bit of a parameter flips on one replica", ("data", "forward", "optimizer"), "stopped",
          cause=CORRUPT, layouts=("ddp2", "ddp3"), overrides=("health.hash_every=1",)),
    Fault("flip-gradient", "a bit of a gradient flips on one replica", ("optimizer",), "stopped",
          cause=CORRUPT, layouts=("ddp2", "ddp3"), overrides=("health.hash_every=1",)),
    Fault("flip-optimizer", "a bit of the optimizer's state flips on one replica", ("data", "optimizer"), "stopped",
          cause=CORRUPT, layouts=("ddp2", "ddp3"), overrides=("health.hash_every=1",)),
    Fault("slow", "a slow rank", ("data", "forward", "optimizer"), "same", cause=r"straggler.*\brank\W+{rank}\b",
          layouts=WITH_PEER, overrides=("watch.straggler_steps=2",)),
    Fault("mismatch", "a collective that the other ranks do not call", ("forward", "reduce", "optimizer"), "stopped",
          cause=MISMATCH, layouts=MULTI_RANK, excluded=(("pp2", "forward"),)),  # gloo does not record point-to-point
    Fault("data-missing", "a shard of tokens is gone", ("start", "data"), "stopped", cause=r"{file} is missing",
          rank0_only=True),
    Fault("data-corrupt", "a bit of a shard of tokens flips", ("start", "data"), "stopped", cause=r"{file} is damaged",
          rank0_only=True),
)  # fmt: skip
BY_NAME = {fault.name: fault for fault in FAULTS}
PAIRS = tuple((fault.name, phase) for fault in FAULTS for phase in fault.phases)
ROUND_FAULTS = ("kill-rank", "sigterm", "sigstop")


# --- trial -----------------------------------------------------------------------------------------------


STEPS, SAVE_EVERY, KEEP_LAST = 12, 2, 2
EXAMPLES, REWARDS, TEACHER = "examples.jsonl", "rewards.py", "teacher"  # of post-training jobs
KILL_STEP = 7  # a fault while loading needs a run that was killed before, after two committed checkpoints
WRITER_PHASES = ("save.write", "save.seal", "save.commit", "save.prune")  # in the writer process of asynchronous saves
COMMAND_FAULTS, COMMAND_SHARE = ("kill-rank", "sigterm", "sigstop"), 0.15  # share of these that run the real command


@dataclass(frozen=True)
class Trial:
    number: int
    seed: int
    fault: str
    phase: str
    layout: str
    saves: str  # sync, async
    job: str  # forked, command
    rank: int
    step: int
    delay_ms: float
    injection_seed: int
    repeat: str  # the command that repeats this trial
    method: str = ""  # of post-training; empty: pretraining

    @property
    def kind(self) -> Fault:
        return BY_NAME[self.fault]

    @property
    def verdict(self) -> str:
        """The expected verdict."""
        return (self.saves == "async" and self.kind.verdict_async) or self.kind.verdict

    @property
    def injections(self) -> list[Injection]:
        in_writer = self.saves == "async" and self.phase in WRITER_PHASES
        process = "writer" if in_writer else "rank"
        injection = Injection(self.fault, self.phase, self.step, self.rank, self.delay_ms, self.injection_seed, process)
        if self.phase.startswith("load"):
            return [Injection("kill-rank", "forward", KILL_STEP, self.rank), injection]
        return [injection]

    def spec(self, data: str) -> RunSpec:
        return trial_spec(self.layout, data, self.saves, self.kind.overrides, self.method)


def sample_trial(seed: int, number: int, fault: str = "", phase: str = "", method: str = "") -> Trial:
    """The first trials cover every legal (fault, phase) pair once, shuffled by the seed; later trials are random."""
    check_method(method)
    legal = [(kind.name, at) for kind in FAULTS for at in kind.phases_of(method)]
    pairs = [pair for pair in legal if fault in ("", pair[0]) and phase in ("", pair[1])]
    if not pairs:
        raise SpecError(unknown_fault_message(fault, phase, method))
    order = random.Random(f"{seed}").sample(pairs, len(pairs))
    draw = random.Random(f"{seed}/{number}")
    name, at = order[number] if number < len(order) else draw.choice(pairs)
    given = {"fault": fault, "phase": phase, "method": method}
    filters = [f"--{option} {value}" for option, value in given.items() if value]
    kind = BY_NAME[name]
    layout = draw.choice(kind.layouts_for(at, method))
    world = trial_spec(layout, "", "sync").parallel.world
    command = kind.command or (draw.random() < COMMAND_SHARE and name in COMMAND_FAULTS)
    return Trial(
        number=number,
        seed=seed,
        fault=name,
        phase=at,
        layout=layout,
        saves=draw.choice(kind.saves),
        job="command" if command else "forked",
        rank=0 if kind.rank0_only else draw.randrange(world),
        step=3 if name == "slow" else sample_step(at, draw),  # the straggler detector needs some steps
        delay_ms=draw.choice([0.0, round(draw.uniform(0, 12), 2)]) if kind.external else 0.0,
        injection_seed=draw.randrange(2**31),
        repeat=" ".join([f"lmworks prove chaos --seed {seed} --trial {number}", *filters]),
        method=method,
    )


def sample_step(phase: str, draw: random.Random) -> int:
    """Early enough that steps remain, also while the save of step 6 is written; 0 where a phase has no step."""
    if phase == "save.prune":
        return 6  # the first save after which an old checkpoint is deleted
    if phase.startswith("save"):
        return draw.choice([4, 6])
    if phase in ROUND:
        return draw.choice([3, 5])  # a round is two steps
    return draw.randint(3, 6) if "." not in phase and phase not in ("start", "init") else 0


def check_method(method: str) -> None:
    if method and method not in METHODS:
        raise SpecError(f"--method {method}: there is no such method{did_you_mean(method, METHODS)}")


def trial_spec(layout: str, data: str, saves: str, overrides: tuple[str, ...] = (), method: str = "") -> RunSpec:
    """Two layers of width 32, 12 steps of 4 sequences, a checkpoint every second step.

    Of post-training: `data` has examples.jsonl, rewards.py and the teacher of distillation; a round of an online method
    is two steps.
    """
    table: dict[str, Any] = {
        "name": "chaos",
        "model": {"preset": "tiny", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "vocab": 258},
        "data": {"path": data or "stdlib:bytes", "seq": 16, "micro_batch": 1, "global_batch": 4},
        "optim": {"steps": STEPS, "lr": 1e-2, "warmup": 2},
        "checkpoint": {"every": SAVE_EVERY, "keep": KEEP_LAST},
        "watch": {"timeout_s": TIMEOUT_S},
        "log": {"eval_every": 0, "eval_batches": 1},
    }
    asynchronous = ("checkpoint.asynchronous=true",) if saves == "async" else ()
    if method:
        table["align"] = {"method": method}
        table["data"] |= {"path": str(Path(data) / EXAMPLES), "tokenizer": "bytes", "seq": 32}
    if method == "distill":
        table["align"]["teacher"] = str(Path(data) / TEACHER)
    if method in ONLINE_METHODS:
        prompts = 12 if layout == "ddp3" else 8  # two steps of best-of-n, whose round has one answer to each prompt
        table["align"] |= {"rewards": [f"{Path(data) / REWARDS}:digits"], "max_tokens": 6, "samples": 2}
        table["align"] |= {"prompts": prompts if method == "best_of_n" else prompts // 2, "beta": 0.05}
    return RunSpec.from_dict(apply_overrides(table, [*LAYOUTS[layout], *asynchronous, *overrides]))


def unknown_fault_message(fault: str, phase: str, method: str) -> str:
    if fault and fault not in BY_NAME:
        return f"there is no fault '{fault}'{did_you_mean(fault, BY_NAME)}"
    phases = sorted({at for kind in FAULTS for at in kind.phases_of(method)})
    if phase and phase not in phases:
        return f"there is no phase '{phase}'{did_you_mean(phase, phases)}"
    possible = BY_NAME[fault].phases_of(method)
    if not possible:
        return f"'{fault}' is a fault of pretraining: leave out --method"
    return f"'{fault}' cannot be injected in the phase '{phase}', only in: {', '.join(possible)}"

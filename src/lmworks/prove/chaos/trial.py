"""Trial number n of a seed. Sampling is a pure function, so any trial can be repeated alone."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ...spec import RunSpec, SpecError
from ...spec.errors import did_you_mean
from ...spec.load import apply_overrides
from .faults import BY_NAME, LAYOUTS, PAIRS, TIMEOUT_S, Fault
from .injection_plan import Injection

STEPS, SAVE_EVERY, KEEP_LAST = 12, 2, 2
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

    @property
    def kind(self) -> Fault:
        return BY_NAME[self.fault]

    @property
    def verdict(self) -> str:
        """The expected verdict."""
        return self.kind.verdict_for(self.saves)

    @property
    def injections(self) -> list[Injection]:
        in_writer = self.saves == "async" and self.phase in WRITER_PHASES
        process = "writer" if in_writer else "rank"
        injection = Injection(self.fault, self.phase, self.step, self.rank, self.delay_ms, self.injection_seed, process)
        if self.phase.startswith("load"):
            return [Injection("kill-rank", "forward", KILL_STEP, self.rank), injection]
        return [injection]

    def spec(self, data: str) -> RunSpec:
        return trial_spec(self.layout, data, self.saves, self.kind.overrides)


def sample_trial(seed: int, number: int, fault: str = "", phase: str = "") -> Trial:
    """The first trials cover every legal (fault, phase) pair once, shuffled by the seed; later trials are random."""
    pairs = [pair for pair in PAIRS if fault in ("", pair[0]) and phase in ("", pair[1])]
    if not pairs:
        raise SpecError(unknown_fault_message(fault, phase))
    order = random.Random(f"{seed}").sample(pairs, len(pairs))
    draw = random.Random(f"{seed}/{number}")
    name, at = order[number] if number < len(order) else draw.choice(pairs)
    filters = [f"--fault {fault}"] * bool(fault) + [f"--phase {phase}"] * bool(phase)
    kind = BY_NAME[name]
    layout = draw.choice(kind.layouts_for(at))
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
    )


def sample_step(phase: str, draw: random.Random) -> int:
    """Early enough that steps remain, also while the save of step 6 is written; 0 where a phase has no step."""
    if phase == "save.prune":
        return 6  # the first save after which an old checkpoint is deleted
    if phase.startswith("save"):
        return draw.choice([4, 6])
    return draw.randint(3, 6) if "." not in phase and phase not in ("start", "init") else 0


def trial_spec(layout: str, data: str, saves: str, overrides: tuple[str, ...] = ()) -> RunSpec:
    """Two layers of width 32, 12 steps of 4 sequences, a checkpoint every second step."""
    table = {
        "name": "chaos",
        "model": {"preset": "tiny", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "vocab": 258},
        "data": {"path": data or "stdlib:bytes", "seq": 16, "micro_batch": 1, "global_batch": 4},
        "optim": {"steps": STEPS, "lr": 1e-2, "warmup": 2},
        "checkpoint": {"every": SAVE_EVERY, "keep": KEEP_LAST},
        "watch": {"timeout_s": TIMEOUT_S},
        "log": {"eval_every": 0, "eval_batches": 1},
    }
    asynchronous = ("checkpoint.asynchronous=true",) if saves == "async" else ()
    return RunSpec.from_dict(apply_overrides(table, [*LAYOUTS[layout], *asynchronous, *overrides]))


def unknown_fault_message(fault: str, phase: str) -> str:
    if fault and fault not in BY_NAME:
        return f"there is no fault '{fault}'{did_you_mean(fault, BY_NAME)}"
    phases = sorted({at for _, at in PAIRS})
    if phase and phase not in phases:
        return f"there is no phase '{phase}'{did_you_mean(phase, phases)}"
    return f"'{fault}' cannot be injected in the phase '{phase}', only in: {', '.join(BY_NAME[fault].phases)}"

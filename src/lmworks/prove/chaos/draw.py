"""Trial number n of a seed: a pure function, so that any one of them can be done again."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ...spec import RunSpec, SpecError
from ...spec.errors import did_you_mean
from ...spec.load import apply_overrides
from .faults import BY_NAME, LAYOUTS, PAIRS, TIMEOUT_S, Fault
from .injection_plan import Act

STEPS, SAVED_EVERY, KEPT = 12, 2, 2
KILLED_AT = 7  # where a fault of loading needs a run that has died before, and two committed steps
WRITTEN = ("save.write", "save.seal", "save.commit", "save.prune")  # by the writer, where a save is asynchronous
COMMANDED, COMMANDS = ("kill-rank", "sigterm", "sigstop"), 0.15  # of these, so many run the real command too


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
    draw: int
    repeat: str  # the command that does this one again

    @property
    def kind(self) -> Fault:
        return BY_NAME[self.fault]

    @property
    def verdict(self) -> str:
        """What must come of it."""
        return self.kind.verdict_of(self.saves)

    @property
    def acts(self) -> list[Act]:
        written = self.saves == "async" and self.phase in WRITTEN
        process = "writer" if written else "rank"
        act = Act(self.fault, self.phase, self.step, self.rank, self.delay_ms, self.draw, process)
        if self.phase.startswith("load"):
            return [Act("kill-rank", "forward", KILLED_AT, self.rank), act]
        return [act]

    def spec(self, data: str) -> RunSpec:
        return spec_of(self.layout, data, self.saves, self.kind.keys)


def draw_trial(seed: int, number: int, fault: str = "", phase: str = "") -> Trial:
    """The first trials go once through every legal pair, in an order of the seed's; those after them are random."""
    pairs = [pair for pair in PAIRS if fault in ("", pair[0]) and phase in ("", pair[1])]
    if not pairs:
        raise SpecError(refusal(fault, phase))
    order = random.Random(f"{seed}").sample(pairs, len(pairs))
    draw = random.Random(f"{seed}/{number}")
    name, at = order[number] if number < len(order) else draw.choice(pairs)
    filters = [f"--fault {fault}"] * bool(fault) + [f"--phase {phase}"] * bool(phase)
    kind = BY_NAME[name]
    layout = draw.choice(kind.layouts_in(at))
    world = spec_of(layout, "", "sync").parallel.world
    command = kind.command or (draw.random() < COMMANDS and name in COMMANDED)
    return Trial(
        number=number,
        seed=seed,
        fault=name,
        phase=at,
        layout=layout,
        saves=draw.choice(kind.saves),
        job="command" if command else "forked",
        rank=0 if kind.lead else draw.randrange(world),
        step=3 if name == "slow" else step_for(at, draw),  # it takes a while to be called slow
        delay_ms=draw.choice([0.0, round(draw.uniform(0, 12), 2)]) if kind.sudden else 0.0,
        draw=draw.randrange(2**31),
        repeat=" ".join([f"lmworks chaos --seed {seed} --trial {number}", *filters]),
    )


def step_for(phase: str, draw: random.Random) -> int:
    """Early enough that something is left to do, also while a save of step 6 goes on; 0 where a phase has no step."""
    if phase == "save.prune":
        return 6  # the first save after which there is one too many
    if phase.startswith("save"):
        return draw.choice([4, 6])
    return draw.randint(3, 6) if "." not in phase and phase not in ("start", "init") else 0


def spec_of(layout: str, data: str, saves: str, keys: tuple[str, ...] = ()) -> RunSpec:
    """Two layers of width 32, 12 steps of 4 sequences, saved after every second."""
    table = {
        "name": "chaos",
        "model": {"preset": "tiny", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "vocab": 258},
        "data": {"path": data or "stdlib:bytes", "seq": 16, "micro_batch": 1, "global_batch": 4},
        "optim": {"steps": STEPS, "lr": 1e-2, "warmup": 2},
        "checkpoint": {"every": SAVED_EVERY, "keep": KEPT},
        "watch": {"timeout_s": TIMEOUT_S},
        "log": {"eval_every": 0, "eval_batches": 1},
    }
    asynchronous = ("checkpoint.asynchronous=true",) if saves == "async" else ()
    return RunSpec.from_dict(apply_overrides(table, [*LAYOUTS[layout], *asynchronous, *keys]))


def refusal(fault: str, phase: str) -> str:
    if fault and fault not in BY_NAME:
        return f"there is no fault '{fault}'{did_you_mean(fault, BY_NAME)}"
    phases = sorted({at for _, at in PAIRS})
    if phase and phase not in phases:
        return f"there is no phase '{phase}'{did_you_mean(phase, phases)}"
    return f"'{fault}' does not strike in the phase '{phase}', but in: {', '.join(BY_NAME[fault].phases)}"

"""What is found of an item of the plan: runs and tables in the workspace, as they are, not what is said of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from pathlib import Path

from .benchmarks import FILE, Benchmarks, comparable
from .runs import Run, checkpoint_problem, find_runs

OWN_WORDS = 15
LEAST_TOKENS = 1_000_000
LEAST_PARAMETERS = 1_000  # of a shard of optimizer states
WANDB_MAGIC = b":W&B"


@dataclass(frozen=True)
class Found:
    done: bool
    what: str = ""  # where it was found, or what is missing


class Workplace:
    """A workspace's runs and tables, read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def runs(self) -> list[Run]:
        return find_runs(self.folder)

    @cached_property
    def benchmarks(self) -> Benchmarks:
        return Benchmarks.read(self.folder)

    def best_run(self, wanted: Callable[[Run], bool], also: Callable[[Run], str] = lambda _: "") -> Found:
        """The first whole one; else why the last of those that were tried does not count. `also`: a further problem."""
        found = Found(False)
        for run in self.runs:
            if not wanted(run):
                continue
            problem = run.problem or also(run)
            if not problem:
                losses = f"loss {run.lines[0]['loss']:.3f} → {run.lines[-1]['loss']:.3f}"
                return Found(True, f"{run.name}: {len(run.lines)} steps on {run.devices}, {losses}")
            found = Found(False, f"{run.name}: {problem}")
        return found

    def tabled(self) -> list[Run]:
        return [run for run in self.runs if not run.problem and self.benchmarks.has(run)]

    def pair(self, differ: str, first: str, second: str, ranks: int = 1) -> Found:
        """Two runs of the table that differ in one setting alone."""
        values = [first, second]
        for one, other in permutations(self.tabled(), 2):
            if (
                [one.about[differ], other.about[differ]] == values
                and one.ranks >= ranks
                and comparable(one, other, differ)
            ):
                return Found(True, f"{FILE}: {one.name} beside {other.name}")
        stale = [run for run in self.runs if not run.problem and not self.benchmarks.has(run)]
        if stale and any(map(self.benchmarks.names, stale)):
            return Found(False, f"{FILE} has other figures than {stale[0].name}: lmworks learn benchmarks")
        return Found(False, "no two runs of the table differ in that alone" if self.tabled() else "")


def has_fallen(run: Run) -> str:
    return "" if run.fallen else "the loss has not fallen"


def one_device(place: Workplace) -> Found:
    return place.best_run(lambda run: run.ranks == 1, has_fallen)


def gpt2_small(place: Workplace) -> Found:
    return place.best_run(lambda run: run.has(model_size="small", data=""), has_fallen)


def ddp(place: Workplace) -> Found:
    return place.best_run(lambda run: run.has(trainer="ddp") and run.ranks > 1)


def fsdp(place: Workplace) -> Found:
    return place.best_run(lambda run: run.has(trainer="fsdp") and run.ranks > 1)


def logging(place: Workplace) -> Found:
    found = place.best_run(lambda _: True)
    return Found(True, f"{found.what.partition(':')[0]}/metrics.jsonl") if found.done else found


def activation_checkpointing(place: Workplace) -> Found:
    return place.best_run(lambda run: run.has(trainer="fsdp", gradient_checkpointing=True))


def fsdp_resumed(place: Workplace) -> Found:
    return place.best_run(lambda run: run.has(trainer="fsdp") and run.number("resumed_from") > 0)


def memory_table(place: Workplace) -> Found:
    return place.pair("trainer", "ddp", "fsdp", ranks=2)


def precisions(place: Workplace) -> Found:
    return place.pair("mixed_precision", "no", "bf16")


def throughput(place: Workplace) -> Found:
    runs = place.tabled()
    return Found(True, f"{FILE}: {runs[0].name}, {runs[0].tokens_per_s:,.0f} tokens/s") if runs else Found(False)


def documented(place: Workplace) -> Found:
    if not place.tabled():
        return Found(False, f"{FILE} has no run" if place.benchmarks.text else "")
    words = place.benchmarks.own_words
    if words < OWN_WORDS:
        return Found(False, f"{FILE}: {words} words of your own; {OWN_WORDS} or more say something")
    return Found(True, f"{FILE}: {words} words beside the table")


def deepspeed(place: Workplace) -> Found:
    """The folder that engine.save_checkpoint writes: `latest` names the step's, with weights and optimizer states."""
    found = Found(False)
    for latest in sorted(filter(Path.is_file, (place.folder / "runs").rglob("latest"))):
        step = latest.parent / latest.read_text(errors="replace").strip()
        weights, states = (sorted(step.glob(f"*{kind}_states.pt")) for kind in ("model", "optim"))
        name = f"{latest.parent.relative_to(place.folder).as_posix()}/{step.name}"
        if not weights or not states:
            found = Found(False, f"{name} has no model and optimizer states of DeepSpeed's ZeRO")
        elif problems := list(filter(None, (checkpoint_problem(file, LEAST_PARAMETERS) for file in states))):
            found = Found(False, f"{name}: {problems[0].replace('checkpoint.pt', states[0].name)}")
        else:
            return Found(True, f"{name}: {len(states)} shards")
    return found


def dataset(place: Workplace) -> Found:
    """Shards are compared with their checksums."""
    found = Found(False)
    for index in sorted({*place.folder.glob("*/index.json"), *place.folder.glob("data/*/index.json")}):
        from ..data.index import read_index
        from ..data.store import TokenData
        from ..spec.errors import DataError

        name = index.parent.relative_to(place.folder).as_posix()
        try:
            tokens = read_index(index.parent).tokens("train")
            TokenData.open(index.parent, "train", verify=True)
        except DataError as error:
            found = Found(False, str(error))
            continue
        if tokens >= LEAST_TOKENS:
            return Found(True, f"{name}: {tokens:,} tokens")
        found = Found(False, f"{name}: {tokens:,} tokens; {LEAST_TOKENS:,} or more are a dataset")
    return found


def wandb(place: Workplace) -> Found:
    """W&B's own record of a whole run, offline or not: it has our figures by name."""
    found = Found(False)
    for run in place.runs:
        for file in sorted(run.folder.glob("wandb/*run-*/run-*.wandb")):
            content = file.read_bytes()
            if run.problem:
                found = Found(False, f"{run.name}: {run.problem}")
            elif content.startswith(WANDB_MAGIC) and b"tokens_per_s" in content:
                return Found(True, file.parent.relative_to(place.folder).as_posix())
            else:
                found = Found(False, f"{file.relative_to(place.folder)} has no figures of a run")
    return found


def file_found(place: Workplace, pattern: str, holds: tuple[str, ...]) -> Found:
    """The first file of that name which holds these words."""
    found = Found(False)
    for file in sorted(filter(Path.is_file, place.folder.glob(pattern))):
        name, content = file.relative_to(place.folder).as_posix(), file.read_text(errors="replace")
        lacking = [word for word in holds if word not in content]
        if content.strip() and not lacking:
            return Found(True, name)
        found = Found(False, f"{name} has no {', '.join(lacking)}" if content.strip() else f"{name} is empty")
    return found


EVIDENCE: dict[str, Callable[[Workplace], Found]] = {
    one.__name__: one
    for one in (
        one_device, gpt2_small, ddp, fsdp, logging, activation_checkpointing, fsdp_resumed, memory_table, precisions,
        throughput, documented, deepspeed, dataset, wandb,
    )
}  # fmt: skip

"""What follows where copies differ: they are named, and the run stops, or goes back and replays.

Of two copies neither has the majority. A replay then says which ranks had been wrong: those whose digest was not the
one that all agree on now. That is every rank where gradients met since the fault, for then it had reached them all; and
one alone where it came after. If copies differ again at the same step, the fault stays, and the run stops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...parallel.world import collective_error
from ...spec import TrainingError
from .bad_step import NotTaken, Trouble
from .replicas import Difference, Digests, compare

if TYPE_CHECKING:
    from ..step import Stepper


def check_replicas(run: Stepper) -> None:
    """Between two steps, and before every save, so that no checkpoint holds what was never compared."""
    found, ranks = compare(run.parallel_model, run.optimizer)
    suspects = run.health.memory.suspects
    replayed = suspects.get("step") == run.step
    if replayed:
        run.health.memory.suspects = {}
    if not found:
        if replayed:
            run.event("rerun", reason="corruption", transient=True, ranks=were_wrong(suspects, ranks))
        return
    worst = max(found, key=lambda difference: len(difference.odd))
    action = run.spec.health.corruption
    one = worst.odd[0] if len(worst.odd) == 1 else None
    names = worst.names[:8]  # after an update everything that the odd one touched is different
    run.event("corrupt", rank=one, ranks=worst.odd, copies=worst.copies, parameters=names, action=action)
    if action == "log":
        return
    again = "; it was so before the run went back, too: the fault stays" if replayed else ""
    if action == "stop" or replayed or run.health.exhausted(run.cursor):
        raise collective_error(
            TrainingError(
                f"step {run.step}: {worst.what}{again}; nothing of this step was saved; take the machine of that rank "
                f"out (ranks count from 0) and resume: the newest checkpoint is from before"
            )
        )
    go_back(run, worst)


def were_wrong(suspects: dict[str, Any], ranks: dict[int, Digests]) -> list[int]:
    """Ranks whose digest was not the one of now; nobody can tell where other ranks did the replay (fault.elastic)."""
    then = {int(rank): digest for rank, digest in suspects["digests"].items()}
    now = {rank: parts[suspects["part"]] for rank, parts in ranks.items() if suspects["part"] in parts}
    return [rank for rank in then if then[rank] != now[rank]] if then.keys() == now.keys() else []


def go_back(run: Stepper, difference: Difference) -> None:
    run.health.note(run.cursor)
    digests = {str(rank): digest for rank, digest in difference.digests.items()}  # as JSON has it
    run.health.memory.suspects = {"step": run.step, "part": difference.part, "digests": digests}
    raise NotTaken(Trouble("corruption", "rewind", difference.what, taken=True))

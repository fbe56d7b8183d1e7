"""Silent data corruption: replicas are compared bitwise; if they differ, the run stops, or rewinds and replays.

Replicas are ranks that should hold the same weights and optimizer state. Every rank hashes its shards and their
optimizer state on its own device; the digests are all-gathered. Ranks are replicas if a weight is not sharded between
them: all of DDP, `dp_replicate` of HSDP, the norms under tensor parallelism. What FSDP or ZeRO shards is on one rank
only, and cannot be compared.

    digest = Σ word_i · m_i  mod 2⁶⁴,  words of eight bytes, m_i odd

An odd factor times any power of two below 2⁶⁴ is not zero there, so one flipped bit always changes it.

Of two replicas neither has the majority. A replay then shows which ranks were faulty: those whose digest differs from
the one that all agree on now. If gradients were reduced since the fault, that is every rank, as the fault reached them
all; otherwise only one. If replicas differ again at the same step, the fault is permanent, and the run stops.
"""

from __future__ import annotations

import functools
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...parallel.data_parallel import Shard
from ...parallel.parallel_model import ParallelModel
from ...parallel.world import all_gather_object, collective_error
from ...spec import TrainingError
from ..train_state import EventRecorder, Position
from .bad_step import Health, HealthIssue, StepRejected

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # as a signed number
CHUNK = {False: 1 << 14, True: 1 << 16}  # numbers that share a factor, on a CPU and on a GPU
Digests = dict[str, int]


@dataclass(frozen=True)
class ReplicaMismatch:
    """Replicas that are not equal."""

    part: str  # of the model
    copies: list[int]  # the ranks that should be equal
    outliers: list[int]  # ranks that differ from the majority; all of them without one
    names: list[str]  # of the weights (or "NAME exp_avg", an optimizer's state) that differ
    digests: dict[int, int]  # by rank

    @property
    def what(self) -> str:
        ranks = ", ".join(map(str, self.outliers))
        some = ", ".join(self.names[:3]) + (f" and {len(self.names) - 3} more" if len(self.names) > 3 else "")
        if self.outliers == self.copies:
            return f"ranks {ranks} hold different copies of {some}, and none has the majority"
        word = "rank" if len(self.outliers) == 1 else "ranks"
        return f"{word} {ranks} of the copies {', '.join(map(str, self.copies))} differ in {some}"


def compare_replicas(
    parallel_model: ParallelModel, optimizer: torch.optim.Optimizer
) -> tuple[list[ReplicaMismatch], dict[int, Digests]]:
    """The mismatches, and the digests of every rank by part of the model. A collective call."""
    mine: dict[str, Digests] = {}  # part → name → digest
    for name, part, value in local_digests(parallel_model, optimizer):
        mine.setdefault(part, {})[name] = value
    whole = {part: combine_digests(digests) for part, digests in mine.items()}
    ranks = dict(enumerate(all_gather_object(whole)))
    groups: dict[str, list[int]] = {}
    for rank, parts in ranks.items():
        for part in parts:
            groups.setdefault(part, []).append(rank)
    broken = [part for part, group in groups.items() if len({ranks[rank][part] for rank in group}) > 1]
    if not broken:
        return [], ranks
    details = all_gather_object({part: mine[part] for part in broken if part in mine})
    found = []
    for part in broken:
        group = groups[part]
        names = [n for n in details[group[0]][part] if len({details[rank][part][n] for rank in group}) > 1]
        digests = {rank: ranks[rank][part] for rank in group}
        found.append(ReplicaMismatch(part, group, find_outliers(digests), names, digests))
    return found, ranks


def find_outliers(digests: dict[int, int]) -> list[int]:
    ((common, count), *_) = Counter(digests.values()).most_common()
    return [rank for rank, digest in digests.items() if digest != common or 2 * count <= len(digests)]


def local_digests(parallel_model: ParallelModel, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, str, int]]:
    """(name, part of the model, digest) of every local weight and optimizer state; one synchronisation per device."""
    named: list[tuple[str, str, Tensor]] = []
    for shard in parallel_model.shards:
        part = shard_key(shard, parallel_model)
        named.append((shard.name, part, digest(shard.leaf)))
        states = optimizer.state.get(shard.leaf, {}).items()
        named += [(f"{shard.name} {key}", part, digest(s)) for key, s in sorted(states) if isinstance(s, Tensor)]
    devices = {value.device for _, _, value in named}
    for device in devices:
        here = [one for one in named if one[2].device == device]
        for (name, part, _), value in zip(here, torch.stack([one[2] for one in here]).tolist(), strict=True):
            yield name, part, value


def shard_key(shard: Shard, parallel_model: ParallelModel) -> str:
    """Identifies a shard: ranks with the same key for a weight hold the same numbers."""
    mesh = parallel_model.mesh
    if mesh is None:
        return ""
    cuts = {*parallel_model.sharding.axes(shard.name), *([shard.rows] if shard.rows else [])}
    axes = sorted("shard" if axis == "flat" else axis for axis in cuts)
    return " ".join(f"{axis}={mesh.rank(axis)}" for axis in ("pp", *axes))


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    words = as_words(tensor.detach())
    size = CHUNK[words.is_cuda]
    rows = words[: len(words) // size * size].view(-1, size)
    last = words[rows.numel() :]
    own = factors(size, words.device)
    sums = [*row_sums(rows, own), (last * own[: len(last)]).sum()[None]]
    each = torch.cat(sums)
    return (each * factors(len(each), words.device)).sum()


def row_sums(rows: Tensor, own: Tensor) -> Iterator[Tensor]:
    """On a CPU a row at a time: it fits into the cache, and `dot` needs no buffer. On a GPU many rows in one kernel."""
    if rows.is_cuda:
        yield from ((some * own).sum(1) for some in rows.split(64))
    else:
        yield from (torch.dot(row, own)[None] for row in rows)


def as_words(tensor: Tensor) -> Tensor:
    """The bits as int64, padded with zeros."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    spare = -len(flat) % 8
    if spare or flat.data_ptr() % 8:  # a view may start at any offset
        flat = torch.nn.functional.pad(flat, (0, spare))
    return flat.view(torch.int64)


@functools.cache
def factors(count: int, device: torch.device) -> Tensor:
    return torch.arange(1, count + 1, device=device) * GOLDEN | 1


def combine_digests(digests: Digests) -> int:
    """One digest of all; each has its own factor."""
    return sum(value * (2 * zlib.crc32(name.encode()) + 1) for name, value in digests.items()) % 2**64


def check_replicas(
    parallel_model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    health: Health,
    at: Position,
    recorder: EventRecorder,
) -> None:
    """Between two steps, and before every save, so that no unverified state is saved."""
    found, ranks = compare_replicas(parallel_model, optimizer)
    suspects = health.state.suspects
    replayed = suspects.get("step") == at.step
    if replayed:
        health.state.suspects = {}
    if not found:
        if replayed:
            recorder.event("rerun", at.step, reason="corruption", transient=True, ranks=faulty_ranks(suspects, ranks))
        return
    worst = max(found, key=lambda mismatch: len(mismatch.outliers))
    action = health.spec.corruption
    one = worst.outliers[0] if len(worst.outliers) == 1 else None
    names = worst.names[:8]  # after an update everything that the outlier touched differs
    fields = {"rank": one, "ranks": worst.outliers, "copies": worst.copies, "parameters": names, "action": action}
    recorder.event("corrupt", at.step, **fields)
    if action == "log":
        return
    again = "; it differed before the rewind, too: the fault is permanent" if replayed else ""
    if action == "stop" or replayed or health.actions_exhausted(at.cursor):
        raise collective_error(
            TrainingError(
                f"step {at.step}: {worst.what}{again}; nothing of this step was saved; take the machine of that rank "
                f"out (ranks count from 0) and resume: the newest checkpoint is from before"
            )
        )
    health.record_action(at.cursor)
    digests = {str(rank): digest for rank, digest in worst.digests.items()}  # as JSON has it
    health.state.suspects = {"step": at.step, "part": worst.part, "digests": digests}
    raise StepRejected(HealthIssue("corruption", "rewind", worst.what, taken=True))


def faulty_ranks(suspects: dict[str, Any], ranks: dict[int, Digests]) -> list[int]:
    """Ranks whose digest differs from the replay's; unknown if other ranks did the replay (fault.elastic)."""
    then = {int(rank): digest for rank, digest in suspects["digests"].items()}
    now = {rank: parts[suspects["part"]] for rank, parts in ranks.items() if suspects["part"] in parts}
    return [rank for rank in then if then[rank] != now[rank]] if then.keys() == now.keys() else []

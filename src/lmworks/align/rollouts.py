"""The sampled answers of a round: what they are, how they are kept, and the micro-batches that train on them."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from ..data import Batch
from ..data.chat_template import Message
from ..data.loader import IGNORED
from ..data.packing import pack
from ..spec import CheckpointError
from ..spec.files import write_whole


@dataclass
class Rollout:
    """One answer to a prompt, with its reward."""

    prompt: int  # number of the prompt within the round
    prompt_ids: list[int]
    token_ids: list[int]  # of the answer, end-of-text included; of several turns, with the observations between them
    sampler_logps: list[float]  # of its tokens, by the engine that sampled them; 0 of observations
    text: str
    ended: bool  # by end-of-text, not by its length
    mask: list[int] = field(default_factory=list)  # 1: sampled by the policy; 0: an observation. Empty: all are sampled
    failure: str = ""  # of its environment: the answer has no reward
    messages: list[Message] = field(default_factory=list)  # of several turns: assistant, tool or user, …
    reward: float = float("nan")  # NaN: no reward function has an opinion
    rewards: dict[str, float] = field(default_factory=dict)  # by source
    advantage: float = 0.0
    advantages: list[float] | None = None  # of its tokens, where a critic estimates their values
    values: list[float] | None = None  # by the critic, before the first update on the round
    returns: list[float] | None = None
    old_logps: list[float] | None = None  # by the trainer, before the first update on the round
    ref_logps: list[float] | None = None  # by the reference model
    version: int = 0  # of the weights that sampled it: the round that trains them next
    stale_tokens: int = 0  # at its beginning, sampled with older weights than `version`
    unfinished: bool = False  # it goes on in the next round

    def __post_init__(self) -> None:
        self.mask = self.mask or [1] * len(self.token_ids)

    @property
    def turns(self) -> int:
        """Of the policy: runs of sampled tokens."""
        return sum(now > before for before, now in pairwise([0, *self.mask]))

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)


def added_rewards(one: float, other: float) -> float:
    """NaN: there is none."""
    return other if math.isnan(one) else one if math.isnan(other) else one + other


KEPT_ROUNDS = 8  # whose answers are in the run folder, beside those that checkpoints need
LISTS = {"prompt_ids": "i4", "token_ids": "i4", "mask": "i1"}  # of a rollout, kept as arrays
FLOATS = ("sampler_logps", "old_logps", "ref_logps", "advantages", "values", "returns")


def save_round(path: Path, step: int, rollouts: Sequence[Rollout]) -> None:
    """Whole or not at all. Numbers are kept exactly: a run that resumes inside of a round ends bitwise alike."""
    tables = [vars(rollout) for rollout in rollouts]
    kinds = LISTS | dict.fromkeys(FLOATS, "f8")
    arrays = {}
    for name, kind in kinds.items():
        rows = [table[name] for table in tables]
        arrays[f"{name}.sizes"] = np.array([-1 if row is None else len(row) for row in rows])
        arrays[name] = np.array([value for row in rows for value in row or ()], kind)
    rest = [{name: value for name, value in table.items() if name not in kinds} for table in tables]
    arrays["rest"] = np.frombuffer(json.dumps({"step": step, "rollouts": rest}).encode(), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    write_whole(path, buffer.getvalue())


def load_round(path: Path) -> list[Rollout]:
    try:
        with np.load(path) as file:
            tables = json.loads(file["rest"].tobytes())["rollouts"]
            for name in (*LISTS, *FLOATS):
                values, sizes = file[name].tolist(), file[f"{name}.sizes"].tolist()
                place = 0
                for table, size in zip(tables, sizes, strict=True):
                    table[name] = None if size < 0 else values[place : place + size]
                    place += max(0, size)
        return [Rollout(**table) for table in tables]
    except FileNotFoundError:
        raise CheckpointError(f"{path}: the answers of the round that this checkpoint is in are missing") from None
    except (OSError, EOFError, ValueError, KeyError, TypeError, BadZipFile) as error:
        raise CheckpointError(f"{path}: not the answers of a round ({error})") from None


def prune_rounds(folder: Path, pattern: str, needed: Collection[Path]) -> None:
    """Delete the files of older rounds, but for those that checkpoints need."""
    for old in sorted(folder.glob(pattern))[:-KEPT_ROUNDS]:
        if old not in needed:
            old.unlink()


# --- micro-batches ----------------------------------------------------------------------------------------------------


def split_over_ranks(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices of the answers of each rank, about equally many tokens: longest first, to the rank with the fewest."""
    loads, shares = [0] * ranks, [[] for _ in range(ranks)]  # type: list[int], list[list[int]]
    for index in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        rank = loads.index(min(loads))
        loads[rank] += lengths[index]
        shares[rank].append(index)
    return [sorted(share) for share in shares]


def micro_batches(
    rollouts: Sequence[Rollout], rank: int, ranks: int, seq: int, rows: int, pad: int
) -> list[tuple[Batch, list[int]]]:
    """This rank's share of an optimizer step, packed into rows of `seq` tokens, `rows` at a time.

    With each, which of the answers it holds. All ranks get the same number of micro-batches, since they take part in
    each other's collectives: one that has none left repeats an answer of which nothing counts.
    """
    shares = split_over_ranks([rollout.length for rollout in rollouts], ranks)
    packed = [pack([rollouts[index].length for index in share], seq) for share in shares]
    count = max(-(-len(packed_rows) // rows) for packed_rows in packed)
    mine = [[shares[rank][index] for index in row] for row in packed[rank]]
    found = []
    for some in (mine[i : i + rows] for i in range(0, len(mine), rows)):
        batch = packed_batch([[rollouts[index] for index in row] for row in some], seq, pad)
        found.append((batch, [index for row in some for index in row]))
    missing = count - len(found)
    return [*found, *[(ignored(packed_batch([[rollouts[0]]], seq, pad)), [])] * missing] if missing else found


def packed_batch(rows: Sequence[Sequence[Rollout]], seq: int, pad: int) -> Batch:
    """Rows of answers with their prompts. `extras` are by answer, (answers, longest):

    index    where the log-probabilities of its tokens are among the rows', flattened
    mask     which of them the policy has sampled: not padding, not observations
    fresh    those of them that were sampled with the weights that the round begins with, where not all are
    others   old_logps, ref_logps, sampler_logps, values, returns where they are known
    advantages   (answers), or (answers, longest) where a critic estimates the values of tokens
    """
    longest = max(len(rollout.token_ids) for row in rows for rollout in row)
    answers = sum(map(len, rows))
    tokens = np.full((len(rows), seq), pad, np.int64)
    targets = np.full((len(rows), seq), IGNORED, np.int64)
    documents = np.zeros((len(rows), seq), np.int64)
    index = np.zeros((answers, longest), np.int64)
    mask = np.zeros((answers, longest), bool)
    number = 0
    for row, members in enumerate(rows):
        place = 0
        for document, rollout in enumerate(members):
            ids = [*rollout.prompt_ids, *rollout.token_ids]
            first, size = place + len(rollout.prompt_ids) - 1, len(rollout.token_ids)
            tokens[row, place : place + len(ids)] = ids
            sampled = np.array(rollout.mask, bool)
            targets[row, first : first + size] = np.where(sampled, rollout.token_ids, IGNORED)
            documents[row, place:] = document
            index[number, :size] = row * seq + first + np.arange(size)
            mask[number, :size] = sampled
            place, number = place + len(ids), number + 1
        documents[row, place:] = len(members)
    members = [rollout for row in rows for rollout in row]
    extras = {"index": torch.from_numpy(index), "mask": torch.from_numpy(mask)}
    extras["advantages"] = torch.tensor([rollout.advantage for rollout in members], dtype=torch.float32)
    if any(rollout.stale_tokens for rollout in members):
        stale = torch.tensor([rollout.stale_tokens for rollout in members])
        extras["fresh"] = extras["mask"] & (torch.arange(longest) >= stale.unsqueeze(1))
    for name in ("old_logps", "ref_logps", "sampler_logps", "advantages", "values", "returns"):
        columns = [getattr(rollout, name) for rollout in members]
        if all(column is not None for column in columns):
            extras[name] = padded(columns, longest)
    rows_of = [torch.from_numpy(one) for one in (tokens, targets, documents)]
    return Batch(rows_of[0], rows_of[1], rows_of[2], int(mask.sum()), extras)


def padded(columns: Sequence[Sequence[float]], width: int) -> Tensor:
    table = np.zeros((len(columns), width), np.float32)
    for row, column in enumerate(columns):
        table[row, : len(column)] = column
    return torch.from_numpy(table)


def ignored(batch: Batch) -> Batch:
    """The same shapes with nothing that counts."""
    counted = batch.extras.keys() & {"mask", "fresh", "advantages"}
    extras = {**batch.extras, **{name: torch.zeros_like(batch.extras[name]) for name in counted}}
    return Batch(batch.tokens, torch.full_like(batch.targets, IGNORED), batch.documents, 0, extras)


def by_answer(values: Tensor, batch: Batch) -> Tensor:
    """(rows, seq) numbers of the trainer as (answers, longest), 0 outside of the mask."""
    extras: dict[str, Any] = batch.extras
    return values.flatten()[extras["index"].to(values.device)] * extras["mask"].to(values.device)

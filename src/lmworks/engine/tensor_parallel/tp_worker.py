"""A tensor-parallel worker: it computes its shard of every step that rank 0 tells it of (`executor.py`)."""

from __future__ import annotations

import pickle
from typing import IO

import torch

from ..core.model_runner import Runner
from ..core.step_input import unpack
from ..core.step_output import in_pieces
from .executor import NewAdapter, OldAdapter, Told, answer, in_words


@torch.no_grad()
def follow(runner: Runner, pipe: IO[bytes], words: IO[str]) -> None:
    """Until the pipe ends."""
    assert runner.ranks is not None
    runner.ranks.listening = True
    while True:
        try:
            told = pickle.load(pipe)
        except EOFError:
            return
        if isinstance(told, NewAdapter):
            answer(words, hold(runner, told))
        elif isinstance(told, OldAdapter):
            runner.drop_adapter(told.name)
        else:
            take(runner, told)


def hold(runner: Runner, told: NewAdapter) -> str | None:
    """What is wrong with an adapter; this rank goes on without it."""
    try:
        runner.hold_adapter(told.name, told.folder)
    except Exception as error:
        return in_words(error)
    return None


def take(runner: Runner, told: Told) -> None:
    """One step: all that rank 0 does up to the logits, and the tokens that it picks."""
    assert runner.ranks is not None
    runner.cache.copy(told.copies)
    runner.choose(told.adapters)
    batch = unpack(torch.from_numpy(told.buffer).to(runner.device), told.layout)
    if told.drafted:
        runner.ranks.share(batch.tokens)
    states = runner.states(batch)
    if told.asked:
        for places in in_pieces(torch.tensor(told.asked, device=runner.device), runner.model):
            runner.model.logits(states[places])
    if told.layout.rows:
        runner.logits(states, batch)
        runner.recent.index_copy_(0, batch.rows, runner.ranks.share(torch.empty_like(batch.rows)))

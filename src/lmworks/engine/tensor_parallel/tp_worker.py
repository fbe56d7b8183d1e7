"""A tensor-parallel worker: it computes its shard of every step that rank 0 tells it of (`executor.py`)."""

from __future__ import annotations

import pickle
from typing import IO

import torch

from ..core.model_runner import ModelRunner
from ..core.step_input import unpack
from ..core.step_output import split_by_logits_memory
from .executor import AddAdapter, RemoveAdapter, StepMessage, answer, describe_error


@torch.no_grad()
def follow(runner: ModelRunner, pipe: IO[bytes], words: IO[str]) -> None:
    """Until the pipe ends."""
    assert runner.ranks is not None
    runner.ranks.listening = True
    while True:
        try:
            told = pickle.load(pipe)
        except EOFError:
            return
        if isinstance(told, AddAdapter):
            answer(words, hold(runner, told))
        elif isinstance(told, RemoveAdapter):
            runner.unload_adapter(told.name)
        else:
            take(runner, told)


def hold(runner: ModelRunner, told: AddAdapter) -> str | None:
    """What is wrong with an adapter; this rank goes on without it."""
    try:
        runner.load_adapter(told.name, told.folder)
    except Exception as error:
        return describe_error(error)
    return None


def take(runner: ModelRunner, told: StepMessage) -> None:
    """One step: all that rank 0 does up to the logits, and the tokens that it picks."""
    assert runner.ranks is not None
    runner.cache.copy(told.copies)
    runner.choose(told.adapters)
    batch = unpack(torch.from_numpy(told.buffer).to(runner.device), told.layout)
    if told.drafted:
        runner.ranks.share(batch.tokens)
    states = runner.states(batch)
    if told.prompt_queries:
        for places in split_by_logits_memory(torch.tensor(told.prompt_queries, device=runner.device), runner.model):
            runner.model.logits(states[places])
    if told.layout.rows:
        runner.logits(states, batch)
        runner.recent.index_copy_(0, batch.rows, runner.ranks.share(torch.empty_like(batch.rows)))

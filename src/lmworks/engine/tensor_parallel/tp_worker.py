"""A tensor-parallel worker: it runs its shard of every step that the executor sends (`executor.py`)."""

from __future__ import annotations

import pickle
from typing import IO

import torch

from ..core.model_runner import ModelRunner
from ..core.step_input import unpack
from ..core.step_output import split_by_logits_memory
from ..kv_tiers.rank_copies import CopyBlocks, HostMapping, WorkerCopies, block_layout
from .executor import AddAdapter, RemoveAdapter, acknowledge, describe_error, reply
from .tp_rank import StepMessage


@torch.no_grad()
def run_worker(runner: ModelRunner, pipe: IO[bytes], replies: IO[str]) -> None:
    """Execute messages until the pipe closes."""
    assert runner.tp_rank is not None
    if runner.spec.kv_host_gib:
        block_layout(runner)  # rank 0 needs this rank's part of it
    runner.tp_rank.workers_ready = True
    copies: WorkerCopies | None = None
    while True:
        try:
            message = pickle.load(pipe)
        except EOFError:
            return
        if isinstance(message, AddAdapter):
            reply(replies, add_adapter(runner, message))
        elif isinstance(message, RemoveAdapter):
            runner.unload_adapter(message.name)
        elif isinstance(message, HostMapping):
            copies = WorkerCopies(runner, message, lambda number: acknowledge(replies, number))
            reply(replies, None)
        elif isinstance(message, CopyBlocks):
            assert copies is not None
            copies.copy(message)
        else:
            run_step(runner, message)


def add_adapter(runner: ModelRunner, message: AddAdapter) -> str | None:
    """Load an adapter; the error, if it fails."""
    try:
        runner.load_adapter(message.name, message.folder)
    except Exception as error:
        return describe_error(error)
    return None


def run_step(runner: ModelRunner, message: StepMessage) -> None:
    """Forward pass up to the logits, then receive the sampled tokens."""
    assert runner.tp_rank is not None
    runner.cache.copy(message.copies)
    runner.set_adapter_indices(message.adapters)
    batch = unpack(torch.from_numpy(message.buffer).to(runner.device), message.layout)
    if message.drafted:
        runner.tp_rank.broadcast(batch.tokens)
    states = runner.states(batch)
    if message.prompt_queries:
        for places in split_by_logits_memory(torch.tensor(message.prompt_queries, device=runner.device), runner.model):
            runner.model.logits(states[places])
    if message.layout.rows:
        runner.logits(states, batch)
        runner.last_token_ids.index_copy_(0, batch.rows, runner.tp_rank.broadcast(torch.empty_like(batch.rows)))

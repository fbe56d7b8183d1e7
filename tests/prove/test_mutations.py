"""A test of the test: bugs of the kind that leave a loss looking right, planted one at a time, turn parity red.

Ranks are forked, so what is replaced here is replaced in them. What one rank computes is computed before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from lmworks.parallel import context_parallel, ddp, expert_parallel, mesh, parallel_model
from lmworks.parallel.ring_attention import chunk_starts
from lmworks.prove.parity import Parity, parity
from lmworks.spec.layouts import layouts


@pytest.fixture(scope="module")
def proof() -> Iterator[Parity]:
    with parity(quick=True) as made:
        yield made


def forget_gradient_scale(patch: pytest.MonkeyPatch) -> None:
    """DDP averages over ranks; the factor that makes a sum of it is lost."""
    make = ddp.DDP.__init__

    def without_factor(self: ddp.DDP, *args: Any) -> None:
        make(self, *args)
        self.loss_factor = 1.0

    patch.setattr(ddp.DDP, "__init__", without_factor)


def reduce_in_wrong_group(patch: pytest.MonkeyPatch) -> None:
    """Gradients meet over tensor-parallel ranks, which hold other parts, instead of data-parallel ones."""
    group = mesh.Mesh.group
    patch.setattr(mesh.Mesh, "group", lambda self, axis: group(self, "tp" if axis == "dp_cp" else axis))


def drop_micro_batch(patch: pytest.MonkeyPatch) -> None:
    """One of several, on one rank of several; the tokens it had are still counted."""
    run = parallel_model.ParallelModel.forward_backward

    def without_last(self: parallel_model.ParallelModel, batches: list[Any], *rest: Any) -> Tensor:
        return run(self, batches[:-1] if dist.is_initialized() and dist.get_rank() == 1 else batches, *rest)

    patch.setattr(parallel_model.ParallelModel, "forward_backward", without_last)


def shift_mask(patch: pytest.MonkeyPatch) -> None:
    """Ring attention takes its chunks to stand where a split without balance would have put them."""

    def in_order(rank: int, ranks: int, chunk: int) -> tuple[int, int]:
        return 2 * rank * chunk, (2 * rank + 1) * chunk

    assert in_order(1, 2, 8) != chunk_starts(1, 2, 8)
    patch.setattr("lmworks.parallel.ring_attention.chunk_starts", in_order)
    assert context_parallel.chunk_starts is chunk_starts  # tokens are still dealt out in a balanced way


def drop_routed_token(patch: pytest.MonkeyPatch) -> None:
    """The last token that a rank sends to an expert comes back as nothing."""
    visit = expert_parallel.dispatch_tokens

    def lossy(moe: Any, rows: Tensor, counts: Tensor, group: Any) -> Tensor:
        result = visit(moe, rows, counts, group)
        kept = result.new_ones(len(result), 1)
        kept[-1] = 0
        return result * kept

    patch.setattr(expert_parallel, "dispatch_tokens", lossy)


def leave_partial_gradients(patch: pytest.MonkeyPatch) -> None:
    """Each rank of sequence parallelism has seen half of the tokens; the other half's gradients are not added."""
    patch.setattr(parallel_model, "sum_gradients", lambda shards, group: None)


def double_gradients(patch: pytest.MonkeyPatch) -> None:
    """Summed where they were summed already. Clipping hides it from weights, and the loss is that of before."""
    finish = parallel_model.ParallelModel.finish

    def twice(self: parallel_model.ParallelModel) -> None:
        finish(self)
        for shard in self.shards if dist.is_initialized() else ():
            if shard.leaf.grad is not None:
                shard.leaf.grad *= 2

    patch.setattr(parallel_model.ParallelModel, "finish", twice)


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("ddp", forget_gradient_scale),
        ("offload-optimizer-tp2", reduce_in_wrong_group),
        ("ddp", drop_micro_batch),
        pytest.param("cp2-ring", shift_mask, marks=pytest.mark.slow),
        pytest.param("ep2", drop_routed_token, marks=pytest.mark.slow),
    ],
)
def test_planted_bug_is_found(
    proof: Parity, monkeypatch: pytest.MonkeyPatch, name: str, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    layout = layouts()[name]
    proof.single_rank(layout)
    plant(monkeypatch)
    result = proof.prove(layout)
    assert not result.ok
    named = re.search(r"gradient of (\S+) differs by", result.failure)
    assert named, result.failure
    assert named[1] in {"embed.weight", "norm.weight", "head.weight"} or named[1].startswith("blocks.")


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        ("bf16-ddp", forget_gradient_scale),
        pytest.param("bf16-cp2", shift_mask, marks=pytest.mark.slow),
        pytest.param("bf16-tp2-sp", leave_partial_gradients, marks=pytest.mark.slow),
        pytest.param("fp16-fsdp2-tp2", double_gradients, marks=pytest.mark.slow),
    ],
)
def test_planted_bug_is_found_in_low_precision(
    proof: Parity, monkeypatch: pytest.MonkeyPatch, name: str, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    """Each is several times as large as the bound: the bound is wide enough for rounding, and not for this."""
    layout = layouts()[name]
    proof.single_rank(layout)
    proof.single_rank(layout, "fp32")
    plant(monkeypatch)
    result = proof.prove(layout)
    assert re.search(
        r"the (loss|gradient of \S+|weight of \S+) is \S+ times as far from fp32 as on one rank", result.failure
    )
    assert result.times_one_rank is not None and result.times_one_rank_limit is not None
    assert result.times_one_rank > 5 * result.times_one_rank_limit

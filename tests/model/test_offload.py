"""Activations that wait in host memory: no number changes, and the bytes that may go are gone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lmworks.model import GPT, activation_offload
from lmworks.model.activation_checkpointing import SELECTIVE_POLICIES, checkpointed_forward
from lmworks.model.activation_offload import HostBuffer, Offload
from lmworks.spec import ModelSpec
from tracker import Tracker

SPEC = ModelSpec(vocab=32, hidden=32, layers=5, heads=2, context=24, ffn=64)
TOKENS = torch.arange(48).view(2, 24) % 32
SHARE = 9_001  # of some 30,000 bytes that a block keeps: the last storage of it is cut


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_offload, "MIN_TENSOR_BYTES", 1024)


def model(share: int, policy: str = "none", spec: ModelSpec = SPEC) -> GPT:
    found = GPT(spec, seed=1)
    found.recompute = policy
    if share:
        found.offload = Offload([share] * 3 + [0] * 2, found.layers()[0].parameters())
    return found


def loss_of(part: GPT, dtype: torch.dtype = torch.float32) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        _, loss = part(TOKENS, TOKENS.roll(-1, 1), keep_logits=False)
    return loss


def gradients(part: GPT, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Of two micro-batches, and the loss."""
    losses = []
    for _ in range(2):
        losses.append(loss_of(part, dtype))
        losses[-1].backward()
    return [*(loss.detach() for loss in losses), *(weight.grad for weight in part.parameters())]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def host(part: GPT) -> list[Tensor]:
    assert part.offload is not None
    return [piece for slabs in part.offload.free.values() for buffer in slabs for piece in buffer.pieces]


@pytest.mark.parametrize("policy", ["none", "selective", "mlp", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_number_changes(policy: str, dtype: torch.dtype) -> None:
    away = model(SHARE, policy)
    assert equal(gradients(model(0, policy), dtype), gradients(away, dtype))
    assert host(away)


@pytest.mark.parametrize(
    "change",
    [{"experts": 4, "top_k": 2}, {"norm": "layer", "mlp": "gelu", "positions": "learned", "tie_embeddings": True}],
    ids=["experts", "gpt2"],
)
def test_nor_of_other_blocks(change: dict[str, Any]) -> None:
    spec = SPEC.replace(**change)
    assert equal(gradients(model(0, spec=spec)), gradients(model(10**9, spec=spec)))


@pytest.mark.slow  # the compiler
@pytest.mark.parametrize("policy", ["none", "selective", "mlp"])
def test_nor_of_compiled_blocks(policy: str) -> None:
    """The hooks see what the compiled graph saves, also of what a policy keeps; and are not compiled themselves."""
    found, parts = [], []
    for share in (0, SHARE):
        torch._dynamo.reset()
        part = model(share, policy)
        for block in part.layers():
            if policy in SELECTIVE_POLICIES:
                block.forward = checkpointed_forward(block, policy)
                block.recompute = "none"
            block.compile(fullgraph=True)
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        found.append(gradients(part))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1
        parts.append(part)
    assert equal(*found)
    assert sum(piece.numel() for piece in host(parts[1])) >= 3 * SHARE


def tracked(part: GPT) -> tuple[int, int]:
    """Bytes of tensors after a forward pass, and at most until its backward pass is over; host memory not counted."""
    gradients(part)
    known = host(part) if part.offload else []
    with Tracker(TOKENS, *part.parameters(), *(weight.grad for weight in part.parameters()), *known) as seen:
        loss = loss_of(part)
        live = seen.live
        loss.backward()
        return live, seen.peak


def test_exactly_its_share_of_every_block_but_the_last_two_leaves() -> None:
    (all_here, peak), (here, lower) = tracked(model(0)), tracked(part := model(SHARE))
    assert all_here - here == 3 * SHARE
    assert peak - lower == 3 * SHARE
    assert [piece.numel() for piece in host(part)] == [8192, 1024] * 3  # and none was made for the second pass


@pytest.mark.parametrize(("dtype", "stream", "inside"), [(torch.float32, 32, 16), (torch.bfloat16, 26, 8)])
def test_neither_weights_nor_what_all_blocks_share_leave(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, stream: int, inside: int
) -> None:
    """All that may go: fp32: 8 tensors as wide as the stream, 4 inside the MLP. Under autocast: the stream twice in
    fp32; in 2 bytes a cast of the norm for each of 5 products, q, k, v and attention's result, and 4 inside the MLP."""
    sent, send = [], activation_offload.BlockPass.send

    def told(block_pass: activation_offload.BlockPass, share: int) -> None:
        send(block_pass, share)
        leaving = [one.storages for one in block_pass.offload.pending_copies if one.index == block_pass.index]
        sent.append(sum(stored.sent for storages in leaving for stored in storages))

    monkeypatch.setattr(activation_offload.BlockPass, "send", told)
    loss_of(model(10**9), dtype)
    each = TOKENS.numel() * (stream * SPEC.hidden + inside * SPEC.ffn)
    assert sent == [each, each, each, 0, 0]


def test_casts_of_one_expert_are_weights_too() -> None:
    weights = Offload([], [nn.Parameter(torch.empty(4, 16, 32)), nn.Parameter(torch.empty(8))]).weights
    assert weights == {(4, 16, 32), (4, 32, 16), (16, 32), (32, 16), (8,)}


def test_memory_is_let_go_when_the_second_next_block_begins() -> None:
    part, seen = model(SHARE), []
    for block in part.layers():
        block.register_forward_pre_hook(lambda *_: seen.append([one.index for one in part.offload.pending_copies]))
    loss_of(part)
    assert seen == [[], [0], [1], [2], []]


def test_a_block_has_its_own_back_when_the_one_above_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    part, order = model(SHARE), list[str]()
    fetch = activation_offload.BlockPass.fetch

    def told(block_pass: activation_offload.BlockPass) -> None:
        if block_pass.offloaded:
            order.append(f"fetch {block_pass.index}")
        fetch(block_pass)

    monkeypatch.setattr(activation_offload.BlockPass, "fetch", told)
    for index, block in enumerate(part.layers()):
        block.register_full_backward_hook(lambda *_, index=index: order.append(f"done {index}"))
    loss_of(part).backward()
    assert order == ["done 4", "fetch 2", "done 3", "fetch 1", "done 2", "fetch 0", "done 1", "done 0"]


class Late(TorchDispatchMode):
    """A courier whose copies happen at the last moment its promises allow: in order, when somebody waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[Callable[[], object]] = []
        self.done = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        self.copies.append(partial(func, *args, **(kwargs or {})))
        return args[0]

    def after_compute(self) -> Late:
        return self

    def mark(self) -> int:
        return len(self.copies)

    def wait(self, end: int | None) -> None:
        for copy in self.copies[self.done : end or 0]:
            copy()
        self.done = max(self.done, end or 0)


def test_everything_that_is_asked_for_was_waited_for() -> None:
    """On a GPU copies may come late, which a CPU would never show."""
    plain, away, late, seen = model(0), model(SHARE), Late(), []
    assert away.offload is not None
    away.offload.copy_streams[torch.device("cpu")] = late  # type: ignore[assignment]
    for block in away.layers():
        block.register_forward_pre_hook(
            lambda *_: seen.append((late.done, [one.done for one in away.offload.pending_copies]))
        )
    torch.use_deterministic_algorithms(True)  # which also fills memory that nothing was copied to with NaN
    try:
        assert equal(gradients(plain), gradients(away))
    finally:
        torch.use_deterministic_algorithms(False)
    done, leaving = zip(*seen[:5], strict=True)
    assert list(leaving) == [[], [done[2]], [done[3]], [done[4]], []]  # let go only when the copies are surely made
    assert done[:2] == (0, 0) and 0 < done[2] < done[3] < done[4] < late.done == len(late.copies)


class Failed(Exception):
    pass


@pytest.mark.parametrize("failing", [1, 2])
def test_a_backward_pass_that_fails_keeps_what_is_on_its_way(failing: int) -> None:
    """The block below had begun to come back: until its copies are made, neither end of them is anybody else's."""
    part, late = model(SHARE), Late()
    gradients(part)  # so that slabs were free, and are used again
    pieces = sorted(map(id, host(part)))
    assert part.offload is not None
    part.offload.copy_streams[torch.device("cpu")] = late  # type: ignore[assignment]

    def fail(*_: object) -> None:
        raise Failed

    hook = part.layers()[failing].register_full_backward_hook(fail)
    loss = loss_of(part)
    with pytest.raises(Failed):
        loss.backward()
    hook.remove()
    del loss
    gc.collect()

    pending_copies = [copy.args for copy in late.copies[late.done :]]
    targets, sources = ({pair[end].untyped_storage().data_ptr() for pair in pending_copies} for end in (0, 1))
    kept = {
        stored.storage.data_ptr() for one in part.offload.pending_copies for stored in one.storages if stored.storage
    }
    assert targets and targets <= kept
    assert sources.isdisjoint(piece.data_ptr() for piece in host(part))

    plain = gradients(model(0))
    part.zero_grad()
    assert equal(plain, gradients(part))
    assert late.done == len(late.copies) and not part.offload.pending_copies
    assert sorted(map(id, host(part))) == pieces  # all are free again, and no more were made


@pytest.mark.parametrize("way", ["send", "fetch"])
def test_copies_that_are_interrupted_are_waited_for(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Ctrl-C between two of them: the one that was begun is made all the same."""
    part, late, copy, begun = model(SHARE), Late(), getattr(activation_offload.OffloadedStorage, way), list[int]()
    assert part.offload is not None
    part.offload.copy_streams[torch.device("cpu")] = late  # type: ignore[assignment]

    def interrupted(*args: Any) -> None:
        if begun:
            raise KeyboardInterrupt
        begun.append(late.mark())
        copy(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(activation_offload.OffloadedStorage, way, interrupted)
        loss_of(part).backward()
    gc.collect()
    assert begun[0] < len(late.copies)
    assert [one.done for one in part.offload.pending_copies] == [len(late.copies)]
    part.zero_grad()
    assert equal(gradients(model(0)), gradients(part))


def test_evaluation_sends_nothing() -> None:
    part = model(SHARE)
    with torch.no_grad():
        loss_of(part)
    assert part.offload is not None and part.offload.last is None and not host(part)


def test_a_pass_that_is_never_finished_leaves_no_trace() -> None:
    part = model(SHARE)
    forgotten = loss_of(part)
    assert equal(gradients(model(0)), gradients(part))
    del forgotten
    assert equal(gradients(model(0)), [*gradients(part)[:2], *(weight.grad / 2 for weight in part.parameters())])


def test_two_passes_may_be_under_way() -> None:
    part, plain = model(SHARE), model(0)
    for one in (part, plain):
        first, second = loss_of(one), loss_of(one)
        first.backward()
        second.backward()
    assert equal([w.grad for w in plain.parameters()], [w.grad for w in part.parameters()])


def sizes(buffer: HostBuffer) -> Iterator[int]:
    return (piece.numel() for piece in buffer.pieces)


def test_host_memory_comes_in_powers_of_two() -> None:
    buffer = HostBuffer(pinned=False)
    buffer.grow(1024 * 683 - 5)
    assert list(sizes(buffer)) == [1024 * size for size in (512, 128, 32, 8, 2, 1)]
    buffer.grow(1000)
    assert len(buffer.pieces) == 6
    assert [view.numel() for view in buffer.views(500 * 1024, 150 * 1024)] == [12 * 1024, 128 * 1024, 10 * 1024]

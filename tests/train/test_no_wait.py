"""The update is launched before anything is read from the device, and held back where health might refuse it."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lmworks.data import Batch, Batches
from lmworks.train.device import use_expandable_segments
from lmworks.train.health.bad_step import Health
from lmworks.train.health.spikes import spike_score, spike_threshold
from lmworks.train.prefetcher import Prefetcher
from lmworks.train.step_scalars import make_gate
from tiny import built, curve, differences, live, make_spec, saved, steps_of, train
from unhealthy import WATCH

CPU = torch.device("cpu")
READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")
EASY = (math.inf, math.inf)


# --- nothing is read before the update ------------------------------------------------------------------


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every way in which Python reads a tensor's numbers, in the order of the calls; on a GPU each would wait."""
    calls: list[str] = []

    def noted(name: str) -> Any:
        real = getattr(torch.Tensor, name)

        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return real(self, *args, **kwargs)

        return read

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, noted(name))
    return calls


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("optim.optimizer=sgd",),
        ("data.document_mask=true",),
        ("precision.dtype=bf16", "precision.weights=bf16", "precision.states=bf16"),
    ],
    ids=["adamw", "sgd", "documents", "bf16 weights"],
)
def test_no_host_read_before_update_launch(
    overrides: tuple[str, ...], dataset: Path, tmp_path: Path, seen: list[str]
) -> None:
    trainer = built(make_spec(dataset, "data.global_batch=2", *overrides), tmp_path)
    list(steps_of(trainer, 1))
    batches = trainer.batches.at(trainer.cursor)
    seen.clear()
    trainer.optimizer.register_step_post_hook(lambda *_: seen.append("updated"))
    trainer.train_step(batches)
    assert seen == ["updated", "tolist"]


def test_next_batch_is_prefetched_between_launch_and_wait(dataset: Path, tmp_path: Path) -> None:
    trainer = built(make_spec(dataset), tmp_path)
    order: list[str] = []
    trainer.optimizer.register_step_post_hook(lambda *_: order.append("launched"))
    trainer.prefetch_next = lambda: order.append("meanwhile")  # type: ignore[method-assign]
    finish = trainer.reader.finish
    trainer.reader.finish = lambda: [order.append("wait"), finish()][1]  # type: ignore[func-returns-value,method-assign]
    list(steps_of(trainer, 1))
    assert order == ["launched", "meanwhile", "wait"]


# --- the gate -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [0.0, 0.1, 1e6])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_grad_divisor_unscales_and_clips_like_torch(clip: float, scale: float) -> None:
    gradient = torch.randn(50, generator=torch.Generator().manual_seed(0))
    weight = torch.nn.Parameter(torch.zeros(50))
    weight.grad = gradient.clone()
    if clip:
        torch.nn.utils.clip_grad_norm_([weight], clip)
    sums = torch.stack([torch.tensor(30.0), (gradient * scale).square().sum()]).double()
    gate, figures = make_gate(sums, 10, scale, clip, EASY, CPU)
    grad_divisor = 1.0 if gate.grad_divisor is None else gate.grad_divisor
    torch.testing.assert_close(gradient * scale / grad_divisor, weight.grad, rtol=2e-6, atol=0)
    assert figures.tolist() == [3.0, pytest.approx(gradient.norm().item(), rel=1e-6), 0.0]
    assert (gate.grad_divisor is None) == (not clip and scale == 1)


@pytest.mark.parametrize(
    ("loss", "squares", "held"),
    [(2.0, 9.0, 0), (2.1, 9.0, 1), (2.0, 9.1, 1), (math.nan, 1.0, 1), (-math.inf, 1.0, 1), (1.0, math.inf, 1)],
)
def test_update_gate_skips_uncertain_steps(loss: float, squares: float, held: int) -> None:
    gate, _ = make_gate(torch.tensor([loss, squares]).double(), 1, 1.0, 1.0, (2.0, 3.0), CPU)
    assert gate.skip.item() == held
    without_limits, _ = make_gate(torch.tensor([loss, squares]).double(), 1, 1.0, 1.0, EASY, CPU)
    assert without_limits.skip.item() == (not (math.isfinite(loss) and math.isfinite(squares)))


def test_limits_catch_all_spikes_with_few_false_skips() -> None:
    draw = random.Random(0)
    for _ in range(300):
        before = [draw.lognormvariate(draw.choice([-20, 0, 20]), draw.choice([0, 0.1, 3])) for _ in range(9)]
        z = draw.choice([0.01, 1, 8, 100])
        most = spike_threshold(z, before)
        middle = spike_score(most, before).median
        assert spike_score(most, before).z <= z
        assert spike_score(math.nextafter(most, -math.inf), before).z <= z
        assert spike_score(most + 1e-6 * (abs(middle) + abs(most)), before).z > z


def test_limits_match_health_checks(dataset: Path) -> None:
    health = Health(make_spec(dataset, *WATCH).health)
    assert health.limits() == EASY
    for number in range(health.spec.warmup):
        health.record_step(3.0 + number / 10, 1.0 + number / 10)
    loss, norm = health.limits()
    assert health.check_step(loss, norm, scaled=False) == []
    (spike,) = health.check_step(loss * 1.001, norm, scaled=False)
    assert spike.kind == "spike_loss"
    assert [issue.kind for issue in health.check_step(loss, norm * 1.001, scaled=False)] == ["spike_grad"]


# --- what is held is judged, and taken all the same -----------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_falsely_skipped_step_equals_unskipped_step(
    optimizer: str, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(dataset, f"optim.optimizer={optimizer}", "optim.steps=5", "optim.clip=0.1")
    launched = train(spec, tmp_path / "launched")
    monkeypatch.setattr(Health, "limits", lambda _: (-1.0, -1.0))
    held = train(spec, tmp_path / "held")
    assert differences(live(launched), live(held)) == []
    assert differences(saved(tmp_path / "launched"), saved(tmp_path / "held")) == []
    assert curve(tmp_path / "launched") == curve(tmp_path / "held")


def test_skipped_update_leaves_weights_states_and_steps(dataset: Path, tmp_path: Path) -> None:
    trainer = built(make_spec(dataset), tmp_path)
    list(steps_of(trainer, 2))
    before = live(trainer)
    batches = trainer.batches.at(2)
    counts = trainer.count(batches)
    gate = trainer.gate(trainer.forward_backward(batches, counts), counts)
    trainer.optimize(gate.grad_divisor, torch.ones(()))
    assert differences(live(trainer), before) == []
    trainer.optimize(gate.grad_divisor)
    moved = differences(live(trainer), before)
    assert {name.rsplit(".", 1)[-1] for name in moved} == {"weight", "exp_avg", "exp_avg_sq", "step"}
    assert getattr(trainer.optimizer, "found_inf", None) is None  # a checkpoint's first step would be held by it


# --- input ----------------------------------------------------------------------------------------------


@pytest.fixture
def prefetcher(dataset: Path) -> Iterator[Prefetcher]:
    spec = make_spec(dataset)
    prefetcher = Prefetcher(Batches(spec.data, seed=0), 0, CPU)
    yield prefetcher
    prefetcher.close()


def same(one: list[Batch], other: list[Batch]) -> bool:
    return all(
        torch.equal(a.tokens, b.tokens) and torch.equal(a.targets, b.targets) for a, b in zip(one, other, strict=True)
    )


def test_prefetched_batch_is_used(prefetcher: Prefetcher) -> None:
    opened: list[int] = []
    stream = prefetcher.batches.stream
    prefetcher.batches.stream = lambda start, *rest: [opened.append(start), stream(start, *rest)][1]  # type: ignore
    assert same(prefetcher.take(3, 4), prefetcher.batches.at(3))
    for cursor in (4, 5):
        prefetcher.prefetch(cursor)
        assert list(prefetcher.ready) == [cursor]
        assert same(prefetcher.take(cursor, 9), prefetcher.batches.at(cursor))
    assert opened == [3]
    prefetcher.prefetch(6)
    assert same(prefetcher.take(9, 2), prefetcher.batches.at(9))  # a skip: what was prepared is of no use
    prefetcher.prefetch(10)
    prefetcher.take(10, 1)
    prefetcher.prefetch(11)  # the last was taken: there is no more
    assert not prefetcher.ready and opened == [3, 9]


def test_prefetch_error_is_raised_on_take(prefetcher: Prefetcher, monkeypatch: pytest.MonkeyPatch) -> None:
    prefetcher.take(0, 5)
    at = prefetcher.batches.at
    monkeypatch.setattr(prefetcher.batches, "at", lambda cursor: (_ for _ in ()).throw(OSError(f"no {cursor}")))
    prefetcher.prefetch(1)
    with pytest.raises(OSError, match="no 1"):
        prefetcher.take(1, 4)
    monkeypatch.setattr(prefetcher.batches, "at", at)
    assert same(prefetcher.take(1, 4), at(1))


def test_targets_are_counted_on_host(dataset: Path) -> None:
    batches = Batches(make_spec(dataset, "data.document_mask=true").data, seed=0)
    found = [batch for cursor in range(4) for batch in batches.at(cursor)]
    assert [batch.counted for batch in found] == [int((batch.targets != -100).sum()) for batch in found]
    assert any(batch.count() < batch.targets.numel() for batch in found)
    assert [batch.to("cpu").count() for batch in found] == [batch.counted for batch in found]
    assert [Batch(batch.tokens, batch.targets).count() for batch in found] == [batch.counted for batch in found]


# --- the allocator --------------------------------------------------------------------------------------


def test_expandable_segments_unless_user_sets_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, str] = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    monkeypatch.setattr(os, "environ", given)
    use_expandable_segments()
    assert given == {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    given.clear()
    use_expandable_segments()
    assert given == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}

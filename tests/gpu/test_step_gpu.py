"""A step on a GPU: nothing in it makes the host wait but the reading of its figures, and the numbers are the same."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from lmworks.bench.train import bench_train, one_step
from lmworks.model.gpt import LayerNorm
from lmworks.spec import RunSpec
from lmworks.train import Trainer
from lmworks.train.health.bad_step import Health
from lmworks.train.prefetcher import Prefetcher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FAMILIES = {
    "llama": {},
    "gpt2": {"norm": "layer", "positions": "learned", "mlp": "gelu", "bias": True, "kv_heads": 4},
}


def make_run(**sections: dict[str, object]) -> RunSpec:
    tables = {
        "model": {"preset": "tiny", "context": 128, **sections.pop("model", {})},
        "data": {"seq": 128, "micro_batch": 4, "global_batch": 8},
        "optim": {"steps": 20},
        "precision": {"dtype": "bf16"},
        "cluster": {"device": "cuda"},
    }
    return RunSpec.from_dict({**tables, **sections})


def built(spec: RunSpec, folder: Path) -> Trainer:
    trainer = Trainer(spec, folder, quiet=True)
    trainer.build()
    return trainer


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever would make the host wait for the device raises an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kept", ["fp32", "bf16"])
@pytest.mark.parametrize("documents", [False, True])
def test_no_synchronisation_before_scalars_are_read(family: str, kept: str, documents: bool, tmp_path: Path) -> None:
    precision = {"dtype": "bf16", "weights": kept, "states": kept}
    spec = make_run(model=FAMILIES[family], precision=precision)
    spec = spec.replace(data=spec.data.replace(document_mask=documents))
    trainer = built(spec, tmp_path / "run")
    with closing(Prefetcher(trainer.batches, 0, trainer.device)) as trainer.prefetcher:
        for _ in range(2):  # states, workspaces and compiled kernels come with the first steps
            trainer.train_step(trainer.prefetcher.take(trainer.cursor, 9))
            trainer.step += 1
            trainer.cursor += 1
        assert trainer.launcher.pending is not None
        with no_waiting():
            now = trainer.launcher.take(trainer.prefetcher.take(trainer.cursor, 9))
            gate = trainer.gate(now.sums, now.tokens)
            trainer.optimize(gate.grad_divisor, gate.skip)
            batches = trainer.next_batches()
            assert batches is not None
            trainer.launcher.launch_next(batches)
            trainer.prefetch_next()
        assert math.isfinite(trainer.read(gate).loss)


def test_async_step_changes_neither_losses_nor_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for name in ("first", "plain", "ahead"):  # the first one's libraries take memory that they keep
        monkeypatch.setattr(Trainer, "is_async", name == "ahead")
        before = torch.cuda.memory_allocated()
        trainer = built(make_run().replace(deterministic=True), tmp_path / name)
        with closing(Prefetcher(trainer.batches, 0, trainer.device)) as trainer.prefetcher:
            losses = [one_step(trainer, left) for left in (9, 8, 7)]
            assert (trainer.launcher.pending is not None) == (name == "ahead")
            torch.cuda.reset_peak_memory_stats()
            losses += [one_step(trainer, left) for left in (6, 5, 4, 3, 2, 1)]
        found[name] = losses, torch.cuda.max_memory_allocated() - before
        del trainer
        gc.collect()
    torch.use_deterministic_algorithms(False)
    assert found["ahead"][0] == found["plain"][0]
    assert found["ahead"][1] <= found["plain"][1] * 1.01  # a batch or two


def test_prefetched_batch_is_exact(tmp_path: Path) -> None:
    trainer = built(make_run(), tmp_path / "run")
    with closing(Prefetcher(trainer.batches, 0, trainer.device)) as feed:
        for cursor in range(6):
            here = feed.take(cursor, 6)
            feed.prefetch(cursor + 1)
            for mine, theirs in zip(here, trainer.batches.at(cursor), strict=True):
                assert mine.tokens.is_cuda
                torch.testing.assert_close(mine.tokens.cpu(), theirs.tokens)
                torch.testing.assert_close(mine.targets.cpu(), theirs.targets)


def test_falsely_skipped_step_equals_unskipped_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = []
    for name in ("launched", "held"):
        trainer = built(make_run().replace(deterministic=True), tmp_path / name)
        with closing(Prefetcher(trainer.batches, 0, trainer.device)) as trainer.prefetcher:
            losses.append([one_step(trainer, left) for left in (5, 4, 3, 2, 1)])
        monkeypatch.setattr(Health, "limits", lambda _: (-1.0, -1.0))
    torch.use_deterministic_algorithms(False)
    assert losses[0] == losses[1]


def test_layer_norm_output_is_bf16_under_autocast() -> None:
    """Which would have its input and its result in fp32 otherwise: four times the bytes before the loss."""
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    norm = LayerNorm(256, device="cuda", dtype=torch.bfloat16)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = norm(x)
    assert out.dtype == torch.bfloat16
    (grad,) = torch.autograd.grad(out, x, out.detach())
    wide = x.detach().float().requires_grad_()
    expected = torch.nn.functional.layer_norm(wide, (256,))
    (wanted,) = torch.autograd.grad(expected, wide, out.detach().float())
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(grad.float(), wanted, rtol=2**-6, atol=2**-6)


def test_expandable_segments(tmp_path: Path) -> None:
    built(make_run(), tmp_path / "run")
    assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())


def test_benchmark_reports_both_rooflines() -> None:
    facts = bench_train(make_run(), 3, kernels=True)
    assert facts is not None
    assert set(facts["floors"]) == {"measured", "datasheet"}
    assert 0 < facts["mfu"] <= facts["hfu"] < 1
    assert facts["floors"]["measured"]["reached"] < 1.05
    assert abs(facts["predicted"]["allocated_error"]) < 0.2
    assert facts["kernels"]["rows"]
    assert 0 <= facts["host_waits"] < 1

"""Which blocks compute their activations again, and that no number changes by it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from layouts import Job, do, layout
from lmworks.model import GPT, activation_offload
from lmworks.parallel.parallelize import apply_activation_checkpointing
from lmworks.plan.policies import saved_bytes_by_policy
from lmworks.spec import SpecError
from tiny import differences, saved
from variations import with_slow

SHAPE = ("model.layers=4", "optim.steps=1", "optim.warmup=0")
WIDE = ("model.hidden=4096", "model.ffn=14336", "data.seq=4096", "model.context=4096")  # as models that need a budget
FULL = ("parallel.recompute=full",)


def policies(data: Path, *keys: str, layers: range = range(4), device: str = "cpu") -> list[str]:
    spec = layout(data, *SHAPE, *keys)
    with torch.device("meta"):
        part = GPT(spec.model, layers=layers)
    apply_activation_checkpointing(part, spec, torch.device(device))
    return [block.recompute for block in part.layers()]


def budget(data: Path, share: float, *keys: str) -> list[str]:
    """With a budget that is a share of what four blocks keep without recompute."""
    gib = share * 4 * saved_bytes_by_policy(layout(data, *SHAPE, *keys))["none"] / 2**30
    return policies(data, *keys, "parallel.recompute=budget", f"parallel.recompute_budget={gib:.12f}")


def test_every_kth_block_of_the_whole_model_wherever_it_stands(dataset: Path) -> None:
    assert policies(dataset, *FULL) == ["full"] * 4
    assert policies(dataset, *FULL, "parallel.recompute_every=2") == ["full", "none"] * 2
    assert policies(dataset, *FULL, "parallel.recompute_every=3") == ["full", "none", "none", "full"]
    assert policies(dataset, *FULL, "parallel.recompute_every=2", layers=range(1, 4)) == ["none", "full", "none"]
    assert policies(dataset, "parallel.recompute=selective") == ["selective"] * 4
    assert policies(dataset, "parallel.recompute=mlp") == ["mlp"] * 4


def test_a_budget_gives_up_as_little_as_it_must(dataset: Path) -> None:
    each, rungs = saved_bytes_by_policy(layout(dataset, *SHAPE, *WIDE)), ("none", "selective", "mlp", "full")
    for here, further in itertools.pairwise(rungs):
        share = each[here] / each["none"]
        assert budget(dataset, share * 1.001, *WIDE) == [here] * 4
        assert budget(dataset, share * 0.999, *WIDE) == [further, here, here, here]
    assert budget(dataset, each["full"] / each["none"] * 1.001, *WIDE) == ["full"] * 4


def test_a_budget_is_counted_for_the_device_that_runs_it(dataset: Path) -> None:
    """A spec that leaves the device open takes a GPU where there is one, and its kernels keep no mask of a window."""
    window = "model.sliding_window=8"
    specs = [layout(dataset, *SHAPE, window, f"cluster.device={name}") for name in ("cpu", "cuda")]
    cpu, cuda = (saved_bytes_by_policy(spec)["none"] for spec in specs)
    assert cuda < cpu
    gib = 4 * (cuda + cpu) / 2 / 2**30  # room for the one, and not for the other
    keys = (window, "cluster.device=auto", "parallel.recompute=budget", f"parallel.recompute_budget={gib:.12f}")
    assert policies(dataset, *keys, device="cuda") == ["none"] * 4
    assert policies(dataset, *keys, device="cpu") != ["none"] * 4


def test_a_budget_is_for_the_share_of_a_rank_and_for_all_micro_batches_it_holds_at_once(dataset: Path) -> None:
    whole, states = saved_bytes_by_policy(layout(dataset, *SHAPE))["none"], 4 * 16 * 32  # fp32 × seq × hidden
    # Attention and MLP each keep their input as it was gathered, whole; the other half of it is not saved.
    assert (
        saved_bytes_by_policy(layout(dataset, *SHAPE, "parallel.tp=2", "parallel.sp=true"))["none"]
        == whole / 2 + states
    )
    # Attention over several ranks keeps its result twice: as it was put together, and as the next product reads it.
    assert saved_bytes_by_policy(layout(dataset, *SHAPE, "parallel.cp=2"))["none"] == whole / 2 + states / 2
    assert budget(dataset, 1.001, "parallel.pp=2") != ["none"] * 4  # two micro-batches are under way
    assert budget(dataset, 2.001, "parallel.pp=2") == ["none"] * 4
    assert budget(dataset, 2.001, "parallel.pp=2", "parallel.schedule=gpipe") != ["none"] * 4  # all four are


def test_a_budget_that_nothing_fits_is_refused_with_what_would(dataset: Path) -> None:
    with pytest.raises(SpecError, match=r"recompute_budget = 1e-09 GiB is too little: .* 4 blocks still keep .* GiB"):
        policies(dataset, "parallel.recompute=budget", "parallel.recompute_budget=1e-9")


def test_no_number_changes_under_any_layout(dataset: Path, tmp_path: Path) -> None:
    layouts = {
        "fsdp2": ("parallel.dp=2", "parallel.strategy=fsdp2"),
        "pp": ("parallel.pp=2", "parallel.schedule=zbv"),
    }
    each = saved_bytes_by_policy(layout(dataset, *SHAPE))
    gib = 2 * (each["none"] + each["mlp"]) / 2**30
    ways = {
        "none": (),
        "mlp": ("parallel.recompute=mlp",),
        "every-2": (*FULL, "parallel.recompute_every=2"),
        "budget": ("parallel.recompute=budget", f"parallel.recompute_budget={gib:.12f}"),
    }
    jobs = {
        (name, way): (*SHAPE, *layouts[name], *ways[way])
        for name, chosen in (("fsdp2", ["none", "mlp", "every-2"]), ("pp", ["none", "budget"]))
        for way in chosen
    }
    do([Job(tmp_path / "-".join(case), layout(dataset, *keys)) for case, keys in jobs.items()])
    for name, way in jobs:
        assert differences(saved(tmp_path / f"{name}-none"), saved(tmp_path / f"{name}-{way}")) == []


@pytest.mark.parametrize("name", with_slow(["fsdp2", "tp"], ["tp"]))
def test_nor_by_waiting_in_host_memory(
    name: str, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two micro-batches a step, and after two steps."""
    monkeypatch.setattr(activation_offload, "MIN_TENSOR_BYTES", 256)  # forked ranks have it too
    keys = ("model.layers=5", "optim.steps=2", "optim.warmup=0", "checkpoint.every=0")
    layouts = {
        "fsdp2": ("parallel.dp=2", "parallel.strategy=fsdp2"),
        "tp": ("parallel.tp=2", "parallel.sp=true", "data.global_batch=1"),
    }
    each = saved_bytes_by_policy(layout(dataset, *keys, *layouts["fsdp2"]))
    gib = 5 * (each["none"] + each["full"]) / 2 / 2**30
    away = f"parallel.offload_activations={3 * 8192 / 2**30:.12f}"
    both = (away, "parallel.recompute=budget", f"parallel.recompute_budget={gib:.12f}")
    assert len({*policies(dataset, *keys, *layouts["fsdp2"], *both, layers=range(5))}) > 1
    ways = {"none": (), "away": (away,)} | ({"both": both} if name == "fsdp2" else {})
    do([Job(tmp_path / way, layout(dataset, *keys, *layouts[name], *words)) for way, words in ways.items()])
    for way in ways:
        assert differences(saved(tmp_path / "none"), saved(tmp_path / way)) == []

"""Health on several ranks: all decide alike, the rank that differs is named, statistics are of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from layouts import layout, with_meshes
from lmworks.parallel.local_ranks import on_ranks
from lmworks.record import RunFolder
from lmworks.record.event_text import findings
from lmworks.record.metrics import read_stats
from lmworks.spec import LMWorksError, RunSpec
from lmworks.train import Trainer
from lmworks.train.health.replicas import combine_digests, digest, faulty_ranks, find_outliers
from tiny import before_step, built, curve, differences, events, saved, steps_of
from unhealthy import WATCH, as_it_is, flip, see_data, spoil_output
from variations import with_slow

DDP = ("parallel.dp=2",)
FSDP2 = ("parallel.dp=2", "parallel.strategy=fsdp2")
TP = ("parallel.tp=2",)
PP = ("parallel.pp=2",)


def watched(dataset: Path, *overrides: str) -> RunSpec:
    return layout(dataset, *WATCH, *overrides)


# --- spikes and modules --------------------------------------------------------------------------------


@with_meshes
def strike(rank: int, cases: dict[Path, RunSpec], module: str) -> list[str]:
    """Every run meets a bad window at cursor 12 and goes past it, then a NaN in the last rank's second block."""
    said = []
    for folder, spec in cases.items():
        trainer = see_data(Trainer(spec, folder, quiet=True), as_it_is, bad=12)
        last = rank == spec.parallel.world - 1
        before_step(trainer, 1, lambda t=trainer, o=last: spoil_output(t, module, lambda: o and t.cursor == 16))
        with pytest.raises(LMWorksError) as caught:
            trainer.run()
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("names", with_slow([("ddp", "tp"), ("fsdp2", "pp")], [("fsdp2", "pp")]), ids="-".join)
def test_ranks_skip_and_rewind_together_and_name_faulty_rank(
    names: tuple[str, str], dataset: Path, tmp_path: Path
) -> None:
    module = "blocks.1.mlp.down"
    cases = {"ddp": (*DDP, "health.spike_loss=skip"), "tp": (*TP, "health.spike_loss=rewind")}
    cases |= {"fsdp2": (*FSDP2, "health.spike_loss=rewind"), "pp": (*PP, "health.spike_loss=skip")}
    specs = {tmp_path / name: watched(dataset, *cases[name]) for name in names}
    ones = {tmp_path / f"one-{how}": watched(dataset, f"health.spike_loss={how}") for how in ("skip", "rewind")}
    (alone, _) = strike(0, ones, module)
    assert f"loss nan, first in the output of {module};" in alone
    first, second = on_ranks(2, strike, specs, module)
    assert first == second
    for folder, said in zip(specs, first, strict=True):
        how = specs[folder].health.spike_loss
        one = tmp_path / f"one-{how}"
        assert f"loss nan, first in the output of {module} on rank 1;" in said, folder
        assert [e["to_cursor"] for e in events(folder, "skip")] == [13]
        assert [(e["from_step"], e["to_step"]) for e in events(folder, "rewind")] == (
            [(12, 8)] if how != "skip" else []
        )
        (fault,) = events(folder, "fault")
        assert (fault["module"], fault["rank"], fault["cursor"]) == (module, 1, 16)
        assert [line[1] for line in curve(folder)] == pytest.approx([line[1] for line in curve(one)], rel=1e-4)


@with_meshes
def spoil_replica(rank: int, cases: dict[Path, RunSpec], weight: str) -> list[str]:
    """Before step 3 the second rank's copy of a weight, or its shard of it, is NaN."""
    said = []
    for folder, spec in cases.items():
        trainer = Trainer(spec, folder, quiet=True)

        def spoil(trainer: Trainer = trainer) -> None:
            if rank == 1:
                next(shard.leaf for shard in trainer.parallel_model.shards if shard.name == weight).data.fill_(
                    float("nan")
                )

        before_step(trainer, 3, spoil)
        with pytest.raises(LMWorksError) as caught:
            trainer.run()
        said.append(str(caught.value))
    return said


def test_nan_weight_on_one_replica_is_named_with_rank(dataset: Path, tmp_path: Path) -> None:
    weight = "blocks.1.mlp.down.weight"
    specs = {tmp_path / name: watched(dataset, *keys) for name, keys in {"ddp": DDP, "fsdp2": FSDP2}.items()}
    first, second = on_ranks(2, spoil_replica, specs, weight)
    assert first == second
    for folder, said in zip(specs, first, strict=True):
        assert f"from the weight {weight} on rank 1" in said, folder
        (fault,) = events(folder, "fault")
        assert (fault["parameter"], fault["rank"]) == (weight, 1)
        (found,) = findings(events(folder, "fault"))  # what `lmworks runs health` prints
        assert f"from the weight {weight} on rank 1" in found.what


# --- copies that differ --------------------------------------------------------------------------------


def test_flipped_bit_changes_digest() -> None:
    value = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for kind in (torch.float32, torch.bfloat16, torch.float64):
        numbers = value.to(kind)
        whole = int(digest(numbers))
        bits = numbers.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[numbers.itemsize])
        for index in (0, 1, 499, 999):
            for bit in range(8 * numbers.itemsize):
                mask = torch.tensor(1, dtype=bits.dtype) << bit
                bits[index] ^= mask
                assert int(digest(numbers)) != whole, (kind, index, bit)
                bits[index] ^= mask
        assert int(digest(numbers)) == whole
    swapped = value.clone()
    swapped[[3, 7]] = value[[7, 3]]
    assert int(digest(swapped)) != int(digest(value))
    assert combine_digests({"a": 1, "b": 2}) != combine_digests({"a": 2, "b": 1})


def test_outlier_is_minority() -> None:
    assert find_outliers({0: 7, 1: 7, 2: 9, 3: 7}) == [2]
    assert find_outliers({4: 7, 6: 9}) == [4, 6]
    assert find_outliers({0: 1, 1: 1, 2: 2, 3: 2}) == [0, 1, 2, 3]
    assert find_outliers({0: 1, 1: 1, 2: 1, 3: 2, 4: 3}) == [3, 4]


def test_faulty_ranks_need_same_ranks_in_replay() -> None:
    suspects = {"step": 6, "part": "pp=0", "digests": {"0": 7, "1": 9}}
    assert faulty_ranks(suspects, {0: {"pp=0": 7}, 1: {"pp=0": 7}}) == [1]
    assert faulty_ranks(suspects, {0: {"pp=0": 7}}) == []  # one rank did not come back
    assert faulty_ranks(suspects, {0: {"pp=0 tp=0": 7}, 1: {"pp=0 tp=1": 7}}) == []


def leaf(trainer: Trainer, name: str) -> torch.Tensor:
    return next(shard.leaf for shard in trainer.parallel_model.shards if shard.name == name)


def once(act: Callable[[], None]) -> Callable[..., None]:
    """A hook that acts the first time it is called."""
    left = [act]
    return lambda *_: left.pop()() if left else None


@with_meshes
def corrupt(rank: int, cases: dict[Path, tuple[RunSpec, int, str, int]]) -> list[str]:
    """Before step 6 a bit of one rank's weight (or optimizer state) is flipped, for the first so many times.

    "late": at the end of the step, when no other rank has had a gradient of it yet.
    """
    said = []
    for folder, (spec, bad, what, times) in cases.items():
        trainer = Trainer(spec, folder, quiet=True)
        done: list[int] = []

        def act(t: Trainer = trainer, bad: int = bad, what: str = what, times: int = times, done: Any = done) -> None:
            if rank == bad and len(done) < times:
                done.append(t.step)
                target = leaf(t, "blocks.0.attention_norm.weight")
                if what == "late":
                    t.optimizer.register_step_post_hook(once(lambda: flip(target)))
                else:
                    flip(target if what == "weight" else t.optimizer.state[target]["exp_avg"])

        before_step(trainer, 6, act)
        try:
            trainer.run()
            said.append("")
        except LMWorksError as error:
            said.append(str(error))
    return said


HASH = ("health.hash_every=2", "optim.steps=8", "checkpoint.every=4", "checkpoint.keep=0", "data.micro_batch=1")


def test_replica_mismatch_names_rank_and_replay_is_bitwise_equal(dataset: Path, tmp_path: Path) -> None:
    stop, back = layout(dataset, *HASH, *DDP), layout(dataset, *HASH, *DDP, "health.corruption=rewind")
    cases = {
        tmp_path / "clean": (stop, 1, "weight", 0),
        tmp_path / "stop": (stop, 1, "weight", 1),
        tmp_path / "state": (stop, 0, "exp_avg", 1),
        tmp_path / "back": (back, 1, "weight", 1),
        tmp_path / "late": (back, 1, "late", 1),
        tmp_path / "stays": (back, 0, "weight", 9),
    }
    first, second = on_ranks(2, corrupt, cases)
    assert first == second
    _, stopped, state, went_on, late, stays = first
    assert stopped.startswith("step 6: ranks 0, 1 hold different copies of blocks.0.attention_norm.weight")
    assert "blocks.0.attention_norm.weight exp_avg" in state  # the moment that was struck, and the weight it has moved
    (event,) = events(tmp_path / "stop", "corrupt")
    assert (event["step"], event["rank"], event["ranks"], event["action"]) == (6, None, [0, 1], "stop")
    assert [event["step"] for event in events(tmp_path / "stop", "save")] == [4]
    # Of two copies neither has the majority. The replay shows which had been wrong: both, where gradients met since.
    for folder, wrong in ((tmp_path / "back", [0, 1]), (tmp_path / "late", [1])):
        assert differences(saved(folder), saved(tmp_path / "clean")) == [] and curve(folder) == curve(
            tmp_path / "clean"
        )
        assert [(e["from_step"], e["to_step"]) for e in events(folder, "rewind")] == [(6, 4)]
        assert [(e["transient"], e["ranks"]) for e in events(folder, "rerun")] == [(True, wrong)]
        assert events(folder, "skip") == []
    assert went_on == late == ""
    assert "it differed before the rewind, too: the fault is permanent" in stays


@pytest.mark.slow  # two replicas that differ stay, and which of several is the outlier
def test_outlier_of_three_replicas_and_no_false_alarms(dataset: Path, tmp_path: Path) -> None:
    every = ("health.hash_every=1", "optim.steps=3", "checkpoint.every=0")
    four = {
        tmp_path / "ddp": (layout(dataset, *HASH, "parallel.dp=4"), 2, "weight", 1),
        tmp_path / "hsdp": (
            layout(dataset, *every, "parallel.dp_replicate=2", "parallel.dp_shard=2", "parallel.strategy=fsdp2"),
            0, "weight", 0,
        ),
        tmp_path / "tp": (layout(dataset, *every, *TP, *DDP, "parallel.sp=true"), 0, "weight", 0),
        tmp_path / "pp": (layout(dataset, *every, *PP, *DDP), 0, "weight", 0),
        tmp_path / "cp": (layout(dataset, *every, "parallel.cp=2", *TP), 0, "weight", 0),
    }  # fmt: skip
    said = on_ranks(4, corrupt, four)[0]
    assert said[0].startswith("step 6: rank 2 of the copies 0, 1, 2, 3 differ in blocks.0.attention_norm.weight")
    assert said[1:] == ["", "", "", ""]
    (event,) = events(tmp_path / "ddp", "corrupt")
    assert (event["rank"], event["copies"]) == (2, [0, 1, 2, 3])


# --- statistics ----------------------------------------------------------------------------------------


def stats_of(folder: Path) -> dict[str, dict[str, float]]:
    (line,) = read_stats(RunFolder(folder).stats_path)
    assert line["step"] == 2
    return dict(line["parts"])


@with_meshes
def two_steps(rank: int, cases: dict[Path, RunSpec]) -> None:
    for folder, spec in cases.items():
        list(steps_of(built(spec, folder), 2))


def test_statistics_equal_manual_computation_under_every_layout(dataset: Path, tmp_path: Path) -> None:
    spec = layout(dataset, "health.stats_every=2", "data.micro_batch=4", "model.tie_embeddings=true")
    trainer = built(spec, tmp_path / "one")
    list(steps_of(trainer, 1))
    seen: dict[str, torch.Tensor] = {}
    block = trainer.model.blocks["1"]
    handle = block.register_forward_hook(lambda _m, _i, out: seen.update(out=out.detach()))
    before = {name: p.detach().clone() for name, p in block.named_parameters()}
    (values,) = steps_of(trainer, 1)
    handle.remove()
    after = dict(block.named_parameters())
    found = stats_of(tmp_path / "one")
    assert found.keys() == {"embed", "0", "1", "norm"}
    row, out = found["1"], seen["out"].double()
    assert row["act_mean_abs"] == pytest.approx(float(out.abs().mean()))
    assert row["act_rms"] == pytest.approx(float(out.square().mean().sqrt()))
    assert row["act_max"] == pytest.approx(float(out.abs().max()))
    norm = sum(float(p.detach().double().square().sum()) for p in after.values()) ** 0.5
    moved = sum(float((after[n].detach() - b).double().square().sum()) for n, b in before.items()) ** 0.5
    assert row["param_norm"] == pytest.approx(norm) and row["update_ratio"] == pytest.approx(moved / norm, rel=1e-5)
    assert sum(part["grad_norm"] ** 2 for part in found.values()) ** 0.5 == pytest.approx(values["grad_norm"])
    layouts = {"ddp": DDP, "fsdp2": FSDP2, "tp": (*TP, "parallel.sp=true"), "pp": PP, "cp": ("parallel.cp=2",)}
    specs = {
        tmp_path / name: layout(dataset, "health.stats_every=2", "model.tie_embeddings=true", *keys)
        for name, keys in layouts.items()
    }
    on_ranks(2, two_steps, specs)
    for folder in specs:
        other = stats_of(folder)
        assert other.keys() == found.keys()
        for name, expected in found.items():
            assert other[name] == pytest.approx(expected, rel=2e-3), (folder.name, name)


def test_statistics_do_not_change_training(dataset: Path, tmp_path: Path) -> None:
    steps = [list(steps_of(built(layout(dataset, *keys), tmp_path / name), 3)) for name, keys in
             {"with": ("health.stats_every=1",), "without": ()}.items()]  # fmt: skip
    assert [[v["loss"], v["grad_norm"]] for v in steps[0]] == [[v["loss"], v["grad_norm"]] for v in steps[1]]

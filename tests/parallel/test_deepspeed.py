"""DeepSpeed behind the same spec: its generated JSON, and its steps against one rank of plain PyTorch."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lmworks.model import GPT
from lmworks.parallel import deepspeed
from lmworks.parallel.comm_counter import CommCounter
from lmworks.parallel.local_ranks import on_ranks
from lmworks.parallel.single_rank import SingleRank
from lmworks.spec import RunSpec, SpecError
from lmworks.train.optim import make_optimizer, set_learning_rate

STEPS, RATE = 5, 1e-2


def spec(**sections: dict[str, Any]) -> RunSpec:
    given: dict[str, dict[str, Any]] = {
        "model": {"layers": 2, "hidden": 32, "heads": 2, "vocab": 63, "context": 16, "ffn": 33},  # nothing is even
        "data": {"seq": 16, "micro_batch": 2, "global_batch": 8},
        "parallel": {"engine": "deepspeed", "strategy": "zero", "zero": 2, "dp_shard": 2},
    }
    return RunSpec.from_dict({key: {**given.get(key, {}), **sections.get(key, {})} for key in given | sections})


def test_config_follows_the_spec() -> None:
    found = deepspeed.config(spec(parallel={"bucket_mb": 1}, optim={"clip": 0.5}))
    assert json.loads(json.dumps(found)) == found
    assert found["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 2**18, "allgather_bucket_size": 2**18}
    assert (found["train_micro_batch_size_per_gpu"], found["gradient_accumulation_steps"]) == (2, 2)
    assert found["gradient_clipping"] == 0.5
    assert "bf16" not in found and "fp16" not in found


def test_config_of_offload_and_precision() -> None:
    full = deepspeed.config(spec(parallel={"zero": 3, "offload": "full"}, precision={"dtype": "bf16"}))
    assert full["zero_optimization"]["offload_optimizer"] == full["zero_optimization"]["offload_param"]
    assert full["bf16"] == {"enabled": True} and full["communication_data_type"] == "fp32"
    part = deepspeed.config(
        spec(parallel={"offload": "optimizer"}, precision={"dtype": "fp16", "loss_scale": 1024, "loss_scale_window": 7})
    )
    assert "offload_param" not in part["zero_optimization"]
    assert (part["fp16"]["initial_scale_power"], part["fp16"]["loss_scale_window"]) == (10, 7)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"parallel": {"zero": 0}}, "parallel.zero = 1, 2 or 3"),
        ({"parallel": {"zero": 3, "dp_replicate": 2}}, "parallel.dp_shard alone"),
        ({"parallel": {"zero": 2, "offload": "full"}}, "parallel.zero = 3"),
        ({"precision": {"dtype": "fp16", "loss_scale": 1000}}, "1024"),
        ({"model": {"experts": 4, "top_k": 2}}, "does not balance model.experts = 4"),
    ],
)
def test_what_deepspeed_cannot_do_is_refused(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        spec(**sections)


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(SpecError, match=r"lmworks\[deepspeed\]"):
        deepspeed.load_deepspeed("cpu")


# --- steps ------------------------------------------------------------------------------------------------------------


def sequences(step: int) -> tuple[Tensor, Tensor]:
    """8 sequences of a global batch; every third target of the first half is not counted."""
    draw = torch.randint(0, 63, (8, 17), generator=torch.Generator().manual_seed(step))
    tokens, targets = draw[:, :-1], draw[:, 1:].clone()
    targets[:4, ::3] = -100
    return tokens, targets


def make(run: RunSpec) -> tuple[GPT, torch.optim.Optimizer]:
    model = GPT(run.model, seed=0)
    return model, make_optimizer(SingleRank(model).shards(), run.model, run.optim)


def alone(rank: int, run: RunSpec) -> dict[str, Any]:
    model, optimizer = make(run)
    losses, norms = [], []
    for step in range(STEPS):
        tokens, targets = sequences(step)
        _, loss = model(tokens, targets)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), run.optim.clip).item())
        set_learning_rate(optimizer, RATE / (step + 1))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    moments = {f"{n}.exp_avg": optimizer.state[p]["exp_avg"] for n, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "model": dict(model.state_dict()), "optim": moments}


def take(engine: deepspeed.DeepSpeedEngine, rank: int, steps: range) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in steps:
        tokens, targets = sequences(step)
        counted = int((targets != -100).sum())
        total = torch.zeros(())
        for micro in range(2):
            rows = slice(4 * rank + 2 * micro, 4 * rank + 2 * micro + 2)
            with engine.micro_batch(last=micro == 1):
                _, loss = engine(tokens[rows], targets[rows], reduction="sum", keep_logits=False)
                engine.backward(loss / counted)
            total += loss.detach() / counted
        dist.all_reduce(total)
        norms.append(engine.step(RATE / (step + 1)))
        losses.append(total.item())
    return losses, norms


def together(rank: int, run: RunSpec) -> dict[str, Any]:
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": "2"}
    model, optimizer = make(run)
    engine = deepspeed.DeepSpeedEngine(model, optimizer, run)
    begun, begun_norms = take(engine, rank, range(2))
    saved = engine.state()
    with CommCounter() as seen:
        losses, norms = take(engine, rank, range(2, STEPS))
    state = engine.state()
    engine.load(saved)  # and again from the middle: the same steps must follow
    again, _ = take(engine, rank, range(2, STEPS))
    resumed = engine.state()["model"]
    with engine.micro_batch(last=True):
        tokens, targets = sequences(0)
        engine.backward(engine(tokens[:2], targets[:2])[1] * float("inf"))
    refused = engine.step(RATE)
    kept = all(torch.equal(value, resumed[name]) for name, value in engine.state()["model"].items())
    moments = engine.state()["optim"]
    engine.load({"model": saved["model"]})  # weights alone, as checkpoint.init has them
    started = engine.state()
    return {
        "losses": begun + losses,
        "norms": begun_norms + norms,
        **state,
        "again": begun + again,
        "resumed": resumed,
        "kinds": {row.kind for row in seen.table() if row.bytes > 1000},
        "refused": refused,
        "kept": kept,
        "started": all(torch.equal(value, saved["model"][name]) for name, value in started["model"].items())
        and all(torch.equal(value, moments[name]) for name, value in started["optim"].items()),
    }


def near(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("zero", "offload"), [(1, "none"), (2, "none"), (3, "none"), (2, "optimizer"), (3, "optimizer"), (3, "full")]
)
def test_five_steps_are_those_of_one_rank(zero: int, offload: str) -> None:
    """Where states are offloaded, under μP: groups with a learning rate each."""
    mup = {"parametrization": "mup", "mup_base_hidden": 16} if offload != "none" else {}
    run = spec(parallel={"zero": zero, "offload": offload}, model=mup)
    deepspeed.load_deepspeed("cpu")  # once, before ranks are forked: it takes seconds to import
    expected = on_ranks(1, alone, run)[0]
    for found in on_ranks(2, together, run, timeout=300):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert found["again"] == pytest.approx(expected["losses"], rel=1e-6)
        for name, weight in expected["model"].items():
            assert near(found["model"][name], weight) < 1e-5, name
            assert near(found["resumed"][name], found["model"][name]) < 1e-6, name
            assert near(found["optim"][f"{name}.exp_avg"], expected["optim"][f"{name}.exp_avg"]) < 1e-4, name
            assert found["optim"][f"{name}.step"] == STEPS
        assert "all-gather" in found["kinds"]  # each rank updates its part alone
        assert found["refused"] == float("inf") and found["kept"] and found["started"]

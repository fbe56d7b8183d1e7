"""Bytes and messages of post-training by arithmetic against what every rank holds and sends: the policy, a reference of
its own, a reference that is the policy without its adapters, and offloaded states."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmworks.align.post_trainer import trainer_class
from lmworks.parallel.local_ranks import on_ranks
from lmworks.prove.planner_agreement import disagreements
from lmworks.prove.rank_record import QUICK_STEPS, RankRecord, record_run
from lmworks.spec import RunSpec
from post_training import make_spec

LAYOUTS = {
    "one rank": (1, []),
    "ddp": (2, ["parallel.dp=2"]),
    "fsdp2": (2, ["parallel.dp=2", "parallel.strategy=fsdp2"]),
    "zero-1": (2, ["parallel.dp=2", "parallel.strategy=zero", "parallel.zero=1"]),
    "zero-2": (2, ["parallel.dp=2", "parallel.strategy=zero", "parallel.zero=2"]),
    "tp": (2, ["parallel.tp=2"]),
    "tp-sp": (2, ["parallel.tp=2", "parallel.sp=true"]),
    "offloaded states": (2, ["parallel.dp=2", "parallel.strategy=fsdp2", "parallel.offload=optimizer"]),
    "offloaded": (2, ["parallel.dp=2", "parallel.strategy=fsdp2", "parallel.offload=full"]),
    "tp-fsdp2": (4, ["parallel.tp=2", "parallel.dp=2", "parallel.strategy=fsdp2"]),
    "fsdp2 of 4": (4, ["parallel.dp=4", "parallel.strategy=fsdp2", "data.micro_batch=1"]),
}  # fmt: skip
LORA = ["lora.rank=3"]  # rows that 2 and 4 ranks do not share evenly
CASES = {
    "dpo, one rank": ("dpo", "one rank", []),
    "dpo with adapters, one rank": ("dpo", "one rank", LORA),
    **{f"dpo, {layout}": ("dpo", layout, []) for layout in LAYOUTS if layout != "one rank"},
    **{f"dpo with adapters, {layout}": ("dpo", layout, LORA) for layout in ("ddp", "fsdp2", "tp-sp", "tp-fsdp2")},
    **{f"{method}, {layout}": (method, layout, []) for method in ("kto", "reward") for layout in ("fsdp2", "tp-sp")},
    **{f"{method}, ddp": (method, "ddp", []) for method in ("kto", "ipo", "orpo", "simpo", "reward")},
    "kto with adapters, fsdp2": ("kto", "fsdp2", LORA),
    **{f"distill, {layout}": ("distill", layout, []) for layout in LAYOUTS},
    "distill with adapters, fsdp2": ("distill", "fsdp2", LORA),
    **{
        f"dpo over a quantized base, {layout}": ("dpo", layout, [*LORA, f"lora.base={base}"])
        for layout, base in (
            ("fsdp2", "nf4"),
            ("offloaded", "int8"),
            ("tp-fsdp2", "nf4"),
            ("fsdp2 of 4", "int8"),
            ("zero-2", "nf4"),
        )
    },
    "distill of experts, tp": ("distill", "tp", ["model.experts=4", "model.top_k=2", "model.expert_ffn=16"]),
    "distill by jsd, tp": ("distill", "tp", ["align.divergence=jsd"]),
    **{f"ppo over one base, {layout}": ("ppo", layout, LORA) for layout in ("one rank", "ddp", "fsdp2", "tp-fsdp2")},
    "dpo, rows shorter than data.seq": ("dpo", "tp", ["data.seq=128", "model.context=128"]),
}
QUICK = (
    "dpo, offloaded states", "dpo with adapters, fsdp2", "reward, tp-sp", "distill by jsd, tp",
    "ppo over one base, fsdp2", "dpo over a quantized base, fsdp2",
)  # fmt: skip


Recorded = dict[str, tuple[RunSpec, list[RankRecord]]]


def record_all(_rank: int, specs: dict[str, RunSpec], folder: Path) -> dict[str, RankRecord]:
    found = {}
    for name, spec in specs.items():
        trainer = trainer_class(spec)(spec, folder / name, quiet=True, force=True)
        found[name] = record_run(trainer, spec.optim, False, QUICK_STEPS)
    return found


@pytest.fixture(scope="module", params=[QUICK, pytest.param(tuple(CASES), marks=pytest.mark.slow)], ids=["some", "all"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """All cases with as many ranks in one start of them."""
    folder, found = tmp_path_factory.mktemp("runs"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LMWORKS_CACHE", str(folder / "cache"))
        for ranks in (1, 2, 4):
            specs = {
                name: make_spec(folder, method, *LAYOUTS[layout][1], *more)
                for name, (method, layout, more) in CASES.items()
                if LAYOUTS[layout][0] == ranks and name in request.param
            }
            records = on_ranks(ranks, record_all, specs, folder) if specs else []
            found |= {name: (spec, [by_name[name] for by_name in records]) for name, spec in specs.items()}
    return found


def test_every_rank_holds_and_sends_what_is_planned(recorded: Recorded) -> None:
    assert not {name: found for name, (spec, ranks) in recorded.items() if (found := disagreements(spec, ranks))}


def test_a_reference_under_adapters_has_no_weights_of_its_own(recorded: Recorded) -> None:
    for name, (spec, ranks) in recorded.items():
        own = spec.align.needs_reference and not spec.lora.rank
        frozen = ["teacher"] if spec.align.method == "distill" else ["reference"] * own
        assert all(list(record.frozen) == frozen for record in ranks), name

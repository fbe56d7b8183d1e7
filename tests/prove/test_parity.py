"""Every layout of spec/layouts.toml equals one rank, and what compares them sees what it should."""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lmworks.parallel import local_ranks
from lmworks.parallel.local_ranks import RENDEZVOUS_TIMEOUT_S, RankFailed, on_ranks
from lmworks.prove.parity import Parity, parity
from lmworks.prove.rank_record import IndexedShard
from lmworks.prove.rounding import abs_errors, relative_errors, worst
from lmworks.spec import SpecError
from lmworks.spec.layouts import Layout, Tolerance, choose, layouts
from lmworks.spec.run import RECOMPUTE, SCHEDULES
from typed import lmworks


@pytest.fixture(scope="module")
def proof() -> Iterator[Parity]:
    with parity(quick=True) as made:
        yield made


# Each kind of parallelism, strategy, precision and offload, most of them in pairs; tests/parallel has each kind alone.
# `make test-slow` and `lmworks prove parity --layouts all` prove all of the list.
QUICK = [
    "ddp-sync-each-pass",
    "ddp-reduce-bf16",
    "uneven-ddp",
    "fsdp1-full-shard",
    "hsdp",
    "zero-3",
    "zero-2-pp2-tied",
    "cp2-ring-documents",
    "cp2-tp2-ulysses-capped-sinks",
    "pp2-interleaved-zero-bubble",
    "ep2-fsdp2-mla-moe",
    "offload-optimizer",
    "offload-full",
    "recompute-selective-ddp",
    "bf16-fsdp2",
    "bf16-weights-fsdp2",
    "qlora-tp2-sp",
    "mup-pp2-fsdp2",
]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name, layout in layouts().items()
    ],
)
def test_layout_equals_one_rank(proof: Parity, layout: Layout) -> None:
    result = proof.prove(layout)
    assert result.ok, result.failure  # bytes and collectives of every rank are those of the planner, too


def test_tensor_parallel_stages_of_a_pipeline(proof: Parity) -> None:
    """On four ranks; the layouts of the list that have both take eight."""
    parallel = {"pp": 2, "tp": 2, "sp": True, "schedule": "interleaved"}
    result = proof.prove(
        Layout("pp2-tp2-sp-tied", {"model": {"layers": 4, "tie_embeddings": True}, "parallel": parallel})
    )
    assert result.ok, result.failure


def test_quick_layouts_have_every_kind() -> None:
    specs = [layouts()[name].run() for name in QUICK]
    rows = [spec.parallel for spec in specs]
    assert {row.strategy for row in rows} == {"ddp", "fsdp1", "fsdp2", "zero"}
    assert {row.offload for row in rows} == {"none", "optimizer", "full"}
    assert {row.cp_method for row in rows if row.cp > 1} == {"ring", "ulysses"}
    assert all(any(getattr(row, axis) > 1 for row in rows) for axis in ("dp_replicate", "dp_shard", "tp", "pp", "ep"))
    assert {spec.precision.dtype for spec in specs} >= {"fp32", "bf16"}
    assert {spec.precision.weights for spec in specs} == {"fp32", "bf16"}


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = lmworks(capsys, "parity", "--layouts", "zero-1", "--json")
    (row,) = json.loads(out)
    assert code == 0 and row["ok"] and row["layout"] == "zero-1" and row["ranks"] == 2
    for key in ("loss_diff", "worst_grad", "worst_param", "grad_norm_diff", "adamw_param"):
        assert 0 <= row[key] < 1e-5, key
    assert row["worst_grad_name"].startswith("blocks.")
    assert row["tokens"] == 5 * 8 * 32
    assert row["peak_bytes"] == max(row["peak_bytes_by_rank"]) > 16 * 30_000  # weights, gradients, moments
    kinds = {(c["kind"], c["group"]) for c in row["collectives"]}
    assert {("reduce-scatter", "dp_shard"), ("all-gather", "dp_shard")} <= kinds
    assert "[1/1] zero-1" in err


def test_a_specs_own_layout(capsys: pytest.CaptureFixture[str], dataset: Path) -> None:
    small = ["model.layers=1", "data.seq=16", "data.micro_batch=1", "data.global_batch=2"]
    spec = ["tiny", f"data.path={dataset}", *small, "parallel.dp=2", "parallel.strategy=fsdp2"]
    code, out, _ = lmworks(capsys, "parity", *spec)
    assert code == 0
    assert "the spec's own" in out and "reduce-scatter" in out and "FAILED" not in out


def test_the_first_that_fails_ends_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        "model": {"layers": 1},
        "data": {"seq": 16, "micro_batch": 1, "global_batch": 4},
        "parallel": {"dp": 2},
    }
    strict = [Layout(name, small, Tolerance(gradient=0.0)) for name in ("one", "two")]
    monkeypatch.setattr("lmworks.spec.layouts.choose", lambda names: strict)
    code, out, err = lmworks(capsys, "parity", "--layouts", "all")
    assert code == 1
    assert "[1/2] one: FAILED" in err and "two" not in err
    assert "lmworks: error: one: the gradient of " in err
    assert "FAILED" in out


def test_a_planner_that_disagrees_fails_the_layout(proof: Parity, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmworks.prove.planner_agreement.on_host", lambda spec, rank: "seven bytes")
    result = proof.prove(layouts()["ddp"])
    assert not result.ok
    assert result.plan_diff.startswith("rank 0 holds ") and "on its host, the planner says seven" in result.plan_diff
    assert result.failure == f"the planner is wrong about it: {result.plan_diff}"


def test_what_is_asked_must_exist(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = lmworks(capsys, "parity", "--layouts", "zero-9")
    assert code == 2 and "there is no layout 'zero-9'" in err
    code, _, err = lmworks(capsys, "parity", "--layouts", ",")
    assert code == 2 and "names no layout" in err
    code, _, err = lmworks(capsys, "parity", "model.layers=4")
    assert code == 2 and "none is given" in err
    code, _, err = lmworks(capsys, "parity", "tiny", "--layouts", "ep2")
    assert code == 2 and "parallel.ep = 2" in err
    zero = ["parallel.dp=2", "parallel.strategy=zero", "parallel.zero=1", "parallel.engine=deepspeed"]
    code, _, err = lmworks(capsys, "parity", "tiny", *zero)
    assert code == 2 and "parallel.engine = 'deepspeed' does not expose" in err


# --- the list ------------------------------------------------------------------------------------------


def test_list_names_everything() -> None:
    specs = [layout.run() for layout in layouts().values()]
    rows = [spec.parallel for spec in specs]
    for schedule in SCHEDULES:
        found = [row for row in rows if row.pp > 1 and row.schedule == schedule]
        assert any(row.dp == 1 for row in found), schedule
        assert any(row.strategy == "fsdp2" and row.dp > 1 for row in found), schedule
    assert {row.strategy for row in rows} == {"ddp", "fsdp1", "fsdp2", "zero"}
    assert {row.zero for row in rows if row.strategy == "zero"} == {0, 1, 2, 3}
    assert {row.recompute for row in rows} == set(RECOMPUTE)
    assert {row.offload for row in rows} == {"none", "optimizer", "full"}
    assert {(row.cp, row.cp_method) for row in rows if row.cp > 1} >= {
        (cp, method) for cp in (2, 4) for method in ("ring", "ulysses")
    }
    assert {spec.precision.dtype for spec in specs} == {"fp32", "bf16", "fp16"}
    assert {spec.precision.weights for spec in specs} == {"fp32", "bf16"}
    assert {spec.model.tie_embeddings for spec in specs if spec.parallel.pp > 1} == {True, False}
    composed = [row for row in rows if sum(size > 1 for size in (row.dp, row.tp, row.cp, row.pp)) > 1 or row.ep > 1]
    assert len(composed) >= 25
    assert max(row.world for row in rows) == 8


def test_looser_only_with_a_cause() -> None:
    for layout in layouts().values():
        assert layout.tolerance == Tolerance() or layout.tolerance.cause, layout.name
    with pytest.raises(SpecError, match="did you mean 'zero-1'"):
        choose("zero1")


def test_a_given_spec_is_laid_out_in_the_same_way() -> None:
    given = {"model": {"preset": "tiny"}, "precision": {"dtype": "bf16"}, "parallel": {"tp": 2}}
    run, alone = layouts()["fsdp2"].run(given), layouts()["fsdp2"].alone(given)
    assert run.model.hidden == alone.model.hidden == 64
    assert (run.parallel.strategy, run.parallel.dp, run.parallel.tp) == ("fsdp2", 2, 1)
    assert alone.parallel.world == 1 and alone.data.global_batch == run.data.global_batch
    assert run.precision.dtype == alone.precision.dtype == "bf16"
    assert layouts()["fsdp2"].alone(given, "fp32").precision.dtype == "fp32"


def test_the_comparing_process_starts_no_threads() -> None:
    """Forked ranks of a later layout would wait for them (Linux on aarch64)."""
    before = torch.get_num_threads()
    with parity():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_table_in_the_docs_is_of_this_list() -> None:
    text = (Path(__file__).parents[2] / "docs" / "parity.md").read_text(encoding="utf-8")
    table = text.partition("<!-- parity -->")[2].partition("<!-- /parity -->")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
    assert [row[0].removeprefix("| ") for row in rows] == list(layouts())
    assert {row[-1].removesuffix(" |") for row in rows} == {"ok"}


# --- what compares -------------------------------------------------------------------------------------


def test_every_element_of_every_copy_counts() -> None:
    truth = {"w": torch.tensor([3.0, 4.0], dtype=torch.float64)}
    half = ([IndexedShard("w", torch.tensor([0]))], [torch.tensor([3.0])])
    other = ([IndexedShard("w", torch.tensor([1]))], [torch.tensor([4.0])])
    copy = ([IndexedShard("w", torch.tensor([1]))], [torch.tensor([4.5])])
    assert relative_errors(truth, abs_errors(truth, [half, other])) == {"w": 0.0}
    assert relative_errors(truth, abs_errors(truth, [half, other, copy])) == {"w": pytest.approx(0.1)}
    assert relative_errors(truth, abs_errors(truth, [half, copy, other])) == {"w": pytest.approx(0.1)}
    assert math.isinf(relative_errors(truth, abs_errors(truth, [half]))["w"])
    assert worst({"a": 1.0, "b": math.nan, "c": 0.5}).name == "b"


def fail(rank: int) -> None:
    if rank == 1:
        raise SpecError("model.heads = 3 will not do")
    time.sleep(60)


def die(rank: int) -> None:
    if rank == 1:
        os._exit(3)
    time.sleep(60)


def hang(rank: int) -> None:
    time.sleep(60)


@pytest.mark.parametrize(
    ("work", "timeout", "message"),
    [
        (fail, 50, "rank 1: model.heads = 3 will not do"),
        (die, 50, "rank 1 died"),
        (hang, 1, "rank 0, 1 did not answer within 1 s"),
    ],
)
def test_a_rank_that_fails_ends_all(work: Callable[[int], None], timeout: float, message: str) -> None:
    with pytest.raises(RankFailed, match=message):
        on_ranks(2, work, timeout=timeout)


def test_ranks_that_never_met_are_forked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that another thread held when a rank was forked is never freed in that rank."""
    forked: list[int] = []
    lock = threading.Lock()

    def meet_behind_a_lock(server: socket.socket, world: int, rank: int) -> None:
        with lock:
            join_group(server, world, rank)

    def fork_under_it(*arguments: Any) -> Any:
        forked.append(len(forked))
        monkeypatch.setattr(local_ranks, "RENDEZVOUS_TIMEOUT_S", 1.0 if len(forked) == 1 else RENDEZVOUS_TIMEOUT_S)
        if len(forked) > 1:
            return on_forks(*arguments)
        with lock:
            return on_forks(*arguments)

    join_group, on_forks = local_ranks.init_gloo_group, local_ranks.run_forked
    monkeypatch.setattr(local_ranks, "init_gloo_group", meet_behind_a_lock)
    monkeypatch.setattr(local_ranks, "run_forked", fork_under_it)
    assert on_ranks(2, lambda rank: rank + 5) == [5, 6]
    assert forked == [0, 1]

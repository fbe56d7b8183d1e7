"""`lmworks bench overlap`: what it varies, what it measures on two ranks over gloo, and what it recommends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmworks.bench.overlap import (
    OverlapStudy,
    Setting,
    Spread,
    TimedTrainer,
    best_of_each_key,
    check_study,
    override_words,
    study,
    variations,
)
from lmworks.cli.bench_overlap import print_study
from lmworks.parallel.comm_counter import CommCounter
from lmworks.parallel.local_ranks import on_ranks
from lmworks.plan.exact.collectives import collectives
from lmworks.report.overlap_plot import draw_overlap
from lmworks.spec import RunSpec, SpecError
from tiny import make_spec
from typed import lmworks


def spec_of(dataset: Path, *changes: str) -> RunSpec:
    return make_spec(dataset, "data.global_batch=8", "parallel.dp=2", *changes)


def two_studies(rank: int, specs: list[RunSpec]) -> list[OverlapStudy | None]:
    return [study(spec, 2) for spec in specs]


@pytest.fixture(scope="module")
def studies(dataset: Path) -> list[OverlapStudy]:
    """Of DDP and of FSDP2, with two micro-batches a rank."""
    specs = [spec_of(dataset, f"parallel.strategy={name}") for name in ("ddp", "fsdp2")]
    found, other = on_ranks(2, two_studies, specs)
    assert other == [None, None]
    return found


@pytest.mark.slow
def test_settings_and_their_figures(studies: list[OverlapStudy]) -> None:
    ddp, fsdp2 = studies
    assert [one.overrides for one in ddp.settings] == [{"sync_each_pass": True}]  # one bucket holds all gradients
    assert [one.overrides for one in fsdp2.settings] == [{"reshard": False}, {"sync_each_pass": True}]
    for found in studies:
        assert (found.ranks, found.backend) == (2, "gloo") and found.compute_s > 0
        assert found.not_measured["comm_priority"] == "gloo has no streams"
        for one in (found.baseline, *found.settings):
            assert one.exposed_s + one.hidden_s > 0
            assert one.gain.low <= one.gain.median <= one.gain.high < 1
        assert found.baseline.gain == Spread(0, 0, 0)
    assert ddp.not_measured.keys() == {"bucket_mb", "comm_priority"}
    assert fsdp2.not_measured.keys() == {"prefetch", "comm_priority"}
    kept, each = fsdp2.settings
    assert kept.planned_bytes > fsdp2.baseline.planned_bytes > each.planned_bytes


@pytest.mark.slow
def test_json_plot_and_table(
    studies: list[OverlapStudy], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("COLUMNS", "200")
    facts = json.loads(json.dumps(studies[1].to_dict(), allow_nan=False))
    assert facts["accumulation"] == 2 and len(facts["settings"]) == 2 and facts["baseline"]["overrides"] == {}
    assert draw_overlap(facts, tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    print_study(studies[1])
    out = capsys.readouterr().out
    assert "parallel.sync_each_pass=true" in out and "recommendation: " in out and "gloo has no streams" in out


def reductions(rank: int, spec: RunSpec, folder: Path) -> list[list[tuple[str, int]]]:
    """Collectives of a step, with and without its messages."""
    found = []
    for silent in (False, True):
        timed = TimedTrainer(spec, folder / str(silent), silent_passes=silent)
        timed.step()
        with CommCounter(timed.trainer.mesh) as counter:
            timed.trainer.train_step(timed.trainer.batches_at(timed.trainer.cursor))
        assert len(timed.passes) == 2 and len(timed.steps) == 1 and timed.passes[0] < timed.steps[0]
        found.append([(row.kind, row.bytes) for row in counter.table()])
    return found


def test_passes_without_communication_send_no_gradient(dataset: Path, tmp_path: Path) -> None:
    spec = spec_of(dataset)
    with_messages, without = on_ranks(2, reductions, spec, tmp_path)[0]
    scalars = min(row.bytes for row in collectives(spec))
    assert sum(size for _, size in with_messages) > spec.model.params * 4
    assert without == [("all-reduce", scalars)]


def setting(overrides: dict[str, Any], gain: float, low: float, memory: int = 100) -> Setting:
    return Setting(
        " ".join(override_words(overrides)),
        overrides,
        1.0,
        Spread(gain, low, gain + 0.1),
        Spread(0, 0, 0),
        0,
        0,
        memory,
    )


def test_only_what_gains_more_than_its_spread_is_recommended() -> None:
    settings = [
        setting({"bucket_mb": 5.0}, 0.05, 0.01),
        setting({"bucket_mb": 1.0}, 0.09, 0.02),
        setting({"reshard": False}, 0.2, -0.01),  # its quartile is a loss
        setting({"prefetch": 2}, 0.005, 0.001),  # too little to be worth a change
    ]
    assert best_of_each_key(settings) == {"bucket_mb": 1.0}
    assert best_of_each_key(settings[2:]) == {}
    assert override_words({"bucket_mb": 1.0, "reshard": False, "prefetch": 2}) == [
        "parallel.bucket_mb=1",
        "parallel.reshard=false",
        "parallel.prefetch=2",
    ]


@pytest.mark.slow
def test_nothing_to_vary_is_said_with_the_reasons(
    studies: list[OverlapStudy], dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, left_out = variations(make_spec(dataset, "parallel.dp=2"), "cpu")
    assert changes == [] and left_out.keys() == {"bucket_mb", "sync_each_pass", "comm_priority"}
    print_study(replace(studies[0], settings=[], together=None, not_measured=left_out))
    out = capsys.readouterr().out
    assert "parallel.bucket_mb: one bucket holds all gradients" in out
    assert out.endswith("recommendation: keep the spec: there was nothing to vary, for the reasons above\n")


@pytest.mark.slow
def test_a_gain_that_is_not_confirmed_is_not_recommended(studies: list[OverlapStudy]) -> None:
    first = replace(studies[0], settings=[setting({"bucket_mb": 1.0}, 0.1, 0.05)])
    confirmed = replace(first, together=setting({"bucket_mb": 1.0}, 0.08, 0.03))
    assert confirmed.to_dict()["recommended"] == ["parallel.bucket_mb=1"]
    refuted = replace(first, together=setting({"bucket_mb": 1.0}, 0.02, -0.03))
    assert refuted.to_dict()["recommended"] == [] and refuted.to_dict()["gain"] is None


def test_what_is_varied(dataset: Path) -> None:
    # 100 MiB hold all gradients, and so would 400
    large = make_spec(
        dataset, "model.layers=10", "model.hidden=256", "model.ffn=1024", "model.vocab=8192", "parallel.dp=2"
    )
    assert 25 < large.model.params * 4 / 2**20 < 100
    changes, left_out = variations(large, "cpu")
    assert changes == [{"bucket_mb": 1.0}, {"bucket_mb": 5.0}, {"bucket_mb": 100.0}]
    assert left_out.keys() == {"sync_each_pass", "comm_priority"}
    fsdp2 = large.replace(parallel=large.parallel.replace(strategy="fsdp2", dp_shard=2, dp_replicate=1))
    changes, left_out = variations(fsdp2, "cuda")
    assert changes == [{"reshard": False}, {"prefetch": 2}, {"prefetch": 4}, {"comm_priority": "high"}]
    assert left_out.keys() == {"sync_each_pass"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("parallel.tp=2",), r"without parallel\.tp = 2"),
        (("parallel.strategy=fsdp2", "parallel.offload=optimizer"), "without parallel.offload = 'optimizer'"),
        (("parallel.dp=1",), "at least 2 data-parallel ranks"),
    ],
)
def test_what_cannot_be_studied(dataset: Path, changes: tuple[str, ...], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        check_study(spec_of(dataset, *changes))


def test_bad_requests_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["nowhere.toml"], ["tiny", "parallel.tp=2"], ["tiny", "--plot", "x.txt"]):
        code, _, err = lmworks(capsys, "study", "overlap", *words)
        assert code == 2 and err.count("\n") == 1, words

"""`lmworks bench ddp-fsdp`: what it measures of small models, what it writes, and what happens when a rank dies."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lmworks.bench.data_parallel import STRATEGIES, Study, select_strategies, study, with_strategy
from lmworks.bench.data_parallel_report import as_markdown, overview_table, write_reports
from lmworks.parallel.local_ranks import on_ranks
from lmworks.plan.memory.sheet import memory
from lmworks.report.html_page import check_output_folder
from lmworks.report.svg import Bars, as_svg, as_text
from lmworks.spec import Cluster, RunSpec, SpecError
from lmworks.train.rank_memory import measure_rank_memory
from tiny import make_spec, write_spec


@pytest.fixture(scope="module")
def small(dataset: Path) -> Study:
    return study(make_spec(dataset), 2, 3, ["fsdp2-reshard", "ZeRO-2"], jobs=False)


def test_strategies_are_compared_with_ddp(small: Study) -> None:
    ddp, fsdp2, zero2 = small.outcomes
    assert [ddp.name, fsdp2.name, zero2.name] == ["DDP", "FSDP2 reshard", "ZeRO-2"]
    assert ddp.ratio == 1
    assert all(one.exact and len(one.seconds) == 3 and one.tokens_per_s > 0 for one in small.outcomes)
    assert ddp.gradients_after == ddp.held[0].gradients, "DDP's buckets stay"
    assert fsdp2.gradients_after == zero2.gradients_after == 0
    assert fsdp2.held[0].total < zero2.held[0].total < ddp.held[0].total


def test_reports_have_the_figures_and_stand_alone(small: Study, tmp_path: Path) -> None:
    markdown, html = write_reports(small, tmp_path / "new" / "folder")
    text, page = markdown.read_text(), html.read_text()
    for one in small.outcomes:
        held = one.held[0]
        assert f"| {one.name} | 0 | yes | {held.parameters:,} | {held.gradients:,} | 0 | {held.optimizer:,} |" in text
        for kind, (count, size) in one.counted.items():
            assert f"| {one.name} | {kind} | yes | {count} | {count} | {size:,} | {size:,} |" in text
        assert f"<td>{one.name}</td>" in page
    assert page.count("<svg") == 4 == text.count("```text")
    assert "http" not in page.split("<main>")[1] and "Rank failure" not in text


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpecError, match=r"--out .*file/new: Not a directory"):
        check_output_folder(tmp_path / "file" / "new")


def test_ranks_are_of_the_cpu_whatever_the_cluster_is(dataset: Path) -> None:
    spec = make_spec(dataset).replace(cluster=Cluster(gpu="H200-SXM-141GB", device="auto"))
    assert with_strategy(spec, 2, STRATEGIES["DDP"]).cluster == Cluster(device="cpu")


def test_a_difference_of_one_byte_is_named(small: Study) -> None:
    first, *others = small.outcomes
    held = [replace(first.held[0], gradients=first.held[0].gradients + 1), *first.held[1:]]
    wrong = replace(small, outcomes=[replace(first, held=held), *others])
    columns, rows = overview_table(wrong)
    assert [row[columns.index("as worked out")] for row in rows[:3]] == ["NO", "yes", "yes"]
    assert "| DDP | 0 | NO |" in as_markdown(wrong)


def test_the_study_is_json(small: Study) -> None:
    facts = json.loads(json.dumps(small.to_dict(), allow_nan=False))
    assert facts["ranks"] == 2
    assert [one["exact"] for one in facts["strategies"]] == [True, True, True]
    assert facts["strategies"][1]["layout"] == STRATEGIES["FSDP2 reshard"]


def peaks(rank: int, specs: dict[str, RunSpec], folder: Path) -> dict[str, int]:
    return {name: sum(measure_rank_memory(rank, spec, folder / name).peak.values()) for name, spec in specs.items()}


@pytest.mark.slow  # tests/plan/test_memory.py holds the formula to simulated ranks
@pytest.mark.parametrize(
    "accumulate",
    [
        {"DDP": 3, "FSDP2 reshard": 1, "ZeRO-2": 3},
        {"FSDP1 grad-op": 1, "FSDP2 keep": 3, "ZeRO-1": 1},
    ],
    ids=", ".join,
)
def test_peaks_follow_the_formula(dataset: Path, tmp_path: Path, accumulate: dict[str, int]) -> None:
    specs = {}
    for name, times in accumulate.items():
        spec = make_spec(dataset, "model.layers=3", "model.hidden=64", f"data.global_batch={4 * times}")
        specs[name] = with_strategy(spec, 2, STRATEGIES[name])
    measured = on_ranks(2, peaks, specs, tmp_path)[0]
    for name, one in specs.items():
        assert measured[name] == pytest.approx(memory(one).tensors, rel=0.05), name


@pytest.mark.slow  # parity holds `ddp-sync-each-pass` to the bytes of the planner
def test_peaks_with_a_reduction_after_each_micro_batch(dataset: Path, tmp_path: Path) -> None:
    """DDP has no second copy of its gradients, FSDP2 no unsharded ones."""
    specs = {}
    for name in ("DDP", "FSDP2 reshard"):
        spec = make_spec(dataset, "model.layers=3", "model.hidden=64", "data.global_batch=12")
        for each in (False, True):
            specs[f"{name} {each}"] = with_strategy(spec, 2, {**STRATEGIES[name], "sync_each_pass": each})
    measured = on_ranks(2, peaks, specs, tmp_path)[0]
    for name in ("DDP", "FSDP2 reshard"):
        each = measured[f"{name} True"]
        assert each == pytest.approx(memory(specs[f"{name} True"]).tensors, rel=0.05), name
        assert each < 0.95 * measured[f"{name} False"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"names": ["fsdp3"]}, "is not a strategy of this study"),
        ({"overrides": ("parallel.tp=2",)}, "without parallel.tp = 2"),
        ({"overrides": ("data.global_batch=6",), "ranks": 4}, "data.global_batch = 6"),
        ({"ranks": 1}, "--ranks 1"),
    ],
)
def test_what_cannot_be_compared_is_refused_at_once(dataset: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        study(make_spec(dataset, *change.get("overrides", ())), change.get("ranks", 2), 1, change.get("names", ()))


def test_deepspeed_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    chosen, missing = select_strategies([])
    assert chosen == list(STRATEGIES)
    assert missing == {f"DeepSpeed ZeRO-{stage}": "not installed" for stage in (1, 2, 3)}


def test_bars_are_as_long_as_their_values() -> None:
    bars = Bars("Bytes", ["a", "bb"], ["x", "y"], [[1, 2], [4, 0]], lambda value: f"{value:g} B", [2, None], "formula")
    lines = as_text(bars).splitlines()
    assert lines[2] == "a   " + "█" * 12 + "▓" * 12 + "|" + "▓" * 12 + " 3 B"
    assert lines[3] == "bb  " + "█" * 48 + " 4 B"
    assert as_svg(bars).count("<polygon") == 4 and as_svg(bars).count('class="cursor"') == 1


@pytest.mark.deepspeed
def test_deepspeed_holds_what_the_arithmetic_says(dataset: Path) -> None:
    pytest.importorskip("deepspeed")
    found = study(
        make_spec(dataset, "data.global_batch=6"), 3, 1, [f"deepspeed-zero-{n}" for n in (1, 2, 3)], jobs=False
    )
    assert [one.exact for one in found.outcomes] == [True] * 4
    assert all(one.held[0].master for one in found.outcomes[1:])


@pytest.mark.slow
def test_a_killed_rank_ends_the_job_and_the_run_can_be_resumed(dataset: Path, tmp_path: Path) -> None:
    file = write_spec(make_spec(dataset), tmp_path / "spec.toml")
    command = [
        sys.executable,
        "-m",
        "lmworks",
        "study",
        "ddp-fsdp",
        str(file),
        "--only",
        "fsdp2-reshard",
        "--steps",
        "1",
    ]
    done = subprocess.run([*command, "--json", "--out", str(tmp_path)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for one in json.loads(done.stdout)["strategies"]:
        job = one["job"]
        assert job["exit_code"] in (1, 137) and job["ended_s"] < 120
        assert "rank" in job["said"] and "resumed" in job["said"]
        assert job["resumed"] == "yes" and 4 <= job["committed"] <= job["reached"]
        assert job["start_s"] > 0
        assert job["checkpoint_bytes"] > 12 * json.loads(done.stdout)["params"], "weights and two moments"
    assert "## Rank failure" in (tmp_path / "report.md").read_text()


@pytest.mark.slow
def test_a_killed_study_leaves_no_job(dataset: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom lmworks.bench.data_parallel import run_job\n"
        "from lmworks.spec import load_run\n"
        "run_job(load_run(sys.argv[1], ['parallel.dp=2']), Path(sys.argv[2]))\n"
    )
    file = write_spec(make_spec(dataset), tmp_path / "spec.toml")
    folder = tmp_path / "job"
    study = subprocess.Popen([sys.executable, "-c", code, str(file), str(folder)])

    def ranks() -> list[str]:
        """Processes of the job."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                found += [entry.name] if os.fsencode(folder / "run") in words else []
        return found

    def within(seconds: float, done: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + seconds
        while not done() and time.monotonic() < deadline:
            time.sleep(0.1)
        return done()

    try:
        assert within(120, lambda: (folder / "run" / "metrics.jsonl").exists()), "the job did not start"
        assert len(ranks()) >= 2
    finally:
        study.kill()
        study.wait()
    assert within(60, lambda: not ranks()), ranks()

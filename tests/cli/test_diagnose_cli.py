"""`lmworks diagnose`: the verdict on traces, and on the latest traces of a run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from lmworks.bench.remedy_trial import Trial
from lmworks.record import RunFolder
from lmworks.record.attach import Attached
from lmworks.spec import RunSpec
from typed import lmworks

DATA = Path(__file__).parents[1] / "trace" / "data"
KEYS = {"verdict", "evidence", "remedy", "predicted_gain"}


def test_traces(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(DATA / "resnet50_workers0.json.gz")
    code, out, _ = lmworks(capsys, "diagnose", file)
    assert code == 0 and out.startswith("verdict: input_bound\n") and "data.workers=4" in out
    code, out, _ = lmworks(capsys, "diagnose", file, "--json")
    facts = json.loads(out)
    assert code == 0 and facts.keys() >= {*KEYS, "steps", "idle_by_cause"}
    assert facts["remedy"]["overrides"] == ["data.workers=4"] and len(facts["evidence"]) == 3
    assert json.loads(lmworks(capsys, "profile", "trace", file, "--json")[1]).keys() == facts.keys()


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """With the traces of two ranks, and an older one."""
    folder = RunFolder.create(tmp_path / "run", RunSpec.from_dict({"data": {"workers": 5}}))
    folder.traces.mkdir()
    for name, file in (("rank0-steps-1-2", "alexnet"), ("rank0-steps-8-9", "resnet50_workers0")):
        shutil.copy(DATA / f"{file}.json.gz", folder.traces / f"{name}.json.gz")
    os.utime(folder.traces / "rank0-steps-1-2.json.gz", (1, 1))
    return folder


def test_the_latest_traces_of_a_run(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = lmworks(capsys, "diagnose", str(run.path))
    assert code == 0 and "rank0-steps-8-9" in out and "rank0-steps-1-2" not in out and "no hang" not in out
    assert "verdict: input_bound" in out and "data.workers=10" in out
    facts = json.loads(lmworks(capsys, "diagnose", str(run.path), "--json")[1])
    assert facts["verdict"] == "input_bound" and facts.keys() >= {*KEYS, "attempt", "ranks"}


def test_a_recorded_run_has_the_remedy_of_its_spec(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = shutil.copy(DATA / "resnet50_workers0.json.gz", tmp_path)
    monkeypatch.setattr("lmworks.record.attach.Attach.run", lambda self: Attached(8, 9, [Path(trace)], 3))
    monkeypatch.setattr("lmworks.bench.profile_train.profile_train", lambda *_, **options: [Path(trace)])
    for words in (("attach", str(run.path)), ("train", "tiny", "data.workers=5", "--run-dir", str(tmp_path / "new"))):
        code, out, err = lmworks(capsys, "profile", *words, "--json")
        assert code == 0 and json.loads(out)["remedy"]["overrides"] == ["data.workers=10"], err


def test_unfinished_traces_are_not_read(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    for end in ("json", "half"):
        draft = run.traces / f".rank0-steps-8-9.json.gz.{end}"
        draft.write_text("{")
        os.utime(draft, (4e9, 4e9))
    code, out, err = lmworks(capsys, "diagnose", str(run.path))
    assert code == 0 and "verdict: input_bound" in out, err


def test_a_healthy_run_has_nothing_to_try(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmworks.diagnose.verdict.WORTH", 2.0)
    code, _, err = lmworks(capsys, "diagnose", str(run.path), "--try")
    assert (code, err) == (2, "lmworks: error: --try: the verdict is healthy: there is nothing to try\n")


# Ranges of the measured gain, and whether the steps of both are apart; the last two overlap.
TRIALS = [((0.0, 1.0), True), ((0.0, 0.01), True), ((0.98, 0.99), True), *[((-0.1, 0.3), False)] * 2]


def test_the_remedy_is_tried(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    trials = [Trial(0.4, 0.3, 0.25, gains, apart) for gains, apart in TRIALS]

    def tried(*wanted: object) -> Trial:
        asked.append(wanted)
        return trials[len(asked) - 1]

    monkeypatch.setattr("lmworks.bench.remedy_trial.try_remedy", tried)
    code, out, _ = lmworks(capsys, "diagnose", str(run.path), "--try", "--steps", "2")
    assert code == 0 and asked == [(str(run.path), ("data.workers=10",), 2)]
    low, high = json.loads(lmworks(capsys, "diagnose", str(run.path), "--json")[1])["predicted_gain"].values()
    assert 0.01 < low < high < 0.98, (low, high)  # so that the trials are beside, below and above it
    assert "became one of 300 ms, a gain of 25% for each sequence (0% to 100%), as predicted\n" in out
    for words in ("(0% to 1%), less than predicted", "(98% to 99%), more than predicted", "it may be chance"):
        assert f"{words}\n" in lmworks(capsys, "diagnose", str(run.path), "--try")[1]
    trial = json.loads(lmworks(capsys, "diagnose", str(run.path), "--try", "--json")[1])["trial"]
    assert trial == {"before_s": 0.4, "after_s": 0.3, "gain": 0.25, "gain_range": [-0.1, 0.3], "apart": False}


def test_what_cannot_be_tried_or_diagnosed(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(DATA / "alexnet.json.gz")
    for words, says in (
        ((file, "--try"), "give the run"),
        ((file, str(run.path)), "is no file"),
        ((str(tmp_path / "none.json"),), "none.json"),
    ):
        code, out, err = lmworks(capsys, "diagnose", *words)
        assert code == 2 and not out and err.count("\n") == 1 and says in err
    shutil.rmtree(run.traces)
    code, _, err = lmworks(capsys, "diagnose", str(run.path), "--try")
    assert code == 2 and "has no traces" in err

"""The cheat sheet: the planner's numbers against hand arithmetic, what was measured, and summaries of readings."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lmworks.cli.main import app
from lmworks.learn import rules_of_thumb
from lmworks.learn.cheat_sheet import (
    MEASURED,
    PLANNED,
    STATE_FORMATS,
    Problem,
    cheat_sheet,
    limits,
    measured_table,
    planned_table,
    problem_table,
    ring_bytes,
    shipped_measurement,
)
from lmworks.learn.exercise import exercises
from lmworks.learn.goals import readings
from lmworks.learn.summaries import COMMAND, HEADINGS, read_summary, summary_found
from lmworks.learn.web.cheat_sheet import cheat_sheet_body
from lmworks.learn.web.pages import Pages
from lmworks.learn.workspace import Workspace
from lmworks.spec.errors import LMWorksError, SpecError
from test_docs import ROOT, parse

MISTRAL = 7_241_732_096  # parameters
RULES = {rule.id: rule for rule in cheat_sheet().rules}
PROBLEMS = {one.id: one for one in cheat_sheet().problems}


def learn(*words: str) -> str:
    result = CliRunner().invoke(app, ["learn", *words])
    if isinstance(result.exception, LMWorksError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def planned_rows(rule: str) -> list[dict[str, Any]]:
    return planned_table(RULES[rule]).rows


# --- the planner's numbers -------------------------------------------------------------------------------


def test_ddp_is_16_bytes_a_parameter_on_any_number_of_ranks() -> None:
    for row in planned_rows("ddp"):
        assert row["states"] == pytest.approx(16 * MISTRAL, rel=1e-6)
        assert row["sent"] == pytest.approx(2 * (1 - 1 / row["ranks"]) * 4 * MISTRAL, rel=1e-6)


def test_fsdp_divides_by_the_ranks_and_sends_half_as_much_again() -> None:
    for row in planned_rows("fsdp"):
        assert row["states"] == pytest.approx(16 * MISTRAL / row["ranks"], rel=1e-3)
        assert row["saving"] == pytest.approx(row["ranks"], rel=1e-3)
        weights, gradients = 2, 4 if row["reduce"] == "fp32" else 2
        assert row["sent_ratio"] == pytest.approx((2 * weights + gradients) / (2 * gradients), rel=0.03)


def test_savings_of_zero_by_hand() -> None:
    rows = planned_rows("zero")
    assert len(rows) == 4 * len(STATE_FORMATS)
    for row in rows:
        weights, gradients, states = map(int, row["format"].partition(": ")[2].split(" + "))
        n = row["ranks"]
        total = weights + gradients + states
        assert row["of_parameter"] == pytest.approx(total, rel=1e-6)
        held = {"zero1": weights + gradients + states / n, "zero2": weights + (gradients + states) / n}
        for stage, bytes_held in {**held, "zero3": total / n}.items():
            assert row[stage] == pytest.approx(total / bytes_held, rel=2e-3), row


def test_savings_are_those_of_the_paper() -> None:
    """Figure 1: 7.5B parameters on 64 GPUs, 120 GB a GPU; GB with the three stages."""
    (row,) = [one for one in planned_rows("zero") if one["ranks"] == 64 and "fp32 copy" in one["format"]]
    assert [round(120 / row[stage], 1) for stage in ("zero1", "zero2", "zero3")] == [31.4, 16.6, 1.9]


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_limits_of_formats(name: str) -> None:
    known = torch.finfo({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name])
    found = limits(name)
    assert (found["largest"], found["epsilon"]) == (known.max, known.eps)
    assert found["smallest"] == known.smallest_normal * known.eps
    row = rules_of_thumb.format_row(name)
    assert row["as_formula"] and {key: row[key] for key in found} == found
    assert row["small_gradient"] == ("0" if name == "fp16" else "1e-08")
    assert row["large_value"] == {"fp32": "100000", "bf16": "99840", "fp16": "inf"}[name]
    assert row["sum"] == ("256" if name == "bf16" else "257")


def test_recompute_is_one_more_forward_pass_at_most() -> None:
    plain, selective, full = planned_rows("recompute")
    assert plain["saved"] == 0 and plain["slower"] == 1
    assert 1.3 < full["flops"] <= 4 / 3 and 1 < selective["slower"] < full["slower"] < 4 / 3
    assert full["activations"] < 0.3 * plain["activations"]


def test_bytes_of_a_ring() -> None:
    assert ring_bytes({"all-reduce": (3, 800)}, 4) == 2 * 3 / 4 * 800
    assert ring_bytes({"all-gather": (1, 800), "reduce-scatter": (1, 400)}, 2) == (800 + 400) / 2


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=lambda one: one.id)
def test_a_problem_starts_from_what_its_command_prints(problem: Problem) -> None:
    result = CliRunner().invoke(app, [*problem.case.command.split()[1:], "--json"])
    printed = json.loads(result.output)
    first, *others = problem_table(problem).rows
    assert (first["reserved"], first["fits"]) == (printed["reserved"], printed["fits"])
    assert len(others) >= sum(bool(tip.change) for tip in problem.tips) > 0


def test_each_tip_against_running_out_of_memory_helps_and_all_of_them_fit() -> None:
    first, *alone, together = problem_table(PROBLEMS["oom"]).rows
    assert len(alone) == 4
    assert not first["fits"] and all(one["reserved"] < 0.9 * first["reserved"] for one in alone)
    assert together["fits"] and together["reserved"] < min(one["reserved"] for one in alone)
    assert alone[3]["host"] > 0 == alone[0]["host"] and alone[3]["step_s"] > 2 * first["step_s"]
    assert first["reserved"] - alone[2]["reserved"] > 16 * MISTRAL * 7 / 8  # DDP has buckets, too


def test_bf16_is_faster_than_fp32_and_costs_what_fp16_does() -> None:
    fp32, bf16 = problem_table(PROBLEMS["slow"]).rows
    assert bf16["step_s"] < fp32["step_s"] / 3
    fp16, normalised, bf16 = problem_table(PROBLEMS["nan"]).rows
    assert bf16["reserved"] == fp16["reserved"] and bf16["step_s"] == pytest.approx(fp16["step_s"], rel=0.01)
    assert 1 < normalised["step_s"] / fp16["step_s"] < 1.05


COMMANDS = [tip.command for problem in PROBLEMS.values() for tip in problem.tips]
COMMANDS += [one.command for one in cheat_sheet().essential]


@pytest.mark.parametrize("command", dict.fromkeys(COMMANDS))
def test_commands_can_be_typed(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    parse(command)


# --- what was measured -----------------------------------------------------------------------------------


def test_the_package_shows_what_the_benchmark_wrote() -> None:
    assert MEASURED.read_text() == (ROOT / "benchmarks/results/rules_of_thumb.json").read_text()
    assert set(RULES) == set(PLANNED) == set(shipped_measurement()["rules"])


def test_what_was_measured_is_what_was_planned() -> None:
    for rule in ("ddp", "fsdp", "zero"):
        for row in measured_table(RULES[rule], shipped_measurement()).rows:
            assert row["exact"] and row["states"] == row["planned_states"]
    plain, full = measured_table(RULES["recompute"], shipped_measurement()).rows
    assert all(row["peak"] == pytest.approx(row["planned_peak"], rel=1e-3) for row in (plain, full))
    assert 0.6 < full["saved"] < 0.9 and 1.1 < full["slower"] < 1.6


@pytest.mark.slow
def test_the_rules_measured_on_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMWORKS_CACHE", str(tmp_path))  # so that the study prepares its data before it forks
    said: list[str] = []
    rows = {row["strategy"]: row for row in rules_of_thumb.rank_rows("fp32", 2, said.append)}
    spec = rules_of_thumb.ranks_spec("fp32", 2)
    size, tensors = spec.model.params, 2 + 1 + 9 * spec.model.layers  # each has a counter of steps, 4 bytes
    expected = {"DDP": 16, "ZeRO-1": 12, "ZeRO-2": 10, "ZeRO-3": 8}
    assert {name: row["states"] for name, row in rows.items()} == {
        name: each * size + 4 * tensors for name, each in expected.items()
    }
    assert all(row["exact"] for row in rows.values()) and len(said) == 5
    assert rows["DDP"]["sent"] == pytest.approx(4 * size, rel=1e-3)
    assert rows["ZeRO-1"]["sent_ratio"] == rows["ZeRO-2"]["sent_ratio"] == 1
    assert 1.4 < rows["ZeRO-3"]["sent_ratio"] < 1.5
    plain, full = rules_of_thumb.recompute_rows(rounds=3)
    assert full["peak"] == pytest.approx(full["planned_peak"], rel=1e-3)
    assert 0.7 < full["saved"] < 0.85 and 1 < full["slower"] < 2
    assert plain["slower"] == 1


# --- the command and the page ----------------------------------------------------------------------------


def test_the_command_prints_all_of_it() -> None:
    said = learn("cheatsheet")
    sheet = cheat_sheet()
    assert not [one.title for one in (*sheet.rules, *sheet.problems) if one.title not in said]
    assert not [one.answer for one in sheet.questions if one.answer not in said]
    assert not [one.reading.link for one in sheet.essential if one.reading.link not in said]
    assert "1,023 ×" in said and "out of memory" in said.lower() and "Measured on " in said


def test_a_measurement_of_this_machine_is_shown_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = {**shipped_measurement()["rules"], "ddp": {"about": "here", "rows": [{"ranks": 3, "states": 7}]}}
    monkeypatch.setattr(rules_of_thumb, "measure", lambda report: {"where": "my machine", "rules": rules})
    found = json.loads(learn("cheatsheet", "--measure", "--json"))
    assert found["measured_on"] == "my machine"
    assert {one["id"]: one["measured"] for one in found["rules"]}["ddp"] == rules["ddp"]
    assert found["rules"][0]["planned"]["rows"] == planned_rows("ddp")
    assert [one["reading"] for one in found["essential"]][:3] == ["zero_paper", "megatron_paper", "gpipe_paper"]
    assert found["problems"][0]["planned"]["rows"] == problem_table(PROBLEMS["oom"]).rows
    assert "Measured on my machine." in learn("cheatsheet", "--measure")


def test_the_page_has_tables_and_the_state_of_summaries(tmp_path: Path) -> None:
    workspace = Workspace.create(tmp_path / "course")
    pages = Pages(workspace, "/x")
    text = cheat_sheet_body(pages)
    shown = unescape(re.sub(r"<[^>]+>", " ", text))
    assert "2.29 ×" in shown and "1,023 ×" in shown and text.count("<table>") == 2 * len(RULES) + len(PROBLEMS)
    assert text.count("summary missing") == len(cheat_sheet().essential)
    (workspace.folder / "summaries").mkdir()
    (workspace.folder / "summaries/zero_paper.md").touch()
    assert cheat_sheet_body(pages).count("summary started") == 1


def test_what_it_names_is_there() -> None:
    assert not {name for one in cheat_sheet().questions for name in one.exercises} - set(exercises())
    assert all(2 <= len(one.reading.quiz) <= 3 for one in cheat_sheet().essential)


# --- summaries -------------------------------------------------------------------------------------------


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    Workspace.create(tmp_path / "course")
    monkeypatch.chdir(tmp_path / "course")
    return tmp_path / "course"


def write(workspace: Path, words: int, without: str = "") -> None:
    """`words` below each heading; below `without` only what the template says."""
    text = (workspace / "summaries/zero_paper.md").read_text()
    for number, heading in enumerate(HEADINGS):
        if heading != without:
            text = text.replace(f"## {heading}\n", f"## {heading}\n\n- {f'word{number} ' * words}\n")
    (workspace / "summaries/zero_paper.md").write_text(text)


def test_a_summary_from_its_template_to_one_page(workspace: Path) -> None:
    assert not summary_found(workspace, "zero_paper").done and summary_found(workspace, "zero_paper").what == ""
    assert "summaries/zero_paper.md: write below each heading" in learn("summary", "zero_paper")
    text = (workspace / "summaries/zero_paper.md").read_text()
    assert text.startswith("# ZeRO: Memory Optimizations") and text.count("\n## ") == len(HEADINGS) == 8
    assert "lmworks plan memory mistral-7b --cluster 64xh100 --zero 2 --seq 2048" in text.partition(COMMAND)[2]
    started = read_summary(workspace, "zero_paper")
    assert (started.state, started.words, started.empty) == ("started", 0, tuple(HEADINGS))
    write(workspace, 10, without="The formula")
    assert read_summary(workspace, "zero_paper").empty == ("The formula",)
    found = summary_found(workspace, "zero_paper")
    assert not found.done and found.what == "summaries/zero_paper.md: nothing below 'The formula'"
    kept = (workspace / "summaries/zero_paper.md").read_text()
    assert "nothing below 'The formula'" in learn("summary", "zero_paper")
    assert (workspace / "summaries/zero_paper.md").read_text() == kept
    (workspace / "summaries/zero_paper.md").write_text(kept.replace("## The formula\n", "## The formula\n\n16ψ/N\n"))
    assert summary_found(workspace, "zero_paper").done
    assert summary_found(workspace, "zero_paper").what == "summaries/zero_paper.md: 71 words"


@pytest.mark.parametrize(
    ("words", "problem"), [(1, "8 words; 60 or more say something"), (8, ""), (75, ""), (76, "608 words; a page")]
)
def test_a_summary_is_a_page(workspace: Path, words: int, problem: str) -> None:
    learn("summary", "zero_paper")
    write(workspace, words)
    summary = read_summary(workspace, "zero_paper")
    assert summary.words == 8 * words and summary.problem.startswith(problem) and bool(summary.problem) == bool(problem)


def test_one_sentence_below_all_headings_is_no_summary(workspace: Path) -> None:
    learn("summary", "zero_paper")
    write(workspace, 10)
    file = workspace / "summaries/zero_paper.md"
    file.write_text(file.read_text().replace("word3", "word1"))
    assert read_summary(workspace, "zero_paper").problem == "below 'The problem' stands the text of another heading"


def test_a_heading_that_is_gone_is_named(workspace: Path) -> None:
    learn("summary", "zero_paper")
    write(workspace, 10)
    file = workspace / "summaries/zero_paper.md"
    file.write_text(file.read_text().replace("## The method\n", "## How\n"))
    assert read_summary(workspace, "zero_paper").empty == ("The method",)


def test_all_summaries_with_their_state(workspace: Path) -> None:
    learn("summary", "gpipe_paper")
    rows = {row["reading"]: row for row in json.loads(learn("summary", "--json"))}
    assert list(rows) == list(readings())
    assert rows["gpipe_paper"]["state"] == "started" and rows["zero_paper"]["state"] == "missing"
    assert rows["zero_paper"]["problem"] == ""
    assert re.search(r"gpipe_paper +started +nothing below 8 of 8 headings\n", learn("summary"))
    assert [json.loads(learn("summary", "zero_paper", "--json"))["new"] for _ in range(2)] == [True, False]


def test_a_reading_that_is_not_there(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="no reading 'zero_papr'; did you mean 'zero_paper'"):
        learn("summary", "zero_papr")
    assert not (workspace / "summaries").exists()
    monkeypatch.chdir(workspace.parent)
    with pytest.raises(SpecError, match="is in no workspace"):
        learn("summary")

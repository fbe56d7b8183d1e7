"""The interview: its data, calculations against arithmetic by hand, the boxes, the commands and the page."""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections.abc import Iterator
from datetime import date
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from test_course_page import Worker, ask
from test_learn_cli import learn

from lmworks.learn import review
from lmworks.learn.exercise import exercises
from lmworks.learn.interview import is_near, next_question, questions, score_of
from lmworks.learn.interview_calculations import CALCULATIONS, RATES
from lmworks.learn.progress import Progress
from lmworks.learn.quantity import parse_quantity, show_quantity
from lmworks.learn.review import Card, after_answer, due_names
from lmworks.learn.web import server as page_server
from lmworks.learn.web.server import PageServer
from lmworks.learn.workspace import Workspace
from lmworks.spec.errors import SpecError

MONDAY = date(2026, 3, 2)


def day(number: int) -> date:
    """Of March 2026."""
    return date(2026, 3, number)


# --- the data --------------------------------------------------------------------------------------------


def test_each_question_is_whole() -> None:
    assert 28 <= len(questions()) <= 36
    every = [point for one in questions().values() for point in one.rubric]
    assert len(set(every)) == len(every)
    for one in questions().values():
        assert 3 <= len(one.rubric) <= 6 and 2 <= len(one.follow_ups) <= 3, one.id
        assert one.question.endswith("?") or one.question.endswith("."), one.id
        assert all(point.endswith(".") for point in one.rubric), one.id
        assert all(follow_up.question.endswith(("?", ".")) for follow_up in one.follow_ups), one.id
        assert set(one.exercises) <= set(exercises()), one.id
    assert {one.id for one in questions().values() if one.calculation} == set(CALCULATIONS)


@pytest.mark.parametrize("name", CALCULATIONS)
def test_mistakes_are_told_from_the_right_answer(name: str) -> None:
    """Of some of the parameters that may be drawn. Where one is no mistake (stage 3 shards all), it is right."""
    asked = questions()[name].calculation
    assert asked is not None
    every = [dict(zip(asked.draw, values, strict=True)) for values in itertools.product(*asked.draw.values())]
    for drawn in every[:: 1 + len(every) // 6]:
        found = CALCULATIONS[name](**drawn)
        assert found.expected > 0 and found.wrong.keys() == asked.mistakes.keys()
        assert asked.ask.format(**drawn) and asked.formula.format(**drawn, **found.facts)
        for mistake, value in found.wrong.items():
            assert value == found.expected or not is_near(value, found.expected), (drawn, mistake)


def test_parameters_change_with_the_turn_and_are_repeatable() -> None:
    asked = questions()["kv_cache"]
    turns = [asked.scenario(turn) for turn in range(6)]
    assert turns == [asked.scenario(turn) for turn in range(6)]
    assert len({str(one and one.drawn) for one in turns}) > 2
    assert questions()["triton"].scenario(0) is None


# --- calculations by hand --------------------------------------------------------------------------------

N_8B, N_70B = 8_030_261_248, 70_553_706_496  # parameters of Llama 3
BY_HAND: list[tuple[str, dict[str, Any], float]] = [
    ("ddp", {"model": "llama3-8b", "ranks": 8}, 2 * 7 / 8 * 2 * N_8B),
    ("zero", {"model": "llama3-8b", "ranks": 8, "stage": 1}, (2 + 2 + 12 / 8) * N_8B),
    ("zero", {"model": "llama3-8b", "ranks": 8, "stage": 2}, (2 + 2 / 8 + 12 / 8) * N_8B),
    ("zero", {"model": "llama3-8b", "ranks": 16, "stage": 3}, 16 / 16 * N_8B),
    ("memory_30b", {"model": "opt-30b"}, 12 * 29.97e9),
    ("activations", {"model": "llama3-8b", "micro_batch": 2, "tokens": 4096}, 32 * 2 * 4096 * 4096 * 2),
    ("rlhf", {"model": "llama3-8b"}, 36 * N_8B),
    ("collectives", {"model": "llama3-8b", "ranks": 16}, 3 * 15 / 16 * 2 * N_8B),
    ("ring_tree", {"ranks": 8, "kib": 1024, "alpha": 10}, 14 * (10e-6 + 2**20 / 8 / 25e9)),
    ("scaling_stalls", {"model": "llama3-8b", "ranks": 32, "gbit": 400}, 2 * 31 / 32 * 2 * N_8B / 50e9),
    ("bandwidth", {"ranks": 8, "ms": 5}, 2 * 7 / 8 * 1e9 / 5e-3),
    ("tensor_parallel", {"model": "llama3-8b", "tokens": 4096}, 32 * 4 * 4096 * 4096 * 2),
    ("bubble", {"stages": 4, "micro_batches": 8}, 3 / 11),
    ("zero_bubble", {"stages": 4, "chunks": 2, "micro_batches": 8}, 3 / 19),
    ("throughput", {"micro_batch": 4, "ranks": 32}, 2**22 / 4096 / 4 / 32),
    ("hardware", {"gpu": "H100-SXM-80GB"}, 989e12 / 3.35e12),
    ("flash_attention", {"model": "llama3-8b", "tokens": 2048}, 32 * 2048**2 * 4),
    ("resume", {"gpus": 1024, "save_s": 60}, math.sqrt(2 * 60 * 50_700 * 3600 / 1024)),
    ("scheduling", {"gpus": 16_384, "days": 54}, 419),  # what Llama 3's report counts
    ("kv_cache", {"model": "llama3-70b", "sequences": 16, "tokens": 2048}, 2 * 80 * 8 * 128 * 2 * 16 * 2048),
    ("speculative", {"model": "llama3-8b", "gpu": "H100-SXM-80GB"}, 2 * N_8B / 3.35e12),
    ("slo", {"busy": 80, "service_ms": 500}, 0.5 / 0.2 * math.log(80)),
    ("code_models", {"samples": 10, "correct": 3, "k": 5}, 1 - math.comb(7, 5) / math.comb(10, 5)),
]
# By rules of thumb, which leave out attention or small matrices: an answer by them has to count, too.
BY_RULE: list[tuple[str, dict[str, Any], float]] = [
    ("thousand_gpus", {"model": "llama3-70b", "tokens": 15, "gpus": 2048, "mfu": 40},
     6 * N_70B * 15e12 / (2048 * 989e12 * 0.4)),
    ("utilisation", {"model": "llama3-8b", "tokens": 8000}, 6 * 8e9 * 8000 / 989e12),
    ("attention", {"model": "llama3-70b", "tokens": 32_768},
     80 * 2 * 32_768 * 8192 / (80 * 2 * 32_768 * 8192 + 2 * (N_70B - 128_256 * 8192))),
    ("compute_optimal", {"budget": 1}, math.sqrt(1e21 / 120)),
    ("compute_optimal", {"budget": 10}, math.sqrt(1e22 / 120)),
    ("batching", {"model": "llama3-8b", "gpu": "H100-SXM-80GB", "tokens": 8192}, (72e9 - 16.06e9) / (131_072 * 8192)),
    ("quantization", {"model": "llama3-70b"}, (N_70B - 2.1e9) * (0.5 + 2.5 / 128) + 2 * 2.1e9),
]  # fmt: skip


@pytest.mark.parametrize(("name", "drawn", "expected"), BY_HAND)
def test_by_hand(name: str, drawn: dict[str, Any], expected: float) -> None:
    assert CALCULATIONS[name](**drawn).expected == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(("name", "drawn", "expected"), BY_RULE)
def test_by_rules_of_thumb(name: str, drawn: dict[str, Any], expected: float) -> None:
    assert is_near(expected, CALCULATIONS[name](**drawn).expected)


def test_each_calculation_is_checked_by_other_arithmetic() -> None:
    assert {name for name, _, _ in BY_HAND + BY_RULE} == set(CALCULATIONS)
    assert pytest.approx(50_700, rel=1e-3) == 1 / RATES["llama3"]  # as the questions say


def test_a_wrong_number_gets_its_cause() -> None:
    scenario = questions()["memory_30b"].scenario(0)
    assert scenario is not None
    params = {"opt-13b": 12.85e9, "opt-30b": 29.97e9, "opt-66b": 65.72e9}[scenario.drawn["model"]]
    assert scenario.grade(f"{12 * params:g}").right
    missing = scenario.grade(f"{8 * params / 1e9} GB")
    assert not missing.right and "the fp32 copy is missing" in missing.cause
    assert "1 GiB = 2³⁰ bytes" in scenario.grade(f"{12 * params / 1e9} GiB").cause
    assert "Bits" in scenario.grade(f"{8 * 12 * params:g}").cause
    assert scenario.grade("1 GB").cause == scenario.grade("0").cause == ""


# --- quantities ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("80e9", "bytes", 80e9), ("80 GB", "bytes", 80e9), ("74.5 GiB", "bytes", 74.5 * 2**30),
        ("80gb", "bytes", 80e9), ("1,024", "bytes", 1024), ("16 bytes", "bytes", 16), ("300 GB/s", "bytes/s", 300e9),
        (".5TB/s", "bytes/s", 5e11), ("2 days", "seconds", 172_800),
        ("25 %", "share", 0.25), ("0.25", "share", 0.25), ("1.2 s", "seconds", 1.2), ("12ms", "seconds", 0.012),
        ("5 µs", "seconds", 5e-6), ("5 us", "seconds", 5e-6), ("3.5 h", "seconds", 12_600),
        ("2.9B", "parameters", 2.9e9), ("2.9e9 parameters", "parameters", 2.9e9), ("52", "sequences", 52),
    ],
)  # fmt: skip
def test_quantities_are_read(text: str, unit: str, value: float) -> None:
    assert parse_quantity(text, unit) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "unit"),
    [("", "bytes"), ("GB", "bytes"), ("80 Gigs", "bytes"), ("74,5 GB", "bytes"), ("-3", "bytes"), ("nan", "share"),
     ("٨٠GB", "bytes"), ("1.2 GB", "seconds"), ("25 %", "bytes"), ("5 tokens", "sequences"), ("80GB/s", "bytes")],
)  # fmt: skip
def test_what_is_no_quantity_is_refused(text: str, unit: str) -> None:
    with pytest.raises(SpecError, match="is not an answer in"):
        parse_quantity(text, unit)


@pytest.mark.parametrize("value", [3.21, 4_790_000_000.0, 0.000298])
@pytest.mark.parametrize("unit", ["bytes", "bytes/s", "seconds", "share", "parameters"])
def test_what_is_shown_can_be_typed(value: float, unit: str) -> None:
    text = show_quantity(value, unit).partition("(")[0]
    assert parse_quantity(text, unit) == pytest.approx(value, rel=0.01)


# --- the boxes -------------------------------------------------------------------------------------------


def test_known_cards_come_back_after_two_four_eight_and_sixteen_days() -> None:
    card, found = None, []
    on = MONDAY
    for _ in range(6):
        card = after_answer(card, 1.0, on)
        found.append(((card.due - on).days, card.box))
        on = card.due
    assert found == [(2, 2), (4, 3), (8, 4), (16, 5), (16, 5), (16, 5)]
    assert card and card.answers == 6
    assert after_answer(card, 0.4, on) == Card(date.fromordinal(on.toordinal() + 1), 1, 7)


def test_half_known_cards_stay_in_their_box() -> None:
    assert after_answer(Card(day(2), 3, 4), 0.5, day(2)) == Card(day(6), 3, 5)
    assert (
        after_answer(Card(day(2), 3, 4), 0.79, day(2)).box == 3 and after_answer(Card(day(2), 3), 0.8, day(2)).box == 4
    )
    assert after_answer(None, 0.5, day(2)) == Card(day(3), 1, 1)


def test_known_before_it_is_due_changes_nothing_and_missed_does() -> None:
    card = after_answer(None, 0.0, day(2))
    assert card == Card(day(3), 1, 1)
    assert after_answer(card, 1.0, day(2)) == Card(day(3), 1, 2)
    assert after_answer(Card(day(20), 4, 5), 0.0, day(2)) == Card(day(3), 1, 6)


def test_longest_due_first() -> None:
    cards = {"b": Card(day(4)), "a": Card(day(2)), "later": Card(day(5)), "c": Card(day(3))}
    assert due_names(cards, day(4)) == ["a", "c", "b"]


def test_what_is_due_comes_before_what_is_new() -> None:
    first, second = list(questions().values())[:2]
    assert next_question({}, day(2)) is first
    known = {first.card: Card(day(4), 2, 1)}
    assert next_question(known, day(2)) is second and next_question(known, day(4)) is first
    assert next_question({**known, first.calculation_card: Card(day(2))}, day(2)) is first
    assert next_question({"interview/gone": Card(day(1)), "rmsnorm/0": Card(day(1))}, day(2)) is first
    every = {one.card: Card(day(9)) for one in questions().values()}
    assert next_question(every, day(2)) is None


def test_the_score_is_the_share_of_the_points() -> None:
    asked = questions()["ddp"]
    assert score_of(asked, [1, 3, 3]) == pytest.approx(2 / 6) and score_of(asked, [0]) == 0
    assert score_of(asked, range(1, 7)) == 1


# --- commands --------------------------------------------------------------------------------------------


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    Workspace.create(tmp_path / "course")
    monkeypatch.chdir(tmp_path / "course")
    on(monkeypatch, day(2))
    return tmp_path / "course"


def on(monkeypatch: pytest.MonkeyPatch, today: date) -> None:
    monkeypatch.setattr(review, "today", lambda: today)


def cards(workspace: Path) -> dict[str, Card]:
    return Progress.load(workspace).cards


def test_a_question_from_asking_to_the_next(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ddp = questions()["ddp"]
    said = learn("interview")
    assert ddp.question in said and ddp.rubric[0] not in said and "Calculation: " in said
    said = learn("interview", "ddp", "--rubric")
    assert all(f"{at}. {point}" in said for at, point in enumerate(ddp.rubric, 1)) and ddp.follow_ups[0].answer in said
    assert cards(workspace) == {}
    said = learn("interview", "ddp", "--said", "1", "--said", "3")
    assert "2 of 6 points:" in said and f"✓ 3. {ddp.rubric[2]}" in said and f"✗ 2. {ddp.rubric[1]}" in said
    assert "Box 1 of 5; it comes back on 2026-03-03." in said
    learn("interview", "ddp", *(word for at in range(1, 7) for word in ("--said", str(at))))
    assert cards(workspace) == {"interview/ddp": Card(day(3), 1, 2)}  # its points were read a moment ago
    assert json.loads(learn("interview", "--json"))["id"] == "zero"
    on(monkeypatch, day(3))
    assert json.loads(learn("interview", "--json"))["id"] == "ddp"
    found = json.loads(learn("interview", "ddp", "--json", *(w for at in range(1, 6) for w in ("--said", str(at)))))
    assert found == {"id": "ddp", "answer": {"of": 6, "missed": [6], "due": "2026-03-05", "box": 2, "answers": 3}}


def test_the_calculation_has_other_figures_after_each_answer(workspace: Path) -> None:
    first = json.loads(learn("interview", "kv_cache", "--json"))["calculation"]
    assert first == json.loads(learn("interview", "kv_cache", "--json"))["calculation"] and first["unit"] == "bytes"
    scenario = questions()["kv_cache"].scenario(0)
    assert scenario is not None and scenario.ask == first["ask"]
    found = json.loads(learn("interview", "kv_cache", "--number", "1 GB", "--json"))["calculation"]
    assert not found["right"] and found["box"] == 1 and found["expected"] == scenario.grade("1").expected
    again = questions()["kv_cache"].scenario(1)
    assert again is not None and json.loads(learn("interview", "kv_cache", "--json"))["calculation"]["ask"] == again.ask
    said = learn("interview", "kv_cache", "--number", f"{again.grade('1').expected / 1e9} GB", "--said", "0")
    assert "0 of 6 points" in said and "Right: " in said
    assert {name: card.answers for name, card in cards(workspace).items()} == {
        "interview/kv_cache": 1, "interview/kv_cache/calculation": 2,
    }  # fmt: skip


def test_missed_quiz_questions_come_back(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = exercises()["rmsnorm"].quiz
    learn("quiz", "rmsnorm", "--answer", "2", "--answer", "3")
    assert cards(workspace) == {"rmsnorm/1": Card(day(3), 1, 1)}
    assert "Nothing is due today. The next question comes back on 2026-03-03." in learn("review")
    assert json.loads(learn("review", "--json")) == []
    assert "Due for review" not in learn()
    on(monkeypatch, day(3))
    said = learn("review")
    assert wrong.question in said and right.question not in said and "lmworks learn quiz rmsnorm" in said
    assert "Due for review: 1 (`lmworks learn review`)." in learn()
    learn("quiz", "rmsnorm", "--answer", "2", "--answer", "1")
    assert cards(workspace) == {"rmsnorm/1": Card(day(5), 2, 2)}
    learn("interview", "bubble", "--said", "0", "--number", "1 %")
    on(monkeypatch, day(5))
    found = json.loads(learn("review", "--json"))
    assert [(one["kind"], one["id"]) for one in found] == [
        ("interview", "bubble"), ("calculation", "bubble"), ("quiz", "rmsnorm"),
    ]  # fmt: skip
    scenario = questions()["bubble"].scenario(1)
    assert scenario is not None and found[1]["text"] == scenario.ask


def test_all_questions_with_their_state(workspace: Path) -> None:
    learn("interview", "triton", "--said", "1", "--said", "2", "--said", "3", "--said", "4")
    rows = {row["id"]: row for row in json.loads(learn("interview", "--list", "--json"))}
    assert list(rows) == list(questions())
    assert rows["triton"]["card"] == {"due": "2026-03-04", "box": 2, "answers": 1}
    assert rows["triton"]["calculation"] is None and rows["ddp"]["card"] == rows["ddp"]["calculation"] == {}
    lines = {line.split()[0]: line for line in learn("interview", "--list").splitlines() if line.strip()}
    assert lines["triton"].rstrip().endswith("2026-03-04, box 2") and lines["ddp"].split()[-2:] == ["new", "new"]


def test_older_files_without_cards(workspace: Path) -> None:
    """What was missed before there were cards is due at once; cards of what is no more are left out."""
    file = workspace / ".learn/progress.json"
    table: dict[str, Any] = {"exercises": {"rmsnorm": {"tries": 2}}, "answers": {"rmsnorm/0": True, "rmsnorm/1": False}}
    file.write_text(json.dumps(table))
    assert cards(workspace) == {"rmsnorm/1": Card(day(2))}
    gone = Card(day(1)).to_dict()
    table["cards"] = {"rmsnorm/9": gone, "none/0": gone, "interview/none": gone, "interview/triton/calculation": gone}
    file.write_text(json.dumps(table))
    assert [one["id"] for one in json.loads(learn("review", "--json"))] == ["rmsnorm"]
    learn("hint", "rmsnorm")
    kept = json.loads(file.read_text())
    assert kept["cards"]["rmsnorm/1"] == Card(day(2)).to_dict() and kept["exercises"]["rmsnorm"]["tries"] == 2
    table["cards"] = {"rmsnorm/1": {"due": "soon", "box": 1, "answers": 0}}
    file.write_text(json.dumps(table))
    with pytest.raises(SpecError, match=r"progress\.json is not a progress file"):
        learn("interview")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("ddpp",), r"no question 'ddpp'; did you mean 'ddp'\?; `lmworks learn interview --list`"),
        (("--said", "1"), "--said needs a question: `lmworks learn interview ID --said …`"),
        (("--rubric",), "--rubric needs a question"),
        (("--number", "1"), "--number needs a question"),
        (("ddp", "--said", "7"), "--said 7: the points of ddp are 1 to 6; 0 is none of them"),
        (("ddp", "--said", "-1"), "--said -1: the points"),
        (("triton", "--number", "1"), "--number: triton has no calculation"),
        (("ddp", "--number", "5 Gigs"), "'5 Gigs' is not an answer in bytes; write it like 80e9, 80 GB or 74.5 GiB"),
        (("ddp", "--said", "1", "--number", "x"), "'x' is not an answer in bytes"),
    ],
)
def test_errors_say_what_would_work_and_record_nothing(workspace: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        learn("interview", *words)
    assert cards(workspace) == {}


# --- the page --------------------------------------------------------------------------------------------


@pytest.fixture
def server(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageServer]:
    monkeypatch.setattr(page_server, "CheckWorker", Worker)
    found = PageServer(Workspace(workspace))
    threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


def test_a_question_on_the_page(server: PageServer, workspace: Path) -> None:
    ddp = questions()["ddp"]
    status, text = ask(server, "interview")
    assert status == 200 and ddp.question in text and ddp.rubric[0] not in unescape(text)
    area = text[text.index("<textarea") : text.index("</textarea>")]
    assert "name=" not in area  # what is written there is not sent
    _, text = ask(server, "rubric/ddp", {})
    assert ddp.rubric[0] in unescape(text) and text.count('type="checkbox"') == 6 and text.count("<details>") == 3
    assert cards(workspace) == {}
    _, text = ask(server, "said/ddp", {"1": "on", "3": "on"})
    assert "2 of 6 points. Box 1 of 5; it comes back on 2026-03-03." in text and text.count(" checked>") == 2
    assert cards(workspace) == {"interview/ddp": Card(day(3), 1, 1)}
    assert questions()["zero"].question in ask(server, "interview")[1].partition("<h2>")[0]
    assert "2026-03-03, box 1" in ask(server, "interview")[1]


def test_the_page_lists_what_is_due(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    quiz = exercises()["rmsnorm"].quiz
    ask(server, "quiz/rmsnorm", {"0": "0", "1": "0"})
    ask(server, "quiz/ddp_tutorial", {"0": "1", "1": "1"})
    assert "Due today" not in ask(server, "interview")[1]
    on(monkeypatch, day(3))
    _, text = ask(server, "interview")
    due = unescape(text.partition("<h2>Due today</h2>")[2].partition("<h2>")[0])
    assert f'<a href="/{server.token}/lesson/rmsnorm">{quiz[0].question}</a>' in due and quiz[1].question not in due
    assert due.count("<a ") == 2 and f'href="/{server.token}/reading/ddp_tutorial"' in due


def test_a_calculation_on_the_page(server: PageServer, workspace: Path) -> None:
    scenario = questions()["bubble"].scenario(0)
    assert scenario is not None
    _, text = ask(server, "interview/bubble")
    assert scenario.ask in unescape(text) and '<input type="hidden" name="turn" value="0">' in text
    _, text = ask(server, "number/bubble", {"turn": "0", "number": "0.9%"})
    assert '<span class="bad">No:</span>' in text and "it comes back on 2026-03-03" in text
    _, text = ask(server, "number/bubble", {"turn": "0", "number": str(scenario.grade("1").expected)})
    assert '<span class="good">Right:</span>' in text  # the page still shows the first figures
    assert cards(workspace) == {"interview/bubble/calculation": Card(day(3), 1, 2)}
    for form in ({"number": "1"}, {"turn": "3", "number": "1"}, {"turn": "9" * 5000, "number": "1"}):
        status, text = ask(server, "number/bubble", form)
        assert status == 409 and "load it anew" in text
    status, text = ask(server, "number/bubble", {"turn": "1", "number": "<b>x</b>"})
    assert status == 409 and "&lt;b&gt;x" in text and "<b>" not in text
    assert cards(workspace)["interview/bubble/calculation"].answers == 2
    for path in ("rubric/none", "said/none", "number/none"):
        assert ask(server, path, {})[0] == 404
    assert ask(server, "interview/none")[0] == 404

"""`lmworks learn interview` and `review`: open questions with rubrics, and what comes back today."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..learn import review as boxes
from ..learn.progress import Progress, record_scores
from ..learn.workspace import Workspace
from ..spec.errors import SpecError
from .output import Json, print_json, print_table

if TYPE_CHECKING:
    from ..learn.interview import OpenQuestion, Result


def interview(
    name: Annotated[str, typer.Argument(metavar="[ID]", help="A question of --list; else the next one.")] = "",
    rubric: Annotated[bool, typer.Option("--rubric", help="What a good answer has; nothing is recorded.")] = False,
    said: Annotated[
        list[int] | None, typer.Option("--said", help="A point of the rubric that you made; repeat it. 0: none.")
    ] = None,
    number: Annotated[
        str, typer.Option("--number", metavar="QUANTITY", help="Your answer to the calculation, e.g. 80GB or 25%.")
    ] = "",
    every: Annotated[bool, typer.Option("--list", help="All questions, their boxes and when they come back.")] = False,
    json: Json = False,
) -> None:
    """An open question with its rubric: what is due, then what is new."""
    from ..learn.interview import find_question, next_question

    if not name and (rubric or said is not None or number):
        option = "--rubric" if rubric else "--said" if said is not None else "--number"
        raise SpecError(f"{option} needs a question: `lmworks learn interview ID {option} …`")
    workspace = Workspace.find(Path.cwd())
    progress = Progress.load(workspace.folder)
    if every:
        print_questions(progress, json)
        return
    question = find_question(name) if name else next_question(progress.cards, boxes.today())
    if question is None:
        print_nothing_due(progress, json)
    elif said is None and not number:
        print_question(question, progress, rubric, json)
    else:
        answer(workspace, question, said, number, json)


def review(json: Json = False) -> None:
    """Questions of quizzes and the interview that come back today."""
    from ..learn.due import due_today

    progress = Progress.load(Workspace.find(Path.cwd()).folder)
    due = due_today(progress.cards, boxes.today())
    if json:
        print_json([one.to_dict() for one in due])
        return
    if not due:
        print_nothing_due(progress, json)
        return
    cells = [[one.asked.id, one.asked.text, one.card.box, one.asked.command] for one in due]
    print_table("Due today", ["id", "question", "box", "answer it with"], cells, drop=("box",))


def print_nothing_due(progress: Progress, json: bool) -> None:
    from ..learn.due import next_day

    day = next_day(progress.cards)
    if json:
        print_json({"next": day.isoformat() if day else None})
        return
    typer.echo(f"Nothing is due today.{f' The next question comes back on {day}.' if day else ''}")


def print_questions(progress: Progress, json: bool) -> None:
    from ..learn.interview import questions

    rows = [
        {"id": one.id, "topic": one.topic, "question": one.question, "card": card_of(progress, one.card),
         "calculation": card_of(progress, one.calculation_card) if one.calculation else None}
        for one in questions().values()
    ]  # fmt: skip
    if json:
        print_json(rows)
        return
    cells = [
        [one.id, one.topic, one.question, state(progress, one.card),
         state(progress, one.calculation_card) if one.calculation else ""]
        for one in questions().values()
    ]  # fmt: skip
    print_table("Interview", ["id", "topic", "question", "due", "calculation"], cells, drop=("topic", "question"))


def card_of(progress: Progress, name: str) -> dict[str, Any]:
    """Empty where it was never answered."""
    return progress.cards[name].to_dict() if name in progress.cards else {}


def state(progress: Progress, name: str) -> str:
    card = progress.cards.get(name)
    return f"{card.due}, box {card.box}" if card else "new"


def print_question(question: OpenQuestion, progress: Progress, rubric: bool, json: bool) -> None:
    scenario = question.next_scenario(progress.cards)
    if json:
        shown: dict[str, Any] = {
            "id": question.id, "topic": question.topic, "question": question.question,
            "exercises": list(question.exercises), "points": len(question.rubric),
            "calculation": {"ask": scenario.ask, "unit": scenario.calculation.unit} if scenario else None,
        }  # fmt: skip
        if rubric:
            follow_ups = [vars(one) for one in question.follow_ups]
            shown |= {"rubric": list(question.rubric), "follow_ups": follow_ups}
        print_json(shown)
        return
    typer.echo(f"{question.id} ({question.topic})\n{question.question}")
    if scenario:
        typer.echo(f"\nCalculation: {scenario.ask}")
    typer.echo("")
    if rubric:
        print_rubric(question)
    else:
        typer.echo("Answer aloud or on paper, then compare:")
        typer.echo(f"  lmworks learn interview {question.id} --rubric")
    if scenario:
        typer.echo(f"  lmworks learn interview {question.id} --number …")


def print_rubric(question: OpenQuestion) -> None:
    typer.echo("A good answer says:")
    for at, point in enumerate(question.rubric, 1):
        typer.echo(f"  {at}. {point}")
    typer.echo("\nFollow-ups:")
    for one in question.follow_ups:
        typer.echo(f"  {one.question}\n    {one.answer}")
    if question.exercises:
        typer.echo(f"\nExercises: {', '.join(question.exercises)}")
    typer.echo("\nRecord the points that you made, e.g. 1 and 3:")
    typer.echo(f"  lmworks learn interview {question.id} --said 1 --said 3")


def answer(workspace: Workspace, question: OpenQuestion, said: list[int] | None, number: str, json: bool) -> None:
    """Records both parts, or the one that is given."""
    from ..learn.interview import score_of

    scores: dict[str, float] = {}
    result = None
    if said is not None:
        scores[question.card] = score_of(question, said)
    if number:
        scenario = question.next_scenario(Progress.load(workspace.folder).cards)
        if scenario is None:
            raise SpecError(f"--number: {question.id} has no calculation")
        result = scenario.grade(number)
        scores[question.calculation_card] = float(result.right)
    progress = record_scores(workspace.folder, scores)
    if json:
        print_json(as_json(question, said, result, progress))
        return
    if said is not None:
        print_points(question, said)
        typer.echo(progress.cards[question.card].text)
    if result:
        print_result(result)
        typer.echo(progress.cards[question.calculation_card].text)


def as_json(
    question: OpenQuestion, said: list[int] | None, result: Result | None, progress: Progress
) -> dict[str, Any]:
    shown: dict[str, Any] = {"id": question.id}
    if said is not None:
        missed = [at for at in range(1, len(question.rubric) + 1) if at not in said]
        shown["answer"] = {"of": len(question.rubric), "missed": missed, **card_of(progress, question.card)}
    if result:
        shown["calculation"] = {**vars(result), **card_of(progress, question.calculation_card)}
    return shown


def print_points(question: OpenQuestion, said: list[int]) -> None:
    made = [at in said for at in range(1, len(question.rubric) + 1)]
    typer.echo(f"{sum(made)} of {len(made)} points:")
    for at, (one, point) in enumerate(zip(made, question.rubric, strict=True), 1):
        typer.echo(f"  {'✓' if one else '✗'} {at}. {point}")


def print_result(result: Result) -> None:
    typer.echo(f"{'Right' if result.right else 'No'}: {result.words}\n  {result.formula}")
    if result.cause:
        typer.echo(f"  Perhaps: {result.cause}")

"""`lmworks learn`: the course's commands. Exercises are checked in processes of their own."""

from __future__ import annotations

import errno
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..learn.course_files import course_sources
from ..learn.exercise import GUIDE, Exercise, exercises, find_exercise
from ..learn.progress import Progress, change_progress, record_answers, record_verdict, take_hint
from ..learn.status import next_exercise, state_of
from ..learn.workspace import Workspace
from ..spec.errors import LMWorksError, SpecError
from .groups import CommandGroup
from .learn_cheat_sheet import cheatsheet, summary
from .learn_class import export, grade, new
from .learn_interview import interview, review
from .learn_plan import benchmarks, checklist, milestones, plan
from .learn_serve import serve
from .learn_tracks import print_lesson, tracks
from .output import Json, print_json, print_table

if TYPE_CHECKING:
    from ..learn.checking.verdict import Verdict

Id = Annotated[str, typer.Argument(metavar="[ID]", help="An exercise by its name or number; else the next one.")]
NamedId = Annotated[str, typer.Argument(metavar="ID", help="An exercise by its name or number.")]
LessonId = Annotated[
    str, typer.Argument(metavar="[ID]", help="An exercise, or a lesson of `lmworks learn tracks`; else the next one.")
]
QuizId = Annotated[
    str, typer.Argument(metavar="[ID]", help="An exercise, a reading, a lesson of a track; else the next exercise.")
]
POLL_S = 0.2  # `watch` looks at the files this often

# What helps where a file cannot be read or written.
WHAT_HELPS = {
    errno.ENOSPC: "free some space on that disk",
    errno.EDQUOT: "free some space: your quota is used up",
    errno.EROFS: "copy the workspace to a disk that can be written",
    errno.EACCES: "give yourself the right to write there, or copy the workspace",
    errno.EPERM: "give yourself the right to write there, or copy the workspace",
    errno.EISDIR: "a folder stands where a file belongs; move it away, then `lmworks learn reset FILE`",
    errno.ENOTDIR: "a file stands where a folder belongs; move it away",
    errno.EEXIST: "a file stands where a folder belongs; move it away",
}


class LearnCommands(CommandGroup):
    """A file that cannot be read or written is an error of one line, whichever command meets it."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            helps = WHAT_HELPS.get(error.errno or 0)
            raise LMWorksError(f"{where}{error.strerror or error}{f'; {helps}' if helps else ''}") from None


app = typer.Typer(
    cls=LearnCommands,
    invoke_without_command=True,
    rich_markup_mode=None,
    help="Build it yourself: exercises on the real code, checked.",
)


@app.callback()
def learn(context: typer.Context, json: Json = False) -> None:
    """Without a command: where you are, what is next, and the one thing to do."""
    if context.invoked_subcommand is None:
        print_status(json)


def print_status(json: bool) -> None:
    workspace, progress = here()
    names = list(exercises())
    parts = names[:GUIDE], names[GUIDE:]
    done, further = ([name for name in part if progress.of(name).passed] for part in parts)
    upcoming = next_exercise(progress)
    if json:
        rest = {"passed": further, "of": len(parts[1])}
        print_json({"passed": done, "of": GUIDE, "further": rest, "next": upcoming.id if upcoming else None})
        return
    typer.echo(f"{len(done)} of {GUIDE} exercises pass, {len(further)} of {len(parts[1])} further ones.")
    if progress.due():
        from ..learn.due import due_today
        from ..learn.review import today

        if due := due_today(progress.cards, today()):  # without those whose questions are gone
            typer.echo(f"Due for review: {len(due)} (`lmworks learn review`).")
    if upcoming is None:
        typer.echo("All are done. `lmworks learn milestones` shows what to do with it.")
        return
    hole = workspace.holes(upcoming)[0]
    written = workspace.written(upcoming)
    typer.echo(f"\nNext: {upcoming.about} ({upcoming.difficulty})")
    typer.echo(f"  {upcoming.task}")
    typer.echo(f"  {workspace.folder / upcoming.file}:{hole.start + 1}")
    typer.echo(f"\n{'It is written: ' if written else 'Write it, then '}`lmworks learn check {upcoming.id}`")


@app.command()
def init(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")]) -> None:
    """Make a workspace: programs with holes, which run from the start."""
    workspace = Workspace.create(folder)
    typer.echo(f"{workspace.folder}: {len(exercises())} exercises. Now: cd {workspace.folder} && lmworks learn")


@app.command("list")
def list_exercises(json: Json = False) -> None:
    """All exercises, with how far you are."""
    try:
        workspace, progress = here()
    except SpecError:
        workspace, progress = None, Progress(Path())
    rows = [
        {"number": one.number, "id": one.id, "topic": one.phase, "title": one.title, "file": one.file,
         "difficulty": one.difficulty,
         "depends_on": list(one.depends_on), "state": state_of(workspace, progress, one)}
        for one in exercises().values()
    ]  # fmt: skip
    if json:
        print_json(rows)
        return
    keys, columns = (
        ("number", "topic", "id", "title", "difficulty", "state"),
        ["", "topic", "exercise", "what is written", "difficulty", "state"],
    )
    for title, part in (("Exercises", rows[:GUIDE]), ("Further exercises", rows[GUIDE:])):
        print_table(title, columns, [[row[key] for key in keys] for row in part], drop=("topic", "difficulty"))


@app.command()
def check(name: Id = "", json: Json = False) -> None:
    """Check an exercise, and show what it does in the real trainer."""
    workspace, progress = here()
    exercise = chosen(name, progress)
    verdict = judge(workspace, exercise, quiet=json)
    if json:
        print_json(verdict.as_json())
    if not verdict.passed:
        raise typer.Exit(1)


@app.command()
def watch() -> None:
    """Check whatever you save, until Ctrl-C."""
    workspace, _ = here()
    typer.echo("Loading PyTorch, once.")
    __import__("torch")
    seen = {one.id: answer_of(workspace, one) for one in exercises().values()}
    typer.echo(f"Watching {workspace.folder}: save a file. Ctrl-C ends it.")
    while True:
        time.sleep(POLL_S)
        for exercise in exercises().values():
            answer = answer_of(workspace, exercise)
            if answer == seen[exercise.id]:
                continue
            seen[exercise.id] = answer
            try:
                if workspace.written(exercise):
                    judge(workspace, exercise)
            except SpecError as error:
                typer.echo(str(error))
                break  # the file is broken: once is enough


def answer_of(workspace: Workspace, exercise: Exercise) -> list[str]:
    """What the learner has written; the error where the file cannot be read."""
    try:
        return [hole.body for hole in workspace.holes(exercise)]
    except SpecError as error:
        return [str(error)]


@app.command()
def hint(name: Id = "") -> None:
    """The next of three hints."""
    workspace, progress = here()
    exercise = chosen(name, progress)
    seen = take_hint(workspace.folder, exercise)
    typer.echo(f"{exercise.about}, hint {seen} of {len(exercise.hints)}:")
    typer.echo(f"  {exercise.hints[seen - 1]}")
    if seen == len(exercise.hints):
        typer.echo(f"That was the last one; `lmworks learn solution {exercise.id}` shows the reference.")


@app.command()
def explain(name: LessonId = "", json: Json = False) -> None:
    """The lesson: what it is about, what to read first, what is asked."""
    from ..learn.tracks import lesson, lesson_names

    if name in lesson_names():
        print_lesson(lesson(name), json)
        return
    exercise = find_exercise(name, lesson_names()) if name else chosen(name, here()[1])
    if json:
        print_json(asdict(exercise))
        return
    typer.echo(f"{exercise.about}\n{exercise.phase} · {exercise.difficulty}\n")
    typer.echo(f"Concept: {exercise.concept}\n\n{exercise.insight}\n\nTask: {exercise.task}\n")
    typer.echo(f"File: {exercise.file}")
    for label, lines in (("Depends on", exercise.depends_on), ("Read first", exercise.read_first)):
        if lines:
            typer.echo(f"{label}: {'; '.join(lines)}")
    if exercise.needs:
        typer.echo(f"Needs: {exercise.needs}")
    if exercise.test:
        typer.echo(f"See it at work: {exercise.test}")


@app.command()
def solution(
    name: NamedId,
    apply: Annotated[bool, typer.Option("--apply", help="Put it in place; your file is kept.")] = False,
) -> None:
    """The reference, as a diff. Asked for before it passes: given up."""
    workspace, _ = here()
    exercise = find_exercise(name)
    with change_progress(workspace.folder) as progress:
        record = progress.of(exercise.id)
        record.gave_up = record.gave_up or not record.passed
    if not apply:
        typer.echo(workspace.solution_diff(exercise).rstrip("\n") or "yours is the reference, word for word")
        return
    copy = workspace.apply_solution(exercise)
    typer.echo(f"{exercise.file} has the reference of {exercise.id}; yours is kept: {copy}")


@app.command()
def reset(name: Annotated[str, typer.Argument(metavar="ID|FILE", help="An exercise, or a file.")]) -> None:
    """Take an exercise, or a file, back to its start; a copy is kept."""
    workspace, _ = here()
    files = sorted(course_sources())
    if name.endswith(".py"):
        full = Path(name).resolve()
        target = next((file for file in files if full == (workspace.folder / file).resolve()), "")
        if not target:
            raise SpecError(f"{name} is no file of the course: {', '.join(files)}")
    else:
        target = find_exercise(name).id
    copy = workspace.reset(target)
    typer.echo(f"{target} is as it was at first; yours is kept: {copy}")


@app.command()
def progress(json: Json = False) -> None:
    """What passed, how many tries and hints it took."""
    workspace, progress = here()
    rows = [
        {"id": one.id, "state": state_of(workspace, progress, one), **vars(progress.of(one.id))}
        for one in exercises().values()
    ]
    if json:
        print_json(rows)
        return
    cells = [[row["id"], row["state"], row["tries"], row["hints"], row["passed"][:10]] for row in rows]
    print_table("Progress", ["exercise", "state", "tries", "hints", "passed"], cells)


@app.command()
def quiz(
    name: QuizId = "",
    answer: Annotated[list[int] | None, typer.Option("--answer", help="Which choice, from 1; repeat it.")] = None,
) -> None:
    """Questions on an exercise, reading or lesson; --answer answers."""
    from ..learn.quizzes import find_quiz

    workspace, progress = here()
    asked = find_quiz(name) if name else chosen(name, progress)
    if answer and len(answer) != len(asked.quiz):
        raise SpecError(f"--answer: {len(asked.quiz)} questions, {len(answer)} answers; repeat the option")
    for given, question in zip(answer or (), asked.quiz, strict=False):
        if not 1 <= given <= len(question.choices):
            raise SpecError(f"--answer {given}: the choices are 1 to {len(question.choices)}")
    right = [given - 1 == question.answer for given, question in zip(answer or (), asked.quiz, strict=False)]
    for number, question in enumerate(asked.quiz):
        typer.echo(f"{number + 1}. {question.question}")
        for index, choice in enumerate(question.choices):
            typer.echo(f"   {index + 1}) {choice}")
        if answer:
            typer.echo(f"   {'right' if right[number] else f'no: {question.answer + 1}'}. {question.why}")
    if answer:
        record_answers(workspace.folder, asked.id, right)


for command in (
    plan, checklist, milestones, tracks, benchmarks, cheatsheet, summary, interview, review, serve, export, grade, new,
):  # fmt: skip
    app.command()(command)


# --- shared ----------------------------------------------------------------------------------------------


def here() -> tuple[Workspace, Progress]:
    workspace = Workspace.find(Path.cwd())
    return workspace, Progress.load(workspace.folder)


def chosen(name: str, progress: Progress) -> Exercise:
    if name:
        return find_exercise(name)
    return next_exercise(progress) or list(exercises().values())[-1]


def judge(workspace: Workspace, exercise: Exercise, quiet: bool = False) -> Verdict:
    """Checks, records and says it, with the effect of a pass."""
    from ..learn.checking.check import check_exercise

    verdict = check_exercise(workspace, exercise)
    if not quiet:
        typer.echo("\n".join(verdict.lines(exercise.about)))
    progress = record_verdict(workspace.folder, verdict)
    if verdict.passed and not quiet:
        print_effect(workspace, exercise)
        print_what_follows(progress)
    return verdict


def print_effect(workspace: Workspace, exercise: Exercise) -> None:
    from ..learn.effect import show_effect

    for line in show_effect(workspace, exercise):
        typer.echo(line)


def print_what_follows(progress: Progress) -> None:
    upcoming = next_exercise(progress)
    typer.echo(f"Next: {upcoming.about}" if upcoming else "That was the last one.")

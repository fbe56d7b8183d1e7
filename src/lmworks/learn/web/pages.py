"""The course as pages: HTML from the workspace and its progress. Forms of a page ask for parts of it (page.js)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import groupby

from ...record.formatting import binary_bytes, duration, short
from ...report.html_page import POLICY, card, header, page, tiles
from ...spec.errors import LMWorksError
from ..checking.verdict import Verdict
from ..exercise import Exercise, Question, exercises
from ..goals import LISTS, Reading, Tick, readings, ticks
from ..lesson_pages.pages import commands
from ..progress import Progress
from ..quizzes import Quizzed, page_of_quiz
from ..status import next_exercise, state_of
from ..tracks import Lesson, lesson_ticks
from ..what_if import CHOICES, GPUS, VARIED, Answer, Setting, around
from ..workspace import Workspace
from .text import anchor, code, inline
from .tracks import lesson_body, tracks_body

PAGE_POLICY = f"{POLICY}; connect-src 'self'; form-action 'self'; base-uri 'none'"
LABELS = {
    "model": "model", "gpu": "GPU", "ranks": "world size, GPUs", "zero": "ZeRO stage", "pp": "pipeline stages",
    "tp": "tensor parallel", "micro_batch": "sequences of a micro-batch", "micro_batches": "micro-batches of a step",
    "recompute": "recompute",
}  # fmt: skip
LEARN = re.compile(r"lmworks learn (?P<what>quiz|check) (?P<name>\w+)")
PARTS = ("weights", "gradients", "optimizer", "activations")
LEGEND = "".join(
    f'<ul class="legend"><li>{title}:</li>'
    + "".join(f'<li><i class="s{index}"></i>{name}</li>' for index, name in enumerate(names))
    + "</ul>"
    for title, names in (
        ("bytes of a rank at the peak", (*PARTS, "what else is reserved")),
        ("seconds of a step", ("computes", "sends", "waits in the pipeline")),
    )
)


@dataclass(frozen=True)
class Pages:
    workspace: Workspace
    root: str  # what all addresses begin with

    # --- whole pages -------------------------------------------------------------------------------------

    def home(self) -> str:
        progress, every = Progress.load(self.workspace.folder), list(exercises().values())
        records = [progress.of(one.id) for one in every]
        passed = sum(bool(one.passed) for one in records)
        answered = sum(progress.answers.values())
        figures = [
            ("exercises that pass", f"{passed} of {len(every)}", f"{sum(one.gave_up for one in records)} given up"),
            ("checks", str(sum(one.tries for one in records)), ""),
            ("hints", str(sum(one.hints for one in records)), f"of {sum(len(one.hints) for one in every)}"),
            ("quiz answers right", f"{answered} of {len(progress.answers)}", ""),
        ]
        body = header("The course: build it yourself, on the real code", str(self.workspace.folder)) + tiles(figures)
        upcoming = next_exercise(progress)
        if upcoming:
            body += (
                f'<h2>Next</h2><div class="card"><p><a href="{self.to(upcoming)}">{escape(upcoming.about)}</a> '
                f"({escape(upcoming.difficulty)})</p><p>{inline(upcoming.task)}</p>{self.place(upcoming)}</div>"
            )
        for phase, ones in groupby(every, key=lambda one: one.phase):
            rows = "".join(
                f'<li><a href="{self.to(one)}">{escape(one.about)}</a>'
                f'<span class="state">{escape(self.state(progress, one))}</span></li>'
                for one in ones
            )
            body += f'<h2>{escape(phase)}</h2><div class="card"><ol class="lessons">{rows}</ol></div>'
        return self.document("Where you are", body)

    def lesson(self, exercise: Exercise) -> str:
        every = list(exercises().values())
        at = every.index(exercise)
        progress = Progress.load(self.workspace.folder)
        beside = [("before", one) for one in every[max(0, at - 1) : at]] + [
            ("next", one) for one in every[at + 1 :][:1]
        ]
        state = state_of(self.workspace, progress, exercise)
        about = [f"<p>{inline(exercise.insight)}</p>"]
        about += [f"<p>Needs {inline(exercise.needs)}</p>"] if exercise.needs else []
        about += [f"<p>Read first: {inline(one)}</p>" for one in exercise.read_first]
        needed = ", ".join(f'<a href="{self.to(exercises()[name])}">{name}</a>' for name in exercise.depends_on)
        about += [f"<p>Depends on {needed}</p>"] if needed else []
        lead = f"{exercise.phase} · {exercise.difficulty} · {exercise.concept} · {state}"
        links = "".join(f'<a href="{self.to(one)}">{way}: {escape(one.about)}</a>' for way, one in beside)
        parts = [
            header(exercise.about, lead),
            card("Why", "".join(about)),
            card("The task", f"<p>{inline(exercise.task)}</p>"),
            card("Your part", f'<div id="work" aria-live="polite">{self.work(exercise)}</div>'
                 + self.form("check", exercise.id, "work", '<button class="main">Check</button>')
                 + f'<p class="note">In a terminal: {" · ".join(map(code, commands(exercise)))}</p>'),
            card("Hints", f'<div id="hints" aria-live="polite">{self.hints(exercise)}</div>'),
            card("Quiz", f'<div id="quiz" aria-live="polite">{self.quiz(exercise)}</div>'),
            f"<nav>{links}</nav>",
        ]  # fmt: skip
        return self.document(exercise.about, "".join(parts))

    def reading(self, reading: Reading) -> str:
        body = header(reading.title, "A reading is done once its quiz is answered.")
        body += card("", f"<p>{anchor(reading.link)}</p>") + card(
            "Quiz", f'<div id="quiz" aria-live="polite">{self.quiz(reading)}</div>'
        )
        return self.document(reading.title, body)

    def tracks(self) -> str:
        return self.document("Tracks", tracks_body(self.root, self.workspace))

    def track_lesson(self, one: Lesson) -> str:
        found = lesson_ticks(one, self.workspace.folder, Progress.load(self.workspace.folder))
        quiz = f'<div id="quiz" aria-live="polite">{self.quiz(one)}</div>'
        return self.document(one.title, lesson_body(self.root, one, "".join(map(self.tick, found)), quiz))

    def plan(self) -> str:
        progress = Progress.load(self.workspace.folder)
        quizzes = {one.title: one.id for one in readings().values()}
        body = header("The plan", "Each item is ticked by what is there.")
        for kind, title in LISTS.items():
            found = ticks(kind, self.workspace.folder, progress)
            done = sum(one.done for one in found)
            body += f"<h2>{title}: {done} of {len(found)}</h2>"
            for section, items in groupby(found, key=lambda one: one.section):
                body += card(section, "".join(self.tick(one) for one in items))
        names = "".join(
            f'<p><a href="{self.root}/reading/{name}">{escape(title)}</a></p>' for title, name in quizzes.items()
        )
        return self.document("The plan", body + f"<h2>Quizzes of the readings</h2>{card('', names)}")

    def what_if(self, setting: Setting) -> str:
        controls = "".join(
            f"<label>{LABELS[name]}<select name={name}>"
            + "".join(
                f'<option value="{value}"{" selected" if value == getattr(setting, name) else ""}>'
                f"{escape(GPUS.get(value, value))}</option>"
                for value in values
            )
            + "</select></label>"
            for name, values in CHOICES.items()
        )
        form = (
            f'<form method="get" action="{self.root}/what-if/tables" data-into="tables" data-live>'
            f'<div class="controls">{controls}</div><noscript><button>Show</button></noscript></form>'
        )
        body = header("What happens if…", "By the planner, as you choose: bytes of a rank, and seconds of a step.")
        return self.document("What happens if…", f'{body}{card("", form)}<div id="tables">{self.tables(setting)}</div>')

    def document(self, title: str, body: str) -> str:
        links = {
            "": "Where you are", "plan": "Plan", "tracks": "Tracks", "interview": "Interview",
            "what-if": "What happens if…", "cheatsheet": "Cheat sheet",
        }  # fmt: skip
        nav = "".join(f'<a href="{self.root}/{path}">{name}</a>' for path, name in links.items())
        own = files(__package__)
        style, script = (own / "page.css").read_text(encoding="utf-8"), (own / "page.js").read_text(encoding="utf-8")
        return page(f"{title} · LMWorks course", f"<nav>{nav}</nav>{body}", style, script, PAGE_POLICY)

    # --- parts that forms ask for ------------------------------------------------------------------------

    def work(self, exercise: Exercise, verdict: Verdict | None = None) -> str:
        """The learner's part as it stands, and what a check says of it; what it does in training is asked for then."""
        try:
            holes = self.workspace.holes(exercise)
        except LMWorksError as error:
            return f'<p class="bad">{escape(str(error))}</p>'
        shown = "".join(f"<pre>{escape(hole.body)}</pre>" for hole in holes)
        parts = [self.place(exercise), shown]
        if verdict:
            look = "good" if verdict.passed else "" if verdict.tried else "soft"
            parts.append(f'<pre class="verdict {look}">{escape(chr(10).join(verdict.lines(exercise.about)))}</pre>')
        if verdict and verdict.passed:
            ask = self.form("effect", exercise.id, "effect", "<button>In training</button>", "data-now")
            parts.append(f'<div id="effect">{ask}</div>')
            if upcoming := next_exercise(Progress.load(self.workspace.folder)):
                parts.append(f'<p>Next: <a href="{self.to(upcoming)}">{escape(upcoming.about)}</a></p>')
        return "".join(parts)

    def effect(self, lines: Sequence[str]) -> str:
        return f'<pre class="verdict good">{escape(chr(10).join(lines))}</pre>' if lines else ""

    def hints(self, exercise: Exercise) -> str:
        """Those that were asked for, and the button for the next one."""
        seen = Progress.load(self.workspace.folder).of(exercise.id).hints
        shown = "".join(f"<li>{inline(one)}</li>" for one in exercise.hints[:seen])
        left = len(exercise.hints) - seen
        if left > 0:
            more = self.form("hint", exercise.id, "hints", f"<button>Hint {seen + 1} of {len(exercise.hints)}</button>")
        else:
            more = f'<p class="note">{code(f"lmworks learn solution {exercise.id}")} shows the reference.</p>'
        return (f"<ol>{shown}</ol>" if shown else "") + more

    def quiz(self, asked: Quizzed, given: Mapping[int, int] | None = None) -> str:
        """`given`: question → choice; with it, what is right and why."""
        fields = "".join(
            question(number, one, None if given is None else given.get(number, -1))
            for number, one in enumerate(asked.quiz)
        )
        return self.form("quiz", asked.id, "quiz", f"{fields}<button>Answer</button>")

    def tables(self, setting: Setting) -> str:
        tables = (
            f"<h2>{title}</h2>{table(around(setting, varied), getattr(setting, varied))}"
            for varied, title in VARIED.items()
        )
        command = f'<p class="note">The bytes of this choice, in a terminal: {code(setting.command)}</p>'
        return f"{LEGEND}{''.join(tables)}{command}"

    def error(self, error: Exception) -> str:
        return f'<p class="bad">{inline(str(error))}</p>'

    # --- pieces ------------------------------------------------------------------------------------------

    def state(self, progress: Progress, exercise: Exercise) -> str:
        """With what it took."""
        record = progress.of(exercise.id)
        counts = ((record.tries, "check"), (record.hints, "hint"))
        took = [f"{count} {word}{'s' * (count > 1)}" for count, word in counts if count]
        return " · ".join([*took, state_of(self.workspace, progress, exercise)])

    def to(self, exercise: Exercise) -> str:
        return f"{self.root}/lesson/{exercise.id}"

    def place(self, exercise: Exercise) -> str:
        try:
            line = self.workspace.holes(exercise)[0].start + 1
        except LMWorksError as error:
            return f'<p class="bad">{escape(str(error))}</p>'
        return f"<p>{code(f'{self.workspace.folder / exercise.file}:{line}')}</p>"

    def form(self, action: str, name: str, into: str, inside: str, more: str = "") -> str:
        return f'<form method="post" action="{self.root}/{action}/{name}" data-into="{into}" {more}>{inside}</form>'

    def tick(self, one: Tick) -> str:
        mark = '<span class="good">✓</span>' if one.done else "·"
        rows = [inline(one.found)] if one.found else []
        if not one.done:
            rows += [f"do: {self.means(one.how)}"] if one.how and "\n" not in one.how else []  # scripts stand above
            rows += [f"needs: {inline(one.needs)}"] if one.needs else []
        found = "".join(f'<p class="note">{row}</p>' for row in rows)
        link = f" {anchor(one.link, 'read')}" if one.link else ""
        return f"<p>{mark} {inline(one.item)}{link}</p>{found}"

    def means(self, how: str) -> str:
        """What the page has, too, is a link to it."""
        if found := LEARN.fullmatch(how):
            place = page_of_quiz(found["name"]) if found["what"] == "quiz" else "lesson"
            return f'<a href="{self.root}/{place}/{found["name"]}">{code(how)}</a>'
        return inline(how)


# --- without a workspace ---------------------------------------------------------------------------------


def question(number: int, asked: Question, given: int | None) -> str:
    labels = "".join(
        f'<label><input type="radio" name="{number}" value="{index}" required{" checked" if given == index else ""}> '
        f"{inline(choice)}</label>"
        for index, choice in enumerate(asked.choices)
    )
    said = ""
    if given is not None:
        right = given == asked.answer
        words = "Right." if right else f"No: {asked.choices[asked.answer]}."
        said = f'<p><span class="{"good" if right else "bad"}">{inline(words)}</span> {inline(asked.why)}</p>'
    return f"<fieldset><legend>{number + 1}. {inline(asked.question)}</legend>{labels}{said}</fieldset>"


def table(answers: Mapping[str, Answer | str], chosen: str) -> str:
    """A row a value: what a rank holds, and how long a step takes."""
    known = [one for one in answers.values() if isinstance(one, Answer)]
    most = max((one.reserved for one in known), default=1.0)
    slowest = max((one.step_s for one in known), default=1.0)
    columns = ["", "weights", "gradients", "optimizer", "activations", "peak", "", "step", "sends", "waits",
               "", "tokens/s"]  # fmt: skip
    rows = "".join(
        f"<tr{' class=chosen' if value == chosen else ''}><td>{value}</td>{''.join(cells(one, most, slowest))}</tr>"
        for value, one in answers.items()
    )
    heads = "".join(f"<th>{name}</th>" for name in columns)
    return f'<div class="card scroll"><table class="choices"><tr>{heads}</tr>{rows}</table></div>'


def cells(one: Answer | str, most: float, slowest: float) -> Iterator[str]:
    if isinstance(one, str):
        yield f'<td colspan="11" class="words">{escape(one)}</td>'
        return
    for part in PARTS:
        yield f"<td>{binary_bytes(getattr(one, part))}</td>"
    yield f"<td>{binary_bytes(one.reserved)}{'' if one.fit == 'fits' else f' <span class=bad>{one.fit}</span>'}</td>"
    rest = one.reserved - sum(getattr(one, part) for part in PARTS)
    yield f"<td>{bar([*(getattr(one, part) for part in PARTS), max(0.0, rest)], most)}</td>"
    yield f"<td>{duration(one.step_s)}</td><td>{share(one.sends_s, one)}</td><td>{share(one.idle_s, one)}</td>"
    yield f"<td>{bar([one.step_s - one.sends_s - one.idle_s, one.sends_s, one.idle_s], slowest)}</td>"
    yield f"<td>{short(one.tokens_per_s)}</td>"


def share(seconds: float, one: Answer) -> str:
    return f"{seconds / one.step_s:.0%}"


def bar(parts: Iterable[float], whole: float) -> str:
    pieces = "".join(
        f'<i class="s{index}" style="width:{100 * part / whole:.1f}%"></i>' for index, part in enumerate(parts)
    )
    return f'<span class="bar" aria-hidden="true">{pieces}</span>'

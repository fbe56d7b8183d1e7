"""The interview on the page: a question, notes that are kept nowhere, a rubric with boxes to tick, a calculation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from html import escape
from itertools import groupby

from ...report.html_page import card, header
from ...spec.errors import SpecError
from .. import review
from ..due import due_today
from ..interview import OpenQuestion, next_question, questions, score_of
from ..progress import Progress, record_scores
from ..quantity import example_of
from .pages import Pages
from .text import inline


@dataclass(frozen=True)
class InterviewPages:
    pages: Pages

    def next(self) -> str:
        """What is due first, then what is new; and all of them."""
        progress = self.progress()
        question = next_question(progress.cards, review.today())
        first = self.parts(question, progress) if question else header("Interview", "Nothing is due today.")
        lists = "".join(
            f"<h2>{escape(topic)}</h2>{card('', ''.join(self.row(one, progress) for one in ones))}"
            for topic, ones in groupby(questions().values(), key=lambda one: one.topic)
        )
        due = [one.asked for one in due_today(progress.cards, review.today())]
        links = "".join(f'<p><a href="{self.pages.root}/{one.page}">{inline(one.text)}</a></p>' for one in due)
        due_now = f"<h2>Due today</h2>{card('', links)}" if due else ""
        return self.pages.document("Interview", first + due_now + lists)

    def question(self, question: OpenQuestion) -> str:
        return self.pages.document(question.question, self.parts(question, self.progress()))

    def rubric(self, question: OpenQuestion, said: Collection[int] | None = None) -> str:
        """`said`: what was recorded; None before that."""
        ticked = said or ()
        points = "".join(
            f'<label><input type="checkbox" name="{at}"{" checked" if at in ticked else ""}> {inline(point)}</label>'
            for at, point in enumerate(question.rubric, 1)
        )
        legend = "<legend>Tick the points that you made.</legend>"
        fields = f"<fieldset>{legend}{points}</fieldset><button>Record</button>"
        follow_ups = "".join(
            f"<details><summary>{inline(one.question)}</summary><p>{inline(one.answer)}</p></details>"
            for one in question.follow_ups
        )
        result = "" if said is None else self.recorded(question, len(set(said)))
        return f"{self.pages.form('said', question.id, 'rubric', fields)}{result}<h3>Follow-ups</h3>{follow_ups}"

    def say(self, question: OpenQuestion, form: Mapping[str, str]) -> str:
        said = [at for at in range(1, len(question.rubric) + 1) if str(at) in form]
        record_scores(self.pages.workspace.folder, {question.card: score_of(question, said)})
        return self.rubric(question, said)

    def calculate(self, question: OpenQuestion, form: Mapping[str, str]) -> str:
        """The answer is to the parameters that the page shows, of the turn in the form."""
        card_before = self.progress().cards.get(question.calculation_card)
        turns = {str(turn): turn for turn in range((card_before.answers if card_before else 0) + 1)}
        scenario = question.scenario(turns[form["turn"]]) if form.get("turn") in turns else None
        if scenario is None:
            raise SpecError("this form is not of the page; load it anew")
        result = scenario.grade(form.get("number", ""))
        progress = record_scores(self.pages.workspace.folder, {question.calculation_card: float(result.right)})
        verdict = f'<span class="{"good" if result.right else "bad"}">{"Right" if result.right else "No"}:</span>'
        cause = f"<p>Perhaps: {inline(result.cause)}</p>" if result.cause else ""
        kept = inline(progress.cards[question.calculation_card].text)
        return (
            f"<p>{verdict} {inline(result.words)}</p><p>{inline(result.formula)}</p>{cause}"
            f'<p class="note">{kept} The next time it has other figures.</p>'
        )

    # --- pieces ------------------------------------------------------------------------------------------

    def progress(self) -> Progress:
        return Progress.load(self.pages.workspace.folder)

    def parts(self, question: OpenQuestion, progress: Progress) -> str:
        reveal = self.pages.form(
            "rubric", question.id, "rubric", '<button class="main">Compare with the rubric</button>'
        )
        links = ", ".join(f'<a href="{self.pages.root}/lesson/{name}">{name}</a>' for name in question.exercises)
        notes = '<textarea rows="6" aria-label="Your notes" placeholder="Notes, kept nowhere"></textarea>'
        practise = f'<p class="note">Exercises: {links}</p>' if links else ""
        parts = [
            header(question.question, question.topic),
            card("Your answer", f'{notes}<div id="rubric" aria-live="polite">{reveal}</div>'),
            self.calculation(question, progress),
            practise,
        ]
        return "".join(parts)

    def calculation(self, question: OpenQuestion, progress: Progress) -> str:
        scenario = question.next_scenario(progress.cards)
        if scenario is None:
            return ""
        unit = scenario.calculation.unit
        fields = (
            f'<p>{inline(scenario.ask)}</p><input type="hidden" name="turn" value="{scenario.turn}">'
            f'<input name="number" required autocomplete="off" aria-label="Your answer in {escape(unit)}" '
            f'placeholder="{escape(example_of(unit))}"> <button>Answer</button>'
        )
        form = self.pages.form("number", question.id, "number", fields)
        return card("Calculation", f'{form}<div id="number" aria-live="polite"></div>')

    def recorded(self, question: OpenQuestion, made: int) -> str:
        kept = self.progress().cards[question.card].text
        following = f'<a href="{self.pages.root}/interview">Next question</a>'
        return f"<p>{made} of {len(question.rubric)} points. {kept} {following}</p>"

    def row(self, question: OpenQuestion, progress: Progress) -> str:
        known = progress.cards.get(question.card)
        state = f"{known.due}, box {known.box}" if known else "new"
        link = f'<a href="{self.pages.root}/interview/{question.id}">{inline(question.question)}</a>'
        return f'<p class="row">{link}<span class="state">{state}</span></p>'

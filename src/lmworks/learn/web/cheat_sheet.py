"""The cheat sheet on the course's page."""

from __future__ import annotations

from html import escape
from itertools import groupby

from ...report.html_page import card, header, note
from ...report.html_page import table as html_table
from ..cheat_sheet import (
    Essential,
    KeyQuestion,
    Problem,
    Rule,
    Table,
    cheat_sheet,
    measured_on,
    measured_table,
    planned_table,
    problem_table,
    shipped_measurement,
)
from ..exercise import exercises
from ..summaries import read_summary
from .pages import Pages
from .text import anchor, code, inline


def cheat_sheet_body(pages: Pages) -> str:
    sheet = cheat_sheet()
    parts = [
        header("Cheat sheet", "Rules of thumb beside the planner's and measured numbers."),
        f'<p class="note">Measured on {escape(measured_on(shipped_measurement()))}. '
        f"On this machine: {code('lmworks learn cheatsheet --measure')}</p>",
        "<h2>Rules of thumb</h2>",
        *(rule_section(rule) for rule in sheet.rules),
        "<h2>Debugging</h2>",
        *(problem_section(problem) for problem in sheet.problems),
        "<h2>Key questions</h2>",
        card("", "".join(question_part(pages, one) for one in sheet.questions)),
        "<h2>Essential reading</h2>",
        *(card(kind, "".join(essential_part(pages, one) for one in ones))
          for kind, ones in groupby(sheet.essential, key=lambda one: one.kind)),
    ]  # fmt: skip
    return "".join(parts)


def rule_section(rule: Rule) -> str:
    lines = "".join(
        f"<p><b>{escape(label)}:</b> {inline(text)}</p>"
        for label, text in (*rule.points, ("Premise", rule.premise), ("Formula", rule.formula))
    )
    planned = numbers("By the planner", planned_table(rule))
    return card(rule.title, lines) + planned + numbers("Measured", measured_table(rule, shipped_measurement()))


def problem_section(problem: Problem) -> str:
    tips = "".join(f"<li>{inline(tip.text)} {code(tip.command)}</li>" for tip in problem.tips)
    return card(problem.title, f"<ol>{tips}</ol>") + numbers("By the planner", problem_table(problem))


def numbers(source: str, table: Table) -> str:
    return note(f"{source}: {table.about}") + html_table(table.columns, table.cells)


def question_part(pages: Pages, one: KeyQuestion) -> str:
    practice = ", ".join(f'<a href="{pages.to(exercises()[name])}">{name}</a>' for name in one.exercises)
    answer = f"<p>{inline(one.answer)}</p><p>Exercises: {practice}</p>"
    return f"<details><summary>{inline(one.question)}</summary>{answer}</details>"


def essential_part(pages: Pages, one: Essential) -> str:
    reading, summary = one.reading, read_summary(pages.workspace.folder, one.reading.id)
    quiz = f'<a href="{pages.root}/reading/{reading.id}">questions</a>'
    return (
        f"<p>{anchor(reading.link, reading.title)} · {quiz} · summary {summary.state}</p>"
        f'<p class="note">In LMWorks: {code(one.command)} · {code(f"lmworks learn summary {reading.id}")}</p>'
    )

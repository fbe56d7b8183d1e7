"""The cheat sheet as a page of Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from ..cheat_sheet import (
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
from .markdown import bullets, folded, link, markdown, wrapped


def cheat_sheet_page() -> Iterator[str]:
    sheet = cheat_sheet()
    yield "# Cheat sheet"
    yield wrapped(
        "Rules of thumb with what the planner computes and what was measured, debugging tips, key questions, and what "
        f"to read. Measured on {markdown(measured_on(shipped_measurement()))}, beside other work: of times, the ratio "
        "counts, which is the median of steps taken in turn. On your machine, in a minute or two:"
    )
    yield "    lmworks learn cheatsheet --measure"
    yield "## Rules of thumb"
    for rule in sheet.rules:
        yield from rule_section(rule)
    yield "## Debugging"
    yield wrapped("Tips that a table leaves out change nothing that the planner prices.")
    for problem in sheet.problems:
        yield from problem_section(problem)
    yield "## Key questions"
    for one in sheet.questions:
        yield wrapped(f"**{markdown(one.question)}**")
        practice = ", ".join(link(exercises()[name], name) for name in one.exercises)
        yield from folded("Answer", [wrapped(markdown(one.answer)), wrapped(f"Exercises: {practice}")])
    yield "## Essential reading"
    yield wrapped(
        "Each has questions, on [the page of the readings](readings.md), and a page that you write: "
        "`lmworks learn summary READING`."
    )
    for kind, ones in groupby(sheet.essential, key=lambda one: one.kind):
        yield f"### {markdown(kind)}"
        yield bullets(
            f"[{markdown(one.reading.title)}]({one.reading.link}) (`{one.reading.id}`). In LMWorks: `{one.command}`"
            for one in ones
        )


def rule_section(rule: Rule) -> Iterator[str]:
    yield f"### {markdown(rule.title)}"
    yield bullets(f"**{label}:** {markdown(text)}" for label, text in rule.points)
    yield wrapped(f"**Premise:** {markdown(rule.premise)}")
    yield wrapped(f"**Formula:** {markdown(rule.formula)}")
    for source, table in (
        ("By the planner", planned_table(rule)), ("Measured", measured_table(rule, shipped_measurement()))
    ):  # fmt: skip
        yield wrapped(f"{source}: {markdown(table.about)}.")
        yield rows(table)


def problem_section(problem: Problem) -> Iterator[str]:
    yield f"### {markdown(problem.title)}"
    yield "\n".join(
        wrapped(f"{markdown(tip.text)} `{tip.command}`", f"{number}. ", "   ")
        for number, tip in enumerate(problem.tips, 1)
    )
    yield wrapped(f"By the planner; the memory of the first row: `{problem.case.command}`")
    yield rows(problem_table(problem))


def rows(table: Table) -> str:
    figures = [all(cell[:1].isdigit() for cell in column) for column in zip(*table.cells, strict=True)]
    lines = [table.columns, ["---:" if one else "---" for one in figures], *table.cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

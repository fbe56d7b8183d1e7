"""Tracks and their lessons as parts of the course's page."""

from __future__ import annotations

from html import escape

from ...report.html_page import card, header
from ..exercise import exercises
from ..goals import readings
from ..pictures import picture_svg
from ..progress import Progress
from ..tracks import Deliverable, Lesson, Track, lesson, lesson_ticks, neighbours, track_of, tracks
from ..workspace import Workspace
from .text import anchor, code, inline


def tracks_body(root: str, workspace: Workspace) -> str:
    body = header("Tracks", "Study plans as lessons, ticked by what is there.")
    for track in tracks().values():
        body += card(track.title, f"<p>{inline(track.about)}</p>{lesson_list(root, workspace, track)}")
    return body


def lesson_list(root: str, workspace: Workspace, track: Track) -> str:
    progress = Progress.load(workspace.folder)
    rows = ""
    for one in map(lesson, track.lessons):
        ticks = lesson_ticks(one, workspace.folder, progress)
        rows += (
            f'<li><a href="{root}/tracks/{one.id}">{escape(one.part)}: {escape(one.title)}</a>'
            f'<span class="state">{sum(tick.done for tick in ticks)} of {len(ticks)}</span></li>'
        )
    return f'<ol class="lessons">{rows}</ol>'


def lesson_body(root: str, one: Lesson, to_do: str, quiz: str) -> str:
    track = track_of(one.id)
    body = header(one.title, f"{track.title} · {one.part}")
    body += card("", "".join(f"<p>{inline(paragraph)}</p>" for paragraph in one.idea))
    body += card("", f'<figure class="scroll">{picture_svg(one.picture, one.caption)}'
                     f"<figcaption>{inline(one.caption)}</figcaption></figure>")  # fmt: skip
    if one.formulas:
        rows = (f"<pre>{escape(each.formula)}</pre><p>{inline(each.means)}</p>" for each in one.formulas)
        body += card("Formulas", "".join(rows))
    if one.commands:
        rows = (f"<pre>{escape(each.run)}</pre><p>{inline(each.what)}</p>" for each in one.commands)
        body += card("See it on this machine", "".join(rows))
    links = [f'{anchor(readings()[name].link, readings()[name].title)} '
             f'(<a href="{root}/reading/{name}">quiz</a>)' for name in one.readings]  # fmt: skip
    links += [f'<a href="{root}/lesson/{name}">{escape(exercises()[name].about)}</a>' for name in one.exercises]
    if links:
        body += card("Read and write", "".join(f"<p>{each}</p>" for each in links))
    if one.deliverables:
        body += card("Deliverables", "".join(map(deliverable, one.deliverables)))
    if one.explain:
        rows = (
            f"<details><summary>{inline(each.question)}</summary><p>{inline(each.answer)}</p></details>"
            for each in one.explain
        )
        body += card("Be able to explain", "".join(rows))
    body += card("To do", to_do) + card("Quiz", quiz)
    links = [f'<a href="{root}/tracks/{other.id}">{way}: {escape(other.title)}</a>' for way, other in neighbours(one)]
    command = f'<p class="note">In a terminal: {code(f"lmworks learn explain {one.id}")}</p>'
    return f"{body}{command}<nav>{''.join(links)}</nav>"


def deliverable(one: Deliverable) -> str:
    needs = f" Needs {inline(one.needs)}." if one.needs else ""
    return f"<p>{inline(one.text)}. It leaves {code(one.leaves)}.{needs}</p><pre>{escape(one.how)}</pre>"

"""Pages of tracks and their lessons as Markdown (pages.py writes them with the others)."""

from __future__ import annotations

from collections.abc import Iterator

from ..exercise import exercises
from ..goals import readings
from ..pictures import picture_svg
from ..tracks import Deliverable, Lesson, Track, lesson, lesson_names, neighbours, track_of, tracks
from .markdown import bullets, folded, markdown, quiz_blocks, wrapped


def track_files() -> dict[str, str]:
    """File name → SVG."""
    return {f"pictures/{one.picture}.svg": picture_svg(one.picture, one.caption) for one in map(lesson, lesson_names())}


def track_page(track: Track) -> Iterator[str]:
    yield f"# {markdown(track.title)}"
    yield wrapped(markdown(track.about))
    yield f"    lmworks learn tracks {track.id}"
    rows = [f"| {markdown(one.part)} | [{markdown(one.title)}]({one.id}.md) |" for one in map(lesson, track.lessons)]
    yield "\n".join(["| | lesson |", "|---|---|", *rows])


def track_lesson_page(one: Lesson) -> Iterator[str]:
    track = track_of(one.id)
    yield f"# {markdown(one.title)}"
    yield f"[{markdown(track.title)}](track_{track.id}.md) · {markdown(one.part)}"
    for paragraph in one.idea:
        yield wrapped(markdown(paragraph))
    yield f"![{markdown(one.caption)}](pictures/{one.picture}.svg)"
    if one.formulas:
        yield "## Formulas"
        for formula in one.formulas:
            yield f"    {formula.formula}"
            yield wrapped(markdown(formula.means))
    if one.commands:
        yield "## See it on this machine"
        for command in one.commands:
            yield f"```bash\n{command.run}\n```"
            yield wrapped(markdown(command.what))
    if one.readings:
        yield "## Read"
        yield bullets(f"[{markdown(readings()[name].title)}]({readings()[name].link}), then "
                      f"[its quiz](readings.md): `lmworks learn quiz {name}`" for name in one.readings)  # fmt: skip
    if one.exercises:
        yield "## Write it yourself"
        yield bullets(f"[{markdown(exercises()[name].about)}]({name}.md)" for name in one.exercises)
    if one.deliverables:
        yield "## Deliverables"
        for each in one.deliverables:
            yield from deliverable(each)
    if one.explain:
        yield "## Be able to explain"
        for asked in one.explain:
            yield from folded(markdown(asked.question), [wrapped(markdown(asked.answer))])
    yield "## Quiz"
    yield f"    lmworks learn quiz {one.id}"
    yield from quiz_blocks(one.quiz)
    yield "---"
    links = [f"{way.capitalize()}: [{markdown(other.title)}]({other.id}.md)" for way, other in neighbours(one)]
    yield " · ".join([*links, f"[All of the track](track_{track.id}.md)"])


def deliverable(one: Deliverable) -> Iterator[str]:
    needs = f" Needs {one.needs}." if one.needs else ""
    yield wrapped(f"{markdown(one.text)}. It leaves `{one.leaves}`.{markdown(needs)}")
    yield f"```bash\n{one.how}\n```"


def tracks_overview() -> str:
    return bullets(f"[{markdown(one.title)}](track_{one.id}.md): {len(one.lessons)} lessons. {markdown(one.about)}"
                   for one in tracks().values())  # fmt: skip

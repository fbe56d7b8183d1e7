"""One page on each reading, in the learner's own words: summaries/READING.md of a workspace."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ..spec.errors import SpecError, near_names, suggestion
from ..spec.files import write_whole
from .evidence import Found
from .goals import Reading, readings

FOLDER = "summaries"
MOST_WORDS = 600  # of a page
LEAST_WORDS = 60
COMMAND = "The LMWorks command that shows it"
# Heading → what belongs below it.
HEADINGS = {
    "The claim in one sentence": "What do the authors say is true, or possible now?",
    "The problem": "What did not work, or cost too much, before?",
    "The method": "How does it work? So that you could build it.",
    "The formula": "The one to keep; what each symbol means, and in what unit.",
    "Numbers worth remembering": "Two or three, each with the model and the machine that it is of.",
    "What it costs, and its limits": "What gets slower or larger? Where does it stop helping?",
    COMMAND: "A command, and what its output says about the claim.",
    "My questions, answered": "What you did not understand at first, and the answer.",
}
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)


@dataclass(frozen=True)
class Summary:
    reading: str
    file: str  # in the workspace
    exists: bool
    words: int  # of one's own, below the headings
    empty: tuple[str, ...]  # headings that have none, or are gone
    repeated: str = ""  # a heading below which stands what stands below another one

    @property
    def problem(self) -> str:
        """Why it is no summary yet."""
        if len(self.empty) > 2:
            return f"nothing below {len(self.empty)} of {len(HEADINGS)} headings"
        if self.empty:
            return f"nothing below {', '.join(map(repr, self.empty))}"
        if self.repeated:
            return f"below {self.repeated!r} stands the text of another heading"
        if self.words > MOST_WORDS:
            return f"{self.words} words; a page has at most {MOST_WORDS}"
        return f"{self.words} words; {LEAST_WORDS} or more say something" if self.words < LEAST_WORDS else ""

    @property
    def state(self) -> str:
        if not self.exists:
            return "missing"
        return "started" if self.problem else "written"


def read_summary(workspace: Path, reading: str) -> Summary:
    file = f"{FOLDER}/{reading}.md"
    path = workspace / file
    text = COMMENT.sub("", path.read_text(errors="replace")) if path.exists() else ""
    found = re.findall(r"^## (.*)\n((?:(?!## ).*\n?)*)", text, re.M)
    sections = {heading.strip(): " ".join(body.split()) for heading, body in found}
    empty = tuple(heading for heading in HEADINGS if not count_words(sections.get(heading, "")))
    bodies = list(sections.values())
    repeated = next((heading for heading, body in sections.items() if body and bodies.count(body) > 1), "")
    words = sum(count_words(body) for body in bodies)
    return Summary(reading, file, path.exists(), words, empty, repeated)


def count_words(text: str) -> int:
    """Marks of lists and tables are none."""
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def summary_found(workspace: Path, reading: str) -> Found:
    summary = read_summary(workspace, reading)
    if summary.state == "missing":
        return Found(False)
    return Found(not summary.problem, f"{summary.file}: {summary.problem or f'{summary.words} words'}")


def find_reading(name: str) -> Reading:
    if name in readings():
        return readings()[name]
    raise SpecError(
        f"no reading {name!r}{suggestion(near_names(name, list(readings())))}; `lmworks learn summary` lists them all"
    )


def start_summary(workspace: Path, reading: Reading) -> bool:
    """Writes the template where there is no file yet."""
    path = workspace / FOLDER / f"{reading.id}.md"
    if path.exists():
        return False
    path.parent.mkdir(exist_ok=True)
    write_whole(path, template(reading))
    return True


def template(reading: Reading) -> str:
    from .cheat_sheet import cheat_sheet

    commands = [one.command for one in cheat_sheet().essential if one.reading == reading]
    parts = [f"# {reading.title}", f"<{reading.link}>"]
    for heading, hint in HEADINGS.items():
        example = [f"<!-- For example: {one} -->" for one in commands if heading == COMMAND]
        parts += [f"## {heading}", f"<!-- {hint} -->", *example]
    return "\n\n".join(parts) + "\n"

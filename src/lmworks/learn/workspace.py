"""The learner's folder: programs with stubs, where the learner writes."""

from __future__ import annotations

import difflib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..spec.errors import SpecError
from ..spec.files import write_whole
from .course_files import course_holes, course_sources
from .exercise import Exercise, exercises
from .holes import Hole, find_holes, replace_holes

MARKER = Path(".learn")
README = """# Your workspace

`lmworks learn` says what is next. Write between the marks `# exercise …` and `# end …`, and keep the marks.

    lmworks learn check        the next exercise, or `check rmsnorm`
    lmworks learn watch        checks what you save
    lmworks learn hint         three hints, one after another
    lmworks learn explain      the lesson
    lmworks learn plan         the study plan by days; also `checklist`, `milestones`
    lmworks learn tracks       four study plans as lessons
    lmworks learn cheatsheet   rules of thumb with numbers
    lmworks learn interview    open questions with rubrics; `review` says what is due today

The programs run at any time; what is not written yet runs as the reference does:

    python src/models/gpt.py
    python src/training/ddp_trainer.py --model_size small --max_steps 50
    torchrun --nproc_per_node=2 src/training/fsdp_trainer.py --model_size medium --max_steps 50

`traces/` has the simulated jobs of exercise 59, to be opened in https://ui.perfetto.dev or by
`lmworks profile trace traces/A/*.json`.
"""


@dataclass(frozen=True)
class Workspace:
    folder: Path

    @classmethod
    def create(cls, folder: Path) -> Workspace:
        from .planted_traces import write_traces

        if (folder / MARKER).exists():
            raise SpecError(f"{folder} is a workspace already; `lmworks learn reset ID` takes one exercise back")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise SpecError(f"{folder} is there already, and not an empty folder; name a new one")
        try:
            for path, text in course_sources().items():
                file = folder / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(replace_holes(text, path, stub_of)[0])
            write_traces(folder / "traces")
            (folder / "README.md").write_text(README)
            (folder / MARKER).mkdir()
        except OSError as error:
            raise SpecError(f"{folder}: {error.strerror}; name a folder that can be written") from None
        return cls(folder)

    @classmethod
    def find(cls, start: Path) -> Workspace:
        """The one that `start` lies in."""
        for folder in (start.resolve(), *start.resolve().parents):
            if (folder / MARKER).is_dir():
                return cls(folder)
        raise SpecError(f"{start.resolve()} is in no workspace; `lmworks learn init DIR` makes one, then `cd DIR`")

    def text(self, path: str) -> str:
        try:
            return (self.folder / path).read_text()
        except FileNotFoundError:
            raise SpecError(f"{self.folder / path} is gone; `lmworks learn reset {path}` writes it anew") from None
        except UnicodeDecodeError as error:
            raise SpecError(f"{self.folder / path} is not UTF-8 ({error.reason} at byte {error.start})") from None

    def holes(self, exercise: Exercise) -> list[Hole]:
        """The exercise's parts as they stand here."""
        found = [hole for hole in find_holes(self.text(exercise.file), exercise.file) if hole.exercise == exercise.id]
        missing = {name for name, hole in course_holes().items() if hole.exercise == exercise.id}
        missing -= {hole.name for hole in found}
        if missing:
            raise SpecError(
                f"{exercise.file}: the marks of exercise {', '.join(sorted(missing))} are gone; "
                f"`lmworks learn reset {exercise.file}` writes the file anew (yours is kept beside it)"
            )
        return found

    def written(self, exercise: Exercise) -> bool:
        return all(hole.written for hole in self.holes(exercise))

    def with_reference_around(self, exercise: Exercise) -> tuple[str, list[int]]:
        """The file with every other exercise solved by the reference; the line that each line stands for."""
        self.holes(exercise)
        text = self.text(exercise.file)
        return replace_holes(
            text, exercise.file, lambda hole: None if hole.exercise == exercise.id else solution_of(hole)
        )

    def lines_outside(self, path: str) -> list[int]:
        """Numbers of the lines outside of all marks that are not the course's, or where some of its own are gone."""
        mine, numbers = replace_holes(self.text(path), path, lambda _: "")
        course, _ = replace_holes(course_sources()[path], path, lambda _: "")
        matcher = difflib.SequenceMatcher(None, mine.splitlines(), course.splitlines(), autojunk=False)
        found = []
        for kind, start, stop, _, _ in matcher.get_opcodes():
            if kind != "equal":
                found += numbers[start : max(stop, start + 1)] or numbers[-1:]
        return found

    def reset(self, target: str) -> Path:
        """An exercise, or a file, as it was at first. What stood there is kept: the copy's path."""
        for path, text in course_sources().items():
            if target == path:
                copy = self.keep_copy(path)
                self.write_stubs(path, text)
                self.add_missing()
                return copy
        exercise = exercises()[target]
        self.holes(exercise)
        copy = self.keep_copy(exercise.file)
        self.rewrite(exercise, stub_of)
        return copy

    def write_stubs(self, path: str, text: str) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / path, replace_holes(text, path, stub_of)[0])

    def add_missing(self) -> None:
        """Files that a newer version of the course has."""
        for path, text in course_sources().items():
            if not (self.folder / path).exists():
                self.write_stubs(path, text)

    def apply_solution(self, exercise: Exercise) -> Path:
        self.holes(exercise)
        copy = self.keep_copy(exercise.file)
        self.rewrite(exercise, solution_of)
        return copy

    def solution_diff(self, exercise: Exercise) -> str:
        """From what stands here to the reference."""
        mine = self.text(exercise.file)
        solved = self.changed(exercise, solution_of)
        lines = difflib.unified_diff(
            mine.splitlines(keepends=True), solved.splitlines(keepends=True), exercise.file, "the reference"
        )
        return "".join(lines)

    def changed(self, exercise: Exercise, body: Callable[[Hole], str | None]) -> str:
        text = self.text(exercise.file)
        return replace_holes(text, exercise.file, lambda hole: body(hole) if hole.exercise == exercise.id else None)[0]

    def rewrite(self, exercise: Exercise, body: Callable[[Hole], str | None]) -> None:
        write_whole(self.folder / exercise.file, self.changed(exercise, body))

    def keep_copy(self, path: str) -> Path:
        """Of a file, in .learn/kept; what is not there cannot be kept."""
        copy = self.folder / MARKER / "kept" / f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09d}" / path
        copy.parent.mkdir(parents=True)
        if (self.folder / path).exists():
            shutil.copy2(self.folder / path, copy)
        return copy


def stub_of(hole: Hole) -> str:
    about = exercises()[hole.exercise]
    return f"# TODO {about.number}: {about.title}. `lmworks learn explain {about.id}`\n{hole.stub}"


def solution_of(hole: Hole) -> str:
    return course_holes()[hole.name].body if hole.name in course_holes() else hole.body

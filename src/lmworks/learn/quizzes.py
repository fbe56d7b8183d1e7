"""What has a quiz, by its ID: exercises, readings, lessons of tracks."""

from __future__ import annotations

from .exercise import Exercise, exercises, find_exercise
from .goals import Reading, readings
from .tracks import Lesson, lesson, lesson_names

Quizzed = Exercise | Reading | Lesson


def quiz_names() -> list[str]:
    return [*exercises(), *readings(), *lesson_names()]


def page_of_quiz(name: str) -> str:
    """The folder of its page in `lmworks learn serve`."""
    return "lesson" if name in exercises() else "reading" if name in readings() else "tracks"


def find_quiz(name: str) -> Quizzed:
    """An exercise also by its number."""
    if name in readings():
        return readings()[name]
    if name in lesson_names():
        return lesson(name)
    return find_exercise(name, [*readings(), *lesson_names()])

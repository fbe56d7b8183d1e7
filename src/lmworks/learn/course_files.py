"""The course's source: whole programs, with marks around what the learner writes."""

from __future__ import annotations

import functools
from pathlib import Path

from .holes import Hole, find_holes

COURSE = Path(__file__).parent / "course"


@functools.cache
def course_sources() -> dict[str, str]:
    """Path in a workspace → the complete text."""
    return {path.relative_to(COURSE).as_posix(): path.read_text() for path in sorted(COURSE.rglob("*.py"))}


@functools.cache
def course_holes() -> dict[str, Hole]:
    return {hole.name: hole for path, text in course_sources().items() for hole in find_holes(text, path)}

"""The course: exercises on the real code, checked in a process of their own (docs/course.md)."""

from .unfinished import unfinished

__all__ = ["unfinished"]

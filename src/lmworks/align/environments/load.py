"""The environment that a spec names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from ...spec.errors import SpecError, did_you_mean
from ..imports import import_module, split_arguments
from .environment import Environment
from .file_edit import FileEdit
from .python_tool import PythonTool

KEY = "align.environment"
BUILT_IN: dict[str, type[Environment]] = {"python": PythonTool, "file_edit": FileEdit}
FORMS = "path/file.py:Class, package.module:Class or one of: " + ", ".join(BUILT_IN)

EnvironmentFactory = Callable[[], Environment]  # one for each episode


def load_environment(name: str) -> tuple[type[Environment], EnvironmentFactory]:
    """A name is FORMS, with arguments of the class after it: `python(seconds=2)`."""
    target, arguments = split_arguments(KEY, name)
    found = find_class(name, target)
    known = inspect.signature(found).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in known.values())
    for argument in arguments:
        if argument not in known and not takes_any:
            raise SpecError(f"{KEY} = {name!r}: no argument {argument!r}{did_you_mean(argument, known)}")
    factory = functools.partial(found, **arguments)
    factory()  # wrong arguments, or a sandbox that does not work here, end the run before it starts
    return found, factory


def find_class(name: str, target: str) -> type[Environment]:
    if target in BUILT_IN:
        return BUILT_IN[target]
    place, colon, attribute = target.rpartition(":")
    if not colon:
        raise SpecError(f"{KEY} = {name!r}: no such environment{did_you_mean(target, BUILT_IN)}; or give {FORMS}")
    module = import_module(KEY, name, place, FORMS)
    found: Any = getattr(module, attribute, None)
    if not isinstance(found, type) or not issubclass(found, Environment):
        own = [one for one, value in vars(module).items() if isinstance(value, type) and issubclass(value, Environment)]
        hint = did_you_mean(attribute, own)
        raise SpecError(f"{KEY} = {name!r}: {place} has no subclass of lmworks.align.Environment {attribute!r}{hint}")
    return found

"""Functions and classes that a spec names: FILE.py:NAME or MODULE:NAME, with arguments in parentheses."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import traceback
from pathlib import Path
from typing import Any

from ..spec.errors import SpecError


def split_arguments(key: str, name: str) -> tuple[str, dict[str, Any]]:
    """`numeric(tolerance=1e-3)` → numeric, {tolerance: 1e-3}; `key`: of the spec, for errors."""
    target, parenthesis, rest = name.partition("(")
    if not parenthesis:
        return name, {}
    try:
        parsed = ast.parse(f"f({rest}", mode="eval").body
        if not isinstance(parsed, ast.Call) or parsed.args:
            raise ValueError
        return target, {str(one.arg): ast.literal_eval(one.value) for one in parsed.keywords}
    except (SyntaxError, ValueError):
        raise SpecError(f"{key} = {name!r}: arguments are written as in {target}(name=1.5, other='text')") from None


def import_module(key: str, name: str, place: str, forms: str) -> Any:
    """The module of a file or of a name; `name`: as the spec has it, `forms`: what it may be."""
    try:
        return load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except FileNotFoundError:
        raise SpecError(f"{key} = {name!r}: there is no file {place} (paths are from the working directory)") from None
    except ModuleNotFoundError as error:
        if error.name is None or not (place == error.name or place.startswith(error.name + ".")):
            raise SpecError(f"{key} = {name!r}: {place} needs the module {error.name!r}; install it") from error
        raise SpecError(f"{key} = {name!r}: there is no module {error.name!r}; give {forms}") from None
    except (Exception, SystemExit) as error:
        raise SpecError(f"{key} = {name!r}: {place} cannot be imported: {summary(error)}") from error


def load_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(path)
    spec = importlib.util.spec_from_file_location(f"lmworks_align_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def summary(error: BaseException) -> str:
    """'ValueError: … (rewards.py, line 7)'; without a place where it was not raised, as a timeout, or has its own."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text

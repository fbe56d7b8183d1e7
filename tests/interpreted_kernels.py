"""Triton's interpreter without what it does again at every call of a kernel and of each function that a kernel calls.

It replaces the functions of `triton.language` by its own, and looks for them among all names there: a third of the time
of small kernels. A process that only interprets can leave them replaced.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def replace_language_once() -> None:
    replace, replaced = interpreter._patch_lang, set[int]()

    def replace_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module not in replaced:
            replace(function)
            replaced.add(module)
        return interpreter._LangPatchScope()  # which has nothing to restore

    interpreter._patch_lang = replace_once

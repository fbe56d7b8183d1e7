"""Triton's interpreter without what it does again at every call and every operation of a kernel.

It replaces the functions of `triton.language` by its own, and looks for them among all names there: a third of the time
of small kernels. A process that only interprets can leave them replaced. Every sum and product of integers is computed
twice, to see whether it overflows, which no size here does; and the table of NumPy's types is built each time.
"""

from __future__ import annotations

import functools
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
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    of_any, of_number = interpreter._get_np_dtype, functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda dtype: (of_any if dtype.scalar.is_ptr() else of_number)(dtype.scalar)

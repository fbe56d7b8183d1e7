"""Triton's interpreter in the process of a check: kernels run on a CPU, also where there is a GPU.

There a load outside of a tensor may pass, and nothing counts what is read.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import Any

import numpy as np
import torch


@functools.cache
def interpret_kernels() -> None:
    """Kernels that this process defines from here on are interpreted."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        os.environ["TRITON_INTERPRET"] = "1"
        forget_triton()
    replace_language_once()
    compute_bf16_in_fp32()
    importlib.import_module("triton.runtime.jit").mangle_type(torch.zeros(1))  # imports as much again, the first time


def forget_triton() -> None:
    """Triton chooses when it is imported whether kernels are interpreted or compiled, its own functions as well.

    PyTorch's compiler imports it, too. The next import, and that of our kernels, chooses anew.
    """
    for name, module in list(sys.modules.items()):
        ours = name.startswith("lmworks.kernels.") and "triton" in vars(module)
        if ours or (name.partition(".")[0] == "triton" and not name.startswith("triton._C")):
            del sys.modules[name]


def replace_language_once() -> None:
    """Triton's interpreter without what it does again at every call and every operation of a kernel.

    It replaces the functions of `triton.language` by its own, and looks for them among all names there: a third of the
    time of small kernels. A process that only interprets can leave them replaced. Every sum and product of integers is
    computed twice, to see whether it overflows, which no size here does; and the table of NumPy's types is built each
    time.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
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


def compute_bf16_in_fp32() -> None:
    """NumPy has no bf16: Triton 3.9 adds and multiplies its bits as integers."""
    builder: Any = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    language: Any = importlib.import_module("triton.language")
    binary_op, create_dot = builder.binary_op, builder.create_dot

    def wide(self: Any, value: Any) -> Any:
        return self.cast_impl(value, language.float32) if value.dtype.is_bf16() else value

    def wide_binary_op(self: Any, one: Any, other: Any, op: Any) -> Any:
        found = binary_op(self, wide(self, one), wide(self, other), op)
        is_number = one.dtype.is_bf16() and found.data.dtype != np.bool_
        return self.cast_impl(found, language.bfloat16) if is_number else found

    def wide_dot(self: Any, one: Any, other: Any, *rest: Any) -> Any:
        return create_dot(self, wide(self, one), wide(self, other), *rest)

    builder.binary_op, builder.create_dot = wide_binary_op, wide_dot

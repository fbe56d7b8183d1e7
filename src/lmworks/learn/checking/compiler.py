"""Triton's compiler without a GPU: whether it takes a kernel that runs in the interpreter, which takes more.

In the interpreter a loop may change a variable's shape or dtype, and a product may be of tiles of any size. The first
stage of a compilation, into Triton's own intermediate representation, refuses both, and needs nothing of a GPU.
"""

from __future__ import annotations

import importlib
import json
import os
import traceback
import warnings
from typing import Any, NoReturn

from .interpreter import forget_triton

HOPPER = 90  # compute capability
WARP = 32


def refusal(kernel: Any, arguments: dict[str, Any]) -> tuple[str, str] | None:
    """The line that the compiler refuses, and why. `kernel` is interpreted, `arguments` are those of a launch.

    In a fork: Triton is imported to interpret, or to compile, not both.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        os.close(read_end)
        compile_here(kernel, arguments, write_end)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    if not answer:
        raise RuntimeError("Triton's compiler ended without a verdict")
    found = json.loads(answer)
    return (found[0], found[1]) if found else None


def compile_here(kernel: Any, arguments: dict[str, Any], answer: int) -> NoReturn:
    try:
        warnings.simplefilter("ignore")  # they are for who compiles to run
        del os.environ["TRITON_INTERPRET"]
        forget_triton()
        os.write(answer, json.dumps(refused_line(kernel.fn, arguments)).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def refused_line(function: Any, arguments: dict[str, Any]) -> list[str]:
    triton: Any = importlib.import_module("triton")
    compiler: Any = importlib.import_module("triton.compiler.compiler")
    ir = importlib.import_module("triton._C.libtriton").ir
    names = function.__globals__
    for name, value in list(names.items()):
        if type(value).__name__ == "InterpretedFunction":  # what the kernel calls
            names[name] = triton.jit(value.fn)
        elif getattr(value, "__name__", "") in ("triton", "triton.language"):
            names[name] = importlib.import_module(value.__name__)
    kernel = triton.jit(function)
    constants = {one.name: arguments[one.name] for one in kernel.params if one.is_constexpr}
    types = {
        one.name: "constexpr" if one.is_constexpr else triton.runtime.jit.mangle_type(arguments[one.name])
        for one in kernel.params
    }
    source, context = compiler.ASTSource(kernel, types, constants), ir.context()
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", HOPPER, WARP)
    backend = compiler.make_backend(target)
    options = backend.parse_options({})
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    try:
        source.make_ir(target, options, functions, modules, context)
    except triton.CompilationError as error:
        line = error.src.splitlines()[error.node.lineno - 1] if error.src and error.node else ""
        return [line.strip(), str(error).splitlines()[-1]]
    return []

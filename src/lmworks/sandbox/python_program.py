"""Runs Python source in this process, as `python -S main.py` would: a fork takes half the time of a new interpreter."""

from __future__ import annotations

import builtins
import os
import signal
import sys
import types
from collections.abc import Sequence
from typing import NoReturn

MAIN = "main.py"
HIDDEN = __name__.partition(".")[0]  # our own package


def run_source(source: str, folder: str) -> NoReturn:
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=os.path.join(folder, MAIN), __builtins__=builtins)
    for name in [name for name in sys.modules if name.partition(".")[0] == HIDDEN]:
        del sys.modules[name]
    sys.modules["__main__"] = main
    sys.path[:] = [folder, *(path for path in sys.path if path.startswith(sys.base_prefix))]
    sys.argv[:] = [MAIN]
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # by `site`, which is skipped
    code = 1
    try:
        exec(compile(source, main.__dict__["__file__"], "exec", dont_inherit=True), main.__dict__)
        code = 0
    except SystemExit as end:
        code = exit_code(end)
    except BaseException as error:
        error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)  # without this function
        sys.excepthook(type(error), error, error.__traceback__)
    finish(code)


def exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def finish(code: int) -> NoReturn:
    """What an interpreter does at its end: wait for threads, call what `atexit` holds, flush."""
    try:
        if threading := sys.modules.get("threading"):
            threading._shutdown()
        if atexit := sys.modules.get("atexit"):
            atexit._run_exitfuncs()
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:
            code = code or 120  # as Python has it
    os._exit(code)


def run_command(command: Sequence[str], environment: dict[str, str]) -> NoReturn:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), environment)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    os._exit(127)  # as a shell has it

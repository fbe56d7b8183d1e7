"""`lmworks …` and `python -m lmworks …`: the command, and what Ctrl-C does before it begins and after it has ended."""

from __future__ import annotations

import signal
import sys


def command() -> None:
    """Where nothing is to be finished, Ctrl-C ends the process at once and without a word: while modules are loaded,
    and when all is said. In between it is the command's to handle."""
    handler = signal.getsignal(signal.SIGINT)
    # A shell has it ignored for jobs in the background, and so it stays.
    quiet = signal.SIG_DFL if handler is signal.default_int_handler else handler
    signal.signal(signal.SIGINT, quiet)
    from .cli.main import main

    try:
        try:
            signal.signal(signal.SIGINT, handler)
            main()
        finally:
            signal.signal(signal.SIGINT, quiet)
    except KeyboardInterrupt:  # before it began, another while it said how it ended, or in the line above
        signal.signal(signal.SIGINT, quiet)
        sys.exit(130)


if __name__ == "__main__":
    command()

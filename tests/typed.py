"""Run an `lmworks` command line in this process."""

from __future__ import annotations

import sys

import pytest

from lmworks.cli.main import main


def lmworks(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    argv, sys.argv = sys.argv, ["lmworks", *args]
    try:
        main()
        code: object = 0
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        sys.argv = argv
    out, err = capsys.readouterr()
    assert isinstance(code, int)
    return code, out, err

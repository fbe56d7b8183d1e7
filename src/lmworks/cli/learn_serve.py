"""`lmworks learn serve`: the course on a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..learn.workspace import Workspace
from ..spec.errors import SpecError


def serve(
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Of 127.0.0.1; else one that is free.")] = 0,
) -> None:
    """The course as a page of this machine, until Ctrl-C."""
    workspace = Workspace.find(Path.cwd())
    from ..learn.web.server import PageServer

    try:
        server = PageServer(workspace, port)
    except OSError as error:
        raise SpecError(f"--port {port}: {error.strerror}; without --port a free one is taken") from None
    typer.echo(f"{server.url}\nOpen this address in a browser. Ctrl-C ends it.")
    server.serve()

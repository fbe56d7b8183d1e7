"""`lmworks lsp`: code completion for editors."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from ..spec.errors import LMWorksError

if TYPE_CHECKING:
    from ..editor.language_server import Completer


class StopAt(StrEnum):
    line = "line"
    block = "block"
    syntax = "syntax"


def lsp(
    server: Annotated[
        str, typer.Option("--server", help="Address of the completion server.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option("--model", help="Its model (by default the first that it lists).")] = "",
    stop: Annotated[StopAt, typer.Option("--stop", help="Where a completion ends.")] = StopAt.block,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest completion.")] = 64,
    other_files: Annotated[
        int, typer.Option("--other-files", min=0, help="Characters of similar files in a prompt (0: this file alone).")
    ] = 8000,
    key_variable: Annotated[
        str, typer.Option("--key-variable", help="Environment variable with the server's API key.")
    ] = "LMWORKS_API_KEY",
) -> None:
    """Complete code in an editor, over the Language Server Protocol.

    The editor starts it, and talks to it on stdin and stdout. It asks a server that infills (`lmworks serve`), with the
    files of the project that are most like the one under the cursor.

    \\b
    Examples:
      lmworks lsp
      lmworks lsp --server http://gpu:8000 --model code --stop line --max-tokens 32
    """
    import os

    try:
        import httpx

        from ..editor.language_server import Completer, make_server
        from ..editor.prompt import Budget
    except ImportError as error:
        raise LMWorksError(f"lmworks lsp needs {error.name}: pip install 'lmworks[editor]'") from None
    key = os.environ.get(key_variable)

    def make_completer() -> Completer:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        http = httpx.AsyncClient(base_url=server, timeout=30, headers=headers)
        return Completer(http, model, stop.value, max_tokens, Budget(others=other_files))

    make_server(make_completer).start_io()

"""A language server over stdin and stdout: completions in any editor that speaks LSP.

`textDocument/inlineCompletion` (LSP 3.18: grey text at the cursor) and `textDocument/completion` (a list of one) give
the same text. A request that the editor cancels, because somebody typed on, is cancelled at the completion server.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import httpx
from lsprotocol import types
from pygls.lsp.server import LanguageServer
from pygls.uris import to_fs_path

from .. import __version__
from ..data.grammars import syntax_parser
from ..spec.errors import LMWorksError
from .client import CompletionClient, first_model
from .project import ProjectFiles
from .prompt import Budget, build_prompt
from .stops import Stop, end_of_block, end_of_line, end_of_syntax

GRAMMARS = {".py": "python", ".c": "c", ".h": "c", ".cpp": "cpp", ".go": "go", ".rs": "rust", ".js": "javascript",
            ".java": "java", ".ts": "typescript"}  # fmt: skip


@dataclass
class Completer:
    """The text for a cursor in a file."""

    http: httpx.AsyncClient
    model: str = ""
    stop: str = "block"
    max_tokens: int = 64
    budget: Budget = field(default_factory=Budget)
    projects: dict[Path, ProjectFiles] = field(default_factory=dict)

    async def complete(self, root: Path, path: str, text: str, cursor: int) -> str:
        self.model = self.model or await first_model(self.http)
        project = self.projects.setdefault(root, ProjectFiles(root))
        others = project.like(path) if self.budget.others else {}
        prompt = build_prompt(path, text, cursor, others, self.budget)
        client = CompletionClient(self.http, self.model, self.max_tokens)
        return await client.complete(prompt, self.stop_at(path, text, cursor))

    def stop_at(self, path: str, text: str, cursor: int) -> Stop:
        before, after = text[:cursor], text[cursor:]
        if self.stop == "line":
            return end_of_line
        grammar = GRAMMARS.get(PurePosixPath(path).suffix)
        if self.stop == "syntax" and grammar:
            return end_of_syntax(before, after, syntax_parser(grammar, f"--stop syntax in a {grammar} file"))
        return end_of_block(before)


def make_server(make_completer: Callable[[], Completer]) -> LanguageServer:
    """`make_completer` is called in the server's event loop."""
    server = LanguageServer("lmworks", __version__)
    opened: list[Completer] = []

    async def text_at(uri: str, position: types.Position) -> str:
        if not opened:
            opened.append(make_completer())
        document = server.workspace.get_text_document(uri)
        root = Path(server.workspace.root_path or Path(to_fs_path(uri) or ".").parent)
        file = Path(to_fs_path(uri) or "file")
        path = file.relative_to(root).as_posix() if file.is_relative_to(root) else file.name
        try:
            return await opened[0].complete(root, path, document.source, document.offset_at_position(position))
        except LMWorksError as error:  # the editor stays usable, and its log says why nothing comes
            message = types.LogMessageParams(type=types.MessageType.Error, message=f"lmworks: {error}")
            server.window_log_message(message)
            return ""

    @server.feature(types.TEXT_DOCUMENT_INLINE_COMPLETION)
    async def inline(params: types.InlineCompletionParams) -> types.InlineCompletionList:
        text = await text_at(params.text_document.uri, params.position)
        return types.InlineCompletionList([types.InlineCompletionItem(text)] if text else [])

    @server.feature(types.TEXT_DOCUMENT_COMPLETION)
    async def listed(params: types.CompletionParams) -> types.CompletionList:
        text = await text_at(params.text_document.uri, params.position)
        if not text.strip():
            return types.CompletionList(is_incomplete=True, items=[])
        edit = types.TextEdit(types.Range(params.position, params.position), text)
        label = text.strip().split("\n", 1)[0]
        item = types.CompletionItem(label, kind=types.CompletionItemKind.Text, detail="lmworks", text_edit=edit)
        return types.CompletionList(is_incomplete=True, items=[item])

    return server

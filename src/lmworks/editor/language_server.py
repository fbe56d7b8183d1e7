"""A language server over stdin and stdout: completions in any editor that speaks LSP.

`textDocument/inlineCompletion` (LSP 3.18: grey text at the cursor) and `textDocument/completion` (a list of one) give
the same text. A request that the editor cancels, because somebody typed on, is cancelled at the completion server.
"""

from __future__ import annotations

import asyncio
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
from .project import ProjectIndex
from .prompt import Budget, build_prompt
from .stops import Stop, end_of_block, end_of_line, end_of_syntax

GRAMMARS = {".py": "python", ".c": "c", ".h": "c", ".cpp": "cpp", ".go": "go", ".rs": "rust", ".js": "javascript",
            ".java": "java", ".ts": "typescript"}  # fmt: skip
WAIT_S = 1.0  # for the first look at a project; after that, a prompt has what was read so far


@dataclass
class Completer:
    """The text for a cursor in a file."""

    http: httpx.AsyncClient
    model: str = ""
    stop: str = "block"
    max_tokens: int = 64
    budget: Budget = field(default_factory=Budget)
    projects: dict[tuple[Path, str], ProjectIndex] = field(default_factory=dict)
    scans: dict[tuple[Path, str], asyncio.Future[None]] = field(default_factory=dict)

    async def complete(self, root: Path, path: str, text: str, cursor: int) -> str:
        self.model = self.model or await first_model(self.http)
        project = self.project(root, path)
        if self.budget.others:
            first = project.scanned < 0
            scan = self.scan(project)
            if first:
                await asyncio.wait([scan], timeout=WAIT_S)
        prompt = build_prompt(path, text, cursor, project.context, self.budget)
        client = CompletionClient(self.http, self.model, self.max_tokens)
        return await client.complete(prompt, self.stop_at(path, text, cursor))

    def project(self, root: Path, path: str) -> ProjectIndex:
        """The index of files with the same ending."""
        ending = PurePosixPath(path).suffix
        return self.projects.setdefault((root, ending), ProjectIndex(root, ending))

    def scan(self, project: ProjectIndex) -> asyncio.Future[None]:
        """In a thread; the one that is under way, if there is one."""
        key = project.root, project.ending
        if key not in self.scans or self.scans[key].done():
            self.scans[key] = asyncio.ensure_future(asyncio.to_thread(project.scan))
        return self.scans[key]

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
    made: list[Completer] = []

    def completer() -> Completer:
        if not made:
            made.append(make_completer())
        return made[0]

    def place_of(uri: str) -> tuple[Path, str]:
        """Root of the project, path in it."""
        root = Path(server.workspace.root_path or Path(to_fs_path(uri) or ".").parent)
        file = Path(to_fs_path(uri) or "file")
        return root, file.relative_to(root).as_posix() if file.is_relative_to(root) else file.name

    async def text_at(uri: str, position: types.Position) -> str:
        document = server.workspace.get_text_document(uri)
        root, path = place_of(uri)
        try:
            return await completer().complete(root, path, document.source, document.offset_at_position(position))
        except LMWorksError as error:  # the editor stays usable, and its log says why nothing comes
            message = types.LogMessageParams(type=types.MessageType.Error, message=f"lmworks: {error}")
            server.window_log_message(message)
            return ""

    @server.feature(types.TEXT_DOCUMENT_DID_OPEN)
    async def opened(params: types.DidOpenTextDocumentParams) -> None:
        root, path = place_of(params.text_document.uri)
        project = completer().project(root, path)
        project.show(path, params.text_document.text)
        if completer().budget.others:
            completer().scan(project)  # while nobody waits for it

    @server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
    async def changed(params: types.DidChangeTextDocumentParams) -> None:
        root, path = place_of(params.text_document.uri)
        document = server.workspace.get_text_document(params.text_document.uri)
        completer().project(root, path).show(path, document.source)

    @server.feature(types.TEXT_DOCUMENT_DID_CLOSE)
    async def closed(params: types.DidCloseTextDocumentParams) -> None:
        root, path = place_of(params.text_document.uri)
        completer().project(root, path).read(path)

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

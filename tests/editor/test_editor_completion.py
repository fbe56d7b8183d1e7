"""Completion in an editor: prompts, where answers end, and a real LSP client that talks to `lmworks lsp`."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from lsprotocol import types
from pygls.lsp.client import LanguageClient

from lmworks.data.similar_files import SimilarFiles, context_files
from lmworks.editor.project import LARGEST, ProjectIndex
from lmworks.editor.prompt import Budget, build_prompt
from lmworks.editor.stops import Stop, end_of_block, end_of_line, end_of_syntax

FILES = {
    "geometry.py": "def area_of_circle(radius):\n    return 3 * radius * radius\n",
    "names.py": "NAMES = ['a']\n",
    "main.py": "old text of the file that is open\n",
}
TEXT = "from geometry import area_of_circle\n\ndef total(radius):\n    return \n\nprint(total(1))\n"
CURSOR = TEXT.index("return ") + len("return ")


def similar(path: str, text: str, most: int) -> list[tuple[str, str]]:
    return context_files(SimilarFiles(FILES), path, text, most)


def test_prompt_has_similar_files_first_and_the_text_after_the_cursor() -> None:
    made = build_prompt("main.py", TEXT, CURSOR, similar, Budget())
    assert made.prompt == f"<file_sep>geometry.py\n{FILES['geometry.py']}<file_sep>main.py\n{TEXT[:CURSOR]}"
    assert made.suffix == "\n\nprint(total(1))\n"
    alone = build_prompt("main.py", TEXT, CURSOR, similar, Budget(before=10, after=3, others=0))
    assert (alone.prompt, alone.suffix) == (TEXT[CURSOR - 10 : CURSOR], "\n\np")
    short = build_prompt("main.py", TEXT, CURSOR, similar, Budget(others=20))
    assert short.prompt.startswith("<file_sep>main.py\n")  # none fits


def first_end(stop: Stop, completion: str) -> tuple[str, int]:
    """What is kept of a completion that comes one character at a time, and after how many of them."""
    for count in range(1, len(completion) + 1):
        if (end := stop(completion[:count])) is not None:
            return completion[:end], count
    return completion, len(completion)


def test_line() -> None:
    assert first_end(end_of_line, "x + 1\ny") == ("x + 1", 6)
    assert first_end(end_of_line, "x + 1") == ("x + 1", 5)


def test_block_ends_where_indentation_falls_below_the_cursors() -> None:
    stop = end_of_block("class A:\n    def f(self):\n        if ")
    whole = "x:\n            y = 1\n\n        return y\n    def g(self):\n"
    kept, read = first_end(stop, whole)
    assert kept == "x:\n            y = 1\n\n        return y"
    assert read <= len(kept) + len("\n    d")
    assert first_end(end_of_block("x = "), "1\ny = 2\n") == ("1\ny = 2\n", 8)  # the outermost block has no end


def test_syntax_ends_where_the_file_can_be_parsed_again() -> None:
    from lmworks.data.grammars import syntax_parser

    pytest.importorskip("tree_sitter_python")
    before, after = "def f(x):\n    return g(", "\n\nprint(f(1))\n"
    stop = end_of_syntax(before, after, syntax_parser("python", "a test"))
    assert first_end(stop, "\n        x,\n        2,\n    )\n    y = 1\n")[0] == "\n        x,\n        2,\n    )"
    broken = end_of_syntax("def (:\n" + before, after, syntax_parser("python", "a test"))
    assert first_end(broken, "x)\n    y = 1\n")[0] == "x)"  # an error elsewhere was there before


def test_project_files(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/b.py").write_text("two")
    (tmp_path / "c.txt").write_text("not Python")
    (tmp_path / "large.py").write_text("x" * (LARGEST + 1))
    (tmp_path / "bad.py").write_bytes(b"\xff\xfe")
    for hidden in (".venv", "__pycache__"):
        (tmp_path / hidden).mkdir()
        (tmp_path / hidden / "d.py").write_text("hidden")
    project = ProjectIndex(tmp_path, ".py")
    project.scan()
    assert project.index.texts == {"a.py": "one", "sub/b.py": "two"}


def test_an_index_is_of_the_files_as_they_are_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On disk by their times, in the editor by what was typed; rankings are those of an index made anew."""
    monkeypatch.setattr("lmworks.editor.project.RESCAN_S", 0.0)
    words = ["alpha", "beta", "gamma", "delta", "alpha beta", "beta beta gamma", "delta alpha alpha"]
    for number, text in enumerate(words):
        (tmp_path / f"f{number}.py").write_text(text)
    project = ProjectIndex(tmp_path, ".py")
    project.scan()

    def fresh(**other: str) -> SimilarFiles:
        texts = {path.name: path.read_text() for path in tmp_path.glob("*.py")}
        return SimilarFiles(texts | {f"{name}.py": text for name, text in other.items()})

    def same(expected: SimilarFiles) -> None:
        for query in ("alpha", "beta gamma", "delta alpha beta"):
            assert project.context("new.py", query, 100) == context_files(expected, "new.py", query, 100)
            for method in ("bm25", "jaccard"):
                assert project.index.rank(query, 99, method) == expected.rank(query, 99, method)

    same(fresh())
    (tmp_path / "f0.py").write_text("gamma delta")
    (tmp_path / "f1.py").unlink()
    (tmp_path / "f9.py").write_text("beta alpha")
    project.scan()
    same(fresh())
    project.show("f2.py", "alpha typed")  # not saved yet
    same(fresh(f2="alpha typed"))
    (tmp_path / "f2.py").write_text("delta")  # by somebody else, while it is open
    project.scan()
    same(fresh(f2="alpha typed"))
    project.read("f2.py")  # closed
    same(fresh())
    reads: list[str] = []
    read = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self, **words: (reads.append(self.name), read(self, **words))[1])
    (tmp_path / "f3.py").write_text("changed alone")
    project.scan()
    assert reads == ["f3.py"]


# --- an editor, a language server and a completion server ---------------------------------------------------


class Scripted(BaseHTTPRequestHandler):
    """Streams PIECES as /v1/completions does, a little apart, and remembers what it was asked."""

    pieces: tuple[str, ...] = ()
    asked: list[dict[str, Any]]
    written: list[int]  # pieces of each answer that were sent before the client hung up
    ended: list[bool]  # whether all of it was wanted
    streaming = threading.Event()

    def do_GET(self) -> None:
        self.answer(200, "application/json", b'{"data": [{"id": "mine"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if body["model"] != "mine":
            self.answer(404, "application/json", b'{"error": {"message": "no such model"}}')
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        self.written.append(0)
        try:
            for piece in self.pieces:
                self.wfile.write(f"data: {json.dumps({'choices': [{'index': 0, 'text': piece}]})}\n\n".encode())
                self.wfile.flush()
                self.written[-1] += 1
                self.streaming.set()
                time.sleep(0.02)
            self.wfile.write(b"data: [DONE]\n\n")
            self.ended.append(True)
        except OSError:
            self.ended.append(False)

    def answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def scripted() -> Iterator[tuple[type[Scripted], str]]:
    handler = type("Handler", (Scripted,), {"asked": [], "written": [], "ended": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield handler, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


async def edit(project: Path, words: list[str], change: str = "") -> tuple[list[Any], list[Any], list[str]]:
    """What an editor gets for the cursor in main.py: inline items, list items, and what the server logs."""
    client, logged = LanguageClient("editor", "1"), []

    @client.feature(types.WINDOW_LOG_MESSAGE)
    def log(params: types.LogMessageParams) -> None:
        logged.append(params.message)

    await client.start_io(sys.executable, "-m", "lmworks", "lsp", *words)
    root = project.as_uri()
    await client.initialize_async(
        types.InitializeParams(capabilities=types.ClientCapabilities(), root_uri=root, root_path=str(project))
    )
    client.initialized(types.InitializedParams())
    uri = f"{root}/main.py"
    item = types.TextDocumentItem(uri, types.LanguageKind.Python, 1, TEXT)
    client.text_document_did_open(types.DidOpenTextDocumentParams(item))
    line, column = TEXT[:CURSOR].count("\n"), len(TEXT[:CURSOR].rpartition("\n")[2])
    if change:  # somebody types
        at = types.Position(line, column)
        event = types.TextDocumentContentChangePartial(types.Range(at, at), change)
        version = types.VersionedTextDocumentIdentifier(2, uri)
        client.text_document_did_change(types.DidChangeTextDocumentParams(version, [event]))
        column += len(change)
    document, position = types.TextDocumentIdentifier(uri), types.Position(line, column)
    context = types.InlineCompletionContext(types.InlineCompletionTriggerKind.Automatic)
    inline = await client.text_document_inline_completion_async(
        types.InlineCompletionParams(context, document, position)
    )
    listed = await client.text_document_completion_async(types.CompletionParams(document, position))
    await client.shutdown_async(None)
    client.exit(None)
    await client.stop()
    return inline.items, listed.items, logged


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_an_editor_completes(project: Path, scripted: tuple[type[Scripted], str]) -> None:
    handler, url = scripted
    handler.pieces = ("area_of_", "circle(", "radius)", "\n", "\n", "def ", "other(", "x):", *["\n    pass"] * 200)
    inline, listed, logged = asyncio.run(edit(project, ["--server", url, "--max-tokens", "500"], "2 * "))
    assert [item.insert_text for item in inline] == ["area_of_circle(radius)"]
    (item,) = listed
    assert (item.label, item.text_edit.new_text) == ("area_of_circle(radius)", "area_of_circle(radius)")
    assert logged == []
    first = handler.asked[0]
    assert first["model"] == "mine" and first["max_tokens"] == 500 and first["stream"] is True
    assert first["prompt"].endswith("<file_sep>main.py\n" + TEXT[:CURSOR] + "2 * ")  # as it is in the editor
    assert first["prompt"].startswith("<file_sep>geometry.py\n") and first["suffix"] == TEXT[CURSOR:]
    assert all(count < 100 for count in handler.written)  # the rest was not waited for, and not computed


def test_a_server_that_fails_leaves_the_editor_usable(project: Path, scripted: tuple[type[Scripted], str]) -> None:
    _, url = scripted
    inline, listed, logged = asyncio.run(edit(project, ["--server", url, "--model", "other"]))
    assert not inline and not listed
    assert logged == ["lmworks: the server answered 404: no such model"] * 2
    inline, _, logged = asyncio.run(edit(project, ["--server", "http://127.0.0.1:9", "--model", "mine"]))
    assert not inline and logged[0].startswith("lmworks: no answer from http://127.0.0.1:9")


async def type_on(project: Path, url: str) -> float:
    """Seconds until the answer to a request that was cancelled, and then shutdown, are there."""
    client = LanguageClient("editor", "1")
    await client.start_io(sys.executable, "-m", "lmworks", "lsp", "--server", url, "--model", "mine")
    root = project.as_uri()
    await client.initialize_async(types.InitializeParams(types.ClientCapabilities(), root_uri=root))
    client.initialized(types.InitializedParams())
    item = types.TextDocumentItem(f"{root}/main.py", types.LanguageKind.Python, 1, TEXT)
    client.text_document_did_open(types.DidOpenTextDocumentParams(item))
    params = types.CompletionParams(types.TextDocumentIdentifier(item.uri), types.Position(0, 0))
    asked = client.protocol.send_request_async(types.TEXT_DOCUMENT_COMPLETION, params, msg_id="first")
    waiting = asyncio.ensure_future(asked)
    await asyncio.sleep(0)
    while not Scripted.streaming.is_set():
        await asyncio.sleep(0.01)
    began = time.monotonic()
    client.cancel_request(types.CancelParams(id="first"))
    await asyncio.wait([waiting], timeout=20)
    waiting.cancel()
    seconds = time.monotonic() - began
    await client.shutdown_async(None)
    client.exit(None)
    await client.stop()
    return seconds


def test_a_request_that_is_cancelled_ends_at_the_server(project: Path, scripted: tuple[type[Scripted], str]) -> None:
    handler, url = scripted
    Scripted.streaming.clear()
    handler.pieces = ("x ",) * 1000  # 20 s
    assert asyncio.run(type_on(project, url)) < 5
    deadline = time.monotonic() + 5
    while not handler.ended and time.monotonic() < deadline:
        time.sleep(0.01)
    assert handler.ended and handler.written[0] < 500
